"""What a run's agent sees of its session: it speaks, it asks, and what it finishes becomes history."""

from __future__ import annotations

import uuid
from typing import assert_never

import msgspec
import trio

from loop_protocol.v1.types import (
    ApprovalRequest,
    AssistantMessage,
    ErrorInfo,
    Message,
    ModelRef,
    ToolCallBlock,
    ToolResultMessage,
)

from .agent import (
    Ask,
    Model,
    Reply,
    RetryWait,
    Said,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolEnded,
    ToolOutcome,
    ToolOutput,
    ToolStarted,
)
from .agent.context import ConversationInput
from .agent.permissions import answer_for
from .core.approvals import ASKED, Resolution
from .core.guards import REFUSED, Declined, Operation
from .core.history import decode_message, encode
from .core.inputs import UnsupportedInput, require_supported
from .core.runs import RunState
from .core.state import SessionCore
from .event_log import EventLog
from .models import ModelUnavailable
from .saving import Saving
from .storage.journal import entering
from .title_worker import TitleWorker


class Conversation:
    """A session's history as its model wants it: per prompt only what is new is encoded (S-23)."""

    def __init__(self, core: SessionCore) -> None:
        self._core = core
        self._input: ConversationInput | None = None
        self._model: ModelRef | None = None
        self._fed = 0

    async def for_model(self, model: Model) -> ConversationInput:
        """All of the history so far; encoded anew only after an opening or a model switch."""
        history = self._core.history
        if self._input is None or self._model != model.ref:
            fresh = ConversationInput(model)
            count = history.messages
            await fresh.rebuild(model, (history.line(index) for index in range(count)))
            self._input, self._model, self._fed = fresh, model.ref, count
        while self._fed < history.messages:
            self.add(decode_message(history.line(self._fed)))
        return self._input

    def add(self, message: Message) -> None:
        assert self._input is not None
        self._input.add(message)
        self._fed += 1


class Context:
    """All that an agent sees of its session. Once generation has ended it refuses: a stale agent must not speak into
    the next run."""

    def __init__(
        self,
        run: RunState,
        core: SessionCore,
        conversation: Conversation,
        saving: Saving,
        model: Model,
        titles: TitleWorker,
        events: EventLog,
    ) -> None:
        self._run = run
        self._core = core
        self._conversation = conversation
        self._saving = saving
        self._model = model
        self._titles = titles
        self._events = events

    def say(self, said: Said) -> None:
        self._require_speaking()
        shown = self._core.transcript
        match said:
            case TextDelta(text):
                shown.say_text(text)
            case ThinkingDelta(text):
                shown.say_thinking(text)
            case ToolCallDelta(id, name, arguments):
                shown.say_call(id, name, arguments)
            case ToolStarted(call):
                shown.begin_tool(call)
            case ToolOutput(call_id, text):
                shown.say_output(call_id, text)
            case ToolEnded(call_id, is_error):
                shown.complete_tool(call_id, is_error=is_error)
            case RetryWait(wait_s, reason):
                shown.announce_retry(wait_s, reason)
            case _:
                assert_never(said)

    async def append(self, finished: Reply | ToolOutcome, call: ToolCallBlock | None = None) -> Message:
        self._require_speaking()
        transcript = self._core.transcript
        message: AssistantMessage | ToolResultMessage
        if isinstance(finished, Reply):
            message = transcript.reply(finished.content, finished.usage, finished.stop_reason, model=self._core.model)
        else:
            assert call is not None
            message = transcript.result(call, finished.content, is_error=finished.is_error)
        line = encode(message)
        # Whoever stops the run meanwhile finds this message finished.
        await self._saving.journal(self._run, line)
        if isinstance(message, AssistantMessage):
            transcript.append_reply(message, line)
        else:
            transcript.append_result(message, line)
        self._conversation.add(message)
        return message

    async def approve(self, call: ToolCallBlock, ask: Ask) -> str | None:
        await trio.lowlevel.checkpoint()
        self._require_speaking()
        # Where a tool shields what it does: a run that was stopped asks nobody any more.
        if self._run.stop_requested or REFUSED[Operation.ASK_APPROVAL] & self._core.conditions():
            return answer_for("cancelled", None)
        approvals, policy = self._core.approvals, self._run.approvals
        if approvals.grant_covers(ask.rules):
            return None
        if len(msgspec.json.encode(call.arguments)) > ASKED:
            return "Not done: it is too much for a person to decide on at once. Do it in smaller parts."
        answered, at_work = trio.Event(), self._core.transcript.tools[call.id]
        at_work.allowed = False
        pending = approvals.ask(self._request(call, ask), answered.set)
        try:
            if policy.mode == "reject" and not self._events.has_approver:
                approvals.settle(pending, Resolution("unavailable"))
            with trio.move_on_after(float("inf") if policy.timeout_ms is None else policy.timeout_ms / 1000):
                await answered.wait()
            approvals.settle(pending, Resolution("timed-out"))
        finally:
            approvals.settle(pending, Resolution("cancelled"))
        # A stop right after the answer: it was allowed, and must not happen any more, also where a tool shields itself.
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._run.stop_requested:
            return answer_for("cancelled", None)
        resolution = pending.resolution
        assert resolution is not None
        refusal = answer_for(resolution.outcome, resolution.feedback)
        at_work.allowed = refusal is None
        return refusal

    def _request(self, call: ToolCallBlock, ask: Ask) -> ApprovalRequest:
        core, now, timeout_ms = self._core, self._core.clock.now_ms(), self._run.approvals.timeout_ms
        assert core.runtime_id is not None
        return ApprovalRequest(
            approval_id=uuid.uuid4().hex[:8],  # people type it
            runtime_id=core.runtime_id,
            session_id=core.id,
            run_id=self._run.id,
            tool_call_id=call.id,
            tool_name=call.name,
            arguments=call.arguments,
            operation=ask.operation,
            reason=ask.reason,
            cwd=core.cwd,
            sandbox=ask.sandbox,
            created_at=now,
            rules=list(ask.rules),
            rules_refused=ask.rules_refused,
            justification=ask.justification,
            path=ask.path,
            diff=ask.diff,
            sha256_before=ask.sha256_before,
            expires_at=None if timeout_ms is None else now + timeout_ms,
        )

    async def take_inputs(self) -> bool:
        self._require_speaking()
        queue, entered = self._core.queue, False
        # Once a stop is accepted what waits stays where the person saw it, though the agent comes by once more.
        while not self._run.stop_requested and (item := queue.next_steering):
            queue.begin(item, self._run.id)
            try:
                require_supported(item.content, self._model.input, str(self._model.ref))
                message = self._core.user_message(item.content)
                line = encode(message)
                await self._saving.journal(self._run, entering(item.request, line) if item.request else line)
            except (UnsupportedInput, Declined) as error:
                queue.leave(item, unacceptable(error))
                continue
            except BaseException:  # whatever it is, the item waits on
                queue.leave(item)
                raise
            self._core.enter(self._run, item, message, line)
            if not self._run.aborted:  # it was being written already when the abort came (T-9)
                self._titles.accept(message)
                self._titles.announce()
            self._conversation.add(message)
            entered = True
        return entered

    def _require_speaking(self) -> None:
        if not self._run.generating:
            raise RuntimeError("this run has ended")


def unacceptable(error: UnsupportedInput | ModelUnavailable | Declined) -> ErrorInfo:
    """Why a queued input cannot become part of the conversation, in the protocol's words."""
    match error:
        case UnsupportedInput():
            return ErrorInfo("unsupported_input", str(error))
        case ModelUnavailable():
            return ErrorInfo("model_unavailable", str(error))
        case Declined():
            return ErrorInfo(error.kind, str(error))
