"""What a crash leaves of a run is offered as far as it makes sense, and never stands in the way of a session (S-26)."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from storage_disks import NOW, Conversation, Counting, Faulty, Steps, create_in

from loop_protocol.v1.types import ErrorInfo, PromptTiming, Recoverable, TextBlock, ToolResultMessage, UserMessage
from loopd.core.history import History, RunRecord, encode
from loopd.storage import CutOff, Snapshot, StorageError
from loopd.storage.files import FileStore, open_session, read_session
from loopd.storage.fs import FileSystem
from loopd.storage.journal import recoverable_at

RUN = RunRecord(
    run_id="run-of-the-crash",
    outcome="error",
    timing=PromptTiming(id="run-of-the-crash", user_message_index=4, message_start_index=4, started_at=NOW + 9),
    error=ErrorInfo("interrupted", "cut off"),
    request_id="request",
    digest="digest",
)


class CutShort:
    """A session with one saved turn and a second one that its process did not live to save."""

    def __init__(self, root: Path, fs: FileSystem | None = None) -> None:
        self.store, self.talk = create_in(fs or Steps(), root), Conversation()
        self.store.commit(self.talk.turn("saved"))
        self.saved = len(self.talk.history.lines)
        self.path = self.store.path or ""
        self.journal = Path(self.path).with_name("run.journal")
        self.old = self.journal.with_name("run.journal.old")
        self.snapshot: Snapshot = self.talk.turn("cut off")
        self.lines = self.talk.history.lines[self.saved : -1]  # messages; the last line is the run's record

    def write(self, store: FileStore | None = None) -> None:
        store = store or self.store
        first, *others = self.lines
        store.journal.begin(store.meta.committed.commit_id, RUN, first)
        for line in others:
            store.journal.append(line)

    def crash(self) -> None:
        self.write()
        self.store.close()

    def found(self) -> tuple[Recoverable | None, CutOff | None]:
        """As the next process sees it, which must find the committed range as it was."""
        store, history = open_session(Steps(), self.path)
        with_lock = store.journal.recoverable
        assert history.lines == self.talk.history.lines[: self.saved]
        taken = store.journal.take(store.meta.committed.commit_id, history)
        store.close()
        meta, history = read_session(Steps(), self.path)
        assert recoverable_at(Steps(), self.path, meta, history) == with_lock
        assert (taken is None) == (with_lock is None)
        return with_lock, taken


@pytest.fixture
def cut(tmp_path: Path) -> Iterator[CutShort]:
    before = os.umask(0)
    cut = CutShort(tmp_path)
    yield cut
    cut.store.close()
    os.umask(before)


def test_a_run_that_was_cut_off_is_offered_byte_for_byte_and_never_loaded(cut: CutShort) -> None:  # S-26, S-20
    cut.crash()
    assert stat.S_IMODE(cut.journal.stat().st_mode) == 0o600
    told, taken = cut.found()
    assert told == Recoverable(run_id="run-of-the-crash", started_at=NOW + 9, messages=4)
    assert taken is not None
    assert taken.run == RUN
    assert [line for _, line in taken.messages] == cut.lines
    assert [encode(message) for message, _ in taken.messages] == cut.lines


def test_wherever_it_is_torn_what_is_before_counts(cut: CutShort) -> None:  # S-26
    cut.crash()
    body = cut.journal.read_bytes()
    ends = [at for at, byte in enumerate(body, 1) if byte == 0x0A]
    assert len(ends) == 5  # the head and four messages
    for at in range(len(body)):
        kept = sum(end <= at for end in ends) - 1
        for rest in (b"", bytes(len(body) - at), b"\n\n", b"\xff\n" + body[at:], b'{"role":"user"}\n'):
            cut.journal.write_bytes(body[:at] + rest)
            # A line whose newline alone was lost ends with the next one there is.
            more = at + 1 in ends and rest == b"\n\n"
            told, _ = cut.found()
            assert (told.messages if told else 0) == max(0, kept + more), (at, rest[:20])


def test_the_length_of_a_lost_write_may_be_there_without_its_bytes(cut: CutShort) -> None:
    cut.crash()
    size = cut.journal.stat().st_size
    cut.journal.write_bytes(bytes(size))
    assert cut.found() == (None, None)
    with cut.journal.open("wb") as journal:
        journal.truncate(40 * 1024 * 1024)  # longer than any message may be
    assert cut.found() == (None, None)


def test_only_what_goes_on_from_the_committed_range_counts(cut: CutShort) -> None:
    user, reply, result, _ = cut.lines
    early = encode(UserMessage(index=6, content=[TextBlock("too early")], timestamp=NOW))
    foreign = encode(
        ToolResultMessage(index=6, content=[], timestamp=NOW, tool_call_id="x", tool_name="x", is_error=False)
    )
    for line in (result, early, foreign, reply, user, encode(RUN), b"{}\n", b"[" * 100_000 + b"\n"):
        cut.lines = [user, reply] if line is result else [user, reply, line, result]
        cut.write()
        told, _ = _after(cut)
        assert told is not None
        assert told.messages == 2, line[:80]


def _after(cut: CutShort) -> tuple[Recoverable | None, CutOff | None]:
    """What a crash would leave now, seen beside the live session."""
    history = History()
    for line in cut.talk.history.lines[: cut.saved]:
        history.read(line)
    taken = cut.store.journal.take(cut.store.meta.committed.commit_id, history)
    cut.store.journal.look(cut.store.meta.committed.commit_id, history)
    told, cut.store.journal.recoverable = cut.store.journal.recoverable, None
    return told, taken


@pytest.mark.parametrize(
    "head",
    [b'"format":"other"', b'"version":2', b'"commitId":"another"', b'"run":3', b'"userMessageIndex":99', b"{"],
)
def test_a_journal_of_another_commit_format_version_or_run_is_none(head: bytes, cut: CutShort) -> None:  # K-9, S-19
    cut.crash()
    body = cut.journal.read_bytes()
    commit_id = cut.store.meta.committed.commit_id.encode()
    known = [b'"format":"loop-journal"', b'"version":1', b'"commitId":"' + commit_id + b'"', b'"run":{"type"', b"{"]
    known.append(b'"userMessageIndex":%d' % RUN.timing.user_message_index)
    (was,) = [one for one in known if one.split(b":")[0] == head.split(b":")[0]]
    cut.journal.write_bytes(body.replace(was, head if head != b"{" else b"", 1))
    assert cut.found() == (None, None)


def test_a_commit_removes_it_and_one_that_stays_behind_is_stale(cut: CutShort) -> None:  # S-26, K-9
    cut.write()
    left = cut.journal.read_bytes()
    cut.store.commit(cut.snapshot)
    cut.store.journal.remove()
    assert not cut.journal.exists()
    cut.store.close()
    cut.journal.write_bytes(left)  # killed between publication and removal
    cut.saved = len(cut.talk.history.lines)
    assert cut.found() == (None, None)
    store, _ = open_session(Steps(), cut.path)
    cut.write(store)  # the next run writes over it, since nobody can want it any more
    assert not cut.old.exists()
    store.close()


def test_a_removal_that_is_refused_is_no_failure(tmp_path: Path) -> None:
    class Clinging(Steps):
        def unlink(self, name: str, *, dir_fd: int) -> None:  # noqa: ARG002 the real one's
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    cut = CutShort(tmp_path, Clinging())
    cut.write()
    cut.store.commit(cut.snapshot)
    cut.store.journal.remove()
    assert cut.journal.exists()
    cut.store.close()
    cut.saved = len(cut.talk.history.lines)
    assert cut.found() == (None, None)


def test_a_new_run_sets_aside_what_was_recoverable_and_never_removes_it(cut: CutShort) -> None:
    cut.crash()
    left = cut.journal.read_bytes()
    store, _ = open_session(Steps(), cut.path)
    store.journal.remove()  # of whoever never began
    assert cut.journal.read_bytes() == left
    cut.write(store)
    assert cut.old.read_bytes() == left
    assert store.journal.recoverable is None
    store.commit(cut.snapshot)
    store.journal.remove()
    assert not cut.journal.exists()
    assert cut.old.read_bytes() == left
    store.close()


@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo", "directory"])
def test_what_is_no_file_of_ours_is_neither_read_nor_written(kind: str, cut: CutShort, tmp_path: Path) -> None:
    cut.crash()
    elsewhere = tmp_path / "elsewhere"
    if kind == "link":
        cut.journal.rename(elsewhere)
    cut.journal.unlink(missing_ok=True)
    if "link" in kind:
        cut.journal.symlink_to(elsewhere)
    elif kind == "fifo":
        os.mkfifo(cut.journal)
    else:
        cut.journal.mkdir()
    before = elsewhere.read_bytes() if elsewhere.exists() else None
    assert cut.found() == (None, None)
    store, _ = open_session(Steps(), cut.path)
    with pytest.raises(StorageError, match=r"run\.journal"):
        cut.write(store)
    assert (elsewhere.read_bytes() if elsewhere.exists() else None) == before
    store.commit(cut.snapshot)  # the save does not mind
    store.journal.remove()
    store.close()


def test_one_that_cannot_be_read_is_named_and_may_be_tried_again(tmp_path: Path) -> None:
    """Or the next run would write over what may be all that is left of hours of work."""
    cut = CutShort(tmp_path)
    cut.crash()
    refusals = 0
    for at in count(1):
        fs = Faulty()
        fs.arm(at, errno.EIO)
        try:
            store, _ = open_session(fs, cut.path)
        except StorageError as error:
            refusals += "run.journal" in str(error)
            continue
        if fs.hit is None:
            break
    assert store.journal.recoverable is not None
    store.close()
    assert refusals >= 3


@pytest.mark.parametrize("short", [False, True])
def test_after_any_fault_in_it_the_run_is_saved_all_the_same(short: bool, tmp_path: Path) -> None:  # S-26, S-14
    hits = 0
    for at in count(1):
        (root := tmp_path / str(at)).mkdir()
        fs = Faulty()
        cut = CutShort(root, fs)
        fs.arm(at, errno.ENOSPC, short=short)
        for step in (cut.write, cut.store.journal.remove):
            with suppress(StorageError):
                step()
        fs.disarm()
        meta = cut.store.commit(cut.snapshot)
        cut.store.journal.remove()
        cut.store.close()
        assert read_session(Steps(), cut.path)[0] == meta
        cut.saved = len(cut.talk.history.lines)
        assert cut.found() == (None, None)
        if fs.hit is None and at > 20:
            break
        hits += fs.hit is not None
    assert hits >= (4 if short else 10)


def test_a_live_run_of_another_process_is_not_offered_to_readers(cut: CutShort) -> None:  # S-22
    cut.write()
    meta, history = read_session(Steps(), cut.path)
    assert recoverable_at(FileSystem(), cut.path, meta, history) is None  # somebody holds the lock
    cut.store.close()
    assert recoverable_at(FileSystem(), cut.path, meta, history) is not None


def test_a_message_costs_one_write_of_its_own_length_however_long_the_run(tmp_path: Path) -> None:  # S-23
    fs = Counting()
    cut = CutShort(tmp_path, fs)
    cut.write()
    for _ in range(500):
        fs.calls.clear()
        fs.written = 0
        cut.store.journal.append(cut.lines[-1])
        assert (fs.calls, fs.written) == (["open", "write", "close"], len(cut.lines[-1]))
    cut.store.close()
