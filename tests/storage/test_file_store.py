"""What only a store on disk promises: places, permissions, locks, cost, and what it refuses to do."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from storage_disks import ID, MODEL, NOW, Conversation, Counting, Steps, create_in

from loopd.storage import SessionLocked, SessionMissing, Snapshot, StorageError
from loopd.storage.files import FileStore, create, open_session, read_session
from loopd.storage.fs import FileSystem
from loopd.storage.places import path_of


@pytest.fixture
def fs() -> Counting:
    return Counting()


@pytest.fixture
def store(fs: Counting, tmp_path: Path) -> Iterator[FileStore]:
    store = create_in(fs, tmp_path)
    yield store
    store.close()


def _directory(store: FileStore) -> Path:
    return Path(store.path or "").parent


def _edit(store: FileStore, **changes: Any) -> None:
    path = Path(store.path or "")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# --- places and permissions


def test_a_new_session_lies_on_disk_at_once_where_its_workspace_says(store: FileStore, tmp_path: Path) -> None:  # S-2
    digest = hashlib.sha256(os.path.realpath(tmp_path).encode()).hexdigest()[:24]
    assert store.path == str(tmp_path / "data" / "sessions" / digest / ID / "meta.json")
    assert sorted(path.name for path in _directory(store).iterdir()) == ["history.jsonl", "meta.json"]
    meta, history = read_session(Steps(), store.path)
    assert (meta, history.lines) == (store.meta, [])
    assert json.loads(Path(store.path).read_text()) == {
        "format": "loop-session",
        "version": 3,
        "minReader": 3,
        "id": ID,
        "cwd": os.path.realpath(tmp_path),
        "createdAt": NOW,
        "updatedAt": NOW,
        "unread": False,
        "model": {"provider": "practice", "id": "echo"},
        "permission": "read-only",
        "committed": {"commitId": ID, "revision": 0, "bytes": 0, "crc32": 0, "messages": 0, "userMessages": 0},
    }


def test_a_session_directory_replaces_the_default_place(tmp_path: Path) -> None:  # S-2
    store = create_in(Steps(), tmp_path, session_dir=str(tmp_path / "mine" / "too"))
    assert store.path == str(tmp_path / "mine" / "too" / ID / "meta.json")
    store.close()


def test_a_workspace_reached_through_a_link_is_the_same_workspace(tmp_path: Path) -> None:  # K-11
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    store = create_in(Steps(), tmp_path, cwd=str(tmp_path / "link"))
    assert store.path == path_of(str(tmp_path / "data"), str(tmp_path / "real"), ID)
    assert store.meta.cwd == os.path.realpath(tmp_path / "real")
    store.close()


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_files_are_private_whatever_the_umask(umask: int, tmp_path: Path) -> None:  # S-20, K-13
    before = os.umask(umask)
    try:
        talk = Conversation()
        store = create_in(Steps(), tmp_path)
        store.commit(talk.turn())
        os.unlink(_directory(store) / "history.jsonl")
        store.commit(talk.turn(), rewrite=True)
        store.rescue([str(tmp_path / "data" / "rescue")], talk.turn())
        store.close()
    finally:
        os.umask(before)
    for path in (tmp_path / "data").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700


def test_creating_over_an_existing_session_is_refused(store: FileStore, tmp_path: Path) -> None:
    store.commit(Conversation().turn())
    store.close()
    with pytest.raises(StorageError, match="already"):
        create_in(Steps(), tmp_path)
    assert read_session(Steps(), store.path or "")[0] == store.meta


def test_a_workspace_whose_path_is_not_utf_8_is_refused_before_anything_exists(tmp_path: Path) -> None:
    workspace = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    os.mkdir(workspace)
    with pytest.raises(StorageError, match="not UTF-8"):
        create_in(Steps(), tmp_path, cwd=workspace)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("where", ["data", "mine"])
def test_a_place_whose_path_is_not_utf_8_is_refused_before_anything_exists(where: str, tmp_path: Path) -> None:
    root = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    with pytest.raises(StorageError, match=r"/caf\\xe9/.* is not UTF-8"):
        create(
            Steps(),
            root if where == "data" else str(tmp_path),
            meta_id=ID,
            cwd=str(tmp_path),
            model=MODEL,
            permission="read-only",
            now_ms=NOW,
            session_dir=root if where == "mine" else None,
        )
    assert list(tmp_path.iterdir()) == []


# --- exact paths


@pytest.mark.parametrize(
    "spelling", ["{dir}", "{dir}/meta.jso", "meta.json", "{dir}/../meta.json", "{dir}/history.jsonl", ""]
)
def test_only_the_exact_path_of_a_session_opens(spelling: str, store: FileStore) -> None:  # S-2
    store.close()
    before = sorted(_directory(store).parent.rglob("*"))
    for read in (open_session, read_session):
        with pytest.raises(SessionMissing):
            read(Steps(), spelling.format(dir=_directory(store)))
    assert sorted(_directory(store).parent.rglob("*")) == before


def test_a_symbolic_link_to_a_session_directory_is_refused(store: FileStore, tmp_path: Path) -> None:
    store.close()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / ID).symlink_to(_directory(store))
    with pytest.raises(SessionMissing, match="links are not followed"):
        open_session(Steps(), str(tmp_path / "elsewhere" / ID / "meta.json"))


# --- locks


HOLDER = """
import sys
from loopd.storage.files import open_session
from loopd.storage.fs import FileSystem
store, history = open_session(FileSystem(), sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_told_the_holder_at_once_and_gets_in_after_its_death(store: FileStore) -> None:
    # S-22, K-5
    path = store.path or ""
    store.close()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        began = time.perf_counter()
        with pytest.raises(SessionLocked) as refused:
            open_session(Steps(), path)
        assert time.perf_counter() - began < 0.1
        assert (refused.value.holder, refused.value.path) == (holder.pid, path)
        assert read_session(Steps(), path)[0] == store.meta  # readers take no lock
        holder.kill()
        holder.wait()
        open_session(Steps(), path)[0].close()


def test_the_same_process_is_refused_as_well_until_the_store_is_closed(store: FileStore) -> None:  # S-22
    with pytest.raises(SessionLocked) as refused:
        open_session(Steps(), store.path or "")
    assert refused.value.holder == os.getpid()
    store.close()
    open_session(Steps(), store.path or "")[0].close()


def test_a_closed_store_writes_nothing_more(store: FileStore) -> None:
    store.close()
    with pytest.raises(StorageError, match="closed"):
        store.update({"pinned_at": 1})


# --- what happens to the files under a live session


def test_a_directory_that_was_moved_away_is_an_error_until_it_is_back(store: FileStore, tmp_path: Path) -> None:  # K-3
    talk = Conversation()
    store.commit(talk.turn())
    snapshot = talk.turn()
    away = tmp_path / "away"
    _directory(store).rename(away)
    for write in (lambda: store.commit(snapshot, rewrite=True), lambda: store.update({"pinned_at": 1})):
        with pytest.raises(StorageError, match="put it back"):
            write()
    assert not _directory(store).exists()
    _directory(store).mkdir()  # another one in its place is no place to write to
    with pytest.raises(StorageError, match="replaced"):
        store.commit(snapshot, rewrite=True)
    assert list(_directory(store).iterdir()) == []
    _directory(store).rmdir()
    away.rename(_directory(store))
    assert read_session(Steps(), store.path or "")[0].committed.revision == 1
    after = store.commit(snapshot)
    assert read_session(Steps(), store.path or "")[0] == after


@pytest.mark.parametrize("damage", ["removed", "lost 5 committed bytes"])
def test_a_lost_history_is_an_error_and_rewriting_brings_all_of_it_back(damage: str, store: FileStore) -> None:  # K-4
    talk = Conversation()
    store.commit(talk.turn("first"))
    history = _directory(store) / "history.jsonl"
    if damage == "removed":
        history.unlink()
    else:
        os.truncate(history, history.stat().st_size - 5)
    snapshot = talk.turn("second")
    with pytest.raises(StorageError, match=damage):
        store.commit(snapshot)
    assert damage != "removed" or not history.exists()  # no new headless file
    store.commit(snapshot, rewrite=True)
    assert history.read_bytes() == b"".join(talk.history.lines)
    assert read_session(Steps(), store.path or "")[1].lines == talk.history.lines


def _edit_history(history: Path) -> None:
    """In place and of the same length, one tick later."""
    before = history.stat()
    with history.open("r+b") as file:
        said = file.read()
        file.seek(0)
        file.write(said.replace(b"first", b"tsrif"))
    os.utime(history, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def _replace_history(history: Path) -> None:
    history.with_name("other").write_bytes(history.read_bytes().replace(b"first", b"tsrif"))
    history.with_name("other").rename(history)


@pytest.mark.parametrize("change", [_edit_history, _replace_history])
def test_a_history_that_was_edited_is_an_error_and_rewriting_brings_back_what_was_said(
    change: Callable[[Path], None], store: FileStore
) -> None:
    talk = Conversation()
    store.commit(talk.turn("first"))
    history = _directory(store) / "history.jsonl"
    change(history)
    edited, snapshot = history.read_bytes(), talk.turn("second")
    for _ in range(2):
        with pytest.raises(StorageError, match="was changed by another program"):
            store.commit(snapshot)
        assert history.read_bytes() == edited
    store.commit(snapshot, rewrite=True)
    store.commit(talk.turn("third"))
    assert read_session(Steps(), store.path or "")[1].lines == talk.history.lines


def test_a_history_edited_before_the_first_commit_after_opening_is_noticed(store: FileStore) -> None:
    talk = Conversation()
    store.commit(talk.turn("first"))
    store.close()
    store, opened = open_session(Steps(), store.path or "")
    _edit_history(_directory(store) / "history.jsonl")
    with pytest.raises(StorageError, match="was changed by another program"):
        store.commit(Conversation(opened).turn("second"))
    store.close()


def _touch(path: Path) -> None:
    os.utime(path, (5, 5))


def _restore(path: Path) -> None:
    path.with_name("copy").write_bytes(path.read_bytes())
    path.with_name("copy").rename(path)


@pytest.mark.parametrize("name", ["history.jsonl", "meta.json"])
@pytest.mark.parametrize("change", [_touch, _restore])
def test_a_file_that_was_touched_and_says_the_same_is_no_error(
    change: Callable[[Path], None], name: str, store: FileStore
) -> None:
    talk = Conversation()
    store.commit(talk.turn("first"))
    change(_directory(store) / name)
    store.commit(talk.turn("second"))
    change(_directory(store) / name)
    store.update({"pinned_at": 1})
    meta, history = read_session(Steps(), store.path or "")
    assert (meta.pinned_at, history.lines) == (1, talk.history.lines)


def test_no_commit_is_taken_for_another_programs_however_fast_they_follow_each_other(
    fs: Counting, store: FileStore
) -> None:
    talk = Conversation()
    for number in range(200):
        snapshot = talk.turn(f"{number}")
        fs.calls.clear()
        store.commit(snapshot)
        assert number == 0 or "read" not in fs.calls


def _empty(meta: Path) -> None:
    meta.write_bytes(b"{}")


def _scribble(meta: Path) -> None:
    meta.write_bytes(bytes(meta.stat().st_size))


def _link(meta: Path) -> None:
    meta.rename(meta.with_name("real"))
    meta.symlink_to("real")


@pytest.mark.parametrize("change", [_empty, _scribble, _link, Path.unlink])
def test_metadata_that_was_damaged_is_an_error_and_rewriting_brings_it_back(
    change: Callable[[Path], None], store: FileStore
) -> None:
    talk = Conversation()
    store.commit(talk.turn("first"))
    store.update({"pinned_at": 4})
    meta, snapshot = Path(store.path or ""), talk.turn("second")
    change(meta)
    for write in (lambda: store.update({"pinned_at": 5}), lambda: store.commit(snapshot)):
        with pytest.raises(StorageError, match=r"meta\.json.*flush writes it anew"):
            write()
    assert change is not Path.unlink or not meta.exists()
    store.commit(snapshot, rewrite=True)
    published, history = read_session(Steps(), str(meta))
    assert (published.pinned_at, history.lines) == (4, talk.history.lines)
    assert store.update({"pinned_at": 5}) == read_session(Steps(), str(meta))[0]


def test_metadata_of_another_program_is_noticed_without_an_error_before(store: FileStore) -> None:
    talk = Conversation()
    store.commit(talk.turn())
    committed = json.loads(Path(store.path or "").read_text())["committed"]
    _edit(store, committed=committed | {"commitId": "somebody-else"})
    with pytest.raises(StorageError, match="another program"):
        store.update({"pinned_at": 1})


def test_memory_that_is_not_what_was_committed_never_replaces_it(store: FileStore) -> None:
    talk = Conversation()
    store.commit(talk.turn("first"))
    (_directory(store) / "history.jsonl").unlink()
    other = Conversation()
    other.turn("another")
    with pytest.raises(StorageError, match="not what was committed"):
        store.commit(other.turn("second"), rewrite=True)


def test_metadata_written_by_somebody_else_is_not_written_over_after_an_error(store: FileStore) -> None:
    talk = Conversation()
    store.commit(talk.turn())
    snapshot = talk.turn()
    history = _directory(store) / "history.jsonl"
    history.rename(history.with_name("kept"))
    with pytest.raises(StorageError):
        store.commit(snapshot)
    history.with_name("kept").rename(history)
    committed = json.loads(Path(store.path or "").read_text())["committed"]
    _edit(store, committed=committed | {"commitId": "somebody-else"})
    before = Path(store.path or "").read_bytes()
    for write in (lambda: store.commit(snapshot, rewrite=True), lambda: store.update({"pinned_at": 1})):
        with pytest.raises(StorageError, match="another program"):
            write()
    assert Path(store.path or "").read_bytes() == before


def test_a_tail_beyond_the_committed_range_is_ignored_and_cut_by_the_next_commit(store: FileStore) -> None:
    # S-14, K-7, K-9
    talk = Conversation()
    store.commit(talk.turn("first"))
    history = _directory(store) / "history.jsonl"
    with history.open("ab") as file:
        file.write(b'{"role":"user","index":4}{"no newline' * 9)
    store.close()
    store, opened = open_session(Steps(), store.path or "")
    talk = Conversation(opened)
    assert opened.messages == 4
    store.update({"pinned_at": 3})  # leaves the tail where it is
    assert history.read_bytes().endswith(b"no newline")
    store.commit(talk.turn("second"))
    assert history.read_bytes() == b"".join(talk.history.lines)
    store.close()


# --- cost


def _cost(fs: Counting, store: FileStore, snapshot: Snapshot) -> tuple[int, list[str]]:
    fs.calls.clear()
    fs.written = 0
    store.commit(snapshot)
    return fs.written, list(fs.calls)


def test_the_300th_commit_costs_what_the_3rd_costs(fs: Counting, store: FileStore) -> None:  # S-23, S-21
    talk = Conversation()
    costs = {number: _cost(fs, store, talk.turn(f"{number:03}")) for number in range(1, 301)}
    (early, calls), (late, later_calls) = costs[3], costs[300]
    assert calls == later_calls
    assert calls.count("fsync") == 3
    assert late - early < 100  # numbers have more digits: that is all


def test_a_metadata_write_touches_no_history(fs: Counting, store: FileStore) -> None:  # S-13
    store.commit(Conversation().turn())
    history = _directory(store) / "history.jsonl"
    before = (history.read_bytes(), history.stat().st_mtime_ns)
    fs.calls.clear()
    store.update({"pinned_at": 4})
    assert (fs.calls.count("fsync"), fs.calls.count("open")) == (2, 2)  # the metadata and the directory
    assert (history.read_bytes(), history.stat().st_mtime_ns) == before
    fs.calls.clear()
    store.update({"pinned_at": 4})
    assert "write" not in fs.calls


def test_without_durability_nothing_is_synced(fs: Counting, tmp_path: Path) -> None:  # S-21
    store = create_in(fs, tmp_path, durable=False)
    store.commit(Conversation().turn())
    store.update({"pinned_at": 4})
    store.close()
    assert "fsync" not in fs.calls


# --- the format can grow


def test_what_a_newer_writer_added_survives_our_rewrites(store: FileStore) -> None:  # S-27
    talk = Conversation()
    store.commit(talk.turn())
    store.close()
    known = json.loads(Path(store.path or "").read_text())
    _edit(
        store,
        version=4,
        colour={"big": 10**30, "text": "\U0001f600 \u2028"},
        model=known["model"] | {"temperature": 0.10},
        committed=known["committed"] | {"digest": "hello"},
    )
    store, _ = open_session(Steps(), store.path or "")
    store.update({"pinned_at": 4, "model": MODEL.__class__("practice", "other", "high")})
    store.update({"model": MODEL, "pinned_at": None})
    store.commit(talk.turn())
    store.close()
    now = json.loads(Path(store.path or "").read_text())
    assert (now["version"], now["colour"]) == (4, {"big": 10**30, "text": "\U0001f600 \u2028"})
    assert now["model"] == {"provider": "practice", "id": "echo", "temperature": 0.10}
    assert (now["committed"]["digest"], now["committed"]["revision"]) == ("hello", 2)
    assert "pinnedAt" not in now


def test_records_of_a_newer_writer_stay_in_their_place(store: FileStore) -> None:  # S-27
    talk = Conversation()
    talk.turn()
    talk.history.read(b'{"type":"weather","sunny":true}\n')
    store.commit(talk.snapshot())
    store.close()
    store, history = open_session(Steps(), store.path or "")
    assert history.lines[-1] == b'{"type":"weather","sunny":true}\n'
    assert history.messages == 4
    store.close()


# --- rescue


def test_a_rescue_copy_is_a_whole_session_that_names_its_base(store: FileStore, tmp_path: Path) -> None:  # S-25
    talk = Conversation()
    base = store.commit(talk.turn("first"))
    snapshot = talk.turn("second")
    (tmp_path / "file").write_text("in the way")
    copy = Path(store.rescue([str(tmp_path / "file"), str(tmp_path / "rescue")], snapshot))
    assert copy == tmp_path / "rescue" / f"{ID}-2"
    assert json.loads((copy / "base.json").read_text()) == {
        "path": store.path,
        "commitId": base.committed.commit_id,
        "bytes": base.committed.bytes,
        "crc32": base.committed.crc32,
    }
    assert store.rescue([str(tmp_path / "rescue")], snapshot) == str(copy)
    assert store.meta == base
    copy.rename(tmp_path / ID)  # under its own name it opens like any other
    rescued, history = read_session(Steps(), str(tmp_path / ID / "meta.json"))
    assert history.lines == talk.history.lines
    assert store.commit(snapshot) == rescued


def test_the_rescue_copy_of_another_snapshot_is_never_written_over(store: FileStore, tmp_path: Path) -> None:  # S-25
    talk, other = Conversation(), Conversation()
    first = Path(store.rescue([str(tmp_path)], talk.turn("first")))
    second = Path(store.rescue([str(tmp_path)], other.turn("other")))
    assert (first.name, second.name) == (f"{ID}-1", f"{ID}-1-2")
    assert (first / "history.jsonl").read_bytes() == b"".join(talk.history.lines)


class FullBelow(Steps):
    """Takes directories, and no byte, as a full disk does."""

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        if "/full/" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return Steps.write(self, fd, data, offset)


def test_a_full_disk_keeps_no_empty_rescue_copy(tmp_path: Path) -> None:  # S-25
    with closing(create_in(FullBelow(), tmp_path)) as store:
        snapshot = Conversation().turn()
        copy = Path(store.rescue([str(tmp_path / "full"), str(tmp_path / "rescue")], snapshot))
        assert copy.parent == tmp_path / "rescue"
        assert list((tmp_path / "full").iterdir()) == []
        begun = tmp_path / "full" / copy.name  # by an earlier try, which got further: that is not ours to remove
        begun.mkdir()
        (begun / "history.jsonl").write_bytes(b"all that is left")
        store.rescue([str(tmp_path / "full"), str(tmp_path / "rescue")], snapshot)
        assert (begun / "history.jsonl").read_bytes() == b"all that is left"


@pytest.mark.parametrize(("file", "content"), [("meta.json", None), ("meta.json", b"{"), ("history.jsonl", b"")])
def test_what_is_left_of_a_damaged_or_unfinished_rescue_copy_is_never_written_over(  # S-25
    file: str, content: bytes | None, store: FileStore, tmp_path: Path
) -> None:
    talk = Conversation()
    first = Path(store.rescue([str(tmp_path)], talk.turn("first")))
    if content is None:
        (first / file).unlink()
    else:
        (first / file).write_bytes(content)
    before = {path.name: path.read_bytes() for path in first.iterdir()}
    second = Path(store.rescue([str(tmp_path)], Conversation().turn("other")))
    assert second.name == f"{ID}-1-2"
    assert {path.name: path.read_bytes() for path in first.iterdir()} == before


def test_a_rescue_that_no_place_takes_says_why(store: FileStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="Not a directory"):
        store.rescue([str(tmp_path / "file")], Conversation().turn())


def test_the_real_file_system_syncs_and_locks_for_real(tmp_path: Path) -> None:
    store = create(FileSystem(), str(tmp_path), meta_id=ID, cwd="/", model=MODEL, permission="read-only", now_ms=NOW)
    talk = Conversation()
    store.commit(talk.turn("x" * 600_000))
    store.close()
    assert read_session(FileSystem(), store.path or "")[1].lines == talk.history.lines
