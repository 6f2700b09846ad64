"""Any call that fails, in any way: a fresh reader sees N or N+1, and the retry loses nothing and doubles nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count, permutations
from pathlib import Path

import msgspec
import pytest
from storage_disks import ID, Conversation, Faulty, Steps, create_in

from loopd.storage import Metadata, SessionMissing, Snapshot, StorageError
from loopd.storage.document import publication
from loopd.storage.files import FileStore, open_session, read_session
from loopd.storage.places import path_of

ERRORS = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.EFBIG, errno.EACCES]
FAULTS = [(errno.errorcode[number], number, after) for number in ERRORS for after in (False, True)]
SHORT = ("short", errno.ENOSPC, False)


@pytest.fixture(params=[*FAULTS, SHORT], ids=lambda fault: f"{fault[0]}{'-after-effect' * fault[2]}")
def fault(request: pytest.FixtureRequest) -> tuple[str, int, bool]:
    param: tuple[str, int, bool] = request.param
    return param


@pytest.fixture(autouse=True)
def _no_descriptor_stays_open() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def _rounds(fault: tuple[str, int, bool], tmp_path: Path) -> Iterator[tuple[Faulty, Callable[[], None], Path]]:
    """One round for each call of an operation, until the operation has no k-th call any more."""
    kind, number, after = fault
    hits: list[str] = []
    for k in count(1):
        fs, root = Faulty(), tmp_path / f"round-{k}"
        root.mkdir()
        yield fs, lambda fs=fs, k=k: fs.arm(k, number, after=after, short=kind == "short"), root
        if fs.hit is not None:
            hits.append(fs.hit)
        elif kind != "short" or k > 40:
            break
    print(f"{kind}{' after effect' * after}: {len(hits)} points hit: {' '.join(hits)}")
    assert hits


def _attempt(fs: Faulty, what: Callable[[], object]) -> None:
    """With the fault: an error for people, or none if nothing was hit."""
    told: str | None = None
    try:
        what()
    except StorageError as error:
        told = str(error)
    # A refused removal of our own temporary file is no loss; no other fault may pass.
    assert (told is None) == (fs.hit in (None, "unlink"))
    for word in (os.strerror(fs.number), errno.errorcode[fs.number]):
        assert told is None or word in told
    fs.disarm()


def _read(path: str) -> tuple[Metadata, list[bytes]]:
    meta, history = read_session(Steps(), path)
    return meta, history.lines


def test_create_is_nothing_or_whole_and_may_be_repeated(fault: tuple[str, int, bool], tmp_path: Path) -> None:  # S-2
    for fs, arm, root in _rounds(fault, tmp_path):
        path = path_of(str(root / "data"), str(root), ID)
        stores: list[FileStore] = []
        arm()
        _attempt(fs, lambda fs=fs, root=root, stores=stores: stores.append(create_in(fs, root)))
        if not stores:
            with suppress(SessionMissing):
                assert _read(path)[0].committed.revision == 0
            # Nothing is left, or the whole of it.
            assert os.path.exists(path) or not os.path.exists(os.path.dirname(path))
            stores.append(create_in(fs, root))
        store, talk = stores[0], Conversation()
        meta = store.commit(talk.turn())
        assert _read(path) == (meta, talk.history.lines)
        store.close()


def test_commit_reads_n_or_n_plus_1_and_the_retry_publishes_once(
    fault: tuple[str, int, bool], tmp_path: Path
) -> None:  # S-14, K-2, K-6
    for fs, arm, root in _rounds(fault, tmp_path):
        store, talk = create_in(fs, root), Conversation()
        before = store.commit(talk.turn("first"))
        old = list(talk.history.lines)
        snapshot = talk.turn("second")
        after = publication(before, snapshot, published=len(old))
        arm()
        _attempt(fs, lambda store=store, snapshot=snapshot: store.commit(snapshot))
        assert _read(store.path or "") in [(before, old), (after, talk.history.lines)]
        assert store.commit(snapshot) == after
        assert _read(store.path or "") == (after, talk.history.lines)
        third = store.commit(talk.turn("third"))
        assert third.committed.revision == after.committed.revision + 1
        assert _read(store.path or "") == (third, talk.history.lines)
        store.close()


def test_update_is_old_or_new_and_leaves_the_history_alone(fault: tuple[str, int, bool], tmp_path: Path) -> None:  # S-7
    for fs, arm, root in _rounds(fault, tmp_path):
        store, talk = create_in(fs, root), Conversation()
        before = store.commit(talk.turn())
        pinned = msgspec.structs.replace(before, pinned_at=9)
        arm()
        _attempt(fs, lambda store=store: store.update({"pinned_at": 9}))
        assert _read(store.path or "") in [(before, talk.history.lines), (pinned, talk.history.lines)]
        assert store.update({"pinned_at": 9}) == pinned
        assert _read(store.path or "") == (pinned, talk.history.lines)
        store.close()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault[0]}{'-after-effect' * fault[2]}")
def test_open_fails_without_a_trace(fault: tuple[str, int, bool], tmp_path: Path) -> None:
    for fs, arm, root in _rounds(fault, tmp_path):
        store, talk = create_in(fs, root), Conversation()
        meta = store.commit(talk.turn())
        store.close()
        opened: list[FileStore] = []
        arm()
        _attempt(fs, lambda fs=fs, path=store.path, opened=opened: opened.append(open_session(fs, path or "")[0]))
        again = opened[0] if opened else open_session(fs, store.path or "")[0]
        assert again.meta == meta
        again.close()


def test_a_rescue_copy_that_failed_is_made_whole_by_the_next_try(fault: tuple[str, int, bool], tmp_path: Path) -> None:
    for fs, arm, root in _rounds(fault, tmp_path):
        store, talk = create_in(fs, root), Conversation()
        snapshot = talk.turn()
        arm()
        _attempt(fs, lambda store=store, snapshot=snapshot, root=root: store.rescue([str(root / "rescue")], snapshot))
        left = list((root / "rescue").iterdir()) if (root / "rescue").exists() else []
        assert all((path / "meta.json").exists() for path in left), "part of a copy stays"
        copy = Path(store.rescue([str(root / "rescue")], snapshot))
        assert (copy / "history.jsonl").read_bytes() == b"".join(talk.history.lines)
        assert [path.name for path in (root / "rescue").iterdir()] == [f"{ID}-1"]
        store.close()


def _die(store: FileStore) -> FileStore:
    store.close()
    return open_session(Steps(), store.path or "")[0]


@pytest.mark.parametrize("order", list(permutations(["pin", "flush", "kill", "pin again"])), ids=" ".join)
def test_after_a_failed_commit_no_order_of_pin_flush_and_kill_loses_or_doubles(
    order: tuple[str, ...], tmp_path: Path
) -> None:  # I-5, S-7, S-14, K-9
    for fs, arm, root in _rounds(("EIO", errno.EIO, True), tmp_path):
        store, talk = create_in(fs, root), Conversation()
        before = store.commit(talk.turn("first"))
        old = list(talk.history.lines)
        snapshot: Snapshot = talk.turn("second")
        arm()
        _attempt(fs, lambda store=store, snapshot=snapshot: store.commit(snapshot))
        pins, flushed, alive = 0, False, True
        for step in order:
            if step == "kill":
                store, alive = _die(store), False
            elif step == "flush":
                flushed = alive or flushed
                if alive:
                    store.commit(snapshot)
            else:
                pins += 1
                store.update({"pinned_at": pins})
        store.close()
        meta, lines = _read(store.path or "")
        assert meta.pinned_at == pins
        assert lines == (talk.history.lines if meta.committed.revision == 2 else old)
        assert meta.committed.revision == 2 if flushed else meta.committed.revision >= before.committed.revision


def test_a_short_write_then_a_full_disk_keeps_the_old_range_and_glues_nothing(tmp_path: Path) -> None:  # K-6
    fs = Faulty()
    store, talk = create_in(fs, tmp_path), Conversation()
    before = store.commit(talk.turn("first"))
    history = Path(store.path or "").with_name("history.jsonl")
    old = history.read_bytes()
    snapshot = talk.turn("second")
    fs.arm(1, errno.ENOSPC, short=True)
    with pytest.raises(
        StorageError, match=r"append to .*history\.jsonl: No space left on device \(ENOSPC\); free space"
    ):
        store.commit(snapshot)
    assert history.read_bytes() == old + snapshot.lines[len(old.splitlines())][:7]
    assert read_session(Steps(), store.path or "")[0] == before
    fs.disarm()
    store.commit(snapshot)
    assert history.read_bytes() == b"".join(talk.history.lines)
    store.close()


def test_after_a_failed_fsync_the_bytes_are_written_again_through_a_new_descriptor(tmp_path: Path) -> None:  # K-2
    class OneFailedSync(Steps):
        """Like the kernel: after the failure the written pages count as clean and are lost, whoever syncs again."""

        def __init__(self) -> None:
            self.fail = False
            self.rewritten = 0

        def step(self, name: str, args: tuple[object, ...], go: Callable[[], object]) -> object:
            if name == "fsync" and self.fail:
                self.fail = False
                os.pwrite(args[0], bytes(20), os.fstat(args[0]).st_size - 20)  # type: ignore[arg-type]
                raise OSError(errno.EIO, "Input/output error")
            return go()

    fs = OneFailedSync()
    store, talk = create_in(fs, tmp_path), Conversation()
    store.commit(talk.turn("first"))
    snapshot = talk.turn("second")
    fs.fail = True
    with pytest.raises(StorageError, match="EIO"):
        store.commit(snapshot)
    after = store.commit(snapshot)
    assert _read(store.path or "") == (after, talk.history.lines)
    store.close()
