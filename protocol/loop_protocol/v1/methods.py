"""The method table: one row drives the server's dispatch, the typed clients, the schema and the docs.

A new method is a new row here and a function of the same name in ``loopd/api.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from .types import (
    ApprovalOutcome,
    ApprovalRequest,
    DamagedSession,
    Decision,
    ErrorInfo,
    ModelRef,
    Outcome,
    Params,
    Permission,
    QueuedItem,
    RawMessage,
    RunResult,
    SessionKind,
    SessionRow,
    SessionState,
    Title,
    Wire,
)

# `$` and not Python's `\Z`: the pattern stands in the JSON Schema too, and here both say the same.
Path = Annotated[str, Meta(pattern=r"^/[^\x00]*$", max_length=4096, description="absolute path, without NUL")]
Count = Annotated[int, Meta(ge=0, le=2**53 - 1)]
Limit = Annotated[int, Meta(ge=1, le=2147483647)]
RequestId = Annotated[str, Meta(min_length=1, max_length=128)]
Identifier = Annotated[str, Meta(min_length=1, max_length=128)]

# --- server -----------------------------------------------------------------------------------------------------------


class ClientInfo(Wire, frozen=True):
    name: str
    version: str | None = None


class ClientCapabilities(Wire, frozen=True):
    approvals: bool = False


class InitializeParams(Wire, frozen=True):
    """The only parameters whose unknown fields are ignored: a later client must be able to negotiate."""

    versions: list[int]
    client: ClientInfo | None = None
    capabilities: ClientCapabilities | None = None


class ServerInfo(Wire, frozen=True):
    name: str
    version: str


class Capabilities(Wire, frozen=True):
    """What this daemon has of version 1: its methods and its event types."""

    methods: list[str]
    events: list[str]


class Limits(Wire, frozen=True, kw_only=True):
    """Bytes, except where the name says otherwise."""

    frame: int
    frame_before_initialize: int
    batch: int
    nesting: int
    request_id: int
    connections: int
    requests_in_flight: int
    event_log_events: int
    event_log_bytes: int
    page: int


class InitializeResult(Wire, frozen=True):
    version: int
    server: ServerInfo
    capabilities: Capabilities
    limits: Limits


class NoParams(Params, frozen=True):
    pass


class Nothing(Wire, frozen=True):
    pass


class PendingSave(Wire, frozen=True, kw_only=True):
    session_id: str
    reason: str
    path: str | None = None


class SandboxStatus(Wire, frozen=True):
    """Whether commands of restricted presets run in a sandbox here; where not, why, and each of them asks."""

    works: bool
    reason: str | None = None


class ServerStatus(Wire, frozen=True, kw_only=True):
    """``sandbox`` is missing until it was tried, right after the start."""

    version: str
    pid: int
    uptime_ms: int
    draining: bool
    runtimes: int
    sessions: int
    runs: int
    pending_approvals: int
    pending_saves: list[PendingSave]
    connections: int
    socket: str
    data_dir: str
    counters: dict[str, int]
    sandbox: SandboxStatus | None = None


class DescribeResult(Wire, frozen=True):
    schema: dict[str, Any]


class DrainParams(Params, frozen=True, kw_only=True):
    """``exit``: end the daemon once it is quiet. ``rescue``: also over a pending save, after writing a rescue copy.

    ``cancel``: take work again instead.
    """

    deadline_ms: Annotated[int, Meta(ge=0, le=2147483647)] | None = None
    exit: bool = False
    rescue: bool = False
    cancel: bool = False


class DrainResult(Wire, frozen=True, kw_only=True):
    """``queued``: how many inputs wait in all sessions. They are in memory only: a daemon that exits drops them."""

    draining: bool
    quiet: bool
    exiting: bool
    runs: int
    pending_saves: list[PendingSave]
    rescued: list[str]
    queued: int = 0


# --- runtime ----------------------------------------------------------------------------------------------------------


class OpenSession(Params, frozen=True, kw_only=True):
    kind: Literal["new", "continue", "open", "draft", "memory"]
    path: Path | None = None
    session_dir: Path | None = None


class ModelChoice(Params, frozen=True):
    """A model as a client names it. ``effort``: how much it reasons, where it can."""

    provider: str
    id: str
    effort: str | None = None

    @property
    def ref(self) -> ModelRef:
        return ModelRef(self.provider, self.id, self.effort)


class TitleOptions(Params, frozen=True, kw_only=True):
    """How the session gets its titles; what is missing is as the daemon's configuration says. ``off``: the first words.
    ``first-prompt``: a model makes one of the first text. ``all-prompts``: again of all texts, with each new one.
    ``model``: else the conversation's. ``max_input_bytes``: of the texts as JSON; where there is more, no title comes.
    ``timeout_ms``: for fetching the key and for the answer."""

    mode: Literal["off", "first-prompt", "all-prompts"] | None = None
    model: ModelChoice | None = None
    max_input_bytes: Limit | None = None
    max_output_tokens: Limit | None = None
    timeout_ms: Limit | None = None


class CallerParams(Params, frozen=True, kw_only=True):
    """What a session takes over from whoever opens it, and does not store. For its tools ``env``, of which the
    allow-listed variables, and ``umask``."""

    env: dict[str, str] | None = None
    umask: Annotated[int, Meta(ge=0, le=0o777)] | None = None
    title: TitleOptions | None = None


class RuntimeOpenParams(CallerParams, frozen=True, kw_only=True):
    """Another ``env`` or ``umask`` than the open session's is no conflict: it keeps its own. Another ``title`` is."""

    cwd: Path
    session: OpenSession
    runtime_id: Literal["new"] | None = None
    model: ModelChoice | None = None
    permission: Permission | None = None


class RuntimeOpenResult(Wire, frozen=True, kw_only=True):
    """``created`` is false when an open runtime was joined."""

    runtime_id: str
    session_id: str
    created: bool
    state: SessionState
    path: str | None = None


class RuntimeParams(Params, frozen=True):
    runtime_id: Identifier


class DisposeParams(Params, frozen=True, kw_only=True):
    """``discard_queue``: also with inputs that wait, which are lost then; else they are a ``conflict``."""

    runtime_id: Identifier
    discard_queue: bool = False


class RuntimeRow(Wire, frozen=True, kw_only=True):
    runtime_id: str
    cwd: str
    session_id: str
    kind: SessionKind
    message_count: int
    running: bool
    has_pending_save: bool
    default: bool
    path: str | None = None
    title: Title | None = None
    queued: int = 0
    pending_approvals: int = 0


class RuntimeListResult(Wire, frozen=True):
    runtimes: list[RuntimeRow]


class ReplaceResult(Wire, frozen=True, kw_only=True):
    cancelled: bool
    runtime_id: str
    session_id: str
    created: bool
    state: SessionState
    path: str | None = None


class NewSessionParams(CallerParams, frozen=True, kw_only=True):
    """``env``, ``umask`` and ``title`` stay those of the session that is replaced where they are not given.
    ``discard_queue``: see ``runtime/dispose``."""

    runtime_id: Identifier
    discard_queue: bool = False


class SwitchParams(CallerParams, frozen=True, kw_only=True):
    """``discard_queue`` as in ``runtime/dispose``."""

    runtime_id: Identifier
    path: Path
    discard_queue: bool = False


class AttachParams(Params, frozen=True, kw_only=True):
    """``since``: the last ``seq`` seen, exclusive. ``follow: false`` ends the subscription at ``session_replaced``."""

    runtime_id: Identifier
    since: Count | None = None
    follow: bool = True


class AttachResult(Wire, frozen=True, kw_only=True):
    """With ``replayed`` the missed events follow; else ``state`` is the snapshot as of ``seq``."""

    seq: int
    state: SessionState | None = None
    replayed: bool = False


# --- session ----------------------------------------------------------------------------------------------------------


class SessionListParams(Params, frozen=True, kw_only=True):
    """Without ``cwd``: all workspaces."""

    cwd: Path | None = None
    session_dir: Path | None = None
    limit: Annotated[int, Meta(ge=1, le=2147483647)] | None = None


class SessionListResult(Wire, frozen=True, kw_only=True):
    sessions: list[SessionRow]
    damaged: list[DamagedSession]
    legacy: list[str]
    unsupported: int


class SessionParams(Params, frozen=True):
    session_id: Identifier


class SessionOrPathParams(Params, frozen=True, kw_only=True):
    """Exactly one of the two; a path reads a session that is not open."""

    session_id: Identifier | None = None
    path: Path | None = None


class MessagesParams(Params, frozen=True, kw_only=True):
    session_id: Identifier | None = None
    path: Path | None = None
    start: Count = 0
    limit: Annotated[int, Meta(ge=1, le=2147483647)] | None = None


class MessagesResult(Wire, frozen=True, kw_only=True):
    """A page of at most 1 MiB or one message. ``committed``: how many of ``total`` are on disk."""

    start: int
    total: int
    committed: int
    messages: list[RawMessage]


class ImageInput(Params, frozen=True, tag_field="type", tag="image"):
    data: str
    mime_type: str


class TextInput(Params, frozen=True, tag_field="type", tag="text"):
    text: str


Content = str | list[TextInput | ImageInput]


class ApprovingParams(Params, frozen=True, kw_only=True):
    """What becomes of a run's requests for approval. ``approvals``: with ``reject`` they are settled at once, as
    ``unavailable``, while no client is attached that can approve (capability ``approvals``); ``wait`` is the default
    (A-6). ``approval_timeout_ms``: how long each may wait for its answer; for ever where it is missing. A repeat of a
    ``request_id`` changes neither."""

    approvals: Literal["wait", "reject"] = "wait"
    approval_timeout_ms: Limit | None = None


class PromptParams(ApprovingParams, frozen=True, kw_only=True):
    session_id: Identifier
    content: Content
    request_id: RequestId | None = None
    wait: bool = False


class PromptResult(Wire, frozen=True, kw_only=True):
    """``runId`` at acceptance; with ``wait: true`` also what ``run/wait`` answers."""

    run_id: str
    outcome: Outcome | None = None
    saved: bool | None = None
    error: ErrorInfo | None = None


class RunParams(Params, frozen=True):
    run_id: Identifier


class StopParams(Params, frozen=True):
    session_id: Identifier
    run_id: Identifier


class StopResult(Wire, frozen=True):
    stopped: bool


class ResumeParams(ApprovingParams, frozen=True, kw_only=True):
    """What it says of approvals is for the run that it resumes; a queued input has its own."""

    session_id: Identifier


class ResumeResult(Wire, frozen=True):
    """The run that goes on; where there was only a paused queue to let go on, the one of its first item."""

    run_id: str


class FlushResult(Wire, frozen=True):
    flushed: bool


class SetModelParams(Params, frozen=True):
    session_id: Identifier
    model: ModelChoice


class SetModelResult(Wire, frozen=True):
    model: ModelRef


class SetPermissionParams(Params, frozen=True):
    session_id: Identifier
    permission: Permission


class SetPermissionResult(Wire, frozen=True):
    permission: Permission


class MarkReadParams(Params, frozen=True, kw_only=True):
    """``message_count``: how many saved messages were seen."""

    message_count: Count
    session_id: Identifier | None = None
    path: Path | None = None


class MarkReadResult(Wire, frozen=True):
    """False: there are other messages than the ones that were seen, so the session stays unread."""

    read: bool


class SetPinnedParams(Params, frozen=True, kw_only=True):
    pinned: bool
    session_id: Identifier | None = None
    path: Path | None = None


class SetPinnedResult(Wire, frozen=True):
    pinned_at: int | None = None


class DeleteParams(Params, frozen=True):
    path: Path


class RecoverResult(Wire, frozen=True, kw_only=True):
    """The run that was taken over, and how many messages of it; missing results of its calls were added."""

    run_id: str
    messages: int


class RenameParams(Params, frozen=True, kw_only=True):
    text: str
    session_id: Identifier | None = None
    path: Path | None = None


class TitleResult(Wire, frozen=True):
    title: Title


class TitleWaitResult(Wire, frozen=True, kw_only=True):
    """As in the state: the title, and why none came by itself the last time."""

    title: Title | None = None
    title_error: ErrorInfo | None = None


class TitleCancelResult(Wire, frozen=True):
    """False: there was nothing to cancel."""

    cancelled: bool


# --- queue ------------------------------------------------------------------------------------------------------------

ItemId = Annotated[str, Meta(min_length=1, max_length=128)]


class QueueAddParams(ApprovingParams, frozen=True, kw_only=True):
    """The same ``request_id`` with the same content is the same item; once that has started, ``queue_item_started``.
    What it says of approvals is for the run that it starts, not for one that it steers."""

    session_id: Identifier
    content: Content
    steer: bool = False
    request_id: RequestId | None = None


class QueueEditParams(Params, frozen=True, kw_only=True):
    """``revision``: the one that the change is made on; an older one is a ``conflict`` with ``data.revision``. A string
    as ``content`` replaces the text and keeps the images, blocks replace all. What changes nothing raises no revision.
    """

    session_id: Identifier
    item_id: ItemId
    revision: Count
    content: Content | None = None
    steer: bool | None = None


class QueueMoveParams(Params, frozen=True, kw_only=True):
    """``to``: its place afterwards, 0 is the next one; beyond the end is the end."""

    session_id: Identifier
    item_id: ItemId
    to: Count


class QueueRemoveParams(Params, frozen=True, kw_only=True):
    session_id: Identifier
    item_id: ItemId


class QueueResult(QueuedItem, frozen=True, kw_only=True):
    """The item as it is now, or was when it was removed. ``run_id``: it did not have to wait, and started that run."""

    run_id: str | None = None


# --- approvals --------------------------------------------------------------------------------------------------------


class ApprovalListParams(Params, frozen=True, kw_only=True):
    """Without ``session_id``: of all sessions."""

    session_id: Identifier | None = None


class ApprovalListResult(Wire, frozen=True):
    """What waits for an answer, the oldest first."""

    approvals: list[ApprovalRequest]


class ApprovalResolveParams(Params, frozen=True, kw_only=True):
    """``feedback`` goes with ``rejected``: it is what the model is told."""

    approval_id: Identifier
    decision: Decision
    feedback: Annotated[str, Meta(max_length=65536)] | None = None


class ApprovalResolveResult(Wire, frozen=True, kw_only=True):
    approval_id: str
    outcome: ApprovalOutcome


# --- models -----------------------------------------------------------------------------------------------------------


class ModelRow(Wire, frozen=True, kw_only=True):
    """``usable`` false comes with the ``reason``, and with ``keyEnv`` if it lacks the key that this variable of the
    daemon's environment would hold. ``default``: what a new session gets. ``reasoning``: it takes an ``effort``."""

    provider: str
    id: str
    usable: bool
    input: list[str]
    default: bool
    reason: str | None = None
    context_window: int | None = None
    max_output: int | None = None
    reasoning: bool = False
    key_env: str | None = None


class ModelListResult(Wire, frozen=True):
    models: list[ModelRow]


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Method:
    """``starts_work``: in a batch its reply would come after the events that it starts, so it may not stand in one."""

    name: str
    params: type
    result: type
    summary: str
    starts_work: bool = False


_TABLE = (
    Method("initialize", InitializeParams, InitializeResult, "negotiate the version; must come first"),
    Method("server/status", NoParams, ServerStatus, "what the daemon is doing; never blocked by a session"),
    Method("server/describe", NoParams, DescribeResult, "the JSON schema of this version"),
    Method("server/drain", DrainParams, DrainResult, "take no new work; answers when quiet, with what is pending"),
    Method("server/watch", NoParams, Nothing, "`server/event`s from here on, on this connection", starts_work=True),
    Method("runtime/open", RuntimeOpenParams, RuntimeOpenResult, "a runtime with its session: made, or joined"),
    Method("runtime/list", NoParams, RuntimeListResult, "the open runtimes"),
    Method("runtime/newSession", NewSessionParams, ReplaceResult, "replace the session by an empty one"),
    Method("runtime/switchSession", SwitchParams, ReplaceResult, "replace the session by the one at that path"),
    Method("runtime/dispose", DisposeParams, Nothing, "stop and await the run, close the session, release the runtime"),
    Method(
        "runtime/attach",
        AttachParams,
        AttachResult,
        "events from here on, after a snapshot or what was missed",
        starts_work=True,
    ),
    Method("runtime/detach", RuntimeParams, Nothing, "no more events of this runtime on this connection"),
    Method("session/list", SessionListParams, SessionListResult, "saved sessions, newest first, from metadata only"),
    Method("session/state", SessionOrPathParams, SessionState, "a snapshot of one session"),
    Method("session/messages", MessagesParams, MessagesResult, "a page of the conversation"),
    Method("session/prompt", PromptParams, PromptResult, "start a run; answers at acceptance", starts_work=True),
    Method("session/stop", StopParams, StopResult, "end that run; answers when it is settled"),
    Method("session/abort", SessionParams, StopResult, "cancel and drain everything of the session"),
    Method("session/resume", ResumeParams, ResumeResult, "go on with stopped or failed work", starts_work=True),
    Method("session/flush", SessionParams, FlushResult, "write a snapshot whose save failed"),
    Method("session/recover", SessionParams, RecoverResult, "take over the messages of a run that a crash cut off"),
    Method("session/setModel", SetModelParams, SetModelResult, "choose the model"),
    Method("session/setPermission", SetPermissionParams, SetPermissionResult, "choose the permission preset"),
    Method("session/markRead", MarkReadParams, MarkReadResult, "clear `unread`, if all that is saved was seen"),
    Method("session/setPinned", SetPinnedParams, SetPinnedResult, "pin or unpin; at any time, during a run too"),
    Method("session/delete", DeleteParams, Nothing, "remove a session that is not open, with all of its files"),
    Method("title/rename", RenameParams, TitleResult, "name the session by hand; nothing changes that by itself"),
    Method(
        "title/refresh", SessionParams, TitleResult, "make the title anew of what is saved, also instead of your own"
    ),
    Method("title/wait", SessionParams, TitleWaitResult, "wait for title work and its writes, and cancel nothing"),
    Method("title/cancel", SessionParams, TitleCancelResult, "end title work, and wait for that; a run goes on"),
    Method("queue/add", QueueAddParams, QueueResult, "an input for later; starts at once when idle", True),
    Method("queue/edit", QueueEditParams, QueueResult, "change an input that waits"),
    Method("queue/move", QueueMoveParams, QueueResult, "change when its turn comes"),
    Method("queue/remove", QueueRemoveParams, QueueResult, "take it out; answers what it was"),
    Method("approval/list", ApprovalListParams, ApprovalListResult, "what waits for a person's answer"),
    Method("approval/resolve", ApprovalResolveParams, ApprovalResolveResult, "answer one; the first answer holds"),
    Method("run/wait", RunParams, RunResult, "wait until a run is settled; always a result"),
    Method("model/list", NoParams, ModelListResult, "what can be chosen here, and why the rest cannot"),
)

METHODS: dict[str, Method] = {method.name: method for method in _TABLE}
