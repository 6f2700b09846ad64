"""I-9: the snapshot at k, with the events after k folded in, equals every later snapshot, from any attach point."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from asking import RULE, Asking, answer, asks, pending, requested
from inprocess import PlayedModel, Probe, World, call, running, text
from seats import PNG, Held, seated
from test_saving import Breaking
from titling import ALL, Namer, hangs, say, state, title

from loop_protocol.replica import fold
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.events import ApprovalResolved, EventParams, RunStarted
from loop_protocol.v1.types import SessionState
from loopd.agent import ModelError, Reply, TextDelta, ThinkingDelta, ToolCallDelta

_decode_state = msgspec.json.Decoder(SessionState).decode


class Watching(trio.abc.Instrument):
    """Takes the snapshot that an attach would get, after every step of every task."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.snapshots: dict[int, SessionState] = {}
        self.bodies: dict[int, bytes] = {}

    def after_task_step(self, _: trio.lowlevel.Task) -> None:
        for runtime in self.world.daemon.runtimes.by_id.values():
            state = runtime.session.state()
            log = runtime.events
            for seq in range(max(log.first, len(self.bodies) + 1), log.head + 1):
                self.bodies[seq] = log.entry(seq)
            # As a client sees it. The last snapshot at a seq is the one that the next event follows.
            seen = _decode_state(msgspec.json.encode(state))
            if log.head in self.snapshots and self.snapshots[log.head] != seen:
                self._require_announced(seen, log.head)
            self.snapshots.setdefault(log.head, seen)

    def _require_announced(self, seen: SessionState, head: int) -> None:
        """Between an acceptance and its first event a snapshot is ahead of the events."""
        before = self.snapshots[head]
        assert without_accepted(seen, before) == before, "a change without an event"


def without_accepted(ahead: SessionState, before: SessionState) -> SessionState:
    """But for what a run changes by being accepted."""
    accepted = {name: getattr(before, name) for name in ("run", "operation", "live_count", "title")}
    return msgspec.structs.replace(ahead, **accepted)


async def _thinking(_: Any, say: Callable[[Any], None]) -> Reply:
    for said in (ThinkingDelta("hm "), ThinkingDelta("so"), TextDelta("I "), ToolCallDelta("c1", "probe", "{}")):
        say(said)
        await trio.lowlevel.checkpoint()
    return call()


async def _cut(_: Any, say: Callable[[Any], None]) -> Reply:
    say(TextDelta("half"))
    await trio.lowlevel.checkpoint()
    raise ModelError("incomplete", "cut")


async def _hang(_: Any, say: Callable[[Any], None]) -> Reply:
    say(TextDelta("partial"))
    await trio.sleep_forever()
    raise AssertionError


async def test_a_replica_equals_the_snapshot_from_any_attach_point(tmp_path: Path) -> None:
    disk = Breaking()
    model = PlayedModel([_thinking, text("done"), _cut, _hang, text("x"), text("y"), text("z")])
    async with running(tmp_path, model=model, tools=[Probe()], fs=disk) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        watching = Watching(world)
        trio.lowlevel.add_instrument(watching)
        session_id = opened["sessionId"]
        ask = {"sessionId": session_id, "content": "hi", "wait": True}
        await wire.call("session/prompt", ask)
        await wire.call("session/setPermission", {"sessionId": session_id, "permission": "danger-full-access"})
        await wire.call("session/setPinned", {"sessionId": session_id, "pinned": True})
        await wire.call("session/markRead", {"sessionId": session_id, "messageCount": 4})
        await wire.call("title/rename", {"sessionId": session_id, "text": "by hand"})
        await wire.call("session/prompt", ask)
        run_id = await wire.prompt(session_id)
        while wire.events[-1].event.__struct_config__.tag != "message_update":
            await wire.receive()
        await wire.call("session/stop", {"sessionId": session_id, "runId": run_id})
        disk.error = errno.ENOSPC
        await wire.call("session/prompt", ask)
        disk.error = None
        await wire.call("session/flush", {"sessionId": session_id})
        replaced = await wire.call("runtime/newSession", {"runtimeId": opened["runtimeId"]})
        await wire.call("session/prompt", {**ask, "sessionId": replaced["sessionId"]})
        trio.lowlevel.remove_instrument(watching)
        await wire.aclose()
    require_law(watching, at_least=30)


async def test_a_replica_follows_a_queue_steering_pauses_and_resumed_work(tmp_path: Path) -> None:  # I-9 Q-1…Q-4
    disk = Breaking()
    first, second, third = Held("one", reply=call()), Held("half"), Held("more")
    empty = Held(reply=Reply([], text("x").usage, "stop"))
    async with seated(tmp_path, first, second, third, text("fine"), empty, text("end"), fs=disk) as seat:
        watching = Watching(seat.world)
        trio.lowlevel.add_instrument(watching)
        run_id = await seat.begin(first)
        a, b = await seat.add("a"), await seat.add("b", steer=True)
        image = await seat.add([PNG], steer=True)
        await seat.ask("queue/edit", itemId=a["itemId"], revision=1, content="a2")
        await seat.ask("queue/move", itemId=a["itemId"], to=9)
        first.go.set()  # b enters, the image is not taken and pauses
        await second.asked.wait()
        await seat.add("c", steer=True)
        await seat.stop(run_id)
        await seat.ask("queue/remove", itemId=image["itemId"])
        resumed = await seat.resume()
        await third.asked.wait()
        disk.error = errno.ENOSPC
        third.go.set()
        await seat.over(resumed)
        await seat.add("d")
        disk.error = None
        await seat.ask("session/flush")  # c starts, then a2, whose answer is empty
        await empty.asked.wait()
        empty.go.set()
        await seat.wire.event("run_settled")
        await seat.quiet()
        assert (await seat.waiting(), (await seat.queue())["paused"]) == (["d"], "error")
        await seat.wire.call("server/drain", {})
        await seat.add("e")
        await seat.wire.call("server/drain", {"cancel": True})
        await seat.over(await seat.resume())
        await seat.quiet()
        await seat.ask("session/abort")
        assert b["itemId"] not in repr(await seat.state())
        replaced = await seat.wire.call("runtime/newSession", {"runtimeId": seat.runtime_id})
        await seat.wire.call("session/prompt", {"sessionId": replaced["sessionId"], "content": "x", "wait": True})
        trio.lowlevel.remove_instrument(watching)
    require_law(watching, at_least=40)
    paused = {state.queue.paused for state in watching.snapshots.values()}
    assert paused == {None, "error", "stopped", "save_failed"}


async def test_a_replica_does_not_see_the_old_queue_in_the_session_that_follows(tmp_path: Path) -> None:  # I-9 R-5
    turn = Held(reply=Reply([], text("x").usage, "stop"))
    async with seated(tmp_path, turn, text("x")) as seat:
        watching = Watching(seat.world)
        trio.lowlevel.add_instrument(watching)
        run_id = await seat.begin(turn)
        await seat.add("a")
        turn.go.set()
        await seat.over(run_id)
        await seat.wire.call("runtime/newSession", {"runtimeId": seat.runtime_id, "discardQueue": True})
        trio.lowlevel.remove_instrument(watching)
    require_law(watching, at_least=5)


async def test_a_replica_follows_what_tools_ask(tmp_path: Path) -> None:  # A-1 A-5
    plays = [asks("a", rules=[RULE]), asks("b"), asks("c"), text("x"), asks("d"), text("x"), asks("e")]
    async with seated(tmp_path, *plays, tools=[Asking()]) as seat:
        watching = Watching(seat.world)
        trio.lowlevel.add_instrument(watching)
        run_id = await seat.prompt(approvalTimeoutMs=50)
        await answer(seat.wire, await requested(seat.wire), "allowed-session")
        await answer(seat.wire, await requested(seat.wire), "rejected", feedback="no")
        assert (await seat.over(run_id))["outcome"] == "success"  # the third one waits too long
        await seat.prompt(approvals="reject", wait=True)
        run_id = await seat.prompt()
        while not (await seat.state())["approvals"]:
            pass
        await seat.add("later")
        await seat.stop(run_id)
        replaced = await seat.wire.call("runtime/newSession", {"runtimeId": seat.runtime_id, "discardQueue": True})
        run_id = await seat.wire.prompt(replaced["sessionId"])
        while not (pending_now := await pending(seat.wire)):
            pass
        await answer(seat.wire, pending_now[0]["approvalId"])
        while not (pending_now := await pending(seat.wire)):
            pass
        await seat.wire.call("session/stop", {"sessionId": replaced["sessionId"], "runId": run_id})
        trio.lowlevel.remove_instrument(watching)
        told = [params.event for params in seat.wire.events]
    require_law(watching, at_least=40)
    assert {len(state.approvals) for state in watching.snapshots.values()} == {0, 1}
    outcomes = [event.outcome for event in told if isinstance(event, ApprovalResolved)]
    ways = ["allowed-session", "rejected", "timed-out", "unavailable", "cancelled", "allowed-once", "cancelled"]
    assert outcomes == ways


async def test_titles_and_what_they_take_can_be_followed_too(tmp_path: Path) -> None:  # T-11
    namer = Namer([text("One"), _cut_title, text("Three"), _cut_title, text("Five"), hangs])
    async with running(tmp_path, model=PlayedModel([text("hi")]), titles=namer) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=ALL)
        watching = Watching(world)
        trio.lowlevel.add_instrument(watching)
        for content in ("one", "two", "three"):
            await say(wire, opened, content)
            await title(wire, opened, "wait")
        with pytest.raises(RpcError, match="cut off"):
            await title(wire, opened, "refresh")
        await title(wire, opened, "refresh")
        await title(wire, opened, "rename", text="Mine")
        refreshing = await wire.request("title/refresh", {"sessionId": opened["sessionId"]})
        await namer.requests(6)
        await title(wire, opened, "cancel")
        with pytest.raises(RpcError, match="cancelled"):
            await wire.answer(refreshing)
        trio.lowlevel.remove_instrument(watching)
        assert (await state(wire, opened))["titleUsage"] == {"inputTokens": 15, "outputTokens": 5}
        await wire.aclose()
    require_law(watching, at_least=20)


async def _cut_title(*_: Any) -> Reply:
    await trio.lowlevel.checkpoint()
    return msgspec.structs.replace(text("cut"), stop_reason="length")


def require_law(watching: Watching, *, at_least: int) -> None:
    events = {
        seq: msgspec.json.decode(msgspec.json.encode(msgspec.json.decode(body)["params"]), type=EventParams)
        for seq, body in watching.bodies.items()
    }
    attach_points = sorted(watching.snapshots)
    assert len(attach_points) > at_least
    for start in attach_points:
        state = watching.snapshots[start]
        for seq in range(start + 1, attach_points[-1] + 1):
            state = fold(state, events[seq])
            if seq in watching.snapshots:
                expected = watching.snapshots[seq]
                following = events[seq + 1].event if seq + 1 in events else None
                if isinstance(following, RunStarted) and expected.run and expected.run.run_id == following.run_id:
                    # What this event told, and the next run's acceptance, were one step.
                    expected = without_accepted(expected, state)
                assert state == expected, f"attached at {start}, folded to {seq}"
