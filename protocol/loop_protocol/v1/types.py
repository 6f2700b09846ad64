"""The records that cross the socket and that the history file keeps: messages, timings, the session's state.

Names are camelCase on the wire. An optional field is omitted, never null. Times are integer Unix milliseconds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct


class Wire(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Base of everything that is sent. Unknown fields are ignored, so that a newer daemon can say more."""


class Params(Wire, frozen=True, forbid_unknown_fields=True):
    """Base of every method's parameters. An unknown field is an error: a typo must not be silently ignored (D-1)."""


Permission = Literal["read-only", "workspace-write", "danger-full-access"]
Outcome = Literal["success", "error", "cancelled"]
StopReason = Literal["stop", "toolUse", "length", "error", "aborted"]
SessionKind = Literal["persistent", "draft", "memory"]
Decision = Literal["allowed-once", "allowed-session", "rejected"]
ApprovalOutcome = Literal["allowed-once", "allowed-session", "rejected", "cancelled", "timed-out", "unavailable"]


class ModelRef(Wire, frozen=True):
    """A model's identity, never its credentials. ``effort`` is the reasoning effort where a model has one."""

    provider: str
    id: str
    effort: str | None = None

    def __str__(self) -> str:
        return f"{self.provider}/{self.id}"


class Usage(Wire, frozen=True):
    """Tokens as the provider reported them. Cached tokens are part of ``input_tokens``."""

    input_tokens: int
    output_tokens: int
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cache_read_tokens + other.cache_read_tokens,
            self.cache_write_tokens + other.cache_write_tokens,
        )


# --- content blocks ---------------------------------------------------------------------------------------------------


class TextBlock(Wire, frozen=True, tag_field="type", tag="text"):
    text: str


class ImageBlock(Wire, frozen=True, tag_field="type", tag="image", kw_only=True):
    """Base64 ``data`` in messages; events and snapshots carry ``bytes``, ``index`` and ``block`` instead of it."""

    mime_type: str
    data: str | None = None
    bytes: int | None = None
    index: int | None = None
    block: int | None = None


class ThinkingBlock(Wire, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str | None = None


class ToolCallBlock(Wire, frozen=True, tag_field="type", tag="toolCall"):
    id: str
    name: str
    arguments: dict[str, Any]


UserBlock = TextBlock | ImageBlock
AssistantBlock = TextBlock | ThinkingBlock | ToolCallBlock
Block = TextBlock | ImageBlock | ThinkingBlock | ToolCallBlock


# --- messages: a line of the history file is byte for byte what session/messages answers ------------------------------


class UserMessage(Wire, frozen=True, tag_field="role", tag="user", kw_only=True):
    index: int
    content: list[UserBlock]
    timestamp: int


class AssistantMessage(Wire, frozen=True, tag_field="role", tag="assistant", kw_only=True):
    index: int
    content: list[AssistantBlock]
    timestamp: int
    provider: str
    model: str
    usage: Usage
    stop_reason: StopReason
    error_message: str | None = None


class ToolResultMessage(Wire, frozen=True, tag_field="role", tag="toolResult", kw_only=True):
    index: int
    content: list[UserBlock]
    timestamp: int
    tool_call_id: str
    tool_name: str
    is_error: bool


Message = UserMessage | AssistantMessage | ToolResultMessage

# A message whose JSON is passed on as it is stored.
RawMessage = Annotated[Raw, Meta(extra_json_schema={"$ref": "#/$defs/Message"})]


class PromptTiming(Wire, frozen=True, kw_only=True):
    """Wall time of one accepted prompt (P-1). ``message_start_index`` is inclusive, ``message_end_index`` exclusive."""

    user_message_index: int
    started_at: int
    id: str | None = None
    message_start_index: int | None = None
    message_end_index: int | None = None
    finished_at: int | None = None
    stopped: bool = False


class ErrorInfo(Wire, frozen=True):
    """What went wrong. ``errors`` holds the parts when a run and its save failed both (S-17)."""

    kind: str
    message: str
    errors: list[ErrorInfo] | None = None


class Title(Wire, frozen=True, kw_only=True):
    """What identifies a conversation, apart from its messages (T-4). ``message_indices`` are the positions of the texts
    it was made of, none for a person's own; ``model`` is the one that made it, provider and id only."""

    text: str
    source: Literal["fallback", "model", "user"]
    message_indices: list[int]
    model: ModelRef | None = None


# --- a session as clients see it --------------------------------------------------------------------------------------


class RunInfo(Wire, frozen=True, kw_only=True):
    """The run that goes on; ``item_id`` is the queued input that it began with, if it did."""

    run_id: str
    started_at: int
    timing: PromptTiming
    item_id: str | None = None


class RunResult(Wire, frozen=True, kw_only=True):
    """How a run ended: ``run/wait`` always answers with it, whatever the outcome."""

    run_id: str
    outcome: Outcome
    saved: bool
    error: ErrorInfo | None = None

    def once_saved(self) -> RunResult:
        """The same after a flush: what is left of the error is the run's own."""
        parts = self.error.errors if self.error and self.error.errors else []
        return RunResult(run_id=self.run_id, outcome=self.outcome, saved=True, error=parts[0] if parts else None)


class Draft(Wire, frozen=True):
    """The assistant message being streamed. It is not history (S-11)."""

    message_id: str
    content: list[AssistantBlock]


class RunningTool(Wire, frozen=True, kw_only=True):
    """A tool call under way; ``output`` is the tail of what it printed (``OUTPUT_TAIL`` characters at most)."""

    tool_call_id: str
    tool_name: str
    arguments: dict[str, Any]
    output: str


OUTPUT_TAIL = 4096


class Recoverable(Wire, frozen=True, kw_only=True):
    """A run that a crash cut off: so many finished messages of it were kept, the prompt included (S-26)."""

    run_id: str
    started_at: int
    messages: int


class QueuedItem(Wire, frozen=True, kw_only=True):
    """An input that waits for its turn. ``revision`` grows with each edit. ``steer``: it enters the run that goes on,
    at the next safe boundary, and does not wait for its end. Images are shown by ``bytes``, without ``data``."""

    item_id: str
    revision: int
    content: list[UserBlock]
    steer: bool
    created_at: int


# Why a queue does not go on. An item that cannot be accepted pauses it with `error`, too.
Pause = Literal["stopped", "error", "save_failed", "draining"]


class QueueState(Wire, frozen=True):
    """What waits, the next one first. ``paused`` says why it does not go on, ``error`` why its head was not accepted,
    if that is the reason. A queue without items is never paused."""

    items: list[QueuedItem]
    paused: Pause | None = None
    error: ErrorInfo | None = None


class ApprovalRequest(Wire, frozen=True, kw_only=True):
    """What a tool wants to do and may not by itself, with all that is needed to decide it (A-1, A-8).

    ``arguments`` are the exact ones of the call. ``reason``: why it takes a person. ``justification``: what the model
    says of it. ``sandbox``: what the call may do without an approval. ``rules``: what ``allowed-session`` would
    allow for as long as the session is open; where there are none ``rulesRefused`` says why, and that decision is
    refused. Of a file: its real ``path``, the ``diff``, and ``sha256Before`` of its content, none where it is new; what
    is approved is that change of that content. ``expiresAt``: when it is ``timed-out``, if ever.
    """

    approval_id: str
    runtime_id: str
    session_id: str
    run_id: str
    tool_call_id: str
    tool_name: str
    arguments: dict[str, Any]
    operation: Literal["command", "write", "edit"]
    reason: str
    cwd: str
    sandbox: str
    created_at: int
    rules: list[str] = []
    rules_refused: str | None = None
    justification: str | None = None
    path: str | None = None
    diff: str | None = None
    sha256_before: str | None = None
    expires_at: int | None = None


class SessionState(Wire, frozen=True, kw_only=True):
    """Everything about a session but its messages. Folding events over it gives the later state (see ``replica``).
    ``title_error``: why no title came by itself the last time, until one succeeds. ``title_usage``: the tokens of all
    requests for titles since the session was opened, which ``usage`` has nothing of. ``grants``: the rules of what was
    allowed for the session, until it is closed or gets another ``permission``."""

    session_id: str
    cwd: str
    kind: SessionKind
    model: ModelRef
    permission: Permission
    unread: bool
    created_at: int
    updated_at: int
    message_count: int
    user_message_count: int
    live_count: int
    timings: list[PromptTiming]
    tools: list[RunningTool]
    queue: QueueState
    approvals: list[ApprovalRequest]
    has_pending_save: bool
    usage: Usage
    runtime_id: str | None = None
    path: str | None = None
    title: Title | None = None
    title_error: ErrorInfo | None = None
    title_usage: Usage | None = None
    pinned_at: int | None = None
    operation: str | None = None
    run: RunInfo | None = None
    last_run: RunResult | None = None
    draft: Draft | None = None
    save_error: str | None = None
    recoverable: Recoverable | None = None
    grants: list[str] = []


class SessionRow(Wire, frozen=True, kw_only=True):
    """One session of a list, from its metadata alone."""

    session_id: str
    path: str
    cwd: str
    created_at: int
    updated_at: int
    message_count: int
    user_message_count: int
    unread: bool
    live: bool
    title: Title | None = None
    pinned_at: int | None = None


class DamagedSession(Wire, frozen=True):
    path: str
    reason: str
