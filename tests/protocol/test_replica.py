"""The fold over events: each of them does to a snapshot what the daemon's own state went through."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from msgspec.structs import replace

from loop_protocol.replica import NeedSnapshot, fold
from loop_protocol.v1 import events as ev
from loop_protocol.v1.types import (
    OUTPUT_TAIL,
    AssistantMessage,
    Draft,
    ErrorInfo,
    ModelRef,
    PromptTiming,
    QueuedItem,
    QueueState,
    RunInfo,
    RunningTool,
    RunResult,
    SessionState,
    TextBlock,
    ThinkingBlock,
    Usage,
    UserMessage,
)

IDLE = SessionState(
    session_id="s",
    runtime_id="r",
    cwd="/",
    kind="persistent",
    model=ModelRef("p", "m"),
    permission="read-only",
    unread=False,
    created_at=1,
    updated_at=1,
    message_count=4,
    user_message_count=2,
    live_count=4,
    timings=[],
    tools=[],
    queue=QueueState([]),
    approvals=[],
    has_pending_save=False,
    usage=Usage(10, 5),
)
START = PromptTiming(id="run", user_message_index=4, message_start_index=4, started_at=1000)
FINISH = replace(START, message_end_index=6, finished_at=1500)
USER = UserMessage(index=4, content=[TextBlock("hi")], timestamp=1000)
ANSWER = AssistantMessage(
    index=5,
    content=[TextBlock("hello")],
    timestamp=1400,
    provider="p",
    model="m",
    usage=Usage(3, 2, cache_read_tokens=1),
    stop_reason="stop",
)


def raw(message: Any) -> Raw:
    return Raw(msgspec.json.encode(message))


def after(state: SessionState, *events: Any) -> SessionState:
    for seq, event in enumerate(events):
        body = msgspec.json.encode(
            ev.EventParams(runtime_id="r", session_id=state.session_id, seq=seq, at=999, event=event)
        )
        before = msgspec.json.encode(state)
        folded = fold(state, msgspec.json.decode(body, type=ev.EventParams))
        assert msgspec.json.encode(state) == before, "the old state was changed"
        state = folded
    return state


BEGIN = (ev.RunStarted("run", "prompt"), ev.PromptTimingEvent(START))
SPOKEN = (
    ev.MessageStart(message_id="u", message=raw(USER), index=4),
    ev.MessageEnd(message_id="u", index=4, message=raw(USER)),
)
STREAM = (
    ev.MessageStart(message_id="a", message=Raw(b'{"role":"assistant","content":[],"timestamp":1}')),
    ev.MessageUpdate(message_id="a", text_delta="hel"),
    ev.MessageUpdate(message_id="a", text_delta="lo"),
)
SETTLED = ev.RunSettled(run_id="run", outcome="success", saved=True)


def test_a_whole_prompt_leads_from_one_idle_state_to_the_next() -> None:  # I-9
    end = after(
        IDLE,
        *BEGIN,
        *SPOKEN,
        *STREAM,
        ev.MessageEnd(message_id="a", index=5, message=raw(ANSWER)),
        ev.PromptTimingEvent(FINISH),
        ev.SessionSaved(6, 3, 1600, unread=True),
        SETTLED,
    )
    assert end == replace(
        IDLE,
        live_count=6,
        message_count=6,
        user_message_count=3,
        updated_at=1600,
        unread=True,
        timings=[FINISH],
        usage=Usage(13, 7, cache_read_tokens=1),
        last_run=RunResult(run_id="run", outcome="success", saved=True),
    )


def test_in_mid_stream_the_run_its_timing_and_the_draft_are_there() -> None:  # I-9
    state = after(IDLE, *BEGIN, *SPOKEN, *STREAM)
    assert state == replace(
        IDLE,
        operation="prompt",
        live_count=5,
        run=RunInfo(run_id="run", started_at=1000, timing=START),
        draft=Draft("a", [TextBlock("hello")]),
    )


def test_a_finished_timing_shows_in_the_run_until_it_settles() -> None:
    state = after(IDLE, *BEGIN, ev.PromptTimingEvent(FINISH))
    assert state.run == RunInfo(run_id="run", started_at=1000, timing=FINISH)
    assert state.timings == [FINISH]


def test_a_snapshot_that_is_ahead_of_run_started_stays_as_it_is() -> None:  # I-9
    accepted = replace(IDLE, operation="prompt", live_count=5, run=RunInfo(run_id="run", started_at=1000, timing=START))
    assert after(accepted, *BEGIN, *SPOKEN) == accepted


def test_text_and_thinking_join_what_is_last_and_tool_calls_stay_out_of_the_draft() -> None:
    call = ev.ToolCallDelta(id="c", name="read", arguments_delta="{")
    state = after(
        IDLE,
        STREAM[0],
        ev.MessageUpdate(message_id="a", thinking_delta="h"),
        ev.MessageUpdate(message_id="a", thinking_delta="m"),
        ev.MessageUpdate(message_id="a", text_delta="x"),
        ev.MessageUpdate(message_id="a", tool_call_delta=call),
        ev.MessageUpdate(message_id="a", text_delta="y"),
        ev.MessageUpdate(message_id="a", thinking_delta="z"),
    )
    assert state.draft == Draft("a", [ThinkingBlock("hm"), TextBlock("xy"), ThinkingBlock("z")])


@given(st.lists(st.tuples(st.booleans(), st.text(min_size=1, max_size=3)), max_size=12), st.data())
def test_how_deltas_were_joined_into_events_makes_no_difference(
    deltas: list[tuple[bool, str]], data: st.DataObject
) -> None:
    def event(thinking: bool, text: str) -> ev.MessageUpdate:
        if thinking:
            return ev.MessageUpdate(message_id="a", thinking_delta=text)
        return ev.MessageUpdate(message_id="a", text_delta=text)

    joined: list[tuple[bool, str]] = []
    for thinking, text in deltas:
        if joined and joined[-1][0] == thinking and data.draw(st.booleans()):
            joined[-1] = (thinking, joined[-1][1] + text)
        else:
            joined.append((thinking, text))
    one = after(IDLE, STREAM[0], *(event(*delta) for delta in deltas))
    assert one == after(IDLE, STREAM[0], *(event(*delta) for delta in joined))


def test_deltas_of_another_message_are_not_of_this_draft() -> None:
    assert after(IDLE, ev.MessageUpdate(message_id="b", text_delta="x")) == IDLE
    state = after(IDLE, *STREAM, ev.MessageUpdate(message_id="b", text_delta="x"))
    assert state.draft == Draft("a", [TextBlock("hello")])


def test_a_discarded_message_clears_the_draft_and_nothing_else() -> None:  # S-11
    before = after(IDLE, *BEGIN, *SPOKEN)
    assert after(before, *STREAM, ev.MessageEnd(message_id="a", discarded=True)) == before


def test_running_tools_show_the_tail_of_their_output_until_they_end() -> None:
    state = after(
        IDLE,
        ev.ToolExecutionStart("c", "bash", {"command": "yes"}),
        ev.ToolExecutionStart("d", "read", {}),
        ev.ToolExecutionUpdate("c", "a" * OUTPUT_TAIL),
        ev.ToolExecutionUpdate("c", "é!"),
        ev.ToolExecutionEnd("d", is_error=True),
    )
    tail = "a" * (OUTPUT_TAIL - 2) + "é!"
    assert state.tools == [RunningTool(tool_call_id="c", tool_name="bash", arguments={"command": "yes"}, output=tail)]
    assert after(state, ev.ToolExecutionEnd("c", is_error=False)) == IDLE


def test_the_queue_is_taken_as_a_whole_and_is_not_paused_where_nothing_says_so() -> None:  # I-9 Q-3
    item = QueuedItem(item_id="i", revision=1, content=[TextBlock("x")], steer=True, created_at=1)
    error = ErrorInfo("unsupported_input", "no images")
    waiting = after(IDLE, ev.QueueChanged([item]), ev.QueueChanged([item, replace(item, item_id="j")], "error", error))
    assert waiting == replace(IDLE, queue=QueueState([item, replace(item, item_id="j")], "error", error))
    assert after(waiting, ev.QueueChanged([item])) == replace(IDLE, queue=QueueState([item]))
    assert after(waiting, ev.QueueChanged([])) == IDLE


def test_a_run_that_a_queued_input_began_names_it_and_one_that_entered_later_changes_nothing_of_it() -> None:  # I-9 Q-2
    state = after(IDLE, ev.RunStarted("run", "prompt", "i"), ev.PromptTimingEvent(START), *SPOKEN)
    assert state.run == RunInfo(run_id="run", started_at=1000, timing=START, item_id="i")
    steers = replace(USER, index=5)
    entered = after(
        state,
        ev.MessageStart(message_id="s", message=raw(steers), index=5, item_id="j"),
        ev.MessageEnd(message_id="s", index=5, message=raw(steers)),
    )
    assert entered == replace(state, live_count=6)


def test_a_resumed_run_has_its_operation_and_the_anchor_of_the_first_attempt() -> None:  # I-9 P-3
    again = replace(START, id="again", user_message_index=2, message_start_index=4)
    state = after(IDLE, ev.RunStarted("again", "resume"), ev.PromptTimingEvent(again))
    assert state == replace(IDLE, operation="resume", run=RunInfo(run_id="again", started_at=1000, timing=again))


def test_settings_are_taken_as_a_whole_and_a_missing_one_is_unset() -> None:
    held = replace(IDLE, pinned_at=7, operation="setModel")
    change = ev.SessionChanged(
        model=ModelRef("q", "n", "high"), permission="workspace-write", unread=True, updated_at=9
    )
    assert after(held, change) == replace(
        IDLE, model=ModelRef("q", "n", "high"), permission="workspace-write", unread=True, updated_at=9
    )


def test_a_failed_save_is_pending_until_one_succeeds() -> None:  # S-14
    failed = after(IDLE, ev.SaveFailed("disk full"))
    assert failed == replace(IDLE, has_pending_save=True, save_error="disk full")
    assert after(failed, ev.SessionSaved(4, 2, 1, unread=False)) == IDLE


def test_a_run_that_failed_leaves_its_error_and_nothing_that_ran() -> None:
    error = ErrorInfo("model_error", "no")
    running = after(IDLE, *BEGIN, *STREAM, ev.ToolExecutionStart("c", "bash", {}))
    end = after(running, ev.RunSettled(run_id="run", outcome="error", saved=False, error=error))
    assert end == replace(IDLE, last_run=RunResult(run_id="run", outcome="error", saved=False, error=error))


def test_after_a_replacement_the_state_is_the_new_sessions() -> None:  # I-9, R-5
    new = replace(IDLE, session_id="t", live_count=0, message_count=0)
    assert after(after(IDLE, *BEGIN), ev.SessionReplaced("s", new)) == new


def test_a_closed_session_keeps_its_last_state() -> None:
    assert after(IDLE, ev.SessionClosed(reason="disposed")) == IDLE


def test_lost_events_ask_for_a_snapshot() -> None:
    with pytest.raises(NeedSnapshot, match="3 to 9"):
        after(IDLE, ev.EventsLost(first=3, last=9))
