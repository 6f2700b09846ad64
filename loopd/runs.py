"""The runs of one session: what starts one, what ends it, and what is next.

Nothing but ``Run.scope`` cancels a run: its task is shielded, and whoever ends the session stops the run and waits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio

from loop_protocol.v1.types import Pause, UserBlock, UserMessage

from .agent import ToolEnvironment
from .core.guards import Condition, Declined, Operation, Refused
from .core.history import Request
from .core.inputs import UnsupportedInput, require_supported
from .core.queue import Item, new_item
from .core.runs import WAITING, ApprovalPolicy, RunState
from .core.state import SessionCore
from .event_log import EventLog
from .models import ModelUnavailable
from .run import Run, generate
from .run_context import Conversation, unacceptable
from .saving import Saving
from .services import Services
from .title_worker import TitleWorker

# What keeps a queue from going on once the slot is free; of the other conditions each has an end that starts it.
_PAUSING: dict[Condition, Pause] = {Condition.DRAINING: "draining", Condition.UNSAVED: "save_failed"}


def nobody(_: Any) -> None:
    """Has nothing to do with it."""


class Runs:
    """``current`` goes on, ``nursery`` is where. ``on_begin`` is told of each run, ``on_fault`` of a bug: it closes the
    session."""

    def __init__(
        self,
        core: SessionCore,
        saving: Saving,
        services: Services,
        env: ToolEnvironment,
        titles: TitleWorker,
        events: EventLog,
    ) -> None:
        self.current: Run | None = None
        self.nursery: trio.Nursery
        self.on_fault: Callable[[Run, Exception], Awaitable[None]]
        self.on_begin: Callable[[Run], None] = nobody
        self._core = core
        self._saving = saving
        self._services = services
        self._env = env
        self._titles = titles
        self._events = events
        self._conversation = Conversation(core)

    # --- what starts one ----------------------------------------------------------------------------------------------

    def prompt(
        self,
        content: list[UserBlock],
        request: Request | None = None,
        approvals: ApprovalPolicy = WAITING,
    ) -> Run:
        """Accept: from here on the prompt is kept. What can be checked is checked first (P-4): raises ``Refused``,
        ``ModelUnavailable``, ``UnsupportedInput`` and ``Declined``. No await, and no event before the reply is queued
        (D-2)."""
        self.require(Operation.PROMPT)
        message = self._message(content)
        return self._begin(self._core.begin_run(message, request), approvals, message)

    def resume(self, approvals: ApprovalPolicy = WAITING) -> Run:
        """Go on with the history as it is; where it ends with a whole answer, with a queue that is paused (Q-4). Raises
        what :meth:`prompt` raises."""
        self.require(Operation.RESUME)
        core = self._core
        if (left := core.recoverable) is not None:
            text = "a crash cut off a run; session/recover takes over what it finished, then there is more to resume"
            raise Declined("conflict", text, runId=left.run_id)
        anchor = core.history.resumable
        if anchor is not None:
            self._services.models.resolve(core.model)
            core.queue.lift()
            return self._begin(core.begin_resume(anchor), approvals)
        if not core.queue.items:
            end = "ends with a whole answer" if core.history.messages else "has no message yet"
            raise Declined("nothing_to_resume", f"the conversation {end}; send a prompt")
        run = self._start(core.queue.items[0])
        core.queue.lift()
        return run

    def add(
        self,
        content: list[UserBlock],
        *,
        steer: bool,
        request: Request | None,
        approvals: ApprovalPolicy = WAITING,
    ) -> tuple[Item, Run | None]:
        """Queue an input. One that does not have to wait is a prompt, and is refused as one."""
        self.require_queue()
        core = self._core
        now_ms = core.clock.now_ms()
        item = new_item(content, steer=steer, now_ms=now_ms, request=request, approvals=approvals)
        if core.queue.items or not self._may_start():
            core.user_message(content)  # what does not fit in one would never have its turn
            core.queue.add(item)
            self.start_queued()
            return item, None
        return item, self._start(item)

    def start_queued(self) -> None:
        """The slot may have become free: start what is next (Q-2). What is not acceptable stays where it is, and pauses
        the queue (Q-3)."""
        queue = self._core.queue
        item = queue.next
        if item is None:
            return
        try:
            self.require(Operation.START_QUEUED)
            self._start(item)
        except Refused as refused:
            if refused.condition in _PAUSING:
                queue.pause(_PAUSING[refused.condition])
        except (ModelUnavailable, UnsupportedInput, Declined) as error:
            queue.pause("error", unacceptable(error))

    def _start(self, item: Item) -> Run:
        """Raises what :meth:`_message` raises, and then it is where it was."""
        message = self._message(item.content)
        return self._begin(self._core.begin_queued(message, item), item.approvals, message)

    def require_queue(self) -> None:
        """Raise ``Refused`` when the queue may not be changed now."""
        if self._core.disposing:  # what is added would go with the session, unseen
            raise Refused(Condition.CLOSED, Operation.CHANGE_QUEUE, None)
        self.require(Operation.CHANGE_QUEUE)

    def _may_start(self) -> bool:
        try:
            self.require(Operation.START_QUEUED)
        except Refused:
            return False
        return True

    def require(self, operation: Operation) -> None:
        """Raise ``Refused`` when ``operation`` may not happen now."""
        self._core.require(operation, draining=self._services.draining)

    def _message(self, content: list[UserBlock]) -> UserMessage:
        model = self._services.models.resolve(self._core.model)
        require_supported(content, model.input, str(self._core.model))
        return self._core.user_message(content)

    def _begin(self, state: RunState, approvals: ApprovalPolicy, message: UserMessage | None = None) -> Run:
        state.approvals = approvals
        self.current = run = Run(state)
        self.on_begin(run)
        if message is not None:
            self._titles.accept(message)
        self.nursery.start_soon(self._perform, run, message)
        return run

    # --- its course, and its end --------------------------------------------------------------------------------------

    async def _perform(self, run: Run, message: UserMessage | None) -> None:
        core, saving = self._core, self._saving
        with trio.CancelScope(shield=True):
            try:
                if message is not None:
                    await saving.journal(run.state, core.history.lines[-1])
                core.announce_run(run.state, message)
                self._titles.announce()
                error = await generate(
                    run, core, self._conversation, saving, self._services, self._env, self._titles, self._events
                )
                core.complete_run(run.state, error)
                await saving.save()
                core.settle_run(run.state)
            except Exception as error:  # boundary: session supervisor; a bug closes this session alone (D-5)
                await self.on_fault(run, error)
            self.current = None
            run.done.set()
            self.start_queued()
            if self._services.draining:
                self._services.watch.state_changed()

    def stop(self) -> Run | None:
        """Ask the run to end; answers it. What waits does not start by itself after that, not even where generation was
        over already: nobody who stops wants the next one to begin (Q-3)."""
        self._core.queue.pause("stopped")
        self.interrupt()
        return self.current

    def interrupt(self) -> None:
        """Ask the run to end. What it asks is settled with it: an answer that comes now comes too late (A-4)."""
        if self.current and self.current.stop():
            self._core.approvals.cancel()
