"""``run.journal``: what a run has finished, kept beside the session while it goes on, for the case of a crash (S-26).

A head that names the commit on which the run builds, then the run's messages, line by line as history will have them,
one that steered the run behind a line with its request.
Nothing of it is synced or promised: it counts only as long as that commit is the published one, and only as far as it
makes sense. The commit of the run removes it; one that stays behind is stale by then.
"""

from __future__ import annotations

import errno
import os.path
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec
from msgspec import Struct

from loop_protocol.v1.types import Recoverable
from loopd.core.history import LINE, History, Malformed, Request, RunRecord, decode_message, decode_steered

from . import CutOff, Metadata
from .fs import BLOCK, DIRECTORY, FRESH, READ, WRITE, FileSystem, failing, opened, write_all
from .places import beside

JOURNAL = "run.journal"
OLD = "run.journal.old"
FORMAT = "loop-journal"
VERSION = 1


class Head(Struct, frozen=True, rename="camel"):
    """``run`` is what is recorded of the run if it is cut off."""

    format: str
    version: int
    commit_id: str
    run: RunRecord


_head = msgspec.json.Decoder(Head)
_encode = msgspec.json.Encoder().encode
_THEN = "the next run has a journal again"


class FileJournal:
    """The journal in a session's directory, whose descriptor ``directory`` answers. Whoever writes holds its lock."""

    def __init__(self, fs: FileSystem, path: str, directory: Callable[[], int]) -> None:
        self._fs = fs
        self._path = beside(path, JOURNAL)
        self._directory = directory
        self._end = 0
        self._ours = False  # the next commit has what is in it
        self.recoverable: Recoverable | None = None

    def look(self, commit_id: str, history: History) -> None:
        """Find out what is recoverable; nothing of it is kept in memory. Raises ``StorageError``."""
        self.recoverable = described(self._read(commit_id, history))

    def take(self, commit_id: str, history: History) -> CutOff | None:
        found = self._read(commit_id, history)
        self._ours, self.recoverable = found is not None, None
        return found

    def begin(self, commit_id: str, run: RunRecord, line: bytes) -> None:
        left, self.recoverable = self.recoverable, None
        head = _encode(Head(FORMAT, VERSION, commit_id, run)) + b"\n"
        with failing("write", self._path, then=_THEN):
            if left is not None:
                self._fs.rename(JOURNAL, OLD, dir_fd=self._directory())
            with opened(self._fs, JOURNAL, FRESH, dir_fd=self._directory()) as fd:
                self._ours = True
                self._fs.chmod(fd, 0o600)
                try:
                    self._end = write_all(self._fs, fd, [head + line], 0)
                except OSError:
                    self.remove()  # a full disk keeps no empty file of ours (K-1)
                    raise

    def append(self, line: bytes) -> None:
        with (
            failing("write", self._path, then=_THEN),
            opened(self._fs, JOURNAL, WRITE, dir_fd=self._directory()) as fd,
        ):
            self._end = write_all(self._fs, fd, [line], self._end)

    def remove(self) -> None:
        if self._ours:
            self._ours = False
            with suppress(OSError):  # one that stays is stale
                self._fs.unlink(JOURNAL, dir_fd=self._directory())

    def _read(self, commit_id: str, history: History) -> CutOff | None:
        return read_journal(self._fs, self._directory(), self._path, commit_id, history)


def described(found: CutOff | None) -> Recoverable | None:
    """What clients are told of it."""
    if found is None:
        return None
    run = found.run
    return Recoverable(run_id=run.run_id, started_at=run.timing.started_at, messages=len(found.messages))


def recoverable_at(fs: FileSystem, path: str, meta: Metadata, history: History) -> Recoverable | None:
    """The same of a session that is only read. While somebody holds its lock, the run goes on and is no crash's."""
    with failing("read", path, then="try again"), opened(fs, os.path.dirname(path), DIRECTORY) as directory:
        found = read_journal(fs, directory, beside(path, JOURNAL), meta.committed.commit_id, history)
        return described(found) if found is not None and fs.lock_holder(directory) is None else None


def read_journal(fs: FileSystem, directory: int, path: str, commit_id: str, history: History) -> CutOff | None:
    """The run that was cut off after ``commit_id``, whose range is ``history``; None where there is none. What makes no
    sense is none; what cannot be read raises ``StorageError``, or the next run would write over it."""
    with failing("read", path, then="try again"):
        try:
            with opened(fs, JOURNAL, READ, dir_fd=directory) as fd:
                return _cut_off(fs, fd, commit_id, history) if stat.S_ISREG(fs.fstat(fd).st_mode) else None
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP):  # a link is no journal of ours
                raise
    return None


def _cut_off(fs: FileSystem, fd: int, commit_id: str, history: History) -> CutOff | None:
    lines = _lines(fs, fd)
    try:
        head = _head.decode(next(lines, b""))
    except msgspec.DecodeError:
        return None
    if (head.format, head.version, head.commit_id) != (FORMAT, VERSION, commit_id):
        return None
    found = CutOff(head.run)
    # The next messages of the conversation, by the rules of history; the first line that is none ends it.
    trial = History(places=list(history.places))
    request: Request | None = None
    for line in lines:
        try:
            line.decode()  # msgspec does not check what it skips
            if (steered := decode_steered(line)) is not None:
                request = steered
                continue
            message = decode_message(line)
            trial.append(message, line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, Malformed):
            break
        found.messages.append((message, line))
        if request is not None:
            found.run.steered.append(request)
            request = None
    try:
        trial.require_range(found.run.timing)
    except Malformed:
        return None
    return found if found.messages else None


def _lines(fs: FileSystem, fd: int) -> Iterator[bytes]:
    """Whole lines: one that is torn, or longer than any message, is none, and neither is what follows."""
    parts: list[bytes] = []  # of the line that goes on in the next block
    offset = pending = 0
    while pending <= LINE and (block := fs.read(fd, BLOCK, offset)):
        offset += len(block)
        *ends, rest = block.split(b"\n")
        for end in ends:
            yield b"".join((*parts, end, b"\n"))
            parts, pending = [], 0
        parts.append(rest)
        pending += len(rest)
