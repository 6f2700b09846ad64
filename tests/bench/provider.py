"""A model provider on loopback: each prompt scripts its own answer, and each answer's times are one line on stdout.

The last ``BENCH n=4 size=8 batch=32 gap=0 tool=`` in a request says: ``n`` deltas of ``size`` bytes, ``batch`` of them
per write, or one every ``gap`` seconds; or first a call of ``bash`` with the command ``tool``. The first line of stdout
is the port; then, per answer, when the first byte of the request was there and when the last write of the answer began
(CLOCK_MONOTONIC, the same for all processes of a machine). Ends with its stdin.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import threading
import time
from functools import lru_cache

SCRIPT = re.compile(rb"BENCH n=(\d+) size=(\d+) batch=(\d+) gap=([\d.]+) tool=(\w*)")
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BASE = {"id": "bench", "object": "chat.completion.chunk", "created": 1, "model": "bench"}
USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}


def event(delta: dict[str, object], finish: str | None = None, **more: object) -> bytes:
    body = BASE | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]} | more
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def end(finish: str) -> bytes:
    return chunk(event({}, finish) + event({}, choices=[], usage=USAGE) + b"data: [DONE]\n\n") + b"0\r\n\r\n"


@lru_cache(8)
def text(n: int, size: int, batch: int) -> list[bytes]:
    """The writes of an answer, ready: what a delta costs here must not be part of what it costs there."""
    deltas = [event({"content": f"w{number:06d} ".ljust(size, "x")[:size]}) for number in range(n)]
    return [chunk(b"".join(deltas[start : start + batch])) for start in range(0, n, batch)]


def call(command: str) -> bytes:
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    id = f"call_{time.monotonic_ns()}"
    return chunk(event({"tool_calls": [{"index": 0, "id": id, "type": "function", "function": function}]}))


async def answer(body: bytes, writer: asyncio.StreamWriter) -> float:
    """Write what the script says; answers when the last write began."""
    start = body.rfind(b"BENCH ")
    script = SCRIPT.match(body, start)
    if script is None:
        raise ValueError("a prompt without a script")
    n, size, batch, gap, tool = int(script[1]), int(script[2]), int(script[3]), float(script[4]), script[5].decode()
    calls = bool(tool) and body.find(b'"role":"tool"', start) < 0
    writer.write(HEAD)
    due = time.monotonic()
    for part in [call(tool)] if calls else text(n, size, 1 if gap else batch):
        due += gap
        if gap:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        writer.write(part)
        await writer.drain()
    # Before the write: after it this process may be kept from running while the daemon goes on.
    done = time.monotonic()
    writer.write(end("tool_calls" if calls else "stop"))
    await writer.drain()
    return done


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.set_write_buffer_limits(high=0)  # drained means that the kernel has it all
    try:
        while first := await reader.read(1):
            asked = time.monotonic()
            head = first + await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            body = await reader.readexactly(int(length[1])) if length else b""
            done = await answer(body, writer)
            print(json.dumps({"asked": asked, "done": done, "bytes": len(body)}), flush=True)
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


def end_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


async def main() -> None:
    threading.Thread(target=end_with_stdin, daemon=True).start()
    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 24)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
