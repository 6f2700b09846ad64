"""What goes out to one client: replies in order, events from its cursors, in pieces that its socket takes.

A queued reply remembers the heads of the cursors: events up to there precede it, later ones follow it (D-2).
"""

from __future__ import annotations

import logging
import socket
from collections import deque

import trio

from loop_protocol import jsonrpc
from loop_protocol.jsonrpc import Framing

from .event_log import Cursor

# Small, because a client that does not read keeps one such piece alive; larger ones save no time on a local socket.
CHUNK = 16 * 1024
REPLIES_WAITING = 1024 * 1024
PROGRESS_S = 30.0

log = logging.getLogger("loopd.outbox")


class Gone(Exception):
    """The peer does not take anything any more."""


class Outbox:
    """``run`` is the writer. ``push`` is the pump's short cut, for a client that is up to date."""

    def __init__(self, sock: socket.socket) -> None:
        self.framing: Framing | None = None
        self.cursors: dict[str, Cursor] = {}
        self._unanswered: list[Cursor] = []
        self._sock = sock
        self._replies: deque[tuple[bytes, list[tuple[Cursor, int]]]] = deque()
        self._waiting = 0
        self._unsent: memoryview | None = None
        self._failure: OSError | None = None
        self._work = trio.Event()
        self._drained = trio.Event()
        self._finishing = False

    # --- filling ------------------------------------------------------------------------------------------------------

    def subscribe(self, cursor: Cursor) -> None:
        """At most one subscription per runtime; attaching again moves it."""
        self.unsubscribe(cursor.log.runtime_id)
        self.cursors[cursor.log.runtime_id] = cursor
        self._unanswered.append(cursor)
        self._work.set()

    def unsubscribe(self, runtime_id: str) -> None:
        if cursor := self.cursors.pop(runtime_id, None):
            cursor.log.cursors.discard(cursor)

    def reply(self, body: bytes) -> None:
        marks = [
            (cursor, cursor.target)
            for cursor in self.cursors.values()
            # What is replayed to a new subscription follows the answer that announces it.
            if cursor.position < cursor.target and cursor not in self._unanswered
        ]
        self._unanswered.clear()
        self._replies.append((body, marks))
        self._waiting += len(body)
        self._work.set()

    async def room(self) -> None:
        """Until no more than 1 MiB of replies is waiting: who does not read answers may not ask more."""
        while self._waiting > REPLIES_WAITING:
            self._drained = trio.Event()
            await self._drained.wait()

    def finish(self) -> None:
        """``run`` returns once all is sent."""
        self._finishing = True
        self._work.set()

    def close(self) -> None:
        for runtime_id in tuple(self.cursors):
            self.unsubscribe(runtime_id)

    # --- sending ------------------------------------------------------------------------------------------------------

    def push(self) -> None:
        """News from the pump: one attempt to send at once; what is left is the writer's. Never waits, never raises."""
        if self._unsent is None and not self._replies and (data := self._next()):
            self._send(data)
        # Woken for nothing, 50 writers cost as much as all the rest of a delta.
        if self._unsent is not None or any(cursor.behind or cursor.over for cursor in self.cursors.values()):
            self._work.set()

    async def run(self) -> None:
        """Raises :class:`Gone` when the peer is, or takes nothing for 30 s."""
        while True:
            if self._unsent is None and (data := self._next()):
                self._unsent = memoryview(data)
            if self._unsent is not None:
                await self._progress(self._unsent)
            elif self._finishing:
                return
            else:
                self._work = trio.Event()
                await self._work.wait()

    def _send(self, data: bytes | memoryview) -> None:
        """As much as the socket takes now; the rest is unsent."""
        try:
            count = self._sock.send(data)
        except BlockingIOError:
            count = 0
        except OSError as error:
            self._failure, count = error, 0
        self._unsent = None if count == len(data) else memoryview(data)[count:]

    async def _progress(self, unsent: memoryview) -> None:
        self._send(unsent)
        if self._failure is not None:
            raise Gone(str(self._failure))
        if self._unsent is None or len(self._unsent) < len(unsent):
            await trio.lowlevel.checkpoint()
            return
        with trio.move_on_after(PROGRESS_S) as timeout:
            await trio.lowlevel.wait_writable(self._sock)
        if timeout.cancelled_caught:
            raise Gone(f"it took nothing for {PROGRESS_S:.0f} s")

    def _next(self) -> bytes | None:
        """The next piece of about ``CHUNK`` bytes."""
        pieces = self._next_bodies(CHUNK)
        if self._replies or len(self.cursors) != 1:
            size = sum(map(len, pieces))
            while size < CHUNK and (bodies := self._next_bodies(CHUNK - size)):
                size += sum(map(len, bodies))
                pieces += bodies
        if self.framing is Framing.HEADERS:
            pieces = [jsonrpc.frame(body, Framing.HEADERS) for body in pieces]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _next_bodies(self, room: int) -> list[bytes]:
        """Replies in order, each after the events that it has to follow; without replies, events."""
        if self._replies:
            body, marks = self._replies[0]
            for cursor, mark in marks:
                if cursor.position < mark and self.cursors.get(cursor.log.runtime_id) is cursor:
                    return cursor.take(room, upto=mark)
            self._replies.popleft()
            self._waiting -= len(body)
            if self._waiting <= REPLIES_WAITING:
                self._drained.set()
            return [body]
        for cursor in tuple(self.cursors.values()):
            if taken := cursor.take(room, upto=cursor.target):
                return taken
            if cursor.over:
                self.unsubscribe(cursor.log.runtime_id)
        return []
