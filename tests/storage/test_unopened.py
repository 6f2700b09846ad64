"""Sessions that are not open: changed under the lock without reading a message, deleted whole and nothing beside."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from storage_disks import ID, Conversation, Counting, Faulty, Recording, Steps, create_in, lay_out

from loopd.storage import Metadata, SessionLocked, SessionMalformed, SessionMissing, SessionUnsupported, StorageError
from loopd.storage.catalog import Catalog
from loopd.storage.files import read_session
from loopd.storage.unopened import change_metadata, delete

OTHER = "0b9e6679-7425-40de-944b-e07fc1f90ae7"


@pytest.fixture(autouse=True)
def _no_descriptor_stays_open() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return _saved(tmp_path)


def _saved(root: Path, id: str = ID) -> Path:
    store = create_in(Steps(), root, id)
    store.commit(Conversation().turn())
    store.close()
    return Path(store.path or "")


def _pin(fs: Steps, path: Path) -> Metadata:
    return change_metadata(fs, str(path), lambda _: {"pinned_at": 9})


def test_a_change_is_published_and_the_history_is_not_even_opened(path: Path) -> None:  # S-28, S-13
    history = path.with_name("history.jsonl").read_bytes()
    meta, _ = read_session(Steps(), str(path))
    path.with_name("history.jsonl").chmod(0)
    fs = Counting()
    assert _pin(fs, path).pinned_at == 9
    assert fs.calls.count("fsync") == 2
    path.with_name("history.jsonl").chmod(0o600)
    again, _ = read_session(Steps(), str(path))
    assert (again.pinned_at, again.updated_at) == (9, meta.updated_at)
    assert path.with_name("history.jsonl").read_bytes() == history
    fs = Counting()
    _pin(fs, path)
    assert "write" not in fs.calls  # it says so already


def test_a_change_keeps_what_a_newer_writer_added(path: Path) -> None:  # S-27
    path.write_text(json.dumps(json.loads(path.read_text()) | {"colour": "red"}))
    _pin(Steps(), path)
    assert json.loads(path.read_text())["colour"] == "red"


def test_a_writer_elsewhere_keeps_everybody_else_out(tmp_path: Path) -> None:  # S-22, S-28
    store = create_in(Steps(), tmp_path)
    path = Path(store.path or "")
    for refused in (lambda: _pin(Steps(), path), lambda: delete(Steps(), str(path))):
        with pytest.raises(SessionLocked):
            refused()
    store.close()
    delete(Steps(), str(path))
    assert os.listdir(path.parent.parent) == []


@pytest.mark.parametrize("spelling", ["{0}/..", "{1}", "{1}/history.jsonl", "{1}/../nowhere/meta.json", "meta.json"])
def test_only_the_exact_path_of_a_session_is_deleted(spelling: str, path: Path) -> None:  # S-2, S-28
    with pytest.raises(SessionMissing):
        delete(Steps(), spelling.format(path, path.parent))
    assert sorted(os.listdir(path.parent)) == ["history.jsonl", "meta.json"]


def test_deleting_leaves_neither_the_session_nor_a_trace_and_the_others_alone(tmp_path: Path, path: Path) -> None:
    other = _saved(tmp_path, OTHER)
    before = {file.name: file.read_bytes() for file in other.parent.iterdir()}
    for name in (".meta.json.tmp", ".history.jsonl.tmp", "run.journal"):
        path.with_name(name).write_text("left")
    delete(Steps(), str(path))
    assert os.listdir(path.parent.parent) == [OTHER]
    assert {file.name: file.read_bytes() for file in other.parent.iterdir()} == before
    with pytest.raises(SessionMissing):
        delete(Steps(), str(path))


@pytest.mark.parametrize("strange", ["notes.txt", ".hidden", "history.jsonl.bak", "run.journal/"])
def test_a_directory_with_something_else_in_it_stays_as_it_is_and_names_it(strange: str, path: Path) -> None:
    other = path.with_name(strange.strip("/"))
    other.mkdir() if strange.endswith("/") else other.write_text("mine")
    before = sorted(os.listdir(path.parent))
    with pytest.raises(SessionMalformed, match=strange.strip("/")):
        delete(Steps(), str(path))
    assert sorted(os.listdir(path.parent)) == before
    assert read_session(Steps(), str(path))


@pytest.mark.parametrize("damage", ["nul", "no metadata", "cut history", "link"])
def test_a_damaged_session_can_be_deleted(damage: str, tmp_path: Path, path: Path) -> None:  # S-28, K-8
    target = tmp_path / "target"
    target.write_text("somebody's")
    if damage == "cut history":
        path.with_name("history.jsonl").write_bytes(b"")
    else:
        path.unlink()
    if damage == "nul":
        path.write_bytes(bytes(413))
    if damage == "link":
        path.symlink_to(target)
    catalog = Catalog(Steps(), str(tmp_path / "data"))
    assert [one.path for one in catalog.list(str(tmp_path), None).damaged] == [str(path)]
    delete(Steps(), str(path))
    listing = catalog.list(str(tmp_path), None)
    assert (listing.rows, listing.damaged) == ([], [])
    assert target.read_text() == "somebody's"


@pytest.mark.parametrize("content", ["{", '{"format":"package"}', '{"format":"loop-session","minReader":4}'])
def test_a_meta_json_of_somebody_else_or_of_a_newer_version_is_never_deleted(content: str, tmp_path: Path) -> None:
    path = tmp_path / "project" / "meta.json"
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises((SessionMalformed, SessionUnsupported)):
        delete(Steps(), str(path))
    assert path.read_text() == content


def _listed(root: Path, workspace: Path) -> tuple[list[str], list[str]]:
    listing = Catalog(Steps(), str(root / "data")).list(str(workspace), None)
    return [row.meta.id for row in listing.rows], [one.reason for one in listing.damaged]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_deletion_that_fails_at_any_call_leaves_it_listed_whole_or_not_at_all(after: bool, tmp_path: Path) -> None:
    """And the next deletion in the place removes what was left. S-28, rule 15"""
    hits = 0
    for at in count(1):
        root, fs = tmp_path / str(at), Faulty()
        root.mkdir()
        path, other = _saved(root), _saved(root, OTHER)
        fs.arm(at, errno.EIO, after=after)
        told = None
        try:
            delete(fs, str(path))
        except (StorageError, SessionMissing) as error:
            told = str(error)
        reached, rows = fs.hit is not None, _listed(root, root)
        assert rows in [([ID, OTHER], []), ([OTHER, ID], []), ([OTHER], [])]
        assert told is not None or rows == ([OTHER], [])
        fs.disarm()
        if ID in rows[0]:
            assert read_session(Steps(), str(path))
            delete(fs, str(path))
        delete(fs, str(other))
        assert os.listdir(path.parent.parent) == []
        if not reached:
            break
        hits += 1
    print(f"{hits} points hit")
    assert hits > 15


@pytest.mark.parametrize("drop", [None, "the workspace"])
def test_after_a_crash_at_any_moment_of_a_deletion_the_session_is_whole_or_gone(
    drop: str | None, tmp_path: Path
) -> None:
    """What was acknowledged stays deleted; without the fsync of the place it would not."""
    live = tmp_path / "live"
    live.mkdir()
    fs, talk = Recording(live), Conversation()
    store = create_in(fs, live)
    store.commit(talk.turn())
    store.close()
    path = Path(store.path or "")
    fs.moments.clear()
    fs.drop = path.parent.parent.name if drop else None
    delete(fs, str(path))
    fs.acknowledge()
    states, wrong = 0, 0
    for acknowledged, tree in fs.crashes():
        root = tmp_path / f"state-{states}"
        root.mkdir()
        lay_out(tree, root)
        rows, damaged = _listed(root, live)
        wrong += bool(damaged) or (acknowledged > 0 and rows != [])
        states += 1
        if rows:
            delete(Steps(), str(root / path.relative_to(live)))
            assert _listed(root, live) == ([], [])
    print(f"{states} states")
    assert states > 3
    assert (wrong > 0) is (drop is not None)


class SyncFails(Recording):
    """The next sync does, once."""

    fails = False

    def fsync(self, fd: int) -> None:
        if self.fails:
            self.fails = False
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().fsync(fd)


def test_what_an_unsynced_deletion_left_is_removed_only_once_its_new_name_is_safe(tmp_path: Path) -> None:  # rule 2
    live = tmp_path / "live"
    live.mkdir()
    fs = SyncFails(live)
    store = create_in(fs, live)
    store.commit(Conversation().turn())
    store.close()
    fs.moments.clear()
    fs.fails = True
    with pytest.raises(StorageError, match="then try again"):
        delete(fs, store.path or "")
    with pytest.raises(SessionMissing):
        delete(fs, store.path or "")
    assert os.listdir(Path(store.path or "").parents[1]) == []
    for number, (_, tree) in enumerate(fs.crashes()):
        root = tmp_path / f"state-{number}"
        root.mkdir()
        lay_out(tree, root)
        assert _listed(root, live) in [([ID], []), ([], [])]


def test_a_deletion_beside_a_list_is_never_seen_as_damage(tmp_path: Path) -> None:  # S-28
    for at in count(1):
        root = tmp_path / str(at)
        root.mkdir()
        path = _saved(root)
        fs = Meanwhile(at, path)
        listing = Catalog(fs, str(root / "data")).list(str(root), None)
        assert listing.damaged == []
        if fs.number < at:
            break
    assert at > 8


class Meanwhile(Steps):
    """Right before call ``at`` somebody else deletes the session."""

    def __init__(self, at: int, path: Path) -> None:
        self.number = 0
        self._at = at
        self._path = path

    def step(self, name: str, args: tuple[Any, ...], go: Callable[[], Any]) -> Any:  # noqa: ARG002 see Steps
        self.number += 1
        if self.number == self._at:
            delete(Steps(), str(self._path))
        return go()
