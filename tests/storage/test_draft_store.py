"""A draft's first save: nothing or the whole session, at every fault and every crash, with all edits (S-3)."""

from __future__ import annotations

import errno
import os
from itertools import count
from pathlib import Path

import pytest
from storage_disks import ID, MODEL, NOW, Conversation, Faulty, Recording, Steps, draft_in, lay_out

from loop_protocol.v1.types import ImageBlock, UserMessage
from loopd.storage import SessionMissing, StorageError
from loopd.storage.catalog import Catalog
from loopd.storage.files import open_session, read_session
from loopd.storage.fs import FileSystem
from loopd.storage.places import place_of

OTHER = type(MODEL)("other", "model")


class Full(FileSystem):
    """From the first message on, while ``fills_up``, nothing can be changed any more."""

    fills_up = is_full = False

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        self.is_full = self.fills_up and (self.is_full or b'"role"' in bytes(data))
        self._step()
        return super().write(fd, data, offset)

    def truncate(self, fd: int, size: int) -> None:
        self._step()
        super().truncate(fd, size)

    def unlink(self, name: str, *, dir_fd: int) -> None:
        self._step()
        super().unlink(name, dir_fd=dir_fd)

    def _step(self) -> None:
        if self.fills_up and self.is_full:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def _on_disk(root: Path) -> list[str]:
    return [str(found.relative_to(root)) for found in root.rglob("*")]


def _catalog(root: Path) -> Catalog:
    return Catalog(Steps(), str(root / "data"))


def test_nothing_is_on_disk_until_a_commit_holds_a_user_message(tmp_path: Path) -> None:
    store = draft_in(Steps(), tmp_path)
    path = store.path or ""
    assert path == os.path.join(place_of(str(tmp_path / "data"), str(tmp_path)), ID, "meta.json")
    store.update({"pinned_at": 5, "updated_at": NOW + 1})
    store.update({"model": OTHER, "permission": "workspace-write"})
    store.commit(Conversation().snapshot())
    assert _on_disk(tmp_path) == []
    talk = Conversation()
    meta = store.commit(talk.turn())
    assert (meta.id, meta.pinned_at, meta.model, meta.permission) == (ID, 5, OTHER, "workspace-write")
    again, history = read_session(Steps(), path)
    assert (again, history.lines) == (meta, talk.history.lines)
    store.close()
    open_session(Steps(), path)[0].close()  # the lock is free


def test_a_message_that_is_nothing_but_an_attachment_counts(tmp_path: Path) -> None:
    store, talk = draft_in(Steps(), tmp_path), Conversation()
    talk.history.append(UserMessage(index=0, content=[ImageBlock(mime_type="image/png", data="aGk=")], timestamp=NOW))
    store.commit(talk.snapshot())
    assert [row.meta.id for row in _catalog(tmp_path).list(str(tmp_path), None).rows] == [ID]
    store.close()


@pytest.mark.parametrize("after", [False, True], ids=["", "after-effect"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EMFILE])
def test_a_first_save_that_fails_anywhere_leaves_nothing_damaged_and_the_retry_saves_once(
    number: int, after: bool, tmp_path: Path
) -> None:
    hits = []
    for k in count(1):
        fs, root = Faulty(), tmp_path / f"round-{k}"
        root.mkdir()
        store, talk = draft_in(fs, root), Conversation()
        store.update({"pinned_at": 5})
        snapshot = talk.turn("first")
        fs.arm(k, number, after=after)
        try:
            store.commit(snapshot)
        except StorageError:
            listing = _catalog(root).list(str(root), None)
            assert not listing.damaged
            # Nothing, unless an error came after it was published: then all of it.
            assert [row.meta.committed.messages for row in listing.rows] in ([], [4]), fs.hit
            assert listing.rows or not os.path.exists(os.path.dirname(store.path or ""))
        else:
            assert fs.hit in (None, "unlink", "close")
        fs.disarm()
        store.update({"pinned_at": 6})  # a pin works while a save is pending (S-7)
        meta = store.commit(snapshot, rewrite=True)
        assert (meta.pinned_at, meta.committed.messages, meta.committed.revision) == (6, 4, 1)
        assert read_session(Steps(), store.path or "")[1].lines == talk.history.lines
        assert store.commit(talk.turn("second")).committed.messages == 8
        store.close()
        if fs.hit is None:
            break
        hits.append(fs.hit)
    print(f"{errno.errorcode[number]}: {len(hits)} points hit: {' '.join(hits)}")
    assert len(hits) > 20


def test_a_first_save_that_fails_and_cannot_be_taken_back_is_an_empty_session_at_worst(tmp_path: Path) -> None:
    fs, talk = Full(), Conversation()
    store = draft_in(fs, tmp_path)
    snapshot = talk.turn()
    fs.fills_up = True
    with pytest.raises(StorageError):
        store.commit(snapshot)
    listing = _catalog(tmp_path).list(str(tmp_path), None)
    assert ([row.meta.committed.messages for row in listing.rows], listing.damaged) == ([0], [])
    fs.fills_up = False
    assert store.commit(snapshot, rewrite=True).committed.messages == 4
    store.close()


def test_a_crash_during_the_first_save_leaves_nothing_an_empty_session_or_the_whole(tmp_path: Path) -> None:
    live = tmp_path / "live"
    live.mkdir()
    fs, talk = Recording(live), Conversation()
    store = draft_in(fs, live)
    meta = store.commit(talk.turn())
    fs.acknowledge()
    store.close()
    seen = set()
    for number, (acknowledged, tree) in enumerate(fs.crashes()):
        root = tmp_path / f"state-{number}"
        root.mkdir()
        lay_out(tree, root)
        listing = _catalog(root).list(str(live), None)
        assert not listing.damaged
        messages = [row.meta.committed.messages for row in listing.rows]
        seen.add((acknowledged, *messages))
        try:
            opened, _ = open_session(Steps(), str(root / os.path.relpath(store.path or "", live)))
        except SessionMissing:
            assert messages == []
            continue
        assert (opened.meta == meta) is (messages == [4])
        opened.close()
    assert seen == {(0,), (0, 0), (0, 4), (1, 4)}


def test_a_draft_whose_save_is_pending_is_rescued_whole(tmp_path: Path) -> None:  # S-25
    store, talk = draft_in(Steps(), tmp_path), Conversation()
    store.update({"pinned_at": 5})
    copy = Path(store.rescue([str(tmp_path / "rescue")], talk.turn()))
    assert (copy / "history.jsonl").read_bytes() == b"".join(talk.history.lines)
    assert '"pinnedAt":5' in (copy / "meta.json").read_text()
    assert (copy / "base.json").exists()
    assert not (tmp_path / "data").exists()
