"""A session that goes on and on: nothing grows but its history, and nothing of a prompt or a tool call stays behind."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio
from inprocess import Wire, World, running

from loopd import event_log
from loopd.agent.tools import session_tools
from loopd.agent.tools.procfs import process_table
from loopd.config import Config, DaemonSettings, Default

PROMPTS = 2000
TOOL_CALLS = 500
# These are watched allocation by allocation: so many until all of the event log was written anew, and so many to count.
RENEWED, WATCHED = 80, 200
EVENTS = 512
# What a byte of the history costs in memory, with its place, the run's record, its timing. Measured: 2.6. Besides, what
# grew before the watch is counted as new when it is moved: one table of 6,000 lines, 256 remembered runs.
BESIDE, MOVED = 4, 256 * 1024
KIB = 1024


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds, as the system counts it."""

    descriptors: int
    tasks: int
    threads: int
    children: int

    @classmethod
    def now(cls) -> Held:
        return cls(
            descriptors=len(os.listdir("/proc/self/fd")),
            tasks=trio.lowlevel.current_statistics().tasks_living,
            threads=threading.active_count(),
            children=len(process_table().get(os.getpid(), ())),
        )


@pytest.fixture
def config() -> Config:
    return Config(
        default=Default(permission="danger-full-access"),
        daemon=DaemonSettings(durability="process", drain_deadline_s=4),
    )


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(event_log, "EVENTS", EVENTS)
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
async def test_thousands_of_prompts_and_tool_calls_leave_nothing_but_their_history(
    config: Config, tmp_path: Path
) -> None:
    async with running(tmp_path, config=config, tools=session_tools(bash_timeout_s=20)) as world:
        wire = await world.connect()
        session_id = (await wire.open(world))["sessionId"]
        await _prompt(wire, session_id, times=20)
        before = Held.now()
        await _prompt(wire, session_id, times=PROMPTS - TOOL_CALLS - RENEWED - WATCHED - 20)
        await _prompt(wire, session_id, "shell: true", times=TOOL_CALLS)
        after = Held.now()
        tracemalloc.start()
        await _prompt(wire, session_id, times=RENEWED)
        history, memory = _history_bytes(world), _memory()
        await _prompt(wire, session_id, times=WATCHED)
        grown, kept = _history_bytes(world) - history, _memory() - memory
        assert len(world.session().core.history.timings) == PROMPTS
        assert after.descriptors <= before.descriptors
        assert after.tasks <= before.tasks
        assert after.threads <= before.threads + 2  # trio keeps idle ones for a while
        assert after.children == before.children
        print(f"{WATCHED} prompts: {grown / KIB:.0f} KiB of history, {kept / KIB:.0f} KiB kept in memory")
        assert kept < BESIDE * grown + MOVED


async def _prompt(wire: Wire, session_id: str, content: str = "hi", *, times: int) -> None:
    for _ in range(times):
        result = await wire.call("session/prompt", {"sessionId": session_id, "content": content, "wait": True})
        assert result["outcome"] == "success"
        # The client lives in the same process.
        wire.events.clear()
        wire.log.clear()


def _history_bytes(world: World) -> int:
    return sum(map(len, world.session().core.history.lines))


def _memory() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
