"""The daemon's side of a connection, as each test of the client for trio programs scripts it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio

from loop_protocol.jsonrpc import FrameReader, Request, parse, request_body, result_body
from loop_protocol.v1.events import AnyEvent, EventParams, SaveFailed
from loop_protocol.v1.methods import Capabilities, InitializeResult, Limits, ServerInfo

LIMITS = Limits(**dict.fromkeys(Limits.__struct_fields__, 1))
HELLO = InitializeResult(1, ServerInfo("scripted", "0"), Capabilities([], []), LIMITS)


class Peer:
    """The daemon's side of one connection, past the handshake."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._frames = FrameReader(2**26)

    async def read(self) -> Request:
        while (frame := self._frames.next()) is None:
            data = await self.stream.receive_some()
            if not data:
                raise EOFError
            self._frames.feed(data)
        message = parse(frame)
        assert isinstance(message, Request)
        return message

    async def expect(self, method: str) -> Request:
        request = await self.read()
        assert request.method == method
        return request

    async def send(self, *bodies: bytes) -> None:
        await self.stream.send_all(b"".join(bodies))

    async def answer(self, method: str, result: Any) -> Request:
        request = await self.expect(method)
        await self.send(result_body(request.id, result))
        return request


Script = Callable[[Peer], Awaitable[None]]


def event(seq: int, body: AnyEvent | None = None) -> bytes:
    params = EventParams(runtime_id="r", session_id="s", seq=seq, at=1, event=body or SaveFailed(str(seq)))
    return request_body(None, "event", params)


async def stay(_: Peer) -> None:
    await trio.sleep_forever()


@asynccontextmanager
async def serving(path: str, *scripts: Script) -> AsyncIterator[None]:
    """A peer that plays one script per connection, in their order, and then listens no more."""

    async def serve(listener: trio.SocketListener) -> None:
        for script in scripts:
            stream = await listener.accept()
            async with stream:
                peer = Peer(stream)
                await peer.answer("initialize", HELLO)
                await script(peer)
        await listener.aclose()

    sock = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    await sock.bind(path)
    sock.listen()
    async with trio.SocketListener(sock) as listener, trio.open_nursery() as nursery:
        nursery.cancel_scope.deadline = trio.current_time() + 20
        # It listens already: whoever connects before the task runs waits in the backlog.
        nursery.start_soon(serve, listener)  # noqa: ASYNC113
        yield
        nursery.cancel_scope.cancel()
