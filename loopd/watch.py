"""What goes on in the daemon as a whole, for clients that show more than one session (``server/watch``).

Told by whoever did it: ``Saving`` after every write of an open session, ``Session`` when it opens and closes, and what
is done to a session by its path.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from loop_protocol.v1.events import DaemonState, Event, SessionListed, SessionRemoved
from loop_protocol.v1.types import SessionRow

from .core.timings import Clock
from .event_log import Pump, ServerLog
from .storage import Metadata


def row(path: str, meta: Metadata, *, live: bool) -> SessionRow:
    """A saved session as every list shows it."""
    return SessionRow(
        session_id=meta.id,
        path=path,
        cwd=meta.cwd,
        created_at=meta.created_at,
        updated_at=meta.updated_at,
        message_count=meta.committed.messages,
        user_message_count=meta.committed.user_messages,
        unread=meta.unread,
        title=meta.valid_title or meta.committed.fallback,
        pinned_at=meta.pinned_at,
        live=live,
    )


def _nothing() -> DaemonState:
    return DaemonState(draining=False, runs=0, pending_saves=[])


class Watch:
    """``log`` is what watching clients have a cursor in. ``state`` is the daemon's to set."""

    def __init__(self, clock: Clock, pump: Pump) -> None:
        self.log = ServerLog(clock=clock, wake=pump.wake)
        self.state: Callable[[], DaemonState] = _nothing
        self._told = _nothing()

    def changed(self, row: SessionRow) -> None:
        """A saved session is there, or another than before, or was opened or closed."""
        self._say(SessionListed(row))

    def removed(self, path: str, session_id: str) -> None:
        """A saved session was deleted."""
        self._say(SessionRemoved(path, session_id))

    def state_changed(self) -> None:
        """A save failed or was made up for, or a drain goes on. A drain tries several times a second what fails."""
        state, before = self.state(), self._told
        self._told = state
        # Outside a drain runs come and go, which is no news here.
        if state != (before if state.draining else replace(before, runs=state.runs)):
            self._say(state)

    def approval(self, event: Event) -> None:
        """A tool of any session waits for a person, or does not any more."""
        self._say(event)

    def _say(self, event: Event) -> None:
        if self.log.cursors:
            self.log.publish("", event)
