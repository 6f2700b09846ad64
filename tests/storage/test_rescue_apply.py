"""What could not be saved is put back: all of it, once, and only where it belongs (S-25)."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from storage_disks import ID, Conversation, Faulty, Recording, Steps, create_in, lay_out

from loopd.storage import SessionMalformed, SessionMissing, StorageError
from loopd.storage.catalog import Catalog
from loopd.storage.copies import copies_in, read_copy, standing
from loopd.storage.files import FileStore, open_session, read_session
from loopd.storage.fs import DIRECTORY, FileSystem, make_directories, opened, replace_file
from loopd.storage.salvage import Applied, Refused, apply


@dataclass
class Lost:
    """A session with one turn on disk and a second one in a rescue copy only, as after a disk that was full."""

    root: Path
    fs: FileSystem = field(default_factory=Steps)
    saved: int = 1
    talk: Conversation = field(default_factory=Conversation)

    def __post_init__(self) -> None:
        store = create_in(self.fs, self.root)
        for number in range(self.saved):
            store.commit(self.talk.turn(f"saved {number}"))
        self.old = list(self.talk.history.lines)
        self.path = str(store.path)
        self.copy = store.rescue([self.rescue], self.talk.turn("lost"))
        store.close()

    @property
    def rescue(self) -> str:
        return str(self.root / "data" / "rescue")

    @property
    def session(self) -> Path:
        return Path(self.path).parent

    def state(self) -> str:
        return standing(Steps(), read_copy(Steps(), self.copy))[0]

    def put_back(self, fs: FileSystem | None = None, *, as_new: bool = False) -> Applied:
        return apply(fs or Steps(), self.copy, data_dir=str(self.root / "data"), as_new=as_new)

    def lines(self) -> list[bytes]:
        return read_session(Steps(), self.path)[1].lines

    def open(self) -> FileStore:
        return open_session(Steps(), self.path)[0]


@pytest.fixture
def lost(tmp_path: Path) -> Lost:
    return Lost(tmp_path)


@pytest.fixture(autouse=True)
def _no_descriptor_stays_open() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_beyond_the_base_is_appended_and_the_copy_goes(lost: Lost) -> None:
    copy = read_copy(Steps(), lost.copy)
    assert (lost.state(), copy.beyond, copy.history.messages) == ("matches", 4, 8)
    assert lost.put_back() == Applied(lost.path, 4, already=False, kept=None)
    meta, history = read_session(Steps(), lost.path)
    assert history.lines == lost.talk.history.lines
    assert (meta.committed, meta.unread) == (copy.meta.committed, True)
    assert copies_in(Steps(), lost.rescue) == []
    assert os.listdir(lost.rescue) == []
    store, again = open_session(Steps(), lost.path)
    assert store.commit(Conversation(again).turn("next")).committed.revision == meta.committed.revision + 1
    store.close()


def test_only_what_is_new_is_written(lost: Lost) -> None:  # S-23
    before = (lost.session / "history.jsonl").stat()
    lost.put_back()
    assert (lost.session / "history.jsonl").stat().st_ino == before.st_ino


def test_putting_back_twice_says_so_and_removes_what_is_left(lost: Lost) -> None:
    shutil.copytree(lost.copy, lost.copy + "-2")  # another place took a copy of the same snapshot
    lost.put_back()
    lost.copy += "-2"
    assert lost.state() == "applied"
    assert lost.put_back().already
    assert lost.lines() == lost.talk.history.lines
    assert os.listdir(lost.rescue) == []
    with pytest.raises(SessionMissing, match="no rescue copy"):
        lost.put_back()


def test_a_copy_whose_snapshot_was_saved_after_all_and_continued_is_known_as_applied(lost: Lost) -> None:
    store, history = open_session(Steps(), lost.path)
    history.lines.extend(lost.talk.history.lines[len(history.lines) :])
    store.commit(lost.talk.snapshot())
    store.commit(lost.talk.turn("and more"))
    store.close()
    assert lost.state() == "applied"
    assert lost.put_back().already
    assert lost.lines() == lost.talk.history.lines


def test_pin_settings_and_unknown_keys_of_the_session_stay_as_they_are_now(lost: Lost) -> None:  # S-7, S-27
    meta = json.loads(Path(lost.path).read_text())
    meta |= {"fromTheFuture": {"a": 1}}
    Path(lost.path).write_text(json.dumps(meta))
    store = lost.open()
    changed = store.update({"pinned_at": 77, "permission": "workspace-write", "unread": False})
    later = store.update({"updated_at": changed.updated_at + 10_000})
    store.close()
    assert lost.state() == "matches"
    lost.put_back()
    after, _ = read_session(Steps(), lost.path)
    assert (after.pinned_at, after.permission, after.updated_at) == (77, "workspace-write", later.updated_at)
    assert after.unread  # nobody has read what came back
    assert json.loads(Path(lost.path).read_text())["fromTheFuture"] == {"a": 1}


def test_a_session_that_went_on_is_not_touched_and_the_copy_becomes_one_of_its_own(lost: Lost) -> None:
    store, history = open_session(Steps(), lost.path)
    other = Conversation(history)
    store.commit(other.turn("another branch"))
    store.close()
    before = lost.lines()
    assert lost.state() == "differs"
    with pytest.raises(Refused, match=r"something else was saved.*--as-new"):
        lost.put_back()
    assert (lost.lines(), Path(lost.copy).is_dir()) == (before, True)
    shutil.copytree(lost.copy, lost.copy + "-2")
    new = lost.put_back(as_new=True)
    meta, put = read_session(Steps(), new.path)
    assert put.lines == lost.talk.history.lines
    assert (meta.id, meta.cwd) == (Path(new.path).parent.name, str(lost.root))
    assert lost.lines() == before
    assert not Path(lost.copy).exists()
    listed = {row.path for row in Catalog(Steps(), str(lost.root / "data")).list(str(lost.root), None).rows}
    assert listed == {lost.path, new.path}
    lost.copy += "-2"  # cut off before the copy was removed: the same session again, not a third one
    assert lost.put_back(as_new=True) == Applied(new.path, 8, already=True, kept=None)


@pytest.mark.parametrize("saved", [0, 2])
@pytest.mark.parametrize("left", ["no workspace", "no directory", "an empty directory"])
def test_where_the_session_is_gone_all_of_it_comes_back_under_the_same_id(
    saved: int, left: str, tmp_path: Path
) -> None:  # S-28, K-3
    lost = Lost(tmp_path, saved=saved)
    shutil.rmtree(lost.session if left == "no directory" else tmp_path / "data" / "sessions")
    if left == "an empty directory":
        lost.session.mkdir(parents=True)
    assert lost.state() == "gone"
    before = read_copy(Steps(), lost.copy)
    assert lost.put_back() == Applied(lost.path, 4, already=False, kept=None)
    meta, history = read_session(Steps(), lost.path)
    assert (meta, history.lines) == (before.meta, lost.talk.history.lines)
    assert os.listdir(lost.session.parent) == [ID]
    assert lost.session.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in lost.session.iterdir()} == {0o600}


def test_what_is_left_of_a_session_without_metadata_is_not_written_over(lost: Lost) -> None:
    Path(lost.path).unlink()
    with pytest.raises(Refused, match="move it away"):
        lost.put_back()
    assert (lost.session / "history.jsonl").read_bytes() == b"".join(lost.old)
    assert Path(lost.copy).is_dir()
    assert os.listdir(lost.session.parent) == [ID]


def test_of_two_at_once_the_slower_one_does_not_touch_what_the_faster_one_put_back(lost: Lost) -> None:
    """The slower one has opened the hidden directory, and gets its lock when that has become the session."""
    shutil.rmtree(lost.session)
    shutil.copytree(lost.copy, lost.copy + "-2")

    class Overtaken(Steps):
        def lock(self, fd: int) -> None:
            apply(Steps(), lost.copy + "-2", data_dir=str(lost.root / "data"))
            super().lock(fd)

    with pytest.raises(Refused, match="another process has just put it back"):
        lost.put_back(Overtaken())
    assert lost.lines() == lost.talk.history.lines
    assert lost.put_back().already


def test_of_two_copies_that_continue_one_another_both_are_put_back_in_either_order(tmp_path: Path) -> None:
    for order in (0, 1), (1, 0):
        lost = Lost(tmp_path / str(order))
        store = lost.open()
        store._lines = len(lost.old)
        copies = [lost.copy, store.rescue([lost.rescue], lost.talk.turn("lost too"))]
        store.close()
        done = [apply(Steps(), copies[number], data_dir=str(lost.root / "data")) for number in order]
        assert [one.already for one in done] == [False, order == (1, 0)]
        assert lost.lines() == lost.talk.history.lines
        assert os.listdir(lost.rescue) == []


def test_while_a_process_has_the_session_open_it_is_refused_and_named(lost: Lost) -> None:  # K-5
    store = lost.open()
    assert lost.state() == "open"
    with pytest.raises(Refused, match=rf"open in process {os.getpid()}: close it there"):
        lost.put_back()
    assert lost.put_back(as_new=True).messages == 8  # that takes another place
    store.close()


def test_a_damaged_session_is_left_alone(lost: Lost) -> None:  # S-5, K-8
    Path(lost.path).write_bytes(bytes(413))
    assert lost.state() == "unreadable"
    with pytest.raises(Refused, match="not JSON"):
        lost.put_back()
    assert Path(lost.path).read_bytes() == bytes(413)
    assert read_session(Steps(), lost.put_back(as_new=True).path)[1].lines == lost.talk.history.lines


def _flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)


@pytest.mark.parametrize(
    "damage",
    [
        lambda copy: (copy / "meta.json").unlink(),
        lambda copy: (copy / "meta.json").write_bytes(bytes(413)),
        lambda copy: (copy / "history.jsonl").unlink(),
        lambda copy: os.truncate(copy / "history.jsonl", 100),
        lambda copy: _flip(copy / "history.jsonl"),
        lambda copy: (copy / "meta.json").rename(copy / "x") and (copy / "meta.json").symlink_to("x"),
    ],
)
@pytest.mark.parametrize("as_new", [False, True])
def test_a_damaged_copy_is_named_and_never_published(
    damage: Callable[[Path], object], as_new: bool, lost: Lost
) -> None:  # S-5, S-24, K-8
    damage(Path(lost.copy))
    with pytest.raises(SessionMalformed) as refused:
        read_copy(Steps(), lost.copy)
    assert lost.copy in str(refused.value)
    with pytest.raises(SessionMalformed):
        lost.put_back(as_new=as_new)
    assert lost.lines() == lost.old


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda base: base.unlink(), "is missing"),
        (lambda base: base.write_bytes(bytes(99)), "JSON"),
        (lambda base: base.write_text('{"path":"/etc/passwd","commitId":"","bytes":0,"crc32":0}'), "names no session"),
        (lambda base: _edit(base, bytes=7), "does not begin with"),
    ],
)
def test_a_copy_that_does_not_say_what_it_continues_can_only_become_a_session_of_its_own(
    damage: Callable[[Path], object], reason: str, lost: Lost
) -> None:
    damage(Path(lost.copy) / "base.json")
    assert lost.state() == "unreadable"
    with pytest.raises(Refused, match=f"{reason}.*--as-new"):
        lost.put_back()
    assert lost.put_back(as_new=True).messages == 8


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_other_files_in_a_copy_are_nobodys_to_remove(lost: Lost) -> None:
    (Path(lost.copy) / "notes.txt").write_text("mine")
    done = lost.put_back()
    assert "notes.txt" in str(done.kept)
    assert (Path(lost.copy) / "notes.txt").read_text() == "mine"
    assert lost.lines() == lost.talk.history.lines
    (Path(lost.copy) / "notes.txt").unlink()
    assert lost.put_back() == Applied(lost.path, 4, already=True, kept=None)


# --- faults and crashes -----------------------------------------------------------------------------------------------

ERRORS = [errno.ENOSPC, errno.EIO]  # which one it is makes no difference here


@pytest.mark.parametrize("case", ["continues", "gone", "as new"])
@pytest.mark.parametrize("after", [False, True], ids=["", "after-effect"])
@pytest.mark.parametrize("number", [*ERRORS, 0], ids=[*map(errno.errorcode.get, ERRORS), "short"])
def test_after_any_fault_the_session_is_old_or_new_and_a_repeat_completes_it(
    number: int, after: bool, case: str, tmp_path: Path
) -> None:  # I-4, S-14
    hits: list[str] = []
    for k in count(1):
        fs = Faulty()
        lost = Lost(tmp_path / f"{k}")
        if case == "gone":
            shutil.rmtree(lost.session)
        fs.arm(k, number or errno.ENOSPC, after=after, short=not number)
        done, told = None, None
        try:
            done = lost.put_back(fs, as_new=case == "as new")
        except StorageError as error:
            told = str(error)
        assert told is None or os.strerror(fs.number) in told
        fs.disarm()
        paths = Catalog(Steps(), str(lost.root / "data")).list(None, None)
        assert not paths.damaged
        histories = [read_session(Steps(), row.path)[1].lines for row in paths.rows]
        old = {"continues": [lost.old], "gone": [], "as new": [lost.old]}[case]
        new = [lost.talk.history.lines] + ([lost.old] if case == "as new" else [])
        assert sorted(histories, key=len) in (old, sorted(new, key=len))
        if Path(lost.copy).exists():
            assert read_copy(Steps(), lost.copy).history.lines == lost.talk.history.lines
            done = lost.put_back(as_new=case == "as new")
        assert read_session(Steps(), done.path if done else lost.path)[1].lines == lost.talk.history.lines
        assert copies_in(Steps(), lost.rescue) == []
        if fs.hit is not None:
            hits.append(fs.hit)
        elif number or k > 60:
            break
    print(f"{case} {number} {after}: {len(hits)} points hit: {' '.join(hits)}")
    assert hits


@pytest.mark.parametrize("case", ["continues", "gone", "as new"])
def test_in_every_legal_crash_state_the_copy_is_there_until_the_session_has_it(case: str, tmp_path: Path) -> None:
    live = tmp_path / "live"  # I-4, S-21
    live.mkdir()
    fs = Recording(live)
    lost = Lost(live, fs=fs)
    if case == "gone":
        fs = _without_the_session(lost)
    fs.acknowledge()
    start = len(fs.moments) - 1
    lost.put_back(fs, as_new=case == "as new")
    fs.acknowledge()
    fs.moments = fs.moments[start:]
    states = list(fs.crashes())
    seen = set()
    for acknowledged, tree in states:
        shutil.rmtree(live)
        live.mkdir()
        lay_out(tree, live)
        is_there = Path(lost.copy).exists()
        listing = Catalog(Steps(), str(live / "data")).list(None, None)
        assert not listing.damaged
        has_it = [row for row in listing.rows if read_session(Steps(), row.path)[1].lines == lost.talk.history.lines]
        assert has_it or (is_there and read_copy(Steps(), lost.copy).history.lines == lost.talk.history.lines)
        assert has_it or acknowledged == fs.moments[0][0]
        if is_there:
            lost.put_back(as_new=case == "as new")
        listing = Catalog(Steps(), str(live / "data")).list(None, None)
        found = [read_session(Steps(), row.path)[1].lines for row in listing.rows]
        assert found.count(lost.talk.history.lines) == 1
        assert not listing.damaged
        seen.add((is_there, bool(has_it)))
    print(f"crash states: {len(states)}")
    assert seen >= {(True, False), (True, True), (False, True)}


def _without_the_session(lost: Lost) -> Recording:
    """A disk on which only the copy is, and has long been."""
    files = {file.name: file.read_bytes() for file in Path(lost.copy).iterdir()}
    shutil.rmtree(lost.root)
    lost.root.mkdir()
    fs = Recording(lost.root)
    make_directories(fs, lost.copy, durable=True)
    with opened(fs, lost.copy, DIRECTORY) as directory:
        for name, body in files.items():
            replace_file(fs, name, [body], dir_fd=directory, durable=True)
        fs.fsync(directory)
    return fs
