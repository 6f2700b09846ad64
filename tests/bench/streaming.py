"""What a stream costs by the number of clients that watch it, at full rate and at a model's pace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .machine import Daemon, Peer, World, peer
from .rows import Row, Settings
from .talk import Talk, script

DELTAS = 20_000
# Clients: deltas per second, CPU seconds for all of them.
FAST = {1: (50_000, 0.4), 5: (45_000, 0.5), 50: (30_000, 0.8)}
# Clients: percent of a core at 1,000 deltas per second.
PACED = {1: 30, 5: 30, 50: 50}
PACED_S = 3


@dataclass(slots=True)
class Streamed:
    wall: float
    cpu: float


def deltas(settings: Settings) -> Iterator[Row]:
    """20,000 deltas of 8 bytes, 32 per write of the provider, to 1, 5 and 50 clients of another process"""
    with World() as world, world.daemon() as daemon:
        for count, (rate, cpu_s) in FAST.items():
            runs = _streamed(world, daemon, count, script(n=DELTAS), settings.times(6))
            yield Row(
                work=f"20,000 deltas to {_clients(count)}",
                unit="per s",
                samples=[DELTAS / run.wall for run in runs],
                target=rate,
                cpu_ms=[run.cpu * 1000 for run in runs],
                cpu_target_ms=cpu_s * 1000,
                most=True,
            )


def paced(settings: Settings) -> Iterator[Row]:
    """1,000 deltas per second, one per write of the provider, to 1, 5 and 50 clients of another process"""
    with World() as world, world.daemon() as daemon:
        for count, percent in PACED.items():
            text = script(n=PACED_S * 1000, gap=0.001)
            runs = _streamed(world, daemon, count, text, settings.times(2))
            yield Row(
                work=f"1,000 deltas/s to {_clients(count)}: of a core",
                unit="%",
                samples=[run.cpu / run.wall * 100 for run in runs],
                target=percent,
            )


def _clients(count: int) -> str:
    return "one client" if count == 1 else f"{count} clients"


def _streamed(world: World, daemon: Daemon, count: int, text: str, times: range) -> list[Streamed]:
    """The first one warms the provider up and is not counted."""
    with Talk(daemon, world.provider) as talk:
        opened = talk.open(str(world.workspace), attach=False)
        with peer("readers.py", daemon.socket, opened.runtime_id, str(count)) as readers:
            assert readers.line() == "ready"
            _stream(world, daemon, talk, opened, readers, script(n=DELTAS))
            return [_stream(world, daemon, talk, opened, readers, text) for _ in times]


def _stream(world: World, daemon: Daemon, talk: Talk, opened: Any, readers: Peer, text: str) -> Streamed:
    cpu = daemon.cpu()
    sent = talk.start(opened, text)
    end = json.loads(readers.line())
    if end["lost"]:
        raise RuntimeError("a client lost events: the rate would be worth nothing")
    world.provider.answers()
    return Streamed(end["at"] - sent, daemon.cpu() - cpu)
