"""One run: from the accepted prompt to what its agent left behind; or to what a crash left of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import assert_never

import trio

from loop_protocol.v1.methods import RecoverResult
from loop_protocol.v1.types import (
    AssistantMessage,
    ErrorInfo,
    Message,
    ModelRef,
    RunResult,
    ToolCallBlock,
    ToolResultMessage,
)

from .agent import (
    Model,
    ModelError,
    Reply,
    RetryWait,
    Said,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
    ToolEnded,
    ToolEnvironment,
    ToolOutcome,
    ToolOutput,
    ToolStarted,
)
from .agent.context import ConversationInput
from .agent.loop import Agent
from .agent.prompt import system_prompt
from .core.guards import Declined
from .core.history import decode_message, encode
from .core.inputs import UnsupportedInput, require_supported
from .core.runs import RunState
from .core.state import SessionCore
from .models import ModelUnavailable
from .saving import Saving
from .services import Services
from .storage import StorageError
from .storage.journal import entering
from .threads import in_thread
from .title_worker import TitleWorker

log = logging.getLogger("loopd.run")


@dataclass(slots=True)
class Run:
    """A run's task: ``scope`` is its only way to be cancelled, ``done`` comes after ``run_settled``."""

    state: RunState
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    done: trio.Event = field(default_factory=trio.Event)

    def stop(self) -> bool:
        """Ask it to end; False when generation is over already (K-29)."""
        if self.state.generating:
            self.state.stop_requested = True
            self.scope.cancel()
        return self.state.stop_requested

    async def result(self) -> RunResult | None:
        """None when a fault closed the session before the run could settle."""
        await self.done.wait()
        return self.state.result


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


async def generate(
    run: Run,
    core: SessionCore,
    conversation: Conversation,
    saving: Saving,
    services: Services,
    env: ToolEnvironment,
    titles: TitleWorker,
) -> ErrorInfo | None:
    """Run a fresh agent from the history to its end (S-1). What went wrong is the run's outcome, never an exception."""
    try:
        with run.scope:
            model = services.models.resolve(core.model)
            conversed = await conversation.for_model(model)
            now = datetime.fromtimestamp(services.clock.now_ms() / 1000)
            prompt = partial(system_prompt, cwd=core.cwd, permission=core.permission, now=now)
            agent = Agent(
                model=model,
                tools=services.tools,
                input=conversed,
                system=await in_thread(("prompt", core.id), prompt),
                cwd=core.cwd,
                env=env,
                permission=core.permission,
            )
            await agent.run(_Context(run.state, core, conversation, saving, model, titles))
    except Exception as error:  # boundary: agent run; outside the scope, where a clean-up that raises lands too
        return _described(error, core.id)
    return None


class _Context:
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
    ) -> None:
        self._run = run
        self._core = core
        self._conversation = conversation
        self._saving = saving
        self._model = model
        self._titles = titles

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


async def recover(core: SessionCore, saving: Saving) -> RecoverResult:
    """Take over what a crash left of a run (S-26). Raises ``Declined`` where it is gone, ``StorageError`` when the save
    fails: then the messages are history, pending as after any run."""
    found = await saving.cut_off()
    if found is None:
        core.recoverable = None
        raise Declined("nothing_to_recover", "what the crash left is not there any more")
    # Shielded from the end of the daemon too: half of it would be no conversation. Nothing here waits for long.
    with trio.CancelScope(shield=True):
        for message, line in found.messages:
            core.take_over(message, line)
            await trio.lowlevel.checkpoint()
    run = core.complete_recovery(found.run)
    await saving.save()
    core.settle_run(run)
    if core.unsaved is not None:
        raise StorageError(core.unsaved)
    return RecoverResult(run_id=run.id, messages=len(found.messages))


def _described(error: Exception, session_id: str) -> ErrorInfo:
    """A failed run's error, for people. A bug is logged with its traceback and named as such."""
    if isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        return _described(error.exceptions[0], session_id)
    if isinstance(error, ModelError):
        return ErrorInfo(error.kind, str(error))
    log.error("session %s: a fault in a run", session_id, exc_info=error)
    return ErrorInfo("internal", f"a fault in the daemon ended the run: {type(error).__name__}: {error}")
