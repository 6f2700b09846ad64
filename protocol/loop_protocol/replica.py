"""A client's copy of a session's state: a snapshot with the events after it folded in equals the later snapshot.

    state = attached.state
    for params in events:
        state = fold(state, params)

Messages are no part of it: ``live_count`` says how many there are, ``message_end`` and ``session/messages`` have them.
"""

from __future__ import annotations

from typing import Any, Literal, assert_never

import msgspec
from msgspec import Raw, Struct, UnsetType
from msgspec.structs import replace

from .v1.events import (
    ApprovalRequested,
    ApprovalResolved,
    EventParams,
    EventsLost,
    MessageEnd,
    MessageStart,
    MessageUpdate,
    PromptTimingEvent,
    QueueChanged,
    RetryWait,
    RunSettled,
    RunStarted,
    SaveFailed,
    SessionChanged,
    SessionClosed,
    SessionReplaced,
    SessionSaved,
    SessionTitle,
    ToolExecutionEnd,
    ToolExecutionStart,
    ToolExecutionUpdate,
)
from .v1.types import (
    OUTPUT_TAIL,
    AssistantBlock,
    Draft,
    PromptTiming,
    QueueState,
    RunInfo,
    RunningTool,
    RunResult,
    SessionKind,
    SessionState,
    TextBlock,
    ThinkingBlock,
    Usage,
)


class NeedSnapshot(Exception):
    """Events were lost, so that the state cannot be followed: attach again without ``since``."""


def fold(state: SessionState, params: EventParams) -> SessionState:
    """The state after one more event. Nothing of ``state`` is changed. Raises :class:`NeedSnapshot`."""
    event = params.event
    match event:
        case RunStarted():
            return replace(state, operation=event.operation, run=_begun(state, event, params.at))
        case PromptTimingEvent():
            return _timed(state, event.timing)
        case MessageStart():
            draft = Draft(event.message_id, []) if _role(event.message).role == "assistant" else state.draft
            return replace(state, draft=draft)
        case MessageUpdate():
            return replace(state, draft=_extended(state.draft, event))
        case MessageEnd():
            return _ended(state, event)
        case ToolExecutionStart(tool_call_id=id, tool_name=name, arguments=arguments):
            tool = RunningTool(tool_call_id=id, tool_name=name, arguments=arguments, output="")
            return replace(state, tools=[*state.tools, tool])
        case ToolExecutionUpdate():
            return replace(state, tools=[_printed(tool, event) for tool in state.tools])
        case ToolExecutionEnd():
            return replace(state, tools=[tool for tool in state.tools if tool.tool_call_id != event.tool_call_id])
        case ApprovalRequested():
            return replace(state, approvals=[*state.approvals, event.request])
        case ApprovalResolved():
            return _resolved(state, event)
        case QueueChanged():
            return replace(state, queue=QueueState(event.items, event.paused, event.error))
        case SessionChanged():
            grants = state.grants if event.permission == state.permission else []
            return replace(state, grants=grants, **_fields(event))
        case SessionTitle():
            return _titled(state, event)
        case SessionSaved():
            last = state.last_run.once_saved() if state.last_run and not state.last_run.saved else state.last_run
            kind: SessionKind = "persistent" if state.kind == "draft" else state.kind
            return replace(state, kind=kind, has_pending_save=False, save_error=None, last_run=last, **_fields(event))
        case SaveFailed():
            return replace(state, has_pending_save=True, save_error=event.reason)
        case RunSettled():
            last = RunResult(run_id=event.run_id, outcome=event.outcome, saved=event.saved, error=event.error)
            return replace(state, run=None, operation=None, draft=None, tools=[], last_run=last)
        case SessionReplaced():
            return event.new
        case SessionClosed() | RetryWait():
            return state
        case EventsLost():
            raise NeedSnapshot(f"the events {event.first} to {event.last} of {params.runtime_id} were lost")
    assert_never(event)


def _begun(state: SessionState, event: RunStarted, at: int) -> RunInfo:
    # A snapshot may be ahead of this event: a run is part of the state from its acceptance on.
    if state.run is not None and state.run.run_id == event.run_id:
        return state.run
    # The real timing is in the next event.
    return RunInfo(
        run_id=event.run_id,
        started_at=at,
        timing=PromptTiming(started_at=at, user_message_index=state.live_count),
        item_id=event.item_id,
    )


def _timed(state: SessionState, timing: PromptTiming) -> SessionState:
    run = state.run and replace(state.run, started_at=timing.started_at, timing=timing)
    # A run that a crash cut off has an end but no finish.
    over = timing.finished_at is not None or timing.message_end_index is not None
    timings = [*state.timings, timing] if over else state.timings
    return replace(state, run=run, timings=timings)


def _resolved(state: SessionState, event: ApprovalResolved) -> SessionState:
    left = [one for one in state.approvals if one.approval_id != event.approval_id]
    rules = [rule for one in state.approvals if one not in left for rule in one.rules]
    new = rules if event.outcome == "allowed-session" else []
    return replace(state, approvals=left, grants=list(dict.fromkeys([*state.grants, *new])))


def _titled(state: SessionState, event: SessionTitle) -> SessionState:
    usage = event.usage or state.title_usage
    if event.title is not None:
        return replace(state, title=event.title, title_error=None, title_usage=usage)
    return replace(state, title_error=event.error or state.title_error, title_usage=usage)


# --- messages ---------------------------------------------------------------------------------------------------------


class _Role(Struct):
    """What the fold needs of a message."""

    role: Literal["user", "assistant", "toolResult"]
    usage: Usage | None = None


def _role(message: Raw) -> _Role:
    return msgspec.json.decode(message, type=_Role)


def _ended(state: SessionState, event: MessageEnd) -> SessionState:
    if event.index is None or isinstance(event.message, UnsetType):
        return replace(state, draft=None)
    more = _role(event.message).usage
    usage = state.usage if more is None else state.usage + more
    # What a crash left belonged to the end of the saved history: it was taken over, or is left behind now.
    return replace(state, draft=None, live_count=event.index + 1, usage=usage, recoverable=None)


def _extended(draft: Draft | None, event: MessageUpdate) -> Draft | None:
    """Text and thinking only: a tool call under construction is not shown in snapshots."""
    if draft is None or draft.message_id != event.message_id:
        return draft
    content = draft.content
    if event.thinking_delta:
        content = _appended(content, ThinkingBlock(event.thinking_delta))
    if event.text_delta:
        content = _appended(content, TextBlock(event.text_delta))
    return Draft(draft.message_id, content)


def _appended(content: list[AssistantBlock], more: TextBlock | ThinkingBlock) -> list[AssistantBlock]:
    match content, more:
        case [*before, TextBlock(text=text)], TextBlock():
            return [*before, TextBlock(text + more.text)]
        case [*before, ThinkingBlock(thinking=thinking)], ThinkingBlock():
            return [*before, ThinkingBlock(thinking + more.thinking)]
    return [*content, more]


# --- the rest ---------------------------------------------------------------------------------------------------------


def _printed(tool: RunningTool, event: ToolExecutionUpdate) -> RunningTool:
    if tool.tool_call_id != event.tool_call_id:
        return tool
    return replace(tool, output=(tool.output + event.output_delta)[-OUTPUT_TAIL:])


def _fields(event: SessionChanged | SessionSaved) -> dict[str, Any]:
    """All fields of these two are fields of the state, under the same names."""
    return msgspec.structs.asdict(event)
