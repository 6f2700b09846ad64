"""Events: the notification ``event {runtimeId, sessionId, seq, at, event: {type, …}}`` of a runtime that a client is
attached to, and ``server/event {seq, at, event: {type, …}}`` of the daemon, for who asked with ``server/watch``.

``seq`` counts per runtime, or daemon, and lives in the envelope. Clients ignore event types that they do not know.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Raw, UnsetType, field

from .methods import PendingSave
from .types import (
    ApprovalOutcome,
    ApprovalRequest,
    ErrorInfo,
    ModelRef,
    Outcome,
    Pause,
    Permission,
    PromptTiming,
    QueuedItem,
    RawMessage,
    SessionRow,
    SessionState,
    Title,
    Usage,
    Wire,
)


class Event(Wire, frozen=True, tag_field="type"):
    """Base of all event bodies."""


class RunStarted(Event, frozen=True, tag="run_started"):
    """An accepted prompt began, or the resumption of an earlier one. ``item_id``: it was queued."""

    run_id: str
    operation: str
    item_id: str | None = None


class PromptTimingEvent(Event, frozen=True, tag="prompt_timing"):
    """The run's timing, once at its start and once finished, before the save (P-5). That of a recovered run comes once,
    with ``messageEndIndex`` and without ``finishedAt``."""

    timing: PromptTiming


class MessageStart(Event, frozen=True, tag="message_start", kw_only=True):
    """A message begins; an assistant's has no index and no content yet. ``item_id``: it was queued."""

    message_id: str
    message: Raw
    index: int | None = None
    item_id: str | None = None


class MessageUpdate(Event, frozen=True, tag="message_update", kw_only=True):
    """More of the streaming message. Deltas that arrived together come as one event."""

    message_id: str
    text_delta: str | None = None
    thinking_delta: str | None = None
    tool_call_delta: ToolCallDelta | None = None


class ToolCallDelta(Wire, frozen=True, kw_only=True):
    """A fragment of a tool call's arguments, as JSON text; not valid JSON by itself."""

    id: str
    name: str
    arguments_delta: str


class MessageEnd(Event, frozen=True, tag="message_end", kw_only=True):
    """The message as history has it (images by reference), or ``discarded``. It says nothing about saving (S-13). With
    one that is kept nothing is ``recoverable`` any more."""

    message_id: str
    index: int | None = None
    message: RawMessage | UnsetType = UNSET  # not None: msgspec refuses an object for `Raw | None`
    discarded: bool = False


class ToolExecutionStart(Event, frozen=True, tag="tool_execution_start"):
    """A tool begins with exactly these arguments."""

    tool_call_id: str
    tool_name: str
    arguments: dict[str, Any]


class ToolExecutionUpdate(Event, frozen=True, tag="tool_execution_update"):
    """Output of a running tool, as it appears."""

    tool_call_id: str
    output_delta: str


class ToolExecutionEnd(Event, frozen=True, tag="tool_execution_end"):
    """A tool ended; its result message follows."""

    tool_call_id: str
    is_error: bool


class ApprovalRequested(Event, frozen=True, tag="approval_requested"):
    """A tool waits for a person; ``approval/resolve`` answers. Exactly one ``approval_resolved`` follows (A-1). It is
    told to who attached to the runtime, and to who asked with ``server/watch``."""

    request: ApprovalRequest


class ApprovalResolved(Event, frozen=True, tag="approval_resolved"):
    """It is settled. ``by``: the client that answered, if one did, by its name and process; ``feedback``: what it told
    the model."""

    approval_id: str
    session_id: str
    outcome: ApprovalOutcome
    by: str | None = None
    feedback: str | None = None


class RetryWait(Event, frozen=True, tag="retry_wait"):
    """The model could not be asked for ``reason``, and will be again at ``until_at``; a stop ends the wait at once."""

    until_at: int
    reason: str


class QueueChanged(Event, frozen=True, tag="queue_changed"):
    """The whole queue as it is now: ``queue`` of the state. An item that is gone, and that no ``run_started`` or
    ``message_start`` before it named, was removed."""

    items: list[QueuedItem]
    paused: Pause | None = None
    error: ErrorInfo | None = None


class SessionChanged(Event, frozen=True, tag="session_changed", kw_only=True):
    """The session's small settings, all of them; an optional one that is missing is unset now."""

    model: ModelRef
    permission: Permission
    unread: bool
    updated_at: int
    pinned_at: int | None = None
    operation: str | None = None


class SessionTitle(Event, frozen=True, tag="session_title", kw_only=True):
    """With ``title`` it is another one now, and an earlier ``titleError`` is over; a fallback may come before it is
    saved, any other title comes after. With ``error`` one that was to come by itself did not: the title stays.
    ``usage``: the ``titleUsage`` from here on."""

    title: Title | None = None
    error: ErrorInfo | None = None
    usage: Usage | None = None


class SessionSaved(Event, frozen=True, tag="session_saved"):
    """The history up to ``message_count`` is on disk. A draft is ``persistent`` from its first one on."""

    message_count: int
    user_message_count: int
    updated_at: int
    unread: bool


class SaveFailed(Event, frozen=True, tag="save_failed"):
    """The snapshot is kept in memory; repair the cause, then ``session/flush``."""

    reason: str


class RunSettled(Event, frozen=True, tag="run_settled", kw_only=True):
    """The last event of a run; exactly one for every accepted prompt. A run that a crash cut off settles when it is
    recovered."""

    run_id: str
    outcome: Outcome
    saved: bool
    error: ErrorInfo | None = None


class SessionReplaced(Event, frozen=True, tag="session_replaced"):
    """The runtime has another session now; the events that follow are the new one's (R-5)."""

    old: str
    new: SessionState


class SessionClosed(Event, frozen=True, tag="session_closed", kw_only=True):
    """The session is not open any more. ``rescue`` names the copy of what could not be saved."""

    reason: str
    rescue: str | None = None


class EventsLost(Event, frozen=True, tag="events_lost", kw_only=True):
    """This client read too slowly: the events ``from``…``to`` are gone for it. Attach again for a snapshot; after
    ``server/watch`` ask ``session/list``, ``approval/list`` and ``server/status`` again."""

    first: int = field(name="from")
    last: int = field(name="to")


AnyEvent = (
    RunStarted
    | PromptTimingEvent
    | MessageStart
    | MessageUpdate
    | MessageEnd
    | ToolExecutionStart
    | ToolExecutionUpdate
    | ToolExecutionEnd
    | ApprovalRequested
    | ApprovalResolved
    | RetryWait
    | QueueChanged
    | SessionChanged
    | SessionTitle
    | SessionSaved
    | SaveFailed
    | RunSettled
    | SessionReplaced
    | SessionClosed
    | EventsLost
)

EVENTS: dict[str, type[Event]] = {str(event.__struct_config__.tag): event for event in AnyEvent.__args__}


class EventParams(Wire, frozen=True, kw_only=True):
    """The notification's parameters."""

    runtime_id: str
    session_id: str
    seq: int
    at: int
    event: AnyEvent


# --- of the daemon ----------------------------------------------------------------------------------------------------


class SessionListed(Event, frozen=True, tag="session_listed"):
    """A saved session is there, or is another than before: its row in ``session/list``, whole. ``live`` says whether it
    is open."""

    session: SessionRow


class SessionRemoved(Event, frozen=True, tag="session_removed"):
    """A saved session was deleted."""

    path: str
    session_id: str


class DaemonState(Event, frozen=True, tag="daemon_state", kw_only=True):
    """A save failed or was made up for, or a drain began, got on or was cancelled: what ``server/status`` says now."""

    draining: bool
    runs: int
    pending_saves: list[PendingSave]


AnyServerEvent = SessionListed | SessionRemoved | DaemonState | ApprovalRequested | ApprovalResolved | EventsLost

SERVER_EVENTS: dict[str, type[Event]] = {str(event.__struct_config__.tag): event for event in AnyServerEvent.__args__}


class ServerEventParams(Wire, frozen=True, kw_only=True):
    """The parameters of ``server/event``."""

    seq: int
    at: int
    event: AnyServerEvent
