"""What large sessions and many sessions cost, and how long they keep everybody else waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from . import material
from .machine import Daemon, Peer, World, peer
from .rows import Row, Settings
from .talk import Talk, script

TURNS = 10_000
TOOL_BYTES = 9_500  # which makes 100 MB of that many prompts
SESSIONS = 10_000
HOLD_MS = 20.0


def large(settings: Settings) -> Iterator[Row]:
    """Open a session of 100 MB (10,000 prompts with a tool's result each), and what that holds up"""
    with World() as world:
        path = material.write(world, material.history(TURNS, tool_bytes=TOOL_BYTES))
        with world.daemon() as daemon, Talk(daemon, world.provider) as talk:

            def opening() -> None:
                opened.append(talk.open(str(world.workspace), path=path, attach=False))

            opened: list[Any] = []
            spent = [_timed(daemon, opening, lambda: talk.dispose(opened.pop())) for _ in settings.times(6)]
            yield Row(
                work="open a session of 100 MB",
                unit="s",
                samples=[wall for wall, _ in spent],
                target=1.5,
                cpu_ms=[cpu * 1000 for _, cpu in spent],
            )
            with _pinging(daemon) as (pinger, idle):
                holds = [_held(pinger, opening, lambda: talk.dispose(opened.pop())) for _ in settings.times(6)]
            yield _hold("open of 100 MB", holds, idle)


def many(settings: Settings) -> Iterator[Row]:
    """List 10,000 sessions of a workspace, in a fresh daemon and again, and what that holds up"""
    first, again, holds, holds_again = [], [], [], []
    with World() as world:
        made = material.history(1)
        for number in range(SESSIONS):
            material.write(world, made, updated_at=material.START + number)
        time.sleep(0.2)  # what was just written is read twice (`storage/catalog.py`)
        for _ in settings.times(4):
            with world.daemon() as daemon, Talk(daemon, world.provider) as talk:
                first.append(_timed(daemon, lambda: _list(talk, world)))
                again += [_timed(daemon, lambda: _list(talk, world)) for _ in range(5)]
        for _ in settings.times(4):
            with world.daemon() as daemon, Talk(daemon, world.provider) as talk, _pinging(daemon) as (pinger, idle):
                holds.append(_held(pinger, lambda: _list(talk, world)))
                holds_again += [_held(pinger, lambda: _list(talk, world)) for _ in range(5)]
    for name, spent, target in (("first", first, 0.5), ("again", again, 0.05)):
        yield Row(
            work=f"list 10,000 sessions, {name}",
            unit="s",
            samples=[wall for wall, _ in spent],
            target=target,
            cpu_ms=[cpu * 1000 for _, cpu in spent],
        )
    yield _hold("list of 10,000, first", holds, idle)
    yield _hold("list of 10,000, again", holds_again, idle)


def saving(settings: Settings) -> Iterator[Row]:
    """What a prompt in a session of 10,000 prompts holds up: the first after opening it, and each with its save"""
    firsts, holds = [], []
    with World() as world:
        path = material.write(world, material.history(TURNS))
        with world.daemon() as daemon, Talk(daemon, world.provider) as talk, _pinging(daemon) as (pinger, idle):
            for _ in settings.times(4):
                opened = talk.open(str(world.workspace), path=path)
                firsts.append(_held(pinger, partial(talk.prompt, opened, script())))
                holds += [_held(pinger, partial(talk.prompt, opened, script())) for _ in range(8)]
                talk.dispose(opened)
    yield _hold("the first prompt of an opened session of 10,000", firsts, idle)
    yield _hold("a prompt and its save at 10,000", holds, idle)


def _list(talk: Talk, world: World) -> None:
    listed = talk.client.call_raw("session/list", {"cwd": str(world.workspace)})
    if listed.count(b'"sessionId"') != SESSIONS:
        raise RuntimeError("sessions are missing from the list")


def _timed(daemon: Daemon, work: Callable[[], Any], after: Callable[[], Any] = lambda: None) -> tuple[float, float]:
    cpu, start = daemon.cpu(), time.monotonic()
    work()
    spent = time.monotonic() - start, daemon.cpu() - cpu
    after()
    return spent


@contextmanager
def _pinging(daemon: Daemon) -> Iterator[tuple[Peer, float]]:
    """A pinger, and its longest round trip in a daemon at rest: the shortest of some, others are at work here too."""
    with peer("pinger.py", daemon.socket) as pinger:
        pinger.line()
        yield pinger, min(_held(pinger, lambda: time.sleep(0.3)) for _ in range(5))


def _held(pinger: Peer, work: Callable[[], Any], after: Callable[[], Any] = lambda: None) -> float:
    """The longest round trip of somebody else while ``work`` went on."""
    pinger.ask()
    work()
    longest = float(pinger.ask())
    after()
    return longest


def _hold(work: str, holds: list[float], idle: float) -> Row:
    samples = [max(0.0, hold - idle) * 1000 for hold in holds]
    return Row(work=f"hold of the loop: {work}", unit="ms", samples=samples, target=HOLD_MS)
