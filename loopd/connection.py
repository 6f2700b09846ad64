"""One client: a reader that accepts requests in the order of their arrival, a writer, and what its requests wait for.

Requests are decided synchronously in the reader, so that two pipelined ones cannot overtake each other.
"""

from __future__ import annotations

import logging
import select
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import trio

from loop_protocol import jsonrpc
from loop_protocol.jsonrpc import BadMessage, FramingError, Request
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.methods import METHODS

from . import api
from .outbox import Gone, Outbox

READ = 64 * 1024
IN_FLIGHT = api.IN_FLIGHT
# Of the answers to one batch together: beyond it the rest is refused, or 1,000 pages would be collected in memory.
BATCH_ANSWERS = 4 * 1024 * 1024
FLUSH_S = 1.0
# How often a client that has closed its sending side, and waits for answers, is looked after.
HANGUP_S = 1.0
# Of a client's own name so much is passed on to others.
NAME = 64

log = logging.getLogger("loopd.connection")
Answer = Callable[[bytes], None]
Outcome = Callable[[], Awaitable[Any]]


class Peer(NamedTuple):
    pid: int
    uid: int


def peer(sock: socket.socket) -> Peer:
    """The process at the other end, as it was when it connected."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return Peer(pid, uid)


class Connection:
    """``sock`` is a connected, non-blocking stream socket, owned from here on. ``name``: what others are told of it."""

    def __init__(self, sock: socket.socket, daemon: api.Daemon) -> None:
        self.daemon = daemon
        self.outbox = Outbox(sock)
        self.initialized = False
        self.can_approve = False
        self.name = "a client"
        self._sock = sock
        self._frames = jsonrpc.FrameReader()
        self._scope = trio.CancelScope()
        self._tails: dict[bytes, trio.CancelScope] = {}
        self._idle = trio.Event()
        self.ended = trio.Event()
        self._nursery: trio.Nursery | None = None

    # --- life ---------------------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Until the peer has closed and has its answers, or the stream cannot be followed, or ``close``."""
        try:
            with self._scope:
                async with trio.open_nursery() as self._nursery:
                    self._nursery.start_soon(self._write)
                    await self._read()
                    await self._await_tails()
                    self.outbox.finish()
        except Exception:  # boundary: connection; a fault here ends this client only (D-5)
            log.exception("a fault in a connection")
        finally:
            self.outbox.close()
            trio.lowlevel.notify_closing(self._sock)
            self._sock.close()
            self.ended.set()

    def close(self) -> None:
        """The daemon ends: what is queued still goes out, for one second at most."""
        self.outbox.finish()
        self._scope.deadline = trio.current_time() + FLUSH_S

    async def _write(self) -> None:
        try:
            await self.outbox.run()
        except Gone as gone:
            log.info("a client is gone: %s", gone)
        self._scope.cancel()

    # --- reading ------------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Until the peer closes its sending side."""
        while data := await self._receive():
            self._frames.feed(data)
            try:
                if not self.daemon.has_room(self._frames.buffered):
                    raise FramingError(RpcError("limit_exceeded", "too many unfinished frames", limit="receiving"))
                while (frame := self._next_frame()) is not None:
                    self._accept(frame)
                    # Between frames too: one chunk of 64 KiB may ask for 600 pages of 1 MiB.
                    await self.outbox.room()
            except FramingError as error:  # the stream cannot be followed: one answer, then the end
                self.outbox.reply(jsonrpc.error_body(None, error.error))
                return
        if line := self._frames.rest():
            self._accept(line)

    async def _receive(self) -> bytes:
        while True:
            await trio.lowlevel.wait_readable(self._sock)
            try:
                return self._sock.recv(READ)
            except BlockingIOError:
                continue
            except OSError:
                return b""

    def _next_frame(self) -> bytes | None:
        frame = self._frames.next()
        self.outbox.framing = self._frames.framing
        return frame

    async def _await_tails(self) -> None:
        """After a half-close outstanding answers still go out; a peer that is gone altogether waits for none."""
        while self._tails:
            if _hung_up(self._sock):
                self._scope.cancel()
            self._idle = trio.Event()
            with trio.move_on_after(HANGUP_S):
                await self._idle.wait()

    @property
    def receiving(self) -> int:
        """Bytes of frames that have not come whole yet."""
        return self._frames.buffered

    # --- requests -----------------------------------------------------------------------------------------------------

    def _accept(self, frame: bytes) -> None:
        try:
            parsed = jsonrpc.parse(frame)
        except BadMessage as bad:
            self.outbox.reply(jsonrpc.error_body(bad.id, bad.error))
            return
        if isinstance(parsed, list):
            _Batch(self, parsed)
        elif isinstance(parsed, Request):
            self.dispatch(parsed, self.outbox.reply, in_batch=False)

    def dispatch(self, request: Request, answer: Answer, *, in_batch: bool) -> None:
        """Decide a request now. Its answer goes to ``answer`` at once, or later from a task that only waits."""
        if request.id is None:
            self._notified(request)
            return
        try:
            outcome = self._decide(request, in_batch=in_batch)
            body = b"" if callable(outcome) else jsonrpc.result_body(request.id, outcome)
        except BadMessage as bad:
            answer(jsonrpc.error_body(None, bad.error))
        except Exception as error:  # boundary: request; translated once, here
            answer(jsonrpc.error_body(request.id, api.translate(error)))
        else:
            if callable(outcome):
                self._wait(request, outcome, answer)
            else:
                answer(body)

    def _decide(self, request: Request, *, in_batch: bool) -> Any:
        method = METHODS.get(request.method)
        if method is None:
            jsonrpc.check_json(request.params or b"null")
            raise RpcError("method_not_found", f"no method {request.method!r}; server/describe lists them")
        if in_batch and method.starts_work:
            raise RpcError("invalid_request", f"{method.name} starts work and may not stand in a batch")
        params = jsonrpc.decode_params(request.params, method.params)
        if not self.initialized and method.name != "initialize":
            raise RpcError("not_initialized", "the first request must be initialize")
        if request.key in self._tails:
            raise RpcError("invalid_request", "this id is in flight already")
        if len(self._tails) >= IN_FLIGHT:
            raise RpcError("limit_exceeded", f"{IN_FLIGHT} requests may be in flight", limit="requestsInFlight")
        self.daemon.services.count("requests")
        return api.TABLE[method.name](api.Call(self.daemon, self), params)

    def accept_handshake(self, name: str | None, *, can_approve: bool) -> None:
        self.initialized, self.can_approve = True, can_approve
        self.name = f"{(name or 'a client')[:NAME]} (pid {peer(self._sock).pid})"
        self._frames.limit = jsonrpc.FRAME

    def _notified(self, request: Request) -> None:
        """``$/cancelRequest`` ends a wait, not the work; every other notification is ignored."""
        if request.method != "$/cancelRequest":
            return
        try:
            params = jsonrpc.decode_params(request.params, api.CancelRequest)
        except (RpcError, BadMessage):
            return
        if scope := self._tails.get(Request("", None, bytes(params.id)).key):
            scope.cancel()

    def _wait(self, request: Request, outcome: Outcome, answer: Answer) -> None:
        scope = self._tails[request.key] = trio.CancelScope()
        assert self._nursery is not None
        self._nursery.start_soon(self._tail, request, outcome, answer, scope)

    async def _tail(self, request: Request, outcome: Outcome, answer: Answer, scope: trio.CancelScope) -> None:
        body = jsonrpc.error_body(request.id, RpcError("request_cancelled", "the wait was cancelled; the work goes on"))
        with scope:
            try:
                body = jsonrpc.result_body(request.id, await outcome())
            except Exception as error:  # boundary: request tail
                body = jsonrpc.error_body(request.id, api.translate(error))
        del self._tails[request.key]
        answer(body)
        if not self._tails:
            self._idle.set()


class _Batch:
    """Requests of one frame, answered together as one array when the last of them is."""

    def __init__(self, connection: Connection, parts: list[Any]) -> None:
        self._reply = connection.outbox.reply
        self._bodies: list[bytes] = []
        self._size = 0
        self._open = 1
        for part in parts:
            if isinstance(part, BadMessage):
                self._bodies.append(jsonrpc.error_body(part.id, part.error))
            elif isinstance(part, Request) and part.id is not None and self._size > BATCH_ANSWERS:
                self._bodies.append(jsonrpc.error_body(part.id, _too_many_answers()))
            elif isinstance(part, Request):
                self._open += part.id is not None
                connection.dispatch(part, self._add, in_batch=True)
        self._close()

    def _add(self, body: bytes) -> None:
        self._bodies.append(body)
        self._size += len(body)
        self._close()

    def _close(self) -> None:
        self._open -= 1
        if not self._open and self._bodies:
            self._reply(jsonrpc.batch_body(self._bodies))


def _too_many_answers() -> RpcError:
    return RpcError(
        "limit_exceeded", f"the answers to a batch may have {BATCH_ANSWERS} bytes; ask for less at once", limit="batch"
    )


def _hung_up(sock: socket.socket) -> bool:
    """The peer closed both directions, not only its own sending side."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return any(flags & (select.POLLHUP | select.POLLERR) for _, flags in poll.poll(0))
