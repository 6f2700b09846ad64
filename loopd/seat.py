"""A runtime: the seat that owns one current session, for as long as clients come and go."""

from __future__ import annotations

from functools import partial

from loop_protocol.v1.methods import RuntimeRow
from loop_protocol.v1.types import Permission, SessionKind

from .core.guards import Declined, Operation, Refused
from .event_log import EventLog
from .session import Session
from .storage import StorageError


class Runtime:
    """``default``: the one that a workspace's clients find; another was made with ``runtimeId: "new"``. ``mode``: what
    it was opened with, and so what ``newSession`` makes here, whatever became of the session since (R-1)."""

    def __init__(self, id: str, events: EventLog, session: Session, *, default: bool, mode: SessionKind) -> None:
        self.id = id
        self.events = events
        self.session = session
        self.default = default
        self.mode = mode
        self._idle_since: float | None = None

    def touch(self) -> None:
        """A client asked for it."""
        self._idle_since = None

    def idle_s(self, now: float) -> float:
        """How long nobody has had to do with it, while nothing would be lost; to be asked again and again."""
        session = self.session
        if self.events.cursors or session.disposal or session.core.closed or not session.can_be_reopened:
            self._idle_since = None
            return 0.0
        if self._idle_since is None:
            self._idle_since = now
        return now - self._idle_since

    def row(self) -> RuntimeRow:
        core = self.session.core
        return RuntimeRow(
            runtime_id=self.id,
            cwd=core.cwd,
            session_id=core.id,
            kind=core.kind,
            path=core.path,
            message_count=core.committed,
            running=core.run is not None,
            has_pending_save=core.unsaved is not None,
            title=core.titles.current,
            default=self.default,
            queued=len(core.queue.items),
            pending_approvals=len(core.approvals.pending),
        )


def conflict(stands: Runtime, reason: str) -> Declined:
    """What stands in the way is named, so that the client can join it."""
    message = f"{reason}; join it, or pass runtimeId: new"
    return Declined("conflict", message, runtimeId=stands.id, sessionId=stands.session.core.id)


def locked(path: str, runtime: Runtime) -> Declined:
    return Declined("session_locked", f"{path} is open in another runtime; join it", runtimeId=runtime.id)


def copied(path: str, runtime: Runtime) -> Declined:
    """An id names one open session. The runtime is not named: who joined it would go on in another file."""
    other = runtime.session.core.path
    return Declined("session_locked", f"{path} is a copy of {other}, which is open; close that one first", path=path)


async def closed_again(session: Session) -> None:
    """It was opened, and no runtime may have it."""
    session.end(None)
    await session.ended.wait()


async def permit(session: Session, permission: Permission | None) -> None:
    """A saved session that is opened with a preset has it from then on: whoever asks for less must not get what it had.
    Raises ``StorageError``; then it is closed again."""
    if permission in (None, session.core.permission):
        return
    try:
        await session.start(Operation.SET_PERMISSION, partial(session.saving.set, permission=permission)).wait()
        return
    except (StorageError, Refused) as error:
        refusal: Exception = error
    await closed_again(session)
    raise refusal
