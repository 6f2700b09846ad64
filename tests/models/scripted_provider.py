"""A provider on loopback that answers as it is told: scripts are plain functions over the socket."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

RECORDED = Path(__file__).parent.parent / "cases" / "sse"

Script = Callable[[trio.SocketStream], Awaitable[None]]

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


@dataclass
class Asked:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class ScriptedProvider:
    """``script`` answers each request; afterwards the connection goes on, unless the script closed it."""

    script: Script | None = None
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    idle: trio.Event = field(default_factory=trio.Event)
    url: str = ""

    async def serve(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        self.open += 1
        try:
            while (request := await _request(stream)) is not None:
                self.asked.append(request)
                assert self.script is not None
                await self.script(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self.open -= 1
            self.idle.set()
            await trio.aclose_forcefully(stream)


async def start(nursery: trio.Nursery) -> ScriptedProvider:
    provider = ScriptedProvider()
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    provider.url = f"http://127.0.0.1:{port}/v1"
    nursery.start_soon(trio.serve_listeners, provider.serve, listeners)
    return provider


async def _request(stream: trio.SocketStream) -> Asked | None:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = await stream.receive_some()
        if not piece:
            return None
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    while len(body) < int(headers["content-length"]):
        body += await stream.receive_some()
    return Asked(first.split(" ")[1], headers, body)


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def delta(finish: str | None = None, **fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})


def call(index: int | None, arguments: str, *, id: str | None = None, name: str | None = None) -> bytes:
    fragment: dict[str, Any] = {"function": {"arguments": arguments}}
    if index is not None:
        fragment["index"] = index
    if id is not None:
        fragment["id"] = id
    if name is not None:
        fragment["function"]["name"] = name
    return delta(tool_calls=[fragment])


USAGE = event(
    {
        "choices": [],
        "usage": {"prompt_tokens": 12, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 5}},
    }
)


def sends(*events: bytes, done: bool = True) -> Script:
    """A whole, well-formed stream."""
    return says(STREAM + chunked(b"".join(events) + (DONE if done else b"")) + END)


def says(data: bytes, *, at_once: int | None = None, close: bool = False) -> Script:
    """Raw bytes, in pieces of ``at_once``."""

    async def script(stream: trio.SocketStream) -> None:
        size = at_once or len(data) or 1
        for start in range(0, len(data), size):
            await stream.send_all(data[start : start + size])
        if close:
            await stream.aclose()

    return script


def answers(status: int, body: bytes, kind: str = "application/json") -> Script:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return says(head.encode() + body)


def resets(data: bytes = b"") -> Script:
    async def script(stream: trio.SocketStream) -> None:
        await stream.send_all(data)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await stream.aclose()

    return script


def hangs(data: bytes = b"", reached: trio.Event | None = None) -> Script:
    """Says ``data`` and then nothing, until the client closes."""

    async def script(stream: trio.SocketStream) -> None:
        await stream.send_all(data)
        if reached is not None:
            reached.set()
        assert await stream.receive_some() == b""
        await stream.aclose()

    return script


def recorded(name: str) -> bytes:
    """The recording up to its last chunk; the recorder's own mark comes after it."""
    data = (RECORDED / f"{name}.raw").read_bytes()
    return data[: data.rindex(b"\r\n0\r\n") + 7]
