"""Sessions on disk as many prompts would have left them, written by the daemon's own store without the syncs."""

from __future__ import annotations

import uuid

from loop_protocol.v1.types import (
    AssistantMessage,
    ModelRef,
    PromptTiming,
    TextBlock,
    ToolCallBlock,
    ToolResultMessage,
    Usage,
    UserMessage,
)
from loopd.core.history import History, RunRecord
from loopd.storage import Snapshot, files
from loopd.storage.fs import FileSystem

from .machine import World

MODEL = ModelRef("bench", "bench")
START = 1_700_000_000_000


def history(turns: int, *, tool_bytes: int = 0) -> History:
    """Each prompt with an answer; with ``tool_bytes`` also with a call whose result has so many."""
    made = History()
    for number in range(turns):
        first, now = made.messages, START + number * 1000
        made.append(UserMessage(index=first, content=[TextBlock(f"please do step {number}")], timestamp=now))
        if tool_bytes:
            call = ToolCallBlock(f"call_{number}", "read", {"path": f"src/part_{number}.py"})
            made.append(_assistant(made, now, call))
            result = [TextBlock(f'{number:>8} some line of a file, with a quote " and a tab\t\n' * (tool_bytes // 54))]
            made.append(
                ToolResultMessage(
                    index=made.messages,
                    content=list(result),
                    timestamp=now,
                    tool_call_id=call.id,
                    tool_name=call.name,
                    is_error=False,
                )
            )
        made.append(_assistant(made, now, TextBlock(f"step {number} is done, as you wanted it to be. ")))
        timing = PromptTiming(
            id=f"run-{number}",
            user_message_index=first,
            started_at=now,
            message_start_index=first,
            message_end_index=made.messages,
            finished_at=now + 900,
        )
        made.append_run(RunRecord(run_id=str(timing.id), outcome="success", timing=timing))
    return made


def _assistant(made: History, now: int, block: TextBlock | ToolCallBlock) -> AssistantMessage:
    return AssistantMessage(
        index=made.messages,
        content=[block],
        timestamp=now,
        provider=MODEL.provider,
        model=MODEL.id,
        usage=Usage(100, 10),
        stop_reason="toolUse" if isinstance(block, ToolCallBlock) else "stop",
    )


def write(world: World, made: History, *, updated_at: int = START) -> str:
    """A session of the world's workspace; answers the path of its ``meta.json``."""
    store = files.create(
        FileSystem(),
        world.data,
        meta_id=str(uuid.uuid4()),
        cwd=str(world.workspace),
        model=MODEL,
        permission="danger-full-access",
        now_ms=START,
        updated_at=updated_at,
        durable=False,
    )
    store.commit(
        Snapshot(
            commit_id=str(uuid.uuid4()),
            lines=made.lines,
            count=len(made.lines),
            messages=made.messages,
            user_messages=made.user_messages,
        )
    )
    assert store.path is not None
    path = store.path
    store.close()
    return path
