"""A daemon that ends with the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
from inprocess import World, running
from pacing import MakeWorld


@pytest.fixture
async def make_world(tmp_path: Path) -> AsyncIterator[MakeWorld]:
    """Takes what ``running`` takes. In a task of its own, or a failed assert would arrive in an exception group."""
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
