"""Draining in the daemon itself: what is refused, what still answers, and that nothing unsaved is let go."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from failing_disks import Broken, Hanging
from inprocess import PlayedModel, Wire, World, running, text

from loop_protocol.v1.errors import RpcError
from loopd import daemon as daemons
from loopd import event_log
from loopd.agent import TextDelta
from loopd.config import Config, DaemonSettings
from loopd.core.timings import Clock
from loopd.storage.files import read_session
from loopd.storage.fs import FileSystem

MakeWorld = Callable[..., Awaitable[World]]


@pytest.fixture
async def make_world(tmp_path: Path) -> AsyncIterator[MakeWorld]:
    """In a task of its own, or a failed assert would arrive in an exception group."""
    over = trio.Event()

    async def live(options: dict[str, Any], task_status: trio.TaskStatus[World]) -> None:
        async with running(tmp_path, **options) as world:
            task_status.started(world)
            await over.wait()

    async with trio.open_nursery() as nursery:

        async def make(**options: Any) -> World:
            world: World = await nursery.start(live, options)
            return world

        yield make
        over.set()


async def talk_until_stopped(_: object, say: Any) -> Any:
    say(TextDelta("half an answer"))
    await trio.sleep_forever()


def settings(**daemon: Any) -> Config:
    return Config(daemon=DaemonSettings(**daemon))


async def kind(call: Awaitable[Any]) -> str:
    with pytest.raises(RpcError) as refused:
        await call
    return refused.value.kind


async def exit_code(world: World) -> int | None:
    with trio.fail_after(10):
        await world.ended.wait()
    return world.exit_code


# --- what is refused, and what still answers --------------------------------------------------------------------------


async def test_a_quiet_daemon_answers_at_once_and_takes_no_new_work_until_it_is_cancelled(
    make_world: MakeWorld,
) -> None:  # D-4
    world = await make_world(model=PlayedModel([text("yes")]))
    wire = await world.connect()
    opened = await wire.open(world)
    ids = {"runtimeId": opened["runtimeId"]}
    session = {"sessionId": opened["sessionId"]}
    quiet = {"draining": True, "quiet": True, "exiting": False, "runs": 0, "pendingSaves": [], "rescued": []}
    for _ in range(2):  # it may be asked again
        assert await wire.call("server/drain") == quiet
    head = world.runtime().events.head
    assert await kind(wire.prompt(session["sessionId"])) == "draining"
    assert await kind(wire.open(world, kind="continue")) == "draining"
    assert await kind(wire.call("runtime/newSession", ids)) == "draining"
    assert world.runtime().events.head == head  # I-10
    other = await world.connect()  # who drains or watches must get in
    assert (await other.call("server/status"))["draining"]
    assert (await other.call("session/state", session))["liveCount"] == 0
    assert await other.call("session/flush", session) == {"flushed": False}
    assert await other.call("session/abort", session) == {"stopped": False}
    assert await other.call("server/drain", {"cancel": True}) == {**quiet, "draining": False}
    await wire.prompt(session["sessionId"], wait=True)
    assert await wire.call("server/drain") == quiet
    assert await wire.call("runtime/dispose", ids) == {}
    assert (await wire.call("server/drain", {"exit": True}))["exiting"]
    assert await exit_code(world) == 0
    for one in (wire, other):
        await one.aclose()


async def test_a_run_may_finish_and_then_the_drain_answers(make_world: MakeWorld) -> None:  # D-4
    go = trio.Event()

    async def answer(*_: object) -> Any:
        await go.wait()
        return text("all of it")

    world = await make_world(model=PlayedModel([answer]))
    wire, other = await world.connect(), await world.connect()
    opened = await wire.open(world)
    run_id = await wire.prompt(opened["sessionId"])
    drains = [await other.request("server/drain", {"deadlineMs": 2_000_000_000}) for _ in range(2)]
    assert (await wire.call("server/status"))["runs"] == 1
    go.set()
    for drain in drains:
        assert (await other.answer(drain))["quiet"]
    assert (await wire.call("run/wait", {"runId": run_id}))["outcome"] == "success"
    for one in (wire, other):
        await one.aclose()


async def test_a_run_that_does_not_finish_by_the_deadline_is_stopped_and_its_text_kept(make_world: MakeWorld) -> None:
    world = await make_world(model=PlayedModel([talk_until_stopped]))  # D-4, S-12
    wire = await world.connect()
    opened = await wire.open(world)
    await wire.prompt(opened["sessionId"])
    await wire.event("message_update")
    done = await wire.call("server/drain", {"deadlineMs": 0, "exit": True})
    assert (done["quiet"], done["exiting"], done["pendingSaves"]) == (True, True, [])
    settled: Any = await wire.event("run_settled")
    assert (settled.event.outcome, settled.event.saved) == ("cancelled", True)
    assert await exit_code(world) == 0
    _, history = read_session(FileSystem(), opened["path"])
    assert b"half an answer" in history.line(1)
    await wire.aclose()


async def test_a_drain_that_is_cancelled_does_not_end_the_daemon_later(make_world: MakeWorld) -> None:  # D-4
    world = await make_world(model=PlayedModel([talk_until_stopped]))
    wire, other = await world.connect(), await world.connect()
    opened = await wire.open(world)
    run_id = await wire.prompt(opened["sessionId"])
    waiting = await wire.request("server/drain", {"exit": True, "deadlineMs": 2_000_000_000})
    while not (await other.call("server/status"))["draining"]:
        pass
    assert (await other.call("server/drain", {"cancel": True}))["runs"] == 1
    again = await other.request("server/drain", {"deadlineMs": 2_000_000_000})  # a later one, that does not exit
    assert not (await wire.answer(waiting))["exiting"]
    assert (await wire.call("session/stop", {"sessionId": opened["sessionId"], "runId": run_id}))["stopped"]
    assert not (await other.answer(again))["exiting"]
    assert (await wire.call("server/status"))["pid"] == os.getpid()
    assert world.exit_code is None
    for one in (wire, other):
        await one.aclose()


# --- pending saves ----------------------------------------------------------------------------------------------------


async def _with_pending_save(make_world: MakeWorld, **options: Any) -> tuple[World, Wire, dict[str, Any], Broken]:
    disk = Broken()
    world = await make_world(model=PlayedModel([text("yes")]), fs=disk, **options)
    wire = await world.connect()
    opened = await wire.open(world)
    disk.below = os.path.dirname(opened["path"])
    assert not (await wire.call("session/prompt", {"sessionId": opened["sessionId"], "content": "x", "wait": True}))[
        "saved"
    ]
    return world, wire, opened, disk


async def test_over_a_pending_save_it_exits_only_with_a_rescue_copy_and_tells_where(make_world: MakeWorld) -> None:
    world, wire, opened, _ = await _with_pending_save(make_world)  # D-4, S-25
    for _ in range(2):
        held = await wire.call("server/drain", {"exit": True})
        assert (held["exiting"], [one["sessionId"] for one in held["pendingSaves"]]) == (False, [opened["sessionId"]])
        assert "EIO" in held["pendingSaves"][0]["reason"]
        assert held["rescued"] == []
    done = await wire.call("server/drain", {"exit": True, "rescue": True})
    assert done["exiting"]
    (copy,) = done["rescued"]
    closed: Any = await wire.event("session_closed")
    assert closed.event.rescue == copy
    assert await exit_code(world) == 75
    assert b'"yes"' in (Path(copy) / "history.jsonl").read_bytes()
    await wire.aclose()


async def test_what_was_rescued_before_does_not_let_later_work_go(make_world: MakeWorld, tmp_path: Path) -> None:
    spoilt = tmp_path / "spoilt"  # D-4
    spoilt.write_text("no directory")
    first = tmp_path / "rescue"
    roots = [str(first)]
    world, wire, opened, disk = await _with_pending_save(make_world, rescue_roots=roots)
    session_id = opened["sessionId"]
    await world.daemon._rescue()
    assert first.exists()
    disk.below = None
    assert await wire.call("session/flush", {"sessionId": session_id}) == {"flushed": True}
    disk.below = os.path.dirname(opened["path"])
    assert not (await wire.call("session/prompt", {"sessionId": session_id, "content": "later", "wait": True}))["saved"]
    roots[:] = [str(spoilt)]
    for rescue in (False, True):
        held = await wire.call("server/drain", {"exit": True, "rescue": rescue})
        assert (held["exiting"], len(held["pendingSaves"])) == (False, 1)
    disk.below = None
    assert (await wire.call("server/drain", {"exit": True}))["exiting"]
    assert await exit_code(world) == 0
    await wire.aclose()


async def test_a_term_over_a_pending_save_retries_it_until_the_deadline(make_world: MakeWorld) -> None:  # D-4
    world, wire, opened, disk = await _with_pending_save(make_world)
    os.kill(os.getpid(), signal.SIGTERM)
    await wire.event("save_failed")  # of the retry: the run's own was told before
    await wire.event("save_failed")
    disk.below = None
    assert await exit_code(world) == 0
    assert read_session(FileSystem(), opened["path"])[0].committed.messages == 2
    await wire.aclose()


async def test_a_term_when_no_place_takes_a_copy_leaves_it_running_and_a_later_one_ends_it(
    make_world: MakeWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:  # D-4
    (tmp_path / "file").write_text("")
    world, wire, opened, disk = await _with_pending_save(
        make_world, rescue_roots=[str(tmp_path / "file"), "/proc/nowhere"], config=settings(drain_deadline_s=0)
    )
    os.kill(os.getpid(), signal.SIGTERM)
    with trio.fail_after(10):
        while "still running" not in caplog.text:
            status = await wire.call("server/status")
    assert (status["draining"], len(status["pendingSaves"])) == (True, 1)
    disk.below = None
    os.kill(os.getpid(), signal.SIGTERM)
    assert await exit_code(world) == 0
    assert read_session(FileSystem(), opened["path"])[0].committed.messages == 2
    await wire.aclose()


# --- a disk that hangs ------------------------------------------------------------------------------------------------


@pytest.fixture
def disk() -> Any:
    disk = Hanging()
    yield disk
    disk.released.set()  # its thread must not outlive the test


async def _hung(world: World, disk: Hanging) -> tuple[Wire, dict[str, Any]]:
    """A run whose save hangs."""
    wire = await world.connect()
    opened = await wire.open(world)
    disk.below = os.path.dirname(opened["path"])
    await wire.prompt(opened["sessionId"])
    await trio.to_thread.run_sync(disk.reached.acquire)
    return wire, opened


async def test_while_one_disk_hangs_status_and_other_sessions_answer_at_once(
    make_world: MakeWorld, tmp_path: Path, disk: Hanging
) -> None:  # D-5
    world = await make_world(model=PlayedModel([text("yes")]), fs=disk)
    wire, opened = await _hung(world, disk)
    (tmp_path / "other").mkdir()
    other = await world.connect()
    second = await other.call("runtime/open", {"cwd": str(tmp_path / "other"), "session": {"kind": "memory"}})
    waits = []
    for method, params in [
        ("server/status", {}),
        ("session/state", {"sessionId": opened["sessionId"]}),
        ("session/messages", {"sessionId": opened["sessionId"]}),
        ("runtime/list", {}),
        ("session/prompt", {"sessionId": second["sessionId"], "content": "x", "wait": True}),
    ]:
        began = time.perf_counter()
        await other.call(method, params)
        waits.append(time.perf_counter() - began)
    assert sorted(waits)[-2] < 0.1  # one of them may have met another program on this processor
    assert max(waits) < 0.5
    disk.released.set()
    await wire.event("session_saved")
    for one in (wire, other):
        await one.aclose()


async def test_a_term_during_a_save_that_hangs_ends_with_a_rescue_copy(  # D-4
    make_world: MakeWorld, disk: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemons, "STOPPING_S", 0.2)
    world = await make_world(model=PlayedModel([text("yes")]), fs=disk, config=settings(drain_deadline_s=0.3))
    wire, _ = await _hung(world, disk)
    began = time.perf_counter()
    os.kill(os.getpid(), signal.SIGTERM)
    closed: Any = await wire.event("session_closed")
    assert b'"yes"' in (Path(closed.event.rescue) / "history.jsonl").read_bytes()
    assert await exit_code(world) == 75
    assert time.perf_counter() - began < 5
    await wire.aclose()


async def test_a_term_when_the_retry_of_a_failed_save_hangs_ends_with_a_rescue_copy(  # D-4
    make_world: MakeWorld, disk: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemons, "STOPPING_S", 0.2)
    world = await make_world(model=PlayedModel([text("yes")]), fs=disk, config=settings(drain_deadline_s=0.5))
    wire = await world.connect()
    opened = await wire.open(world)
    place = os.path.dirname(opened["path"])
    os.rename(place, place + ".away")  # K-3
    await wire.prompt(opened["sessionId"], wait=True)
    await wire.event("save_failed")
    disk.below = place
    os.rename(place + ".away", place)
    os.kill(os.getpid(), signal.SIGTERM)
    closed: Any = await wire.event("session_closed")
    assert closed.event.rescue
    assert await exit_code(world) == 75
    await wire.aclose()


async def test_where_the_first_place_for_copies_hangs_the_second_is_used(  # D-4
    make_world: MakeWorld, disk: Hanging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemons, "STOPPING_S", 0.2)
    monkeypatch.setattr("loopd.saving.RESCUE_DEADLINE_S", 0.3)
    roots = [str(tmp_path / "data" / "rescue"), str(tmp_path / "elsewhere")]
    options: dict[str, Any] = {"config": settings(drain_deadline_s=0.3), "rescue_roots": roots}
    world = await make_world(model=PlayedModel([text("yes")]), fs=disk, **options)
    wire, _ = await _hung(world, disk)
    disk.below = str(tmp_path / "data")  # as where one disk holds it all
    os.kill(os.getpid(), signal.SIGTERM)
    closed: Any = await wire.event("session_closed")
    assert closed.event.rescue.startswith(roots[1])
    assert await exit_code(world) == 75
    await wire.aclose()


@pytest.mark.parametrize("method", ["runtime/open", "runtime/newSession"])
async def test_a_session_that_is_being_made_on_a_disk_that_hangs_does_not_hold_up_the_end(  # D-4
    make_world: MakeWorld, disk: Hanging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(daemons, "STOPPING_S", 0.2)
    world = await make_world(fs=disk, config=settings(drain_deadline_s=0.3))
    wire = await world.connect()
    opened = await wire.open(world)
    disk.below = str(tmp_path / "data")
    (tmp_path / "other").mkdir()
    params: dict[str, dict[str, Any]] = {
        "runtime/open": {"cwd": str(tmp_path / "other"), "session": {"kind": "new"}},
        "runtime/newSession": {"runtimeId": opened["runtimeId"]},
    }
    await wire.request(method, params[method])
    await trio.to_thread.run_sync(disk.reached.acquire)
    assert (await wire.call("server/status"))["runtimes"] == 1
    os.kill(os.getpid(), signal.SIGTERM)
    assert await exit_code(world) == 0
    await wire.aclose()


# --- idle -------------------------------------------------------------------------------------------------------------


class Hands(Clock):
    """Set by the test; otherwise it stands."""

    def __init__(self, mock: trio.testing.MockClock) -> None:
        self._mock = mock

    def boot_ms(self) -> int:
        return int(self._mock.current_time() * 1000)


async def pass_time(clock: trio.testing.MockClock, seconds: float) -> None:
    clock.jump(seconds)
    await trio.testing.wait_all_tasks_blocked()


async def test_the_log_of_an_idle_runtime_shrinks_after_a_minute_and_not_in_a_run(
    make_world: MakeWorld, mock_clock: trio.testing.MockClock
) -> None:
    async def much(_: object, say: Any) -> Any:
        for _ in range(400):
            say(TextDelta("x" * 500))
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
        if first:
            first.clear()
            return text("done")
        return await talk_until_stopped(_, say)

    first = [1]
    world = await make_world(model=PlayedModel([much]), clock=Hands(mock_clock))
    wire = await world.connect()
    opened = await wire.open(world, attach=False)
    await wire.prompt(opened["sessionId"], wait=True)
    log = world.runtime().events
    assert log.size > event_log.IDLE_BYTES
    await pass_time(mock_clock, 45)
    assert log.size > event_log.IDLE_BYTES
    await pass_time(mock_clock, 16)
    assert log.size <= event_log.IDLE_BYTES
    await wire.prompt(opened["sessionId"])
    while log.size < 3 * event_log.IDLE_BYTES:  # noqa: ASYNC110 nothing tells
        await trio.lowlevel.checkpoint()
    await pass_time(mock_clock, 200)
    assert log.size > 2 * event_log.IDLE_BYTES
    await wire.call("session/abort", {"sessionId": opened["sessionId"]})
    await wire.aclose()


@pytest.mark.parametrize("on_demand", [False, True])
async def test_who_is_started_on_demand_leaves_when_nobody_needs_it_and_others_stay(
    make_world: MakeWorld, mock_clock: trio.testing.MockClock, on_demand: bool
) -> None:
    world = await make_world(config=settings(idle_exit_s=40), on_demand=on_demand)
    wire = await world.connect()
    await wire.open(world)
    for _ in range(12):
        await pass_time(mock_clock, 16)  # a client is here
    assert world.exit_code is None
    await wire.aclose()
    await trio.testing.wait_all_tasks_blocked()
    for seconds in (16, 16, 16, 16):
        await pass_time(mock_clock, seconds)
    assert world.exit_code == (0 if on_demand else None)


async def test_what_cannot_be_opened_again_is_not_idle(
    make_world: MakeWorld, mock_clock: trio.testing.MockClock
) -> None:
    disk = Broken()  # S-25
    world = await make_world(model=PlayedModel([text("yes")]), fs=disk, config=settings(idle_exit_s=10), on_demand=True)
    wire = await world.connect()
    opened = await wire.open(world)
    disk.below = os.path.dirname(opened["path"])
    await wire.prompt(opened["sessionId"], wait=True)
    await wire.aclose()
    for _ in range(5):
        await pass_time(mock_clock, 11)
    assert world.exit_code is None
    disk.below = None
    wire = await world.connect()
    assert await wire.call("session/flush", {"sessionId": opened["sessionId"]}) == {"flushed": True}
    memory = await wire.call("runtime/open", {"cwd": "/", "session": {"kind": "memory"}, "runtimeId": "new"})
    await wire.aclose()
    for _ in range(5):
        await pass_time(mock_clock, 11)
    assert world.exit_code is None
    wire = await world.connect()
    await wire.call("runtime/dispose", {"runtimeId": memory["runtimeId"]})
    await wire.aclose()
    await trio.testing.wait_all_tasks_blocked()
    for _ in range(3):
        await pass_time(mock_clock, 11)
    assert world.exit_code == 0
