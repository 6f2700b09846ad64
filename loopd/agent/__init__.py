"""The ports: what an agent sees of its session, of a model and of a tool, and what these may answer.

Nothing here does anything. ``loop.py`` drives these ports, ``models/`` and ``tools/`` implement them, and
``run_context.py`` implements :class:`RunContext`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from loop_protocol.v1.types import (
    AssistantBlock,
    Message,
    ModelRef,
    Permission,
    StopReason,
    ToolCallBlock,
    Usage,
    UserBlock,
)

# --- what is said while it happens: shown to people, never history ----------------------------------------------------


class TextDelta(msgspec.Struct, frozen=True):
    text: str


class ThinkingDelta(msgspec.Struct, frozen=True):
    text: str


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A fragment of a call's arguments as JSON text."""

    id: str
    name: str
    arguments: str


Delta = TextDelta | ThinkingDelta | ToolCallDelta


class ToolStarted(msgspec.Struct, frozen=True):
    call: ToolCallBlock


class ToolOutput(msgspec.Struct, frozen=True):
    call_id: str
    text: str


class ToolEnded(msgspec.Struct, frozen=True):
    call_id: str
    is_error: bool


@dataclass(slots=True, frozen=True)
class RetryWait:
    """The model could not be asked, and will be again after ``wait_s``."""

    wait_s: float
    reason: str


Said = Delta | ToolStarted | ToolOutput | ToolEnded | RetryWait


# --- models -----------------------------------------------------------------------------------------------------------


# The kinds that pass by themselves; of the others whoever raises knows better.
PASSING = frozenset({"rate_limit", "unreachable", "overloaded"})


class ModelError(Exception):
    """The model could not answer. ``kind`` is ``auth``, ``rate_limit``, ``refused``, ``unreachable``, ``incomplete``,
    ``content_filter``, ``overloaded`` or ``provider``; it becomes the run's outcome, never an RPC error.

    ``retryable``: the same request may succeed a little later, by its kind where nothing else is said.
    ``retry_after_s``: how much later, where the provider says so.
    """

    def __init__(
        self, kind: str, message: str, *, retryable: bool | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.retryable = kind in PASSING if retryable is None else retryable
        self.retry_after_s = retry_after_s


class Reply(msgspec.Struct, frozen=True):
    """A model's finished answer: what becomes the assistant message. ``stop_reason`` is stop, toolUse or length."""

    content: list[AssistantBlock]
    usage: Usage
    stop_reason: StopReason


class ModelInput(Protocol):
    """The conversation as one provider wants it, kept incrementally by ``context.py``."""

    @property
    def encoded(self) -> bytes | bytearray | memoryview:
        """Every group as :meth:`Model.encode` gave it, joined by commas."""

    @property
    def turn(self) -> Sequence[Message]:
        """The messages from the last user message on, decoded."""


class ToolSpec(msgspec.Struct, frozen=True):
    """A tool as it is declared to a model; ``parameters`` is a JSON schema object."""

    name: str
    description: str
    parameters: dict[str, Any]


class ModelRequest(msgspec.Struct, frozen=True):
    system: str
    input: ModelInput
    tools: Sequence[ToolSpec] = ()
    max_output_tokens: int | None = None


class Model(Protocol):
    """One model of one provider. Stateless: any number of requests may run at once."""

    @property
    def ref(self) -> ModelRef: ...

    @property
    def input(self) -> frozenset[str]:
        """The kinds of input that it takes: ``text``, ``image``."""

    def encode(self, group: Sequence[Message]) -> bytes:
        """One group in the provider's form: a user message, or an assistant message with all its tool results.

        JSON objects joined by commas, without a comma at either end; empty for what the provider must not see
        (aborted and failed partial text).
        """

    async def respond(self, request: ModelRequest, say: Callable[[Delta], None]) -> Reply:
        """One model turn. ``say`` gets each piece as it arrives, in order; the reply's text is exactly their sum.

        Raises :class:`ModelError`. Cancelling it closes the connection at once.
        """


# --- tools ------------------------------------------------------------------------------------------------------------

# Arguments that are no JSON object are a call's only argument, of this name, as text.
MALFORMED_KEY = "__malformed__"


@dataclass(slots=True, frozen=True)
class ToolOutcome:
    """What the model is told. A failed tool is an outcome with ``is_error``, not an exception."""

    content: list[UserBlock]
    is_error: bool = False


@dataclass(slots=True, frozen=True)
class ToolEnvironment:
    """What tools take over from whoever opened the session: all ``variables`` of their processes, and the ``umask`` of
    these and of the files that they make."""

    variables: dict[str, str]
    umask: int = 0o022


@dataclass(slots=True, frozen=True, kw_only=True)
class Ask:
    """What a call wants to do and may not by itself: the fields of ``ApprovalRequest`` that its tool knows."""

    operation: Literal["command", "write", "edit"]
    reason: str
    sandbox: str
    rules: Sequence[str] = ()
    rules_refused: str | None = None
    justification: str | None = None
    path: str | None = None
    diff: str | None = None
    sha256_before: str | None = None


@dataclass(slots=True, frozen=True)
class ToolScope:
    """What one call may use. ``cwd`` is the workspace, links resolved. ``ask`` waits for a person, and answers None
    where it was allowed, else what the model is told. ``output`` shows text while it runs; ``accepts`` is the kinds of
    input that the model takes."""

    call_id: str
    cwd: str
    env: ToolEnvironment
    permission: Permission
    ask: Callable[[Ask], Awaitable[str | None]]
    output: Callable[[str], None]
    accepts: frozenset[str] = frozenset({"text"})


class Tool(Protocol):
    """``parameters`` is a ``msgspec.Struct`` type; the loop decodes the model's arguments into it before ``run``."""

    name: str
    description: str
    parameters: type[msgspec.Struct]

    async def run(self, arguments: Any, scope: ToolScope) -> ToolOutcome:
        """Perform one call. When it returns or is cancelled, no process of it exists any more."""


# --- the session, as an agent sees it ---------------------------------------------------------------------------------


class RunContext(Protocol):
    """All that an agent sees of its session. A stale agent's context refuses to speak into the next run."""

    def say(self, said: Said) -> None:
        """Show something now. Synchronous: what arrives together becomes one event."""

    async def append(self, finished: Reply | ToolOutcome, call: ToolCallBlock | None = None) -> Message:
        """Make a finished message history: a model's reply, or the outcome of ``call``. It is journalled before anybody
        sees it, which takes bounded time and cannot be cancelled (S-26)."""

    async def approve(self, call: ToolCallBlock, ask: Ask) -> str | None:
        """Wait until a person allows what ``call`` wants to do, unless it was allowed for the session before. None: it
        may happen, exactly as asked, once. Else what the model is told instead (A-2)."""

    async def take_inputs(self) -> bool:
        """Let what people want to steer the run with become history, at a moment when all calls have their results
        (Q-2); whether there was any. It waits for nothing when there is none, so that nothing can come between the last
        time and the end of the run."""
