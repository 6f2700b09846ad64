"""One numbered log of encoded events per runtime, and one of the daemon's own; a subscription is a cursor in it.

Outbox, ring, replay and the rule for slow readers are this one mechanism: an event is encoded once whatever the number
of clients, and a client that does not read costs one integer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec
import trio

from loop_protocol.v1.events import Event, EventsLost

from .core.timings import Clock

EVENTS = 4096
BYTES = 1024 * 1024
IDLE_BYTES = 64 * 1024
# However large they are, the newest events stay: a client that reads promptly must not lose what was just said.
ALWAYS_KEPT = 64

_encode = msgspec.json.Encoder().encode
Build = Callable[[str], Event]


class Cursor:
    """One client's place in a log. ``position`` is the ``seq`` that was handed out last. ``can_approve``: a person is
    there, who can answer requests for approval."""

    def __init__(
        self, log: EventLog, *, position: int, follow: bool, notify: Callable[[], None], can_approve: bool = False
    ) -> None:
        self.log = log
        self.position = position
        self.follow = follow
        self.notify = notify
        self.can_approve = can_approve
        self.end: int | None = None

    @property
    def target(self) -> int:
        """The last event that this client shall get, as of now."""
        return self.log.head if self.end is None else min(self.end, self.log.head)

    @property
    def behind(self) -> bool:
        return self.position < self.target

    @property
    def over(self) -> bool:
        """Nothing will come any more."""
        return self.position >= self.target and (self.end is not None or self.log.closed)

    def take(self, limit: int, *, upto: int) -> list[bytes]:
        """The next events, at most up to ``upto`` and about ``limit`` bytes (at least one), and move on."""
        taken: list[bytes] = []
        size = 0
        upto = min(upto, self.target)
        if self.position < upto and self.position + 1 < self.log.first:
            lost = self.log.lost(self.position + 1)
            self.position = self.log.first - 1
            taken.append(lost)
        while self.position < upto and size < limit:
            entry = self.log.entry(self.position + 1)
            self.position += 1
            size += len(entry)
            taken.append(entry)
        return taken


class EventLog:
    """Events of one runtime, ``first``…``head``. Everything but the pump that sends them."""

    def __init__(self, runtime_id: str, *, clock: Clock, wake: Callable[[EventLog], None]) -> None:
        self.runtime_id = runtime_id
        self.head = 0
        self.first = 1
        self.size = 0
        self.closed = False
        self.touched_ms = clock.boot_ms()
        self.cursors: set[Cursor] = set()
        self._clock = clock
        self._wake = wake
        self._entries: deque[bytes] = deque()
        self._pending: tuple[str, tuple[str, str], Build] | None = None
        self._parts: list[str] = []
        self._session_id = ""

    def publish(self, session_id: str, event: Event) -> None:
        """Number and keep an event; what was streamed before it goes first."""
        self.flush()
        self._append(session_id, event)
        self._wake(self)

    def stream(self, session_id: str, key: tuple[str, str], text: str, build: Build) -> None:
        """Text that joins what was said before under the same ``key`` until the pump, or another event, comes by.

        So what arrived together becomes one event, without a timer (20,000 deltas: about 42 events).
        """
        if self._pending is None or self._pending[1] != key:
            self.flush()
            self._pending = (session_id, key, build)
            self._wake(self)
        self._parts.append(text)

    def flush(self) -> None:
        """Number what was streamed so far; needed before a snapshot, so that it and ``head`` agree."""
        if self._pending is None:
            return
        session_id, _, build = self._pending
        self._pending, text = None, "".join(self._parts)
        self._parts.clear()
        self._append(session_id, build(text))

    def subscribe(
        self, *, position: int, follow: bool, notify: Callable[[], None], can_approve: bool = False
    ) -> Cursor:
        cursor = Cursor(self, position=position, follow=follow, notify=notify, can_approve=can_approve)
        self.cursors.add(cursor)
        return cursor

    @property
    def has_approver(self) -> bool:
        """Somebody is attached who can answer requests for approval (A-6)."""
        return any(cursor.can_approve and cursor.end is None for cursor in self.cursors)

    def end_unfollowing(self) -> None:
        """``follow: false`` subscriptions end with the event just published, ``session_replaced``."""
        for cursor in self.cursors:
            if not cursor.follow and cursor.end is None:
                cursor.end = self.head

    def close(self) -> None:
        """No event comes after those already there."""
        self.flush()
        self.closed = True
        self._wake(self)

    def shrink(self) -> None:
        """What an idle runtime keeps."""
        self._trim(IDLE_BYTES)

    def entry(self, seq: int) -> bytes:
        return self._entries[seq - self.first]

    def lost(self, first: int) -> bytes:
        """What a client is told that fell off the tail; the envelope's ``seq`` is the last one lost."""
        return self._body(self._session_id, self.first - 1, EventsLost(first=first, last=self.first - 1))

    def _append(self, session_id: str, event: Event) -> None:
        self.head += 1
        self._session_id = session_id
        self.touched_ms = self._clock.boot_ms()
        body = self._body(session_id, self.head, event)
        self._entries.append(body)
        self.size += len(body)
        self._trim(BYTES)

    def _body(self, session_id: str, seq: int, event: Event) -> bytes:
        return b'{"jsonrpc":"2.0","method":%b"seq":%d,"at":%d,"event":%b}}\n' % (
            self._envelope(session_id),
            seq,
            self._clock.now_ms(),
            _encode(event),
        )

    def _envelope(self, session_id: str) -> bytes:
        return b'"event","params":{"runtimeId":"%b","sessionId":"%b",' % (self.runtime_id.encode(), session_id.encode())

    def _trim(self, size: int) -> None:
        while len(self._entries) > ALWAYS_KEPT and (len(self._entries) > EVENTS or self.size > size):
            self.size -= len(self._entries.popleft())
            self.first += 1


class ServerLog(EventLog):
    """Of no runtime and no session."""

    def __init__(self, *, clock: Clock, wake: Callable[[EventLog], None]) -> None:
        super().__init__("", clock=clock, wake=wake)

    def _envelope(self, _: str) -> bytes:
        return b'"server/event","params":{'


class SessionLog:
    """The session's part of its runtime's event log."""

    def __init__(self, log: EventLog, session_id: str) -> None:
        self.log = log
        self.session_id = session_id

    def publish(self, event: Event) -> None:
        self.log.publish(self.session_id, event)

    def stream(self, key: tuple[str, str], text: str, build: Build) -> None:
        self.log.stream(self.session_id, key, text, build)


class Pump:
    """Wakes the clients of those logs that have news: one task for all runtimes, each turn of it never waits."""

    def __init__(self) -> None:
        self._news: dict[EventLog, None] = {}
        self._woken = trio.Event()

    def wake(self, log: EventLog) -> None:
        self._news[log] = None
        self._woken.set()

    async def run(self) -> None:
        while True:
            await self._woken.wait()
            self._woken = trio.Event()
            news, self._news = self._news, {}
            for log in news:
                log.flush()
                for cursor in tuple(log.cursors):
                    cursor.notify()
