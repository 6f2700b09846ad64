"""Lists: the workspace's sessions newest first, whatever else lies beside them."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from storage_disks import NOW, Conversation, Counting, Faulty, Steps, create_in

from loopd.storage import Metadata, StorageError
from loopd.storage.catalog import Catalog


def _session(root: Path, *, updated_at: int = NOW, said: str | None = None, **options: Any) -> Path:
    store = create_in(Steps(), root, str(uuid.uuid4()), updated_at=updated_at, durable=False, **options)
    if said is not None:
        store.commit(Conversation().turn(said))
    store.close()
    return Path(store.path or "")


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog(Steps(), str(tmp_path / "data"))


def _paths(catalog: Catalog, cwd: Path | None, session_dir: str | None = None, limit: int | None = None) -> list[Path]:
    rows = catalog.list(None if cwd is None else str(cwd), session_dir, limit).rows
    return [Path(row.path) for row in rows]


def test_a_missing_directory_is_an_empty_list(catalog: Catalog, tmp_path: Path) -> None:  # S-4
    for session_dir in (None, str(tmp_path / "none")):
        for cwd in (None, str(tmp_path)):
            listing = catalog.list(cwd, session_dir)
            assert (listing.rows, listing.damaged, listing.legacy, listing.unsupported) == ([], [], [], 0)
    assert catalog.most_recent(str(tmp_path), None) is None
    assert catalog.highest(str(tmp_path), None) == 0
    assert not (tmp_path / "data").exists()


def test_newest_first_and_ties_by_id_descending(catalog: Catalog, tmp_path: Path) -> None:  # S-4, K-10
    old = _session(tmp_path, updated_at=NOW - 5)
    tied = sorted([_session(tmp_path) for _ in range(5)], reverse=True)
    new = _session(tmp_path, updated_at=NOW + 5)
    assert _paths(catalog, tmp_path) == [new, *tied, old]
    assert _paths(catalog, tmp_path, limit=2) == [new, tied[0]]
    assert catalog.most_recent(str(tmp_path), None) == str(new)


def test_rows_carry_counts_from_metadata_and_no_history_is_opened(tmp_path: Path) -> None:  # S-4, S-23, K-14
    _session(tmp_path, said="hello")
    fs = Counting()
    row = Catalog(fs, str(tmp_path / "data")).list(str(tmp_path), None).rows[0]
    assert (row.meta.committed.messages, row.meta.committed.user_messages, row.meta.unread) == (4, 1, True)
    assert fs.calls.count("read") == 1


def test_only_the_canonical_workspace_by_whatever_name(catalog: Catalog, tmp_path: Path) -> None:  # S-4, K-11
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    through_link = _session(tmp_path, cwd=str(tmp_path / "link"))
    through_real = _session(tmp_path, cwd=str(tmp_path / "real"), updated_at=NOW - 1)
    elsewhere = _session(tmp_path, updated_at=NOW - 2)
    for name in ("link", "real", "real/../link/."):
        assert _paths(catalog, tmp_path / name) == [through_link, through_real]
    assert _paths(catalog, None) == [through_link, through_real, elsewhere]


def test_a_session_directory_is_listed_by_workspace_too(catalog: Catalog, tmp_path: Path) -> None:  # S-2, S-4
    mine = str(tmp_path / "mine")
    here = _session(tmp_path, session_dir=mine)
    there = _session(tmp_path, session_dir=mine, cwd="/", updated_at=NOW - 1)
    assert _paths(catalog, tmp_path, mine) == [here]
    assert _paths(catalog, None, mine) == [here, there]
    assert _paths(catalog, tmp_path) == []


def test_damaged_sessions_are_named_and_hide_nothing(catalog: Catalog, tmp_path: Path) -> None:  # S-4, K-8
    sessions = [_session(tmp_path, said="hi") for _ in range(18)]
    assert len(_paths(catalog, tmp_path)) == 18
    sessions[3].write_bytes(bytes(413))
    assert len(_paths(catalog, tmp_path)) == 17
    flipped = bytearray(sessions[5].read_bytes())
    flipped[flipped.index(b'"id"') + 8] ^= 4
    sessions[5].write_bytes(flipped)
    cwd = bytearray(sessions[6].read_bytes())
    cwd[cwd.index(b'"cwd"') + 8] ^= 4
    sessions[6].write_bytes(cwd)
    os.truncate(sessions[7].with_name("history.jsonl"), 10)
    sessions[8].with_name("history.jsonl").unlink()
    sessions[9].unlink()
    sessions[10].unlink()
    os.mkfifo(sessions[10])
    before = {path: path.read_bytes() for path in sessions if path.is_file()}
    listing = catalog.list(str(tmp_path), None)
    reasons = {Path(damaged.path): damaged.reason for damaged in listing.damaged}
    assert set(reasons) == {sessions[number] for number in (3, 5, 6, 7, 8, 9, 10)}
    for number, reason in {
        3: "JSON",
        5: "id",
        6: "cwd",
        7: "10 bytes",
        8: "missing",
        9: "missing",
        10: "regular",
    }.items():
        assert reason in reasons[sessions[number]]
    assert {Path(row.path) for row in listing.rows} == set(sessions) - set(reasons)
    assert {path: path.read_bytes() for path in before} == before


def test_the_most_recent_one_passes_over_damage_but_not_over_what_cannot_be_read_now(tmp_path: Path) -> None:  # S-2
    older, newest = _session(tmp_path), _session(tmp_path, updated_at=NOW + 1)

    class Refusing(Steps):
        def open(self, name: str, flags: int, *, dir_fd: int | None = None) -> int:
            if name == newest.parent.name:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().open(name, flags, dir_fd=dir_fd)

    with pytest.raises(StorageError, match=f"{newest.parent.name}.*EMFILE"):
        Catalog(Refusing(), str(tmp_path / "data")).most_recent(str(tmp_path), None)
    newest.write_bytes(bytes(413))
    assert Catalog(Steps(), str(tmp_path / "data")).most_recent(str(tmp_path), None) == str(older)


def test_names_that_are_not_utf_8_are_named_with_escapes_and_hide_nothing(catalog: Catalog, tmp_path: Path) -> None:
    session = _session(tmp_path)
    place = os.fsencode(session.parent.parent)
    for name in (b"/\xff", b"/caf\xe9"):
        os.mkdir(place + name)
    Path(os.fsdecode(place + b"/\xff/meta.json")).write_bytes(session.read_bytes())
    Path(os.fsdecode(place + b"/old\xfe.jsonl")).write_text('{"format":"loop-session","version":2}\n')
    other = os.fsencode(tmp_path) + b"/data/sessions/\xfd"
    os.makedirs(other + b"/id")
    Path(os.fsdecode(other + b"/id/meta.json")).write_text("x")
    here, everywhere = catalog.list(str(tmp_path), None), catalog.list(None, None)
    shown = place.decode()
    assert [one.path for one in here.damaged] == [f"{shown}/\\xff/meta.json", f"{shown}/old\\xfe.jsonl"]
    assert [one.path for one in everywhere.damaged] == sorted(
        [f"{tmp_path}/data/sessions/\\xfd/id/meta.json", *(one.path for one in here.damaged)]
    )
    for listing in (here, everywhere):
        assert [row.path for row in listing.rows] == [str(session)]
        assert listing.legacy == []
        assert msgspec.json.encode(listing)


def test_a_place_that_does_not_answer_holds_up_no_other_one(tmp_path: Path) -> None:
    answers, asked = threading.Event(), threading.Event()

    class Dead(Steps):
        def open(self, name: str, flags: int, *, dir_fd: int | None = None) -> int:
            if name.startswith("/dead"):
                asked.set()
                answers.wait(10)
            return super().open(name, flags, dir_fd=dir_fd)

    session = _session(tmp_path)
    catalog = Catalog(Dead(), str(tmp_path / "data"))
    waiting = threading.Thread(target=catalog.list, args=(str(tmp_path), "/dead"))
    waiting.start()
    try:
        assert asked.wait(5)
        done = threading.Thread(target=lambda: (catalog.list(str(tmp_path), None), catalog.highest("/", None)))
        done.start()
        done.join(5)
        assert not done.is_alive()
        assert _paths(catalog, tmp_path) == [session]
    finally:
        answers.set()
        waiting.join()


def test_a_damaged_session_that_is_repaired_lists_again(catalog: Catalog, tmp_path: Path) -> None:
    history = _session(tmp_path, said="hi").with_name("history.jsonl")
    history.rename(tmp_path / "away")
    assert _paths(catalog, tmp_path) == []
    (tmp_path / "away").rename(history)
    assert len(_paths(catalog, tmp_path)) == 1


def test_a_creation_that_was_cut_off_is_no_session(catalog: Catalog, tmp_path: Path) -> None:
    path = _session(tmp_path)
    path.unlink()
    listing = catalog.list(str(tmp_path), None)
    assert (listing.rows, listing.damaged) == ([], [])


def test_earlier_and_newer_formats_are_told_apart_and_left_alone(catalog: Catalog, tmp_path: Path) -> None:  # S-4, S-18
    place = _session(tmp_path).parent.parent
    newer = _session(tmp_path)
    newer.write_text(json.dumps(json.loads(newer.read_text()) | {"minReader": 9, "format": "loop-session"}))
    header = {"format": "loop-session", "version": 2, "id": "old", "cwd": os.path.realpath(tmp_path)}
    (place / "old.jsonl").write_text(json.dumps(header) + '\n{"role":"user"}\n')
    (place / "elsewhere.jsonl").write_text(json.dumps(header | {"cwd": "/"}) + "\n")
    (place / "future.jsonl").write_text(json.dumps(header | {"version": 7}) + "\n")
    (place / "noise.jsonl").write_bytes(b"\xff\0")
    (place / "notes.txt").write_text("mine")
    listing = catalog.list(str(tmp_path), None)
    assert listing.legacy == [str(place / "old.jsonl")]
    assert (len(listing.rows), listing.damaged, listing.unsupported) == (1, [], 3)


def test_a_list_sees_what_was_published_since(catalog: Catalog, tmp_path: Path) -> None:
    """However fast: two publications may share clock tick, size and even inode number."""
    store, talk = create_in(Steps(), tmp_path, durable=False), Conversation()
    for pin in range(1, 30):
        published: Metadata = store.update({"pinned_at": pin}) if pin % 3 else store.commit(talk.turn())
        assert [row.meta for row in catalog.list(str(tmp_path), None).rows] == [published]
    store.close()


def test_highest_counts_what_is_on_disk_and_what_was_noted(catalog: Catalog, tmp_path: Path) -> None:  # S-9
    _session(tmp_path, updated_at=NOW + 70)
    workspace = os.path.realpath(tmp_path)
    assert catalog.highest(str(tmp_path), None) == NOW + 70
    catalog.note(workspace, NOW + 80)
    catalog.note(workspace, NOW + 75)
    assert catalog.highest(str(tmp_path), None) == NOW + 80
    assert catalog.highest("/", None) == 0


class Opened(Counting):
    """Also keeps the names of what was opened."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def step(self, name: str, args: tuple[Any, ...], go: Callable[[], Any]) -> Any:
        if name == "open":
            self.names.add(os.path.basename(args[0]))
        return super().step(name, args, go)


@pytest.fixture
def roomy() -> Iterator[Path]:
    """In memory where that is possible: making and removing 30,000 entries takes a disk longer than the test does."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as place:
        yield Path(place)


def test_ten_thousand_sessions_and_one_of_1_gb_list_without_opening_a_history(roomy: Path) -> None:  # K-14, S-23
    one = _session(roomy, said="hi")
    meta, long_ago = one.read_text(), time.time() - 60
    for number in range(10_000):
        id = f"00000000-0000-4000-8000-{number:012}"
        directory = one.parent.parent / id
        directory.mkdir()
        (directory / "meta.json").write_text(meta.replace(one.parent.name, id))
        os.utime(directory / "meta.json", (long_ago, long_ago))
        os.link(one.with_name("history.jsonl"), directory / "history.jsonl")
    large = json.loads(meta)
    large["committed"]["bytes"] = 1 << 30
    one.write_text(json.dumps(large))
    one.with_name("history.jsonl").unlink()
    one.with_name("history.jsonl").touch()
    os.truncate(one.with_name("history.jsonl"), 1 << 30)  # holes: it takes no room
    os.utime(one, (long_ago, long_ago))
    fs = Opened()
    catalog = Catalog(fs, str(roomy / "data"))
    first = catalog.list(str(roomy), None)
    assert (len(first.rows), len(first.damaged), fs.calls.count("read")) == (10_001, 0, 10_001)
    fs.calls.clear()
    began = time.perf_counter()
    assert catalog.list(str(roomy), None, 50).rows == first.rows[:50]
    print(f"second list of 10,001: {(time.perf_counter() - began) * 1000:.0f} ms")
    assert "read" not in fs.calls
    assert "history.jsonl" not in fs.names


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.EIO])
def test_a_call_that_fails_is_an_error_or_names_its_session_and_the_next_list_is_right(
    number: int, tmp_path: Path
) -> None:  # S-4, D-5
    sessions = [_session(tmp_path, said="hi") for _ in range(2)]
    hits = 0
    for k in count(1):
        fs = Faulty()
        catalog = Catalog(fs, str(tmp_path / "data"))
        fs.arm(k, number)
        with suppress(StorageError):
            listing = catalog.list(str(tmp_path), None)
            assert len(listing.rows) + len(listing.damaged) == 2
        if fs.hit is None:
            break
        hits += 1
        fs.disarm()
        assert set(_paths(catalog, tmp_path)) == set(sessions)
    print(f"{errno.errorcode[number]}: {hits} points hit")
    assert hits
