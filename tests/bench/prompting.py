"""What a prompt costs beyond its provider, and whether that grows with the session."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator

from . import material
from .machine import World
from .rows import Row, Settings
from .talk import Prompted, Talk, script

SIZES = (10, 1_000, 10_000)
WARM_UP = 5
TRACED = 20


def prompts(settings: Settings) -> Iterator[Row]:
    """Warm prompts in sessions of 10, 1,000 and 10,000 prompts, with the syncs and without them"""
    with World() as world:
        paths = {size: material.write(world, material.history(size)) for size in SIZES}
        for durable in (True, False):
            with world.daemon(durable=durable) as daemon, Talk(daemon, world.provider) as talk:
                for size, path in paths.items():
                    opened = talk.open(str(world.workspace), path=path)
                    runs = [talk.prompt(opened, script()) for _ in (*range(WARM_UP), *settings.times(50))][WARM_UP:]
                    yield from _rows(runs, size, durable=durable)
        if shutil.which("strace"):
            yield from _written(world, paths)


def _rows(runs: list[Prompted], size: int, *, durable: bool) -> Iterator[Row]:
    at = f"prompt {size:,}"
    if durable:
        yield Row(
            work=f"{at}, with its syncs: provider's last byte to `run_settled`",
            unit="ms",
            samples=[run.after * 1000 for run in runs],
        )
        return
    yield Row(
        work=f"{at}: sent to first byte at the provider",
        unit="ms",
        samples=[run.before * 1000 for run in runs],
        target=3,
        cpu_ms=[run.cpu * 1000 for run in runs],
        cpu_target_ms=4,
    )
    yield Row(
        work=f"{at}: provider's last byte to `run_settled`, syncs apart",
        unit="ms",
        samples=[run.after * 1000 for run in runs],
        target=3,
    )


def _written(world: World, paths: dict[int, str]) -> Iterator[Row]:
    """In a pass of its own, since tracing takes time."""
    with world.daemon(traced=True) as daemon, Talk(daemon, world.provider) as talk:
        for size, path in paths.items():
            opened = talk.open(str(world.workspace), path=path)
            talk.prompt(opened, script())
            since = time.time()
            for _ in range(TRACED):
                talk.prompt(opened, script())
            calls = daemon.file_calls(since)
            written = sum(result for name, result in calls if name == "pwrite64")
            syncs = sum(name in ("fsync", "fdatasync") for name, _ in calls)
            yield Row(work=f"prompt {size:,}: written to files", unit="bytes", samples=[written / TRACED])
            yield Row(work=f"prompt {size:,}: fsyncs", unit="", samples=[syncs / TRACED], target=3)
