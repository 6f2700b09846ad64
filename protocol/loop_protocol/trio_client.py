"""A client for trio programs: trio-jsonrpc's connection on the daemon's socket, with typed calls and events.

    async with open_client() as client:
        opened = await client.call("runtime/open", {"cwd": "/src/project", "session": {"kind": "new"}})
        await client.call("runtime/attach", {"runtimeId": opened.runtime_id})
        result = await client.run(opened.session_id, "hello")

Needs the extra ``client``. Of trio-jsonrpc it keeps the connection's public methods and replaces what is behind them:
in 0.4.0 a lost peer, a cancelled request and a bad line each leave a connection that hangs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import trio
from msgspec import Raw, Struct
from trio_jsonrpc import JsonRpcConnection, JsonRpcConnectionType  # type: ignore[import-untyped]  # it has no hints
from trio_jsonrpc.transport import BaseTransport, TransportClosed  # type: ignore[import-untyped]

from . import PROTOCOL_VERSIONS, paths
from .backlog import Backlog, P
from .client import LostConnection
from .jsonrpc import FRAME, BadMessage, FrameReader, FramingError, Request, Response, parse, request_body
from .v1.errors import RpcError, failure
from .v1.events import EventParams, EventsLost, ServerEventParams
from .v1.methods import METHODS, AttachParams, AttachResult, Content, PromptParams, RunParams
from .v1.types import RunResult

FLUSH_S = 1.0
HELLO_S = 10.0
# How long ``follow`` tries to reach a daemon that is gone, and how often.
PATIENCE_S = 30.0
RETRY_S = 0.5

log = logging.getLogger("loop_protocol")


class SocketTransport(BaseTransport):  # type: ignore[misc]
    """Whole frames over a stream. Sending only queues: who is cancelled in the middle of it cuts no frame."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._frames = FrameReader(2 * FRAME)
        self._queue, self._queued = trio.open_memory_channel[bytes](16)
        self._written = trio.Event()

    async def recv(self) -> bytes:
        try:
            while (frame := self._frames.next()) is None:
                if not (chunk := await self._stream.receive_some()):
                    raise TransportClosed("the daemon closed the connection")
                self._frames.feed(chunk)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise TransportClosed(f"the connection broke: {error}") from None
        except FramingError as error:
            raise TransportClosed(f"what came is not the protocol: {error}") from None
        return frame

    async def send(self, data: bytes) -> None:
        try:
            await self._queue.send(data.rstrip(b"\n") + b"\n")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise TransportClosed("the connection is closed") from None

    def send_if_room(self, data: bytes) -> None:
        try:
            self._queue.send_nowait(data)
        except (trio.WouldBlock, trio.BrokenResourceError, trio.ClosedResourceError):
            log.debug("not sent: %r", data)

    async def write(self) -> None:
        """Send what is queued until :meth:`close`, or until the peer takes no more."""
        try:
            async for data in self._queued:
                await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the reader of this connection notices too, and says it to whoever waits
        finally:
            self._queued.close()
            self._written.set()

    def close(self) -> None:
        """What is queued still goes out; nothing more is taken."""
        self._queue.close()

    async def flush(self) -> None:
        self.close()
        await self._written.wait()


class Client(JsonRpcConnection):  # type: ignore[misc]
    """One connection, past its handshake. Made by :func:`open_client`; any number of tasks may use it."""

    def __init__(self, transport: SocketTransport) -> None:
        super().__init__(transport, JsonRpcConnectionType.CLIENT)
        self._transport: SocketTransport = transport
        self._waiters: dict[int, trio.MemorySendChannel[Response]] = {}
        self._last_id = 0
        self._backlog = Backlog(params=EventParams)
        self._server_backlog = Backlog(params=ServerEventParams)
        self._news = trio.lowlevel.ParkingLot()
        self._closed = ""

    async def call(self, method: str, params: Struct | dict[str, Any] | None = None) -> Any:
        """The result, as the record that the method table names for ``method``.

        Raises :class:`RpcError` for an error answer and :class:`LostConnection`. Cancelling it ends the wait, here and
        in the daemon, never the work.
        """
        raw = await self._request(method, {} if params is None else params)
        try:
            return msgspec.json.decode(raw, type=METHODS[method].result)
        except msgspec.DecodeError as error:
            raise RpcError("internal", f"the answer to {method} does not fit this client: {error}") from None

    async def request(self, method: str, params: Any = None) -> Any:
        """Any method, also one that this client does not know; the result as plain Python objects."""
        return msgspec.json.decode(await self._request(method, params))

    async def run(self, session_id: str, content: Content, *, request_id: str | None = None) -> RunResult:
        """Prompt and wait for the end: the result of a run that succeeded or was stopped.

        A failed run, or a failed save, raises :class:`RpcError`; both together an ``ExceptionGroup`` of the two.
        Cancelling it leaves the run alone.
        """
        prompt = PromptParams(session_id=session_id, content=content, request_id=request_id)
        started = await self.call("session/prompt", prompt)
        result: RunResult = await self.call("run/wait", RunParams(started.run_id))
        if result.error is not None:
            raise failure(result.error)
        return result

    async def _request(self, method: str, params: Any) -> Raw:
        self._last_id += 1
        id = self._last_id
        self._waiters[id], answers = trio.open_memory_channel[Response](1)
        try:
            with answers:
                await self._transport.send(request_body(id, method, params))
                answer = await answers.receive()
        except trio.Cancelled:
            self._transport.send_if_room(request_body(None, "$/cancelRequest", {"id": id}))
            raise
        except (TransportClosed, trio.EndOfChannel):
            raise LostConnection(self._closed or "the connection is closed") from None
        finally:
            self._waiters.pop(id, None)
        if answer.error is not None:
            raise answer.error
        return Raw(b"null") if answer.result is None else answer.result

    def events(self) -> Client:
        """The events of all attached runtimes, to be read with ``async for``; ends with :class:`LostConnection`.

        They wait here until they are read, ``BACKLOG_BYTES`` at most; then an ``events_lost`` replaces the oldest.
        """
        return self  # an iterator and no generator: nothing is left open when a loop ends early

    __aiter__ = events

    async def __anext__(self) -> EventParams:
        """The next event of a type that this client knows; the others are skipped."""
        return await self._next(self._backlog)

    async def next_server_event(self) -> ServerEventParams:
        """The next of the daemon's own, which ``server/watch`` asks for; kept apart, under the same rules."""
        return await self._next(self._server_backlog)

    async def _next(self, backlog: Backlog[P]) -> P:
        await trio.lowlevel.checkpoint()
        while True:
            while not backlog:
                if self._closed:
                    raise LostConnection(self._closed)
                await self._news.park()
            if params := backlog.take():
                return params

    async def _background_task(self) -> None:
        """Read until the connection is lost; then everybody who waits is told."""
        try:
            while True:
                self._receive(await self._transport.recv())
        except TransportClosed as error:
            self._closed = str(error)
        finally:
            self._closed = self._closed or "the client was closed"
            self._transport.close()
            for waiter in self._waiters.values():
                waiter.close()
            self._news.unpark_all()
            self._inbound_requests_send.close()

    def _receive(self, frame: bytes) -> None:
        try:
            message = parse(frame, trusted=True)
            match message:
                case Response(id=int() as id) if id in self._waiters:
                    self._waiters.pop(id).send_nowait(message)
                case Request(method="event" | "server/event" as method, params=Raw() as params):
                    (self._backlog if method == "event" else self._server_backlog).add(params)
                    self._news.unpark_all()
                case Response(id=None, error=RpcError() as error):
                    # It says this of a frame that it could not read: whose call that was is not to be known.
                    raise TransportClosed(f"the daemon refused what was sent: {error.message}")
                case _:
                    pass  # the answer to a cancelled call, or something that a newer daemon says
        except (BadMessage, msgspec.DecodeError) as error:
            log.warning("ignored what is no message: %s", error)


@asynccontextmanager
async def open_client(
    path: str | None = None, *, name: str = "loop_protocol", approvals: bool = False
) -> AsyncIterator[Client]:
    """Connect and say hello; without ``path`` to this user's daemon. ``approvals``: a person is here whom tools ask.
    Raises OSError when nobody listens, :class:`RpcError` when the versions do not fit."""
    async with await trio.open_unix_socket(path or paths.socket_path(os.environ)) as stream, _nursery() as nursery:
        transport = SocketTransport(stream)
        client = Client(transport)
        nursery.start_soon(client._background_task)
        nursery.start_soon(transport.write)
        try:
            await _say_hello(client, name, approvals=approvals)
            yield client
        finally:
            with trio.move_on_after(FLUSH_S, shield=True):
                await transport.flush()


async def _say_hello(client: Client, name: str, *, approvals: bool) -> Any:
    hello = {"versions": list(PROTOCOL_VERSIONS), "client": {"name": name}, "capabilities": {"approvals": approvals}}
    with trio.move_on_after(HELLO_S):
        return await client.call("initialize", hello)
    raise LostConnection("the daemon does not answer")


@asynccontextmanager
async def _nursery() -> AsyncIterator[trio.Nursery]:
    """Tasks that end with the block. The one error of the block, or of a task, leaves as it is, not inside a group."""
    try:
        async with trio.open_nursery() as nursery:
            try:
                yield nursery
            finally:
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from None  # noqa: ASYNC123 the caller's own error, as if there were no nursery


# --- across lost connections ------------------------------------------------------------------------------------------


@asynccontextmanager
async def follow(
    runtime_id: str, *, path: str | None = None, since: int | None = None, approvals: bool = False
) -> AsyncIterator[trio.MemoryReceiveChannel[AttachResult | EventParams]]:
    """A runtime's events over a connection of their own, which is made again when it is lost.

        async with follow(runtime_id) as items:
            async for item in items:
                state = item.state if isinstance(item, AttachResult) else fold(state, item)

    A snapshot comes first (not with ``since``) and again wherever events were lost; the events after it come once each.
    The block ends with :class:`RpcError` when the daemon does not know the runtime (any more: ids end with the daemon),
    and with OSError or :class:`LostConnection` when no daemon was reached for ``PATIENCE_S``. ``approvals``: see above.
    """
    give, items = trio.open_memory_channel[AttachResult | EventParams](0)
    async with _nursery() as nursery:
        nursery.start_soon(_Follower(runtime_id, path, since, approvals, give).stay_attached)
        yield items


@dataclass(slots=True)
class _Follower:
    runtime_id: str
    path: str | None
    seq: int | None
    approvals: bool
    give: trio.MemorySendChannel[AttachResult | EventParams]

    async def stay_attached(self) -> None:
        alone_since = trio.current_time()
        while True:
            try:
                async with open_client(self.path, approvals=self.approvals) as client:
                    try:
                        while True:
                            await self._pass_on(client)
                    finally:
                        alone_since = trio.current_time()
            except (LostConnection, OSError):
                if trio.current_time() - alone_since > PATIENCE_S:
                    raise
            await trio.sleep(RETRY_S)

    async def _pass_on(self, client: Client) -> None:
        """Attach, and pass events on until some are lost."""
        attached = await client.call("runtime/attach", AttachParams(runtime_id=self.runtime_id, since=self.seq))
        if attached.state is not None:
            self.seq = attached.seq
            await self.give.send(attached)
        async for params in client.events():
            if isinstance(params.event, EventsLost):
                self.seq = None
                return
            # After a hole, events from before the new snapshot may still wait in the client.
            if self.seq is None or params.seq > self.seq:
                self.seq = params.seq
                await self.give.send(params)
