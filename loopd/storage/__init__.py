"""The store: sessions on disk, safe against crashes, full disks and second writers. ``storage.fs`` is the only door."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import Struct

from loop_protocol.v1.types import Message, ModelRef, Permission, Recoverable, Title
from loopd.core.history import History, RunRecord

FORMAT = "loop-session"
VERSION = 3


class Committed(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The range of ``history.jsonl`` that is published: the first ``bytes`` bytes with that checksum. ``fallback`` is
    the title that its messages give, so that a list shows it without reading them."""

    commit_id: str
    revision: int
    bytes: int
    crc32: int
    messages: int
    user_messages: int
    fallback: Title | None = None


class Metadata(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """``meta.json``: small, and it does not grow with the history."""

    format: str
    version: int
    min_reader: int
    id: str
    cwd: str
    created_at: int
    updated_at: int
    unread: bool
    model: ModelRef
    permission: Permission
    committed: Committed
    pinned_at: int | None = None
    title: Title | None = None

    @property
    def valid_title(self) -> Title | None:
        """The stored title. One made of messages that are not committed, since a crash came between its write and
        theirs, is none (rule 13)."""
        title, committed = self.title, self.committed.messages
        if title is None or title.source == "user" or all(0 <= at < committed for at in title.message_indices):
            return title
        return None


@dataclass(slots=True, frozen=True)
class Snapshot:
    """What a commit shall publish: the first ``count`` of ``lines``.

    ``lines`` is the whole history, every line with its newline, and only ever grows; ``commit_id`` stays the same
    through all retries of one snapshot, so that one which was published after all is recognised (rule 3).
    ``changes`` are metadata fields by attribute name; None removes an optional one.
    """

    commit_id: str
    lines: Sequence[bytes]
    count: int
    messages: int
    user_messages: int
    fallback: Title | None = None
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class CutOff:
    """A run that a crash cut off: what is recorded of it, and the messages that it had finished with their lines."""

    run: RunRecord
    messages: list[tuple[Message, bytes]] = field(default_factory=list)


class StorageError(Exception):
    """The world refused. The previous committed range still reads; the text says what to do, for people."""


class SessionLocked(Exception):
    """Another writer has it open; ``holder`` is its pid where the system tells."""

    def __init__(self, path: str, holder: int | None) -> None:
        super().__init__(f"{path} is open in {f'process {holder}' if holder else 'another process'}")
        self.path = path
        self.holder = holder


class SessionMissing(Exception):
    """There is no session at that exact path."""


class SessionMalformed(Exception):
    """The file is damaged; nothing was changed. ``offset`` is a byte position in the file that ``path`` names."""

    def __init__(self, path: str, reason: str, offset: int | None = None) -> None:
        at = "" if offset is None else f" at byte {offset}"
        super().__init__(f"{path}{at}: {reason}")
        self.path = path
        self.reason = reason
        self.offset = offset


class SessionUnsupported(Exception):
    """Written by a newer version, which says that this one cannot read it."""


class Journal(Protocol):
    """What a run has finished before its commit (S-26): a convenience, of which nothing is promised. Synchronous like
    the store, and in its turn."""

    @property
    def recoverable(self) -> Recoverable | None:
        """What a crash left, as the opening found it; None once a run or its recovery began."""

    def take(self, commit_id: str, history: History) -> CutOff | None:
        """The run that was cut off after that commit, whose range is ``history``: the next commit has it.
        Raises ``StorageError``."""

    def begin(self, commit_id: str, run: RunRecord, line: bytes) -> None:
        """A new run after that commit, with its first message. What was recoverable is set aside as it is, instead of
        what was set aside before. Raises ``StorageError``."""

    def append(self, line: bytes) -> None:
        """The run's next message. Raises ``StorageError``."""

    def remove(self) -> None:
        """Its run is committed. Never raises."""


class Store(Protocol):
    """One open session, the only writer of it. Synchronous: the session calls it in a thread, one call at a time.

    After any :class:`StorageError` the next call opens everything anew and re-reads what is published.
    """

    @property
    def path(self) -> str | None:
        """The absolute path of ``meta.json``, None in memory."""

    @property
    def journal(self) -> Journal:
        """Its file is beside ``meta.json``; in memory it keeps nothing."""

    @property
    def meta(self) -> Metadata:
        """As published last."""

    def update(self, changes: dict[str, Any], *, rewrite: bool = False) -> Metadata:
        """Publish changed metadata; the history file stays byte-identical. Idempotent. With ``rewrite`` missing or
        damaged metadata is written anew from memory; without it that is an error."""

    def commit(self, snapshot: Snapshot, *, rewrite: bool = False) -> Metadata:
        """Append what is not on disk yet and publish. With ``rewrite`` a missing or shortened history file is written
        anew from memory; without it that is an error. Returns the metadata published."""

    def rescue(self, roots: Sequence[str], snapshot: Snapshot) -> str:
        """Write the snapshot as a rescue copy below the first of ``roots`` that takes it; answers its directory."""

    def close(self) -> None:
        """Release the lock. Never raises."""
