"""Following a runtime across lost connections: every event once, and a snapshot where some are gone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import trio
from scripted_peer import Peer, event, serving, stay

pytest.importorskip("trio_jsonrpc")

from loop_protocol.jsonrpc import error_body
from loop_protocol.trio_client import PATIENCE_S, follow
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.events import EventParams, EventsLost, SessionSaved
from loop_protocol.v1.methods import AttachResult
from loop_protocol.v1.types import ModelRef, QueueState, SessionState, Usage

STATE = SessionState(
    session_id="s",
    cwd="/",
    kind="memory",
    model=ModelRef("p", "m"),
    permission="read-only",
    unread=False,
    created_at=1,
    updated_at=1,
    message_count=0,
    user_message_count=0,
    live_count=0,
    timings=[],
    tools=[],
    queue=QueueState([]),
    approvals=[],
    has_pending_save=False,
    usage=Usage(0, 0),
)


@pytest.mark.usefixtures("autojump_clock")
async def test_following_goes_on_with_since_where_the_connection_was_lost(path: str) -> None:
    asked: list[Any] = []

    async def first(peer: Peer) -> None:
        request = await peer.answer("runtime/attach", AttachResult(seq=4, state=STATE))
        asked.append(msgspec.json.decode(request.params or b""))
        await peer.send(event(5), event(6))

    async def second(peer: Peer) -> None:
        request = await peer.answer("runtime/attach", AttachResult(seq=8, replayed=True))
        asked.append(msgspec.json.decode(request.params or b""))
        await peer.send(event(7), event(8), event(9))
        await stay(peer)

    async with serving(path, first, second), follow("r", path=path) as items:
        got = [await items.receive() for _ in range(6)]
    assert got[0] == AttachResult(seq=4, state=STATE)
    assert [item.seq for item in got[1:]] == [5, 6, 7, 8, 9]
    assert asked == [{"runtimeId": "r"}, {"runtimeId": "r", "since": 6}]


@pytest.mark.usefixtures("autojump_clock")
async def test_following_takes_a_new_snapshot_where_events_were_lost(path: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.answer("runtime/attach", AttachResult(seq=1, state=STATE))
        await peer.send(event(2), event(90, EventsLost(first=3, last=90)), event(91))
        request = await peer.answer("runtime/attach", AttachResult(seq=95, state=STATE))
        assert b"since" not in bytes(request.params or b"")
        await peer.send(event(95), event(96, SessionSaved(1, 1, 1, unread=False)))
        await stay(peer)

    async with serving(path, script), follow("r", path=path) as items:
        got = [await items.receive() for _ in range(4)]
    assert [item.seq for item in got] == [1, 2, 95, 96]
    assert [type(item) for item in got] == [AttachResult, EventParams, AttachResult, EventParams]


@pytest.mark.usefixtures("autojump_clock")
async def test_following_ends_with_the_error_of_a_daemon_that_forgot_the_runtime(path: str) -> None:
    async def script(peer: Peer) -> None:
        request = await peer.expect("runtime/attach")
        await peer.send(error_body(request.id, RpcError("runtime_not_found", "no such runtime")))
        await stay(peer)

    async with serving(path, script):
        with pytest.raises(RpcError) as caught:
            async with follow("r", path=path, since=3) as items:
                await items.receive()
    assert caught.value.kind == "runtime_not_found"


@pytest.mark.usefixtures("autojump_clock")
async def test_following_gives_up_when_no_daemon_comes_back(path: str) -> None:
    started = trio.current_time()
    with pytest.raises(FileNotFoundError):
        async with follow("r", path=path) as items:
            await items.receive()
    assert PATIENCE_S < trio.current_time() - started < PATIENCE_S + 2


async def test_leaving_the_block_ends_the_connection(path: str) -> None:
    gone = trio.Event()

    async def script(peer: Peer) -> None:
        await peer.answer("runtime/attach", AttachResult(seq=1, state=STATE))
        with pytest.raises(EOFError):
            await peer.read()
        gone.set()

    async with serving(path, script):
        async with follow("r", path=path) as items:
            await items.receive()
        await gone.wait()
