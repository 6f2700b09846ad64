"""One run: from the accepted prompt to what its agent left behind; or to what a crash left of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial

import trio

from loop_protocol.v1.methods import RecoverResult
from loop_protocol.v1.types import (
    ErrorInfo,
    RunResult,
)

from .agent import (
    ModelError,
    ToolEnvironment,
)
from .agent.loop import Agent
from .agent.prompt import joined, prompt_sections
from .core.guards import Declined
from .core.runs import RunState
from .core.state import SessionCore
from .event_log import EventLog
from .run_context import Context, Conversation
from .saving import Saving
from .services import Services
from .storage import StorageError
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


async def generate(
    run: Run,
    core: SessionCore,
    conversation: Conversation,
    saving: Saving,
    services: Services,
    env: ToolEnvironment,
    titles: TitleWorker,
    events: EventLog,
) -> ErrorInfo | None:
    """Run a fresh agent from the history to its end (S-1). What went wrong is the run's outcome, never an exception."""
    try:
        with run.scope:
            model = services.models.resolve(core.model)
            conversed = await conversation.for_model(model)
            now = datetime.fromtimestamp(services.clock.now_ms() / 1000)
            prompt = partial(
                prompt_sections,
                cwd=core.cwd,
                permission=core.permission,
                sandbox=services.sandbox is None or (await services.sandbox.tried()).works,
                now=now,
                protected=services.protected,
            )
            sections = await in_thread(("prompt", core.id), prompt)
            core.history.checkpoint(sections)
            agent = Agent(
                model=model,
                tools=services.tools,
                input=conversed,
                system=joined(sections),
                cwd=core.cwd,
                env=env,
                permission=core.permission,
            )
            await agent.run(Context(run.state, core, conversation, saving, model, titles, events))
    except Exception as error:  # boundary: agent run; outside the scope, where a clean-up that raises lands too
        return _described(error, core.id)
    return None


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
