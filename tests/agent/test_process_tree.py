"""Nothing that a call started outlives it: whatever it did to hide, however and whenever the call ended."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from agent_recording import MakeScope, call, left_over

from loop_protocol.v1.types import Permission
from loopd.agent.tools import process
from loopd.agent.tools.procfs import below, process_table
from loopd.agent.tools.sandbox import Sandbox
from loopd.agent.tools.shell import Bash, BashArguments

pytestmark = pytest.mark.usefixtures("subreaper")

TRIED = Sandbox()
# From the moment at which it runs: before that it may have to wait for a machine that has much to do.
GONE_S = 3.0
PATIENCE_S = 15.0

# Each says `up` on its output when it runs, and is still there when its shell is stopped.
HIDING = {
    "group": "sleep 30 & echo up; wait",
    "setsid": "(setsid yes >/dev/null &); echo up; sleep 30",
    "setsid twice": "(setsid bash -c '(setsid sleep 30 &) ; sleep 30' >/dev/null 2>&1 &); sleep 0.1; echo up; sleep 30",
    "unmarked": "env -i setsid sleep 30 >/dev/null & sleep 0.1; echo up; sleep 30",
    "unmarked orphan": "(env -i setsid sleep 30 >/dev/null &); sleep 0.1; echo up; sleep 30",
    "stopped": "setsid bash -c 'kill -STOP $$' >/dev/null & sleep 0.1; echo up; sleep 30",
    "ignores everything": "(trap '' TERM INT HUP; setsid sleep 30 >/dev/null &); echo up; trap '' TERM; sleep 30",
    "zombie": "(setsid true &); echo up; sleep 30",
    "forks on": "(setsid bash -c 'while :; do sleep 30 & sleep 0.01; done' >/dev/null 2>&1 &); echo up; sleep 30",
}


async def run_until_up(
    make_scope: MakeScope, command: str, stop: trio.CancelScope, way: Permission = "danger-full-access"
) -> None:
    def output(text: str) -> None:
        if "up" in text:
            bound.deadline = trio.current_time() + GONE_S
            stop.cancel()

    with trio.fail_after(PATIENCE_S) as bound, stop:
        await call(Bash(timeout_s=15), BashArguments(command), make_scope(output=output, permission=way))


@pytest.mark.parametrize("command", HIDING.values(), ids=HIDING.keys())
async def test_a_stop_leaves_no_descendant_wherever_it_hid(
    make_scope: MakeScope, way: Permission, command: str
) -> None:  # K-22
    before = left_over()
    await run_until_up(make_scope, command, trio.CancelScope(), way)
    assert left_over() == before


@pytest.mark.parametrize("command", HIDING.values(), ids=HIDING.keys())
async def test_a_return_leaves_no_descendant_wherever_it_hid(
    make_scope: MakeScope, way: Permission, command: str
) -> None:  # D-8
    before = left_over()
    ended = command.replace("; sleep 30", "").replace("; wait", "")

    def output(_: str) -> None:
        bound.deadline = trio.current_time() + GONE_S

    with trio.fail_after(PATIENCE_S) as bound:
        text, _ = await call(Bash(timeout_s=15), BashArguments(ended), make_scope(output=output, permission=way))
    assert "up" in text
    assert left_over() == before


async def test_the_end_of_one_call_leaves_the_processes_of_another_alone(
    make_scope: MakeScope, way: Permission
) -> None:
    """All sessions share one subreaper, so the orphans of a running call are there to be mistaken."""
    names = ("sleep 31.1", "sleep 31.2", "sleep 31.3")
    hidden = f"({names[0]} >/dev/null &); (setsid {names[1]} >/dev/null &); (env -i setsid {names[2]} >/dev/null &)"
    up, done = trio.Event(), trio.CancelScope()
    scope = make_scope(output=lambda _: up.set(), permission=way)
    async with trio.open_nursery() as nursery:

        async def first() -> None:
            with done:
                await call(Bash(timeout_s=15), BashArguments(f"{hidden}; sleep 0.1; echo up; sleep 30"), scope)

        nursery.start_soon(first)
        await up.wait()
        for _ in range(3):
            await call(Bash(timeout_s=15), BashArguments("(setsid sleep 30 &); true"), make_scope(permission=way))
        assert running(*names) == 3
        assert running("sleep 30") == 1  # the first call's own; those of the others are gone
        done.cancel()
    assert running(*names) == 0


async def test_an_unmarked_orphan_goes_with_the_last_call_under_way(make_scope: MakeScope) -> None:
    up, done = trio.Event(), trio.CancelScope()
    scope = make_scope(output=lambda _: up.set())
    async with trio.open_nursery() as nursery:

        async def other() -> None:
            with done:
                await call(Bash(timeout_s=15), BashArguments("echo up; sleep 30"), scope)

        nursery.start_soon(other)
        await up.wait()
        await call(
            Bash(timeout_s=15), BashArguments("(env -i setsid sleep 31.4 >/dev/null &); sleep 0.1"), make_scope()
        )
        assert running("sleep 31.4") == 1
        done.cancel()
    assert running("sleep 31.4") == 0


async def test_an_unmarked_descendant_goes_at_once_while_its_parent_lives(make_scope: MakeScope) -> None:
    up, done = trio.Event(), trio.CancelScope()
    scope = make_scope(output=lambda _: up.set())
    async with trio.open_nursery() as nursery:

        async def other() -> None:
            with done:
                await call(Bash(timeout_s=15), BashArguments("echo up; sleep 30"), scope)

        nursery.start_soon(other)
        await up.wait()
        await run_until_up(
            make_scope, "env -i setsid sleep 31.5 >/dev/null & sleep 0.1; echo up; sleep 30", trio.CancelScope()
        )
        assert running("sleep 31.5") == 0
        done.cancel()


async def test_the_exit_code_of_a_shell_survives_the_end_of_other_calls(make_scope: MakeScope, way: Permission) -> None:
    """While its output is drained it is a zombie child like any other."""
    results: list[tuple[str, bool]] = []
    async with trio.open_nursery() as nursery:

        async def first() -> None:
            results.append(
                await call(Bash(timeout_s=15), BashArguments("sleep 30 & exit 3"), make_scope(permission=way))
            )

        nursery.start_soon(first)
        while not results:
            await call(Bash(timeout_s=15), BashArguments("(setsid true &)"), make_scope(permission=way))
    assert "[exit code 3]" in results[0][0]


@pytest.fixture
def bystanders() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Children that the daemon started in another way, one that runs and one that has ended."""
    with subprocess.Popen(["sleep", "30"]) as running, subprocess.Popen(["sh", "-c", "exit 7"]) as ended:
        yield [running, ended]
        running.kill()


async def test_the_daemons_other_children_are_neither_killed_nor_reaped(
    make_scope: MakeScope, bystanders: list[subprocess.Popen[bytes]]
) -> None:
    await call(Bash(timeout_s=15), BashArguments("(setsid sleep 30 &); sleep 0.1"), make_scope())
    assert [process.poll() for process in bystanders] == [None, 7]


class CancelAt(trio.abc.Instrument):
    """Counts the steps of one task and cancels a scope before the ``at``-th."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.steps = 0
        self.scope = trio.CancelScope()
        self.task = trio.lowlevel.current_task()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self.steps += 1
            if self.steps == self.at:
                self.scope.cancel()


async def call_cancelled_at(make_scope: MakeScope, way: Permission, command: str, at: int | None) -> CancelAt:
    steps = CancelAt(at)
    trio.lowlevel.add_instrument(steps)
    try:
        with trio.fail_after(5), steps.scope:
            await call(Bash(timeout_s=0.3, sandbox=TRIED), BashArguments(command), make_scope(permission=way))
    finally:
        trio.lowlevel.remove_instrument(steps)
    return steps


@pytest.mark.parametrize(
    "command",
    ["true", "sleep 30 & (setsid yes >/dev/null &); echo hi", "(env -i setsid sleep 30 &) ; sleep 30"],
    ids=["short", "left behind", "time limit"],
)
async def test_cancelled_at_any_step_it_leaves_no_process_and_no_descriptor(
    make_scope: MakeScope, way: Permission, command: str
) -> None:
    before = left_over()
    await TRIED.tried()
    undisturbed = await call_cancelled_at(make_scope, way, command, None)
    descriptors = len(os.listdir("/proc/self/fd"))
    hit = 0
    for at in range(1, undisturbed.steps + 1):
        hit += (await call_cancelled_at(make_scope, way, command, at)).scope.cancel_called
        assert left_over() == before
        assert len(os.listdir("/proc/self/fd")) == descriptors
    print(f"cancelled at {hit} of {undisturbed.steps} steps")
    assert hit >= 4


async def test_a_call_cancelled_before_it_began_starts_nothing(make_scope: MakeScope, tmp_path: Path) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await call(Bash(timeout_s=15), BashArguments("touch made"), make_scope())
    assert not (tmp_path / "made").exists()


class Thief(trio.abc.Instrument):
    """Reads a tree's output away between the moment when it became readable and the read."""

    def __init__(self, tree: process.Tree) -> None:
        self.task = trio.lowlevel.current_task()
        self.stolen = b""
        self.done = trio.Event()
        self._end = os.open(f"/proc/self/fd/{tree._output}", os.O_RDONLY | os.O_NONBLOCK)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task and not self.stolen:
            with suppress(BlockingIOError):
                self.stolen = os.read(self._end, 100)
                self.done.set()

    def close(self) -> None:
        os.close(self._end)


async def test_a_command_that_reads_its_own_output_back_stops_nobody(tmp_path: Path) -> None:  # D-6
    waits = "for i in {1..30}; do [ -e go ] && exec echo kept; sleep 0.1; done; echo the daemon stood still"
    tree = await process.start(
        ["bash", "-c", f"echo stolen; {waits}"], cwd=str(tmp_path), env=dict(os.environ), umask=0o022
    )
    async with tree, trio.open_nursery() as nursery:
        thief = Thief(tree)

        async def another_task() -> None:
            await thief.done.wait()
            (tmp_path / "go").touch()

        nursery.start_soon(another_task)
        trio.lowlevel.add_instrument(thief)
        try:
            assert await tree.read() == b"kept\n"
        finally:
            trio.lowlevel.remove_instrument(thief)
            thief.close()
    assert thief.stolen == b"stolen\n"


class Gated(list[str]):
    """Arguments that are read only once a gate is open: as starting a command waits in a directory on a dead disk."""

    def __init__(self, arguments: list[str], gate: threading.Event) -> None:
        super().__init__(arguments)
        self.gate = gate

    def __iter__(self) -> Iterator[str]:
        self.gate.wait(10)
        return super().__iter__()


@pytest.mark.parametrize("command", ["bash", "no-such-command"])
async def test_a_start_that_hangs_is_given_up_and_what_comes_of_it_later_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(process, "CLEANUP_S", 0.1)
    before, descriptors, gate = left_over(), len(os.listdir("/proc/self/fd")), threading.Event()
    hidden = "(env -i setsid sleep 30 &); setsid sleep 30 & sleep 30"
    with trio.fail_after(2), trio.move_on_after(0.05) as stop:
        await process.start(Gated([command, "-c", hidden], gate), cwd=str(tmp_path), env=dict(os.environ), umask=0o022)
    assert stop.cancelled_caught
    assert not process._running
    gate.set()
    until = time.monotonic() + 3
    while len(os.listdir("/proc/self/fd")) > descriptors or left_over() != before:
        assert time.monotonic() < until


async def test_a_start_that_is_only_slow_is_over_when_its_cancelled_call_is() -> None:
    before, descriptors, gate = left_over(), len(os.listdir("/proc/self/fd")), threading.Event()
    opening = threading.Timer(0.1, gate.set)
    opening.start()
    with trio.move_on_after(0.05) as stop:
        await process.start(
            Gated(["bash", "-c", "setsid sleep 30 & sleep 30"], gate), cwd="/", env=dict(os.environ), umask=0o022
        )
    opening.join()
    assert stop.cancelled_caught
    assert left_over() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def running(*commands: str) -> int:
    """Below this process, to which all of them come, being its descendants: others may test at the same time."""
    wanted = {command.replace(" ", "\0").encode() + b"\0" for command in commands}
    pids = [one.pid for one in below(process_table(), os.getpid()) if not one.zombie]
    found = 0
    for pid in pids:
        try:
            found += Path(f"/proc/{pid}/cmdline").read_bytes() in wanted
        except OSError:
            continue
    return found
