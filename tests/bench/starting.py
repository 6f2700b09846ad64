"""What it costs to begin: the shell command, the daemon itself, and its memory at rest."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

from loop_protocol.client import Client

from .machine import World, end_process, timed
from .rows import Row, Settings
from .talk import Talk, script

SESSIONS = 50
IDLE_S = 3.0


def cold(settings: Settings) -> Iterator[Row]:
    """`loopctl prompt` with a running daemon, and one that has to start it, beyond a bare Python process"""
    with World() as world:
        bare = [timed([sys.executable, "-c", "pass"], cwd=world.workspace, env=world.environment) for _ in range(10)]
        floor = min(wall for wall, _ in bare)
        yield Row(
            work="a bare Python process (CPU: its own)",
            unit="s",
            samples=[wall for wall, _ in bare],
            cpu_ms=[cpu * 1000 for _, cpu in bare],
        )
        yield _running(world, settings, floor)
        yield _starting(world, settings, floor)


def _running(world: World, settings: Settings, floor: float) -> Row:
    with world.daemon():
        runs = [_prompt(world) for _ in (0, 0, *settings.times(10))][2:]
    return Row(
        work="`loopctl prompt`, daemon running: adds (CPU: loopctl's)",
        unit="s",
        samples=[wall - floor for wall, _ in runs],
        target=0.15,
        cpu_ms=[cpu * 1000 for _, cpu in runs],
    )


def _starting(world: World, settings: Settings, floor: float) -> Row:
    runs = []
    for _ in settings.times(8):
        try:
            runs.append(_prompt(world))
        finally:
            _end_daemon(world)
    return Row(
        work="`loopctl prompt` that starts the daemon: adds (CPU: loopctl's)",
        unit="s",
        samples=[wall - floor for wall, _ in runs],
        target=0.6,
        cpu_ms=[cpu * 1000 for _, cpu in runs],
    )


def _prompt(world: World) -> tuple[float, float]:
    spent = world.loopctl("prompt", script())
    world.provider.answers()
    return spent


def _end_daemon(world: World) -> None:
    with Client.connect(world.environment["LOOPD_SOCKET"]) as client:
        pid = client.call("server/status").pid
    end_process(pid)


def ready(settings: Settings) -> Iterator[Row]:
    """From starting the daemon to READY"""
    spent = []
    with World() as world:
        for _ in (0, *settings.times(8)):
            with world.daemon() as daemon:
                spent.append((daemon.ready_s, daemon.cpu() * 1000))
    del spent[0]
    yield Row(
        work="daemon ready", unit="s", samples=[wall for wall, _ in spent], target=0.35, cpu_ms=[c for _, c in spent]
    )


def memory(settings: Settings) -> Iterator[Row]:
    """Memory at rest, and per idle session after a run of 4,096 deltas and a wait (`--idle-wait`)"""
    with ExitStack() as stack:
        kinds = {kind: stack.enter_context(World()) for kind in ("new", "memory")}
        daemons = {kind: stack.enter_context(world.daemon()) for kind, world in kinds.items()}
        time.sleep(IDLE_S)
        pss = [value for daemon in daemons.values() if (value := daemon.pss()) is not None]
        yield Row(work="idle daemon: RSS", unit="MiB", samples=[one.rss() for one in daemons.values()], target=40)
        if pss:
            yield Row(work="idle daemon: PSS", unit="MiB", samples=pss)
        before = {}
        for kind, world in kinds.items():
            with Talk(daemons[kind], world.provider) as talk:
                for number in range(1 + SESSIONS):
                    opened = talk.open(str(world.workspace), kind=kind, attach=False)
                    talk.settle(opened, script(n=4096))
                    if not number:  # what the first run of all costs is not a session's
                        before[kind] = daemons[kind].rss()
        time.sleep(settings.idle_wait_s)
        for kind, name in (("new", "persistent"), ("memory", "in-memory")):
            grown = (daemons[kind].rss() - before[kind]) / SESSIONS
            waited = f"{settings.idle_wait_s:.0f} s after its run"
            yield Row(work=f"an idle {name} session, {waited}: RSS", unit="MiB", samples=[grown], target=0.2)


def tool(settings: Settings) -> Iterator[Row]:
    """A call of `bash` with `true`, from the answer that makes it to the request with its result; in a sandbox too"""
    with World() as world, world.daemon(durable=False) as daemon, Talk(daemon, world.provider) as talk:
        bare = min(timed(["true"], cwd=world.workspace, env=world.environment)[0] for _ in range(20))
        for preset, name, target in (
            ("danger-full-access", "`bash` with `true`: last byte of the call to the next request", 15),
            ("workspace-write", "the same in a sandbox: adds to a bare `true`", 50),
        ):
            opened = talk.open(os.path.realpath(world.workspace), permission=preset)
            runs = [talk.prompt(opened, script(tool="true"), requests=2) for _ in (0, 0, *settings.times(40))][2:]
            less = bare if preset == "workspace-write" else 0.0
            yield Row(
                work=f"{name} (CPU: of the whole prompt)",
                unit="ms",
                samples=[(run.between - less) * 1000 for run in runs],
                target=target,
                cpu_ms=[run.cpu * 1000 for run in runs],
            )
