"""A conversation with a run that a crash cut off, wherever it was, is one that every API accepts."""

from __future__ import annotations

import model_bench as bench
import pytest
import strict_checkers

from loop_protocol.v1.types import ErrorInfo, Message, PromptTiming, ToolCallBlock, ToolResultMessage
from loopd.core.history import History, RunRecord, decode_message, encode
from loopd.core.timings import Clock
from loopd.restoring import restored
from loopd.storage.document import first_metadata

CALLS = [ToolCallBlock("0", "bash", {"command": "a"}), ToolCallBlock("1", "bash", {"command": "b"})]
RUN: list[Message] = [
    bench.user(0, "one"),
    bench.assistant(1, "I look", *CALLS),
    bench.result(2, CALLS[0], "A"),
    bench.result(3, CALLS[1], "B"),
    bench.assistant(4, *CALLS),
    bench.result(5, CALLS[0], "C"),
]


@pytest.mark.parametrize("api", strict_checkers.CHECKERS)
@pytest.mark.parametrize("kept", range(1, len(RUN) + 1))
def test_wherever_the_crash_was_the_calls_have_their_results(api: str, kept: int) -> None:  # I-8, S-12, K-20
    meta = first_metadata(id="s", cwd="/", model=bench.M, permission="read-only", created_at=1)
    core = restored(meta, History(), kind="persistent", path="/s/meta.json", clock=Clock())
    for message in RUN[:kept]:
        core.take_over(message, encode(message))
    timing = PromptTiming(id="r", user_message_index=0, message_start_index=0, started_at=1)
    core.complete_recovery(RunRecord(run_id="r", outcome="error", timing=timing, error=ErrorInfo("interrupted", "x")))
    core.history.require_paired()
    messages = [decode_message(core.history.line(index)) for index in range(core.history.messages)]
    assert messages[:kept] == RUN[:kept]
    assert all(isinstance(message, ToolResultMessage) and message.is_error for message in messages[kept:])
    messages.append(bench.user(len(messages), "go on"))
    asked = bench.catalogue("http://127.0.0.1:1/v1", api=api).resolve(bench.M)
    strict_checkers.CHECKERS[api](bench.body(asked, messages, tools=(bench.BASH,)))
