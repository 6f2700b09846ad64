"""A session that nobody has had to do with for 30 minutes is closed, if nothing is lost by that; time is virtual."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from inprocess import PlayedModel, Wire, World, running, text

from loop_protocol import jsonrpc
from loop_protocol.v1.errors import RpcError
from loopd.daemon import IDLE_SESSION_S, TIDY_S
from loopd.storage.fs import FileSystem


class Full(FileSystem):
    is_full = False

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(fd, data, offset)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    over = trio.Event()

    async def live(task_status: trio.TaskStatus[World]) -> None:
        async with running(tmp_path, model=PlayedModel([_obeys]), fs=Full()) as world:
            task_status.started(world)
            await over.wait()

    async with trio.open_nursery() as nursery:
        world: World = await nursery.start(live)
        yield world
        over.set()


async def _obeys(request: Any, _: Any) -> Any:
    await trio.lowlevel.checkpoint()
    if request.input.turn[0].content[0].text == "hang":
        await trio.sleep_forever()
    return text("hi")


async def _pass(clock: trio.testing.MockClock, seconds: float) -> None:
    """The daemon looks around soon after it began, and at the end."""
    for step in (TIDY_S, seconds - TIDY_S):
        clock.jump(step)
        await trio.testing.wait_all_tasks_blocked()


async def _open(world: World) -> list[str]:
    wire = await world.connect()
    rows = (await wire.call("runtime/list"))["runtimes"]  # to list is no use of a session
    await wire.aclose()
    return [row["sessionId"] for row in rows]


async def _away(wire: Wire) -> None:
    await wire.aclose()
    await trio.testing.wait_all_tasks_blocked()


async def test_an_idle_session_is_closed_and_opens_again_with_everything(
    world: World, mock_clock: trio.testing.MockClock
) -> None:
    for kind in ("new", "draft"):  # a draft that was saved is a session like any other
        wire = await world.connect()
        opened = await wire.call("runtime/open", {"cwd": world.cwd, "session": {"kind": kind}, "runtimeId": "new"})
        await wire.prompt(opened["sessionId"], "remember this", wait=True)
        log, before = world.runtime().events, world.session().state()
        await _away(wire)
        await _pass(mock_clock, IDLE_SESSION_S - 1)
        assert await _open(world) == [opened["sessionId"]]
        await _pass(mock_clock, 2 * TIDY_S)
        assert await _open(world) == []
        assert b'"session_closed","reason":"idle"' in log.entry(log.head)
        wire = await world.connect()
        with pytest.raises(RpcError, match="runtime/open"):
            await wire.call("runtime/attach", {"runtimeId": opened["runtimeId"]})
        again = await wire.open(world, kind="continue", attach=False)
        assert (again["path"], again["sessionId"]) == (opened["path"], opened["sessionId"])
        assert again["state"]["timings"][0]["finishedAt"] == before.timings[0].finished_at
        page = await wire.call("session/messages", {"sessionId": again["sessionId"]})
        assert page["messages"][0]["content"][0]["text"] == "remember this"
        await wire.call("runtime/dispose", {"runtimeId": again["runtimeId"]})
        await _away(wire)


async def test_who_is_attached_or_asks_keeps_it_open(world: World, mock_clock: trio.testing.MockClock) -> None:
    wire, other = await world.connect(), await world.connect()
    opened = await wire.open(world)
    await _pass(mock_clock, 2 * IDLE_SESSION_S)
    assert await _open(world)
    await _away(wire)
    asks: list[tuple[str, Any]] = [
        ("session/state", {"sessionId": opened["sessionId"]}),
        ("session/state", {"path": opened["path"]}),
        ("runtime/open", {"cwd": world.cwd, "session": {"kind": "continue"}}),
        ("runtime/attach", {"runtimeId": opened["runtimeId"]}),
    ]
    for method, params in asks:
        await _pass(mock_clock, IDLE_SESSION_S - 4 * TIDY_S)
        await other.call(method, params)
    await _pass(mock_clock, 2 * IDLE_SESSION_S)
    await other.call("runtime/detach", {"runtimeId": opened["runtimeId"]})
    await _pass(mock_clock, IDLE_SESSION_S - TIDY_S)
    assert await _open(world)
    await _pass(mock_clock, 3 * TIDY_S)
    assert not await _open(world)


async def test_what_would_be_lost_is_not_idle(world: World, mock_clock: trio.testing.MockClock) -> None:  # S-3, S-25
    wire = await world.connect()
    kept = []
    for kind in ("memory", "draft", "new", "new"):
        opened = await wire.call("runtime/open", {"cwd": world.cwd, "session": {"kind": kind}, "runtimeId": "new"})
        kept.append(opened["sessionId"])
    untouched_draft, unsaved, hanging = kept[1:]
    disk = world.services.fs
    assert isinstance(disk, Full)
    disk.is_full = True
    await wire.prompt(unsaved, wait=True)
    disk.is_full = False
    await wire.prompt(hanging, "hang")
    await _away(wire)
    await _pass(mock_clock, 2 * IDLE_SESSION_S)
    assert await _open(world) == kept
    wire = await world.connect()
    state = await wire.call("session/state", {"sessionId": untouched_draft})
    assert state["kind"] == "draft"
    await wire.call("session/flush", {"sessionId": unsaved})
    await wire.call("session/abort", {"sessionId": hanging})
    await _away(wire)
    await _pass(mock_clock, IDLE_SESSION_S + 2 * TIDY_S)
    assert await _open(world) == kept[:2]


async def test_a_prompt_at_the_moment_of_the_disposal_is_refused_or_run(  # K-28
    world: World, mock_clock: trio.testing.MockClock
) -> None:
    outcomes = set()
    for steps in range(12):
        wire = await world.connect()
        opened = await wire.open(world, attach=False)
        await trio.testing.wait_all_tasks_blocked()
        await _pass(mock_clock, IDLE_SESSION_S)
        mock_clock.jump(TIDY_S)  # the daemon will look around at its next step
        for _ in range(steps):
            await trio.lowlevel.checkpoint()
        bodies = b"".join(
            jsonrpc.request_body(100 + number, method, params)
            for number, (method, params) in enumerate(
                [
                    ("session/prompt", {"sessionId": opened["sessionId"], "content": "x", "wait": True}),
                    ("runtime/open", {"cwd": world.cwd, "session": {"kind": "continue"}}),
                ]
            )
        )
        await wire.send(bodies)
        try:
            ran = (await wire.answer(100))["outcome"]
        except RpcError as error:
            ran = error.kind
        outcomes.add(ran)
        again = await wire.answer(101)
        assert again["sessionId"] == opened["sessionId"]
        state = await wire.call("session/state", {"path": opened["path"]})
        assert state["messageCount"] == (2 if ran == "success" else 0)
        await wire.call("runtime/dispose", {"runtimeId": world.runtime().id})
        await wire.aclose()
    assert outcomes <= {"success", "session_busy", "session_closed", "session_not_found"}
    assert len(outcomes) > 1, "the moment was missed"
