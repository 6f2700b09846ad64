"""One request, one run: the same ``requestId`` finds its run again, also after a restart; waits always end."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trio
from inprocess import PlayedModel, Wire, running, text
from stepping import Steps

from loop_protocol import jsonrpc
from loop_protocol.v1.errors import RpcError
from loopd.agent import Reply


class Gate:
    """A model turn that waits until it is let go."""

    def __init__(self) -> None:
        self.open = trio.Event()

    async def __call__(self, _: Any, __: Callable[[Any], None]) -> Reply:
        await self.open.wait()
        return text("done")


async def _kind(wire: Wire, method: str, **params: Any) -> str:
    with pytest.raises(RpcError) as caught:
        await wire.call(method, params)
    return caught.value.kind


async def test_a_repeated_request_is_the_same_run_while_it_goes_on_and_after(tmp_path: Path) -> None:
    gate = Gate()
    async with running(tmp_path, model=PlayedModel([gate])) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        ask = {"sessionId": opened["sessionId"], "content": "hi", "requestId": "r1"}
        first = await wire.call("session/prompt", ask)
        assert await wire.call("session/prompt", ask) == first
        assert await _kind(wire, "session/prompt", **(ask | {"content": "else"})) == "conflict"
        assert await _kind(wire, "session/prompt", **(ask | {"requestId": "r2"})) == "session_busy"
        waiting = await wire.request("session/prompt", ask | {"wait": True})
        gate.open.set()
        result = await wire.answer(waiting)
        assert (result["runId"], result["outcome"], result["saved"]) == (first["runId"], "success", True)
        assert await wire.call("session/prompt", ask) == first
        # A refusal is not remembered.
        second = await wire.call("session/prompt", ask | {"requestId": "r2", "content": "else", "wait": True})
        assert second["runId"] != first["runId"]
        assert (await wire.call("session/state", {"sessionId": opened["sessionId"]}))["userMessageCount"] == 2


async def test_a_repeated_request_finds_its_run_after_a_restart(tmp_path: Path) -> None:
    ask = {"content": [{"type": "text", "text": "hi"}], "requestId": "r1"}
    async with running(tmp_path, model=PlayedModel([text("done")])) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        first = await wire.call("session/prompt", {**ask, "sessionId": opened["sessionId"], "wait": True})
    async with running(tmp_path, model=PlayedModel([text("done")])) as world:
        wire = await world.connect()
        opened = await wire.open(world, kind="continue")
        again = await wire.call("session/prompt", {**ask, "sessionId": opened["sessionId"], "wait": True})
        assert again == first
        assert await wire.call("run/wait", {"runId": first["runId"]}) == first
        assert await wire.call("session/stop", {"sessionId": opened["sessionId"], "runId": first["runId"]}) == {
            "stopped": False
        }
        assert world.session().core.history.user_messages == 1


async def test_a_run_is_remembered_after_its_session_is_gone(tmp_path: Path) -> None:
    async with running(tmp_path, model=PlayedModel([text("done")])) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        result = await wire.call("session/prompt", {"sessionId": opened["sessionId"], "content": "x", "wait": True})
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        assert await wire.call("run/wait", {"runId": result["runId"]}) == result
        assert await _kind(wire, "run/wait", runId="nobody") == "run_not_found"
        opened = await wire.open(world)
        assert await _kind(wire, "session/stop", sessionId=opened["sessionId"], runId="nobody") == "run_not_found"


async def test_only_the_last_256_settled_runs_are_remembered(tmp_path: Path) -> None:
    async with running(tmp_path, model=PlayedModel([text("done")])) as world:
        wire = await world.connect()
        opened = await wire.open(world, kind="memory", attach=False)
        runs = [await wire.prompt(opened["sessionId"], wait=True) for _ in range(258)]
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        assert len(world.daemon.runtimes.runs) <= 257
        assert await _kind(wire, "run/wait", runId=runs[0]) == "run_not_found"
        assert (await wire.call("run/wait", {"runId": runs[-1]}))["outcome"] == "success"


async def test_a_disconnect_ends_no_run_and_frees_the_subscription(tmp_path: Path) -> None:  # R-7, I-10
    gate = Gate()
    async with running(tmp_path, model=PlayedModel([gate])) as world:
        wire, other = await world.connect(), await world.connect()
        opened = await wire.open(world)
        run_id = await wire.prompt(opened["sessionId"])
        await wire.request("run/wait", {"runId": run_id})
        await wire.aclose()
        log = world.runtime().events
        with trio.fail_after(5):
            while log.cursors:
                await other.call("server/status")
        gate.open.set()
        result = await other.call("run/wait", {"runId": run_id})
        assert result == {"runId": run_id, "outcome": "success", "saved": True}


async def test_a_second_prompt_at_the_moment_of_settling_runs_or_is_refused(tmp_path: Path) -> None:  # K-28
    async with running(tmp_path, model=PlayedModel([text("done")])) as world:
        wire = await world.connect()
        opened = await wire.open(world, attach=False)
        accepted, refused = 0, 0
        for _ in range(20):
            ids = [
                await wire.request("session/prompt", {"sessionId": opened["sessionId"], "content": "x"})
                for _ in range(3)
            ]
            for id in ids:
                try:
                    last = (await wire.answer(id))["runId"]
                    accepted += 1
                except RpcError as error:
                    refused += error.kind == "session_busy"
            await wire.call("run/wait", {"runId": last})
        state = await wire.call("session/state", {"sessionId": opened["sessionId"]})
        assert accepted + refused == 60
        assert state["userMessageCount"] == accepted == len(state["timings"])


async def test_messages_come_in_pages_of_stored_lines(tmp_path: Path) -> None:
    long = "x" * 400_000
    async with running(tmp_path, model=PlayedModel([text(long)])) as world:
        wire = await world.connect()
        opened = await wire.open(world, attach=False)
        for _ in range(3):
            await wire.prompt(opened["sessionId"], long, wait=True)
        seen: list[Any] = []
        for source in ({"sessionId": opened["sessionId"]}, {"path": opened["path"]}):
            messages: list[Any] = []
            while True:
                page = await wire.call("session/messages", {**source, "start": len(messages)})
                assert (page["total"], page["committed"]) == (6, 6)
                if not page["messages"]:
                    break
                assert len(page["messages"]) <= 2
                messages += page["messages"]
            seen.append(messages)
        assert seen[0] == seen[1]
        assert [message["index"] for message in seen[0]] == list(range(6))
        one = await wire.call("session/messages", {"sessionId": opened["sessionId"], "start": 2, "limit": 1})
        assert [message["index"] for message in one["messages"]] == [2]
        beyond = await wire.call("session/messages", {"sessionId": opened["sessionId"], "start": 99})
        assert beyond["messages"] == []


async def test_a_prompt_that_arrives_at_any_step_of_a_run_is_refused_or_run_and_never_both(tmp_path: Path) -> None:
    """K-28: at the very moment at which the other one settles too."""
    seen: list[str] = []
    async with running(tmp_path, model=PlayedModel([text("done")])) as world:
        wire, other = await world.connect(), await world.connect()
        opened = await wire.open(world, attach=False)
        ask = {"sessionId": opened["sessionId"], "content": "x", "wait": True}
        accepted = 0
        for at in count(1):
            body = jsonrpc.request_body(1000 + at, "session/prompt", ask)
            # At once, so that it is there when the daemon looks again: no task of ours has to run first.
            step = Steps(at=at, act=partial(os.write, other.stream.socket.fileno(), body))
            trio.lowlevel.add_instrument(step)
            assert (await wire.call("session/prompt", ask))["outcome"] == "success"
            accepted += 1
            trio.lowlevel.remove_instrument(step)
            if step.count < at:
                break
            try:
                seen.append((await other.answer(1000 + at))["outcome"])
                accepted += 1
            except RpcError as error:
                seen.append(error.kind)
            state = await wire.call("session/state", {"sessionId": opened["sessionId"]})
            assert (state["messageCount"], state["userMessageCount"]) == (2 * accepted, accepted)
            assert len(state["timings"]) == accepted
    assert set(seen) == {"success", "session_busy"}


async def test_a_stop_before_the_provider_answers_ends_the_run_at_once_and_a_further_one_is_told_that_it_is_late(
    tmp_path: Path,
) -> None:
    """K-29"""
    async with running(tmp_path, model=PlayedModel([Gate()])) as world:
        wire, other = await world.connect(), await world.connect()
        opened = await wire.open(world)
        ask = {"sessionId": opened["sessionId"]}
        assert await wire.call("session/abort", ask) == {"stopped": False}
        for method in ("session/stop", "session/abort"):
            run_id = await wire.prompt(opened["sessionId"])
            stop = ask | ({"runId": run_id} if method == "session/stop" else {})
            with trio.fail_after(2):
                one, two = await wire.request(method, stop), await other.request(method, stop)
                assert await wire.answer(one) == {"stopped": True}
                assert (await other.answer(two))["stopped"] in (True, False)  # it may have been over by then
                result = await wire.call("run/wait", {"runId": run_id})
            assert result == {"runId": run_id, "outcome": "cancelled", "saved": True}
            assert await wire.call(method, stop) == {"stopped": False}
        assert await _kind(wire, "session/stop", **ask, runId="never") == "run_not_found"
        state = await wire.call("session/state", ask)
        assert (state["messageCount"], [one["stopped"] for one in state["timings"]]) == (2, [True, True])
