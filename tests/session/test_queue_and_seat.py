"""What becomes of a queue when its session is replaced, disposed of or left alone (Q-5, R-1…R-6)."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from inprocess import running, text
from seats import Held, Seat, seated
from test_saving import Breaking

from loop_protocol.v1.errors import RpcError
from loopd.agent import Reply
from loopd.daemon import IDLE_SESSION_S, TIDY_S
from loopd.storage.fs import FileSystem


async def paused(seat: Seat, turn: Held, *words: str) -> None:
    """With these inputs, after a stop in ``turn``."""
    run_id = await seat.begin(turn)
    for word in words:
        await seat.add(word)
    await seat.stop(run_id)


async def seat_refusal(seat: Seat, method: str, **params: Any) -> RpcError:
    """It changed nothing (I-10)."""
    before, head = await seat.state(), seat.world.session_of(seat.id).events.head
    with pytest.raises(RpcError) as refused:
        await seat.wire.call(method, {"runtimeId": seat.runtime_id, **params})
    assert (await seat.state(), seat.world.session_of(seat.id).events.head) == (before, head)
    return refused.value


@pytest.mark.parametrize("method", ["newSession", "switchSession", "dispose"])
async def test_what_waits_is_dropped_only_when_asked(tmp_path: Path, method: str) -> None:  # R-1 R-6
    turn = Held("half")
    async with seated(tmp_path, turn, text("x")) as seat:
        other = await seat.wire.open(seat.world, kind="new", runtimeId="new", attach=False)
        await seat.wire.call("runtime/dispose", {"runtimeId": other["runtimeId"]})
        await paused(seat, turn, "a", "b")
        more = {"path": other["path"]} if method == "switchSession" else {}
        refused = await seat_refusal(seat, f"runtime/{method}", **more)
        assert (refused.kind, refused.data["queued"]) == ("conflict", 2)
        refused = await seat_refusal(seat, f"runtime/{method}", **more, discardQueue=False)
        assert refused.kind == "conflict"
        done = await seat.wire.call(f"runtime/{method}", {"runtimeId": seat.runtime_id, **more, "discardQueue": True})
        if method == "dispose":
            assert (await seat.wire.event("session_closed")).event.reason == "disposed"  # type: ignore[union-attr]
        else:
            assert (done["cancelled"], done["state"]["queue"]) == (False, {"items": []})
            assert "runId" in await seat.wire.call("queue/add", {"sessionId": done["sessionId"], "content": "now"})
    async with running(tmp_path) as world:
        await seat.reopen(world)
        assert (await seat.queue(), await seat.brief()) == ({"items": []}, ["user: hi", "assistant: half"])


async def test_its_own_path_drops_nothing_and_needs_no_consent(tmp_path: Path) -> None:
    turn = Held("half")
    async with seated(tmp_path, turn, text("x")) as seat:
        await paused(seat, turn, "a")
        linked = tmp_path / "link"
        linked.symlink_to(Path(seat.opened["path"]).parent)
        through = str(linked / "meta.json")
        for path, more in ((seat.opened["path"], {}), (through, {}), (through, {"discardQueue": True})):
            same = await seat.wire.call("runtime/switchSession", {"runtimeId": seat.runtime_id, "path": path, **more})
            assert (same["sessionId"], same["created"]) == (seat.id, False)
            assert (await seat.waiting(), (await seat.queue())["paused"]) == (["a"], "stopped")


async def test_a_replacement_that_fails_keeps_what_waits(tmp_path: Path) -> None:
    turn, disk = Held("half"), Breaking()
    async with seated(tmp_path, turn, text("x"), fs=disk) as seat:
        await paused(seat, turn, "a")
        before = await seat.queue()
        missing = {"runtimeId": seat.runtime_id, "path": str(tmp_path / "none" / "meta.json"), "discardQueue": True}
        with pytest.raises(RpcError):
            await seat.wire.call("runtime/switchSession", missing)
        disk.error = errno.ENOSPC
        with pytest.raises(RpcError):
            await seat.wire.call("runtime/newSession", {"runtimeId": seat.runtime_id, "discardQueue": True})
        disk.error = None
        assert await seat.queue() == before
        await seat.over(await seat.resume())
        await seat.quiet()
        assert (await seat.brief())[2:] == ["assistant: x", "user: a", "assistant: x"]


@pytest.mark.parametrize("reason", ["error", "stopped"])
async def test_after_the_replacement_nothing_is_told_of_the_old_queue(tmp_path: Path, reason: str) -> None:  # R-5 I-9
    turn = Held("half", reply=Reply([], text("x").usage, "stop"))
    async with seated(tmp_path, turn, text("x")) as seat:
        run_id = await seat.begin(turn)
        await seat.add("a")
        if reason == "stopped":
            await seat.stop(run_id)
        turn.go.set()
        await seat.over(run_id)
        await seat.quiet()
        assert (await seat.queue())["paused"] == reason
        old = seat.id
        done = await seat.wire.call("runtime/newSession", {"runtimeId": seat.runtime_id, "discardQueue": True})
        await seat.wire.call("session/prompt", {"sessionId": done["sessionId"], "content": "x", "wait": True})
        await seat.wire.call("server/status")
        replaced = next(n for n, one in enumerate(seat.wire.events) if hasattr(one.event, "new"))
        assert [one for one in seat.wire.events[replaced + 1 :] if one.session_id == old] == []


async def test_during_a_replacement_nothing_is_queued(tmp_path: Path) -> None:  # R-2 R-4
    disk = Breaking()
    async with seated(tmp_path, text("x"), fs=disk) as seat:
        gate = disk.gate = threading.Event()
        replacing = await seat.wire.request("runtime/newSession", {"runtimeId": seat.runtime_id})
        assert (await seat.refusal("queue/add", content="x")).kind == "replacing"
        assert (await seat.refusal("session/resume")).kind == "replacing"
        gate.set()
        await seat.wire.answer(replacing)


async def test_a_disposal_ends_the_run_and_takes_nothing_more(tmp_path: Path) -> None:
    disk, turn = Breaking(), Held("half")
    async with seated(tmp_path, turn, text("x"), fs=disk) as seat:
        await seat.begin(turn)
        item = await seat.add("a")
        gate = disk.gate = threading.Event()
        disposing = await seat.wire.request("runtime/dispose", {"runtimeId": seat.runtime_id, "discardQueue": True})
        while "finishedAt" not in (await seat.state())["run"]["timing"]:
            await seat.wire.receive()
        assert (await seat.queue())["paused"] == "stopped"
        assert (await seat.refusal("queue/add", content="x")).kind == "session_closed"
        assert (await seat.refusal("queue/remove", itemId=item["itemId"])).kind == "session_closed"
        assert (await seat.refusal("session/resume")).kind == "session_busy"
        gate.set()
        await seat.wire.answer(disposing)
        assert seat.told()[-1] == "settled cancelled"
        assert seat.model.turns == 1


async def test_a_disposal_whose_save_fails_keeps_what_waits(tmp_path: Path) -> None:  # R-6 Q-3 S-25
    disk, turn = Breaking(), Held("half")
    async with seated(tmp_path, turn, text("x"), fs=disk) as seat:
        await seat.begin(turn)
        await seat.add("a")
        disk.error = errno.ENOSPC
        with pytest.raises(RpcError) as failed:
            await seat.wire.call("runtime/dispose", {"runtimeId": seat.runtime_id, "discardQueue": True})
        assert failed.value.kind == "save_failed"
        assert (await seat.waiting(), (await seat.queue())["paused"]) == (["a"], "stopped")
        assert "runId" not in await seat.add("b")  # it takes inputs again
        disk.error = None
        await seat.ask("session/flush")
        assert (await seat.state()).get("run") is None
        await seat.over(await seat.resume())
        await seat.quiet()
        assert [line for line in await seat.brief() if line.startswith("user")] == ["user: hi", "user: a", "user: b"]


async def _pass(clock: trio.testing.MockClock, seconds: float) -> None:
    for step in (TIDY_S, seconds - TIDY_S):
        clock.jump(step)
        await trio.testing.wait_all_tasks_blocked()


async def test_a_session_with_something_in_its_queue_is_never_idle(  # Q-5 D-4
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    turn = Held("half")
    async with seated(tmp_path, turn, text("x"), fs=FileSystem()) as seat:
        await paused(seat, turn, "a")
        for left in (True, False):
            await seat.wire.aclose()
            await trio.testing.wait_all_tasks_blocked()
            await _pass(mock_clock, 2 * IDLE_SESSION_S)
            await _pass(mock_clock, IDLE_SESSION_S)
            seat.wire = await seat.world.connect()
            rows = (await seat.wire.call("runtime/list"))["runtimes"]
            assert [row["queued"] for row in rows] == ([1] if left else [])
            if left:
                (item,) = (await seat.queue())["items"]
                await seat.ask("queue/remove", itemId=item["itemId"])
