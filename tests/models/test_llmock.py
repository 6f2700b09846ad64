"""A fault server that nobody here wrote: llmock 0.2.2 speaks all three APIs and breaks its answers when told to.

It stays out of the development extra, since it brings a web framework and a pytest plugin of its own: installed
anywhere on PATH (``pipx install llmock==0.2.2``), it is used.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import dialects
import model_bench as bench
import pytest
import trio

from loop_protocol.v1.types import Message, TextBlock, ToolCallBlock
from loopd.agent import ModelError
from loopd.models import Catalogue

HELLO: list[Message] = [bench.user(0, "list the files")]
PROGRAM = shutil.which("llmock")
# Its whole end, from the import of its framework to the last row.
PATIENCE_S = 60
PREFIX = {"anthropic-messages": "/anthropic"}

LONG = {"type": "reply", "text": "a word and another one, " * 20}


def broken(kind: str, **more: Any) -> list[dict[str, Any]]:
    """In the middle of its text."""
    return [LONG, {"type": "stream_fault", "kind": kind, "after_chunks": 10, **more}]


FAULTS: list[tuple[str, list[dict[str, Any]], str]] = [
    ("none", [], "answer"),
    ("call", [{"type": "reply", "tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}]}], "call"),
    ("401", [{"type": "fail", "status": 401}], "auth"),
    ("429", [{"type": "fail", "status": 429, "retry_after": 1}], "rate_limit"),
    ("500", [{"type": "fail", "status": 500}], "provider"),
    ("503", [{"type": "fail", "status": 503}], "overloaded"),
    ("disconnect", broken("disconnect"), "incomplete"),
    ("truncate", broken("truncate"), "incomplete"),
    ("malformed", broken("malformed"), "provider"),
    ("stall", broken("stall", stall_seconds=60), "cancelled at once"),
    ("bad arguments", [{"type": "tool_fault", "kind": "malformed_arguments"}], "malformed call"),
]


@pytest.fixture
async def server(nursery: trio.Nursery) -> AsyncIterator[str]:
    """Its address, once it listens."""
    assert PROGRAM is not None
    port = await _free_port()
    process = await trio.lowlevel.open_process(
        [PROGRAM, "serve", "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        heard = b""
        with trio.fail_after(PATIENCE_S):
            while b"running on" not in heard:
                piece = await process.stderr.receive_some()
                assert piece, heard
                heard += piece
        nursery.start_soon(_drain, process.stderr)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            await process.stderr.aclose()


async def _free_port() -> int:
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port: int = listener.socket.getsockname()[1]
    await listener.aclose()
    return port


async def _drain(stream: trio.abc.ReceiveStream) -> None:
    try:
        async for _ in stream:
            pass
    except trio.ClosedResourceError:
        pass


def tell(server: str, behaviors: list[dict[str, Any]]) -> None:
    urllib.request.urlopen(urllib.request.Request(f"{server}/_llmock/reset", method="POST")).close()
    if behaviors:
        body = json.dumps({"behaviors": behaviors}).encode()
        urllib.request.urlopen(f"{server}/_llmock/scenario", data=body).close()


async def outcome(models: Catalogue, fault: str) -> str:
    """Tools are offered where a call is wanted: it calls what it is offered."""
    tools = (bench.BASH,) if fault in ("call", "bad arguments") else ()
    said = bench.Said()
    try:
        if fault == "stall":
            return await _stopped(models, said)
        reply = await bench.ask(models.resolve(bench.M), HELLO, said, tools=tools)
    except ModelError as error:
        return error.kind
    calls = [block for block in reply.content if isinstance(block, ToolCallBlock)]
    if calls:
        return "malformed call" if "__malformed__" in calls[0].arguments else "call"
    assert reply.content == [TextBlock(said.text)]
    return "answer"


async def _stopped(models: Catalogue, said: bench.Said) -> str:
    """It hangs in mid-answer, and a stop does not wait for it."""
    heard = trio.Event()

    def say(delta: Any) -> None:
        said(delta)
        heard.set()

    with trio.fail_after(5):
        async with trio.open_nursery() as asking:
            asking.start_soon(bench.ask, models.resolve(bench.M), HELLO, say)
            await heard.wait()
            asking.cancel_scope.cancel()
    return "cancelled at once"


@pytest.mark.skipif(PROGRAM is None, reason="llmock is not on PATH; `pipx install llmock==0.2.2` brings it")
async def test_every_fault_of_llmock_has_one_outcome_on_every_api(  # K-30
    server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found: dict[str, list[str]] = {}
    for dialect in dialects.DIALECTS:
        url = server + PREFIX.get(dialect.api, "/v1")
        models = bench.catalogue(url, api=dialect.api, api_key_env="KEY", environ={"KEY": bench.KEY})
        for fault, behaviors, _ in FAULTS:
            await trio.to_thread.run_sync(tell, server, behaviors)
            with trio.move_on_after(PATIENCE_S) as late:
                kind = await outcome(models, fault)
            found.setdefault(fault, []).append("hang" if late.cancelled_caught else kind)
        await models.aclose()
    with capsys.disabled():
        print("\n" + bench.table(["llmock", *(dialect.api for dialect in dialects.DIALECTS)], found))
    assert found == {fault: [kind] * len(dialects.DIALECTS) for fault, _, kind in FAULTS}
