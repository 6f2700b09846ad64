"""What a session says of itself: unread, times, timings, and that a refusal changes nothing of it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import trio
from inprocess import PlayedModel, Wire, World, running, text
from test_saving import Breaking

from loop_protocol.v1.errors import RpcError
from loopd.agent import ModelError
from loopd.config import Config, DaemonSettings
from loopd.core.timings import Clock

HOUR = 3_600_000


class SetClock(Clock):
    """By hand: ``now`` is the wall clock, ``boot`` the one that nobody can set."""

    def __init__(self) -> None:
        self.now = 1_700_000_000_000
        self.boot = 5_000

    def now_ms(self) -> int:
        return self.now

    def boot_ms(self) -> int:
        return self.boot


async def _state(wire: Wire, opened: Any) -> Any:
    return await wire.call("session/state", {"sessionId": opened["sessionId"]})


async def test_output_makes_a_session_unread_and_a_run_without_output_does_not(tmp_path: Path) -> None:  # S-8
    async def fails(*_: Any) -> Any:  # noqa: ASYNC124 async as its port is
        raise ModelError("provider", "no")

    async with running(tmp_path, model=PlayedModel([fails, text("hi")])) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        await wire.prompt(opened["sessionId"], wait=True)
        assert not (await _state(wire, opened))["unread"]
        await wire.prompt(opened["sessionId"], wait=True)
        assert (await _state(wire, opened))["unread"]
        listed = await wire.call("session/list", {"cwd": world.cwd})
        assert listed["sessions"][0]["unread"]


async def test_model_and_permission_are_stored_and_move_the_time(tmp_path: Path) -> None:  # S-9, A-7
    async with running(tmp_path) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        before = (await _state(wire, opened))["updatedAt"]
        other = {"provider": "other", "id": "m"}
        changed = await wire.call("session/setModel", {"sessionId": opened["sessionId"], "model": other})
        assert changed == {"model": other}
        between = (await _state(wire, opened))["updatedAt"]
        ask = {"sessionId": opened["sessionId"], "permission": "danger-full-access"}
        assert await wire.call("session/setPermission", ask) == {"permission": "danger-full-access"}
        after = await _state(wire, opened)
        assert before < between < after["updatedAt"]
        assert "operation" not in after
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        reopened = await wire.open(world, kind="continue")
        assert (reopened["state"]["model"], reopened["state"]["permission"]) == (other, "danger-full-access")


@pytest.mark.parametrize("step", [-HOUR, 24 * HOUR])
async def test_clock_steps_change_no_order(step: int, tmp_path: Path) -> None:  # K-10, storage rule 9
    clock = SetClock()
    async with running(tmp_path, model=PlayedModel([text("hi")]), clock=clock) as world:
        wire = await world.connect()
        paths, times = [], []
        for number in range(3):
            opened = await wire.open(world, attach=False)
            for _ in range(2):
                await wire.prompt(opened["sessionId"], wait=True)
                times.append((await _state(wire, opened))["updatedAt"])
            paths.append(opened["path"])
            await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
            clock.now += step if number == 0 else 0
        assert times == sorted(set(times))
        listed = await wire.call("session/list", {"cwd": world.cwd})
        assert [row["path"] for row in listed["sessions"]] == paths[::-1]
    clock.now -= 48 * HOUR
    async with running(tmp_path, model=PlayedModel([text("hi")]), clock=clock) as world:
        wire = await world.connect()
        opened = await wire.open(world, attach=False)
        listed = await wire.call("session/list", {"cwd": world.cwd})
        assert listed["sessions"][0]["path"] == opened["path"]


async def test_a_timing_measures_generation_and_not_the_save(tmp_path: Path) -> None:  # P-1, P-2, P-5
    clock = SetClock()

    class SlowDisk(Breaking):
        def fsync(self, fd: int) -> None:
            clock.boot += 1000
            super().fsync(fd)

    async def takes_a_while(*_: Any) -> Any:  # noqa: ASYNC124 async as its port is
        clock.boot += 250
        clock.now -= HOUR
        return text("x")

    async with running(tmp_path, model=PlayedModel([takes_a_while]), clock=clock, fs=SlowDisk()) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        started = clock.now
        run_id = await wire.prompt(opened["sessionId"], wait=True)
        first, second = [p.event.timing for p in wire.events if p.event.__struct_config__.tag == "prompt_timing"]  # type: ignore[union-attr]
        assert (first.started_at, first.finished_at) == (started, None)
        assert (second.id, second.finished_at - second.started_at) == (run_id, 250)
        assert (second.user_message_index, second.message_start_index, second.message_end_index) == (0, 0, 2)
        assert not second.stopped


async def test_durability_of_the_process_only_needs_no_fsync(tmp_path: Path) -> None:  # S-21
    disk = Breaking()
    config = Config(daemon=DaemonSettings(durability="process"))
    async with running(tmp_path, model=PlayedModel([text("hi")]), fs=disk, config=config) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        result = await wire.call("session/prompt", {"sessionId": opened["sessionId"], "content": "x", "wait": True})
        assert result["saved"]
        assert disk.fsyncs == 0


def _fingerprint(world: World) -> Any:
    files = sorted(path for path in (world.root / "data").rglob("*") if path.is_file())
    disk = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    runtimes = [(runtime.session.state(), runtime.events.head) for runtime in world.daemon.runtimes.by_id.values()]
    return disk, [str(path) for path in files], runtimes


async def test_a_refusal_changes_neither_state_nor_disk_nor_event_numbers(tmp_path: Path) -> None:  # I-10
    async def hang(*_: Any) -> Any:
        await trio.sleep_forever()

    model = {"provider": "none", "id": "x"}
    async with running(tmp_path, model=PlayedModel([hang])) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        ids = {"sessionId": opened["sessionId"]}
        idle = [
            ("session/prompt", {**ids, "content": ""}, "invalid_params"),
            (
                "session/prompt",
                {**ids, "content": [{"type": "image", "data": "AAAA", "mimeType": "image/png"}]},
                "unsupported_input",
            ),
            ("session/prompt", {**ids, "content": "x", "colour": 1}, "invalid_params"),
            ("session/setModel", {**ids, "model": model}, "model_unavailable"),
            ("session/setPermission", {**ids, "permission": "all"}, "invalid_params"),
            ("session/prompt", {"sessionId": "nobody", "content": "x"}, "session_not_found"),
            ("runtime/open", {"cwd": world.cwd, "session": {"kind": "new"}}, "conflict"),
            ("runtime/open", {"cwd": world.cwd + "/nowhere", "session": {"kind": "new"}}, "cwd_missing"),
        ]
        busy = [
            ("session/prompt", {**ids, "content": "x"}, "session_busy"),
            ("session/setPermission", {**ids, "permission": "read-only"}, "session_busy"),
            ("session/flush", ids, "session_busy"),
            ("runtime/newSession", {"runtimeId": opened["runtimeId"]}, "session_busy"),
        ]
        await _all_refused(world, wire, idle)
        await wire.prompt(opened["sessionId"])
        await wire.event("message_end")
        await _all_refused(world, wire, busy)


async def _all_refused(world: World, wire: Wire, requests: list[tuple[str, Any, str]]) -> None:
    for method, params, kind in requests:
        before = _fingerprint(world)
        with pytest.raises(RpcError) as refused:
            await wire.call(method, params)
        assert refused.value.kind == kind, (method, params)
        assert _fingerprint(world) == before, (method, params)
