"""What every store promises, on disk, in memory and between the two alike."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from storage_disks import ID, MODEL, NOW, Conversation, Steps, create_in, draft_in

from loop_protocol.v1.types import Title
from loopd.storage import Snapshot, StorageError, Store
from loopd.storage.document import first_metadata
from loopd.storage.memory import MemoryStore


@pytest.fixture(params=["file", "memory", "draft"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    memory = MemoryStore(first_metadata(id=ID, cwd=str(tmp_path), model=MODEL, permission="read-only", created_at=NOW))
    stores: dict[str, Callable[[], Store]] = {
        "file": lambda: create_in(Steps(), tmp_path),
        "memory": lambda: memory,
        "draft": lambda: draft_in(Steps(), tmp_path),
    }
    store = stores[request.param]()
    yield store
    store.close()


def test_a_new_session_is_empty_and_read(store: Store) -> None:  # S-2
    meta = store.meta
    assert (meta.id, meta.created_at, meta.updated_at, meta.unread, meta.pinned_at) == (ID, NOW, NOW, False, None)
    assert (meta.committed.revision, meta.committed.bytes, meta.committed.messages) == (0, 0, 0)


def test_a_commit_publishes_counts_length_and_chained_checksum(store: Store) -> None:  # S-13, S-24
    talk = Conversation()
    for number in range(1, 4):
        snapshot = talk.turn(f"turn {number}")
        meta = store.commit(snapshot)
        whole = b"".join(talk.history.lines)
        assert meta is store.meta
        assert msgspec.structs.asdict(meta.committed) == {
            "commit_id": snapshot.commit_id,
            "revision": number,
            "bytes": len(whole),
            "crc32": zlib.crc32(whole),
            "messages": 4 * number,
            "user_messages": number,
            "fallback": Title(text="turn 1", source="fallback", message_indices=[0]),
        }
        assert (meta.unread, meta.updated_at) == (True, snapshot.changes["updated_at"])


def test_a_snapshot_publishes_its_own_lines_even_if_the_history_has_grown_since(store: Store) -> None:  # S-14
    talk = Conversation()
    snapshot = talk.turn()
    talk.turn("not yet")
    assert store.commit(snapshot).committed.messages == 4
    assert store.commit(talk.snapshot()).committed.messages == 8


def test_a_published_snapshot_committed_again_changes_nothing(store: Store) -> None:
    snapshot = Conversation().turn()
    meta = store.commit(snapshot)
    assert store.commit(snapshot) == store.commit(snapshot, rewrite=True) == meta


def test_updates_set_and_remove_fields_and_leave_the_committed_range(store: Store) -> None:  # S-7
    meta = store.commit(Conversation().turn())
    assert store.update({"pinned_at": 5}).pinned_at == store.meta.pinned_at == 5
    other = msgspec.structs.replace(MODEL, id="other", effort="high")
    assert store.update({"model": other}).model == other
    assert store.update({"pinned_at": None, "model": MODEL, "unread": True}) == meta


def test_a_commit_keeps_what_updates_set(store: Store) -> None:  # S-10
    talk = Conversation()
    store.update({"pinned_at": 5})
    assert store.commit(talk.turn()).pinned_at == 5


def test_a_snapshot_that_is_shorter_than_what_is_published_is_a_mistake(store: Store) -> None:  # I-4
    talk = Conversation()
    meta = store.commit(talk.turn())
    with pytest.raises(ValueError, match="0 lines after"):
        store.commit(Snapshot(commit_id="x", lines=talk.history.lines, count=0, messages=0, user_messages=0))
    assert store.meta == meta
    assert store.commit(talk.turn()).committed.messages == 8


def test_a_rescue_has_a_place_or_says_that_it_has_none(store: Store) -> None:
    with pytest.raises(StorageError):
        store.rescue([], Conversation().turn())


def test_closing_twice_is_closing_once(store: Store) -> None:
    store.close()
    store.close()
