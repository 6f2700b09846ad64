"""One open session: its supervised life, its slot, and the straight line of a prompt.

Whatever takes the slot runs in the session's nursery and never in a connection's, so a disconnect cancels nothing.
Nothing but ``Run.scope`` cancels a run: its task is shielded, and whoever ends the session stops the run and waits.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import trio

from loop_protocol.v1.methods import RecoverResult
from loop_protocol.v1.types import ModelRef, Permission, SessionKind, SessionState, UserMessage

from .agent import ToolEnvironment
from .core.announce import Announce, Silent
from .core.guards import Operation, Refused
from .core.history import History
from .core.state import SessionCore
from .core.timings import Clock
from .event_log import EventLog
from .job import Job
from .run import Conversation, Run, generate
from .saving import SETTLING_S, Saving
from .services import Services
from .storage import Metadata, StorageError, Store

log = logging.getLogger("loopd.session")
T = TypeVar("T")


class NothingToRecover(Exception):
    """No run that a crash cut off is to be had."""


def restored(
    meta: Metadata,
    history: History,
    *,
    kind: SessionKind,
    path: str | None,
    clock: Clock,
    runtime_id: str | None = None,
    announce: Announce | None = None,
) -> SessionCore:
    """The state of a session as its files tell it, right after they were validated."""
    return SessionCore(
        id=meta.id,
        kind=kind,
        cwd=meta.cwd,
        path=path,
        runtime_id=runtime_id,
        created_at=meta.created_at,
        updated_at=meta.updated_at,
        model=meta.model,
        permission=meta.permission,
        unread=meta.unread,
        pinned_at=meta.pinned_at,
        stored_title=meta.valid_title,
        history=history,
        committed=history.messages,
        committed_user=history.user_messages,
        announce=announce or Silent(),
        clock=clock,
    )


@dataclass(slots=True, frozen=True)
class Place:
    """Where a session is kept, links resolved; ``session_dir`` where that is not the usual place of its workspace."""

    directory: str
    session_dir: str | None


def nobody(_: Session) -> None:
    """Has nothing to do with a fault."""


class Session:
    """``serve`` is its life; ``ended`` is set when its lock is released."""

    def __init__(
        self,
        core: SessionCore,
        store: Store,
        services: Services,
        events: EventLog,
        env: ToolEnvironment,
        place: Place | None,
    ) -> None:
        self.core = core
        self.events = events
        self.env = env
        self.place = place
        self.disposal: Job[None] | None = None
        self.run: Run | None = None
        self.ended = trio.Event()
        self.on_fault: Callable[[Session], None] = nobody
        self.saving = Saving(core, store, services)
        self._services = services
        self._conversation = Conversation(core)
        self._ending = trio.Event()
        self._farewell: str | None = "shutdown"
        self._rescued: str | None = None
        self._job: Job[Any] | None = None
        self._performing: set[trio.CancelScope] = set()

    # --- life ---------------------------------------------------------------------------------------------------------

    async def serve(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until the session is closed. However it ends, a run in it is stopped, saved and settled first."""
        try:
            try:
                async with trio.open_nursery() as nursery:
                    self.nursery = nursery
                    task_status.started()
                    self.saving.show(live=True)
                    try:
                        await self._ending.wait()
                    finally:
                        if self.run:
                            self.run.stop()
                    nursery.cancel_scope.cancel()
            finally:
                with trio.move_on_after(SETTLING_S, shield=True):
                    await self.saving.settle()
        except Exception:  # boundary: session supervisor, the outermost: a fault in closing after a fault
            log.exception("session %s: closed without a rescue copy", self.core.id)
            self._farewell = "fault"
            self.on_fault(self)
        finally:
            if self.run:
                self.run.done.set()
            if self._farewell is not None:
                self.core.close(self._farewell, self._rescued)
            self.core.closed = True
            self.saving.close()
            self.ended.set()
            self.saving.show(live=False)

    def end(self, farewell: str | None, *, rescued: str | None = None) -> None:
        """No new work from here on. ``serve`` stops what goes on, waits for it, and says ``session_closed`` last, with
        ``farewell`` as the reason; None where the runtime goes on with another session, whose stream it is then (R-5).
        ``ended`` tells when it is over."""
        self.core.closed = True
        self._farewell, self._rescued = farewell, rescued
        self._ending.set()

    async def dispose(self, reason: str) -> None:
        """Stop and await what goes on, then close. Raises ``StorageError`` and stays open if the save fails (R-6)."""
        if self.run:
            self.run.stop()
        await self.quiet()
        if self.core.unsaved is not None:
            raise StorageError(self.core.unsaved)
        if not self.core.closed:
            self.end(reason)
        await self.ended.wait()

    async def quiet(self) -> None:
        """Until nothing goes on in it."""
        if self.run:
            await self.run.done.wait()
        if self._job:
            await self._job.settled()

    @property
    def can_be_reopened(self) -> bool:
        """Nothing would be lost if it were closed now; an id of a draft would be."""
        return self.core.kind == "persistent" and self.core.slot is None and not self.saving.unsaved

    # --- the slot -----------------------------------------------------------------------------------------------------

    def require(self, operation: Operation) -> None:
        """Raise ``Refused`` when ``operation`` may not happen now."""
        self.core.require(operation, draining=self._services.draining)

    def start(self, operation: Operation, work: Callable[[], Awaitable[T]]) -> Job[T]:
        """Take the slot and perform ``work`` in it. Raises ``Refused`` at once."""
        self.require(operation)
        self.core.take_slot(operation)

        async def in_slot() -> T:
            try:
                return await work()
            finally:
                self.core.free_slot()

        self._job = job = self._begin(in_slot)
        return job

    def start_beside(self, operation: Operation, work: Callable[[], Awaitable[T]]) -> Job[T]:
        """Perform ``work`` whatever holds the slot; it only queues for the store. Raises ``Refused`` at once."""
        self.require(operation)
        return self._begin(work)

    def _begin(self, work: Callable[[], Awaitable[T]]) -> Job[T]:
        job: Job[T] = Job()
        self.nursery.start_soon(self._perform, job, work)
        return job

    async def _perform(self, job: Job[T], work: Callable[[], Awaitable[T]]) -> None:
        with trio.CancelScope(shield=True) as performing:
            self._performing.add(performing)
            try:
                job.succeed(await work())
            except Exception as error:  # boundary: request; whoever waits for the job gets it
                job.fail(error)
            finally:
                self._performing.discard(performing)
        if performing.cancelled_caught:
            job.fail(StorageError("the daemon ends, and the disk does not answer"))

    def give_up(self) -> None:
        """The daemon ends and waits no longer for a disk that does not answer."""
        self.saving.give_up()
        for performing in tuple(self._performing):
            performing.cancel()

    # --- what clients ask for -----------------------------------------------------------------------------------------

    def state(self) -> SessionState:
        """A snapshot that agrees with the event log's head."""
        self.events.flush()
        return self.core.state()

    def prompt(self, message: UserMessage, *, request_id: str | None, digest: str | None) -> Run:
        """Accept: from here on the prompt is kept. No await, and no event before the reply is queued (D-2)."""
        self.run = run = Run(self.core.begin_run(message, request_id=request_id, digest=digest))
        self.nursery.start_soon(self._run, run, message)
        return run

    async def _run(self, run: Run, message: UserMessage) -> None:
        with trio.CancelScope(shield=True):
            try:
                await self.saving.journal(run.state, self.core.history.lines[-1])
                self.core.announce_run(run.state, message)
                error = await generate(run, self.core, self._conversation, self.saving, self._services, self.env)
                self.core.complete_run(run.state, error)
                await self.saving.save()
                self.core.settle_run(run.state)
            except Exception:  # boundary: session supervisor; a bug closes this session, never the daemon (D-5)
                log.exception("session %s: a fault closes it", self.core.id)
                await self._close_after_fault(run)
            self.run = None
            run.done.set()
            if self._services.draining:
                self._services.watch.state_changed()

    async def _close_after_fault(self, run: Run) -> None:
        """What is unsaved goes to a rescue copy, which the last event names. Where no place takes one the session stays
        open, with a pending save: nothing is thrown away (S-25)."""
        rescued, refusal = None, None
        if self.saving.unsaved and self.core.kind != "memory":
            try:
                rescued = await self.saving.rescue()
            except StorageError as error:
                refusal = str(error)
        if self.core.run is run.state:
            self.core.abandon_run(run.state)
        if refusal is not None:
            log.error("session %s: no rescue copy: %s", self.core.id, refusal)
            self.core.fail_save(refusal)
            return
        self.core.close("fault", rescued)
        self.end(None)
        self.on_fault(self)

    def recover(self) -> Job[RecoverResult]:
        """Take over what a crash left of a run (S-26). Raises ``Refused`` and ``NothingToRecover`` at once. The job
        fails with ``StorageError`` when the save does: then the messages are history, pending as after any run."""
        self.require(Operation.RECOVER)
        if self.core.recoverable is None:
            raise NothingToRecover("no crash cut off a run of this session")
        return self.start(Operation.RECOVER, self._recover)

    async def _recover(self) -> RecoverResult:
        found = await self.saving.cut_off()
        if found is None:
            raise NothingToRecover("what the crash left is not there any more")
        # Shielded from the end of the daemon too: half of it would be no conversation. Nothing here waits for long.
        with trio.CancelScope(shield=True):
            for message, line in found.messages:
                self.core.take_over(message, line)
                await trio.lowlevel.checkpoint()
        run = self.core.complete_recovery(found.run)
        await self.saving.save()
        self.core.settle_run(run)
        if self.core.unsaved is not None:
            raise StorageError(self.core.unsaved)
        return RecoverResult(run_id=run.id, messages=len(found.messages))

    async def set_model(self, model: ModelRef) -> ModelRef:
        await self.saving.set(model=model)
        return model

    async def set_permission(self, permission: Permission) -> Permission:
        await self.saving.set(permission=permission)
        return permission

    async def retry_save(self) -> None:
        """One more try at a save that failed, if nothing else is at work."""
        try:
            if self.core.unsaved is not None:
                await self.start(Operation.FLUSH, self.saving.flush).wait()
        except (Refused, StorageError):
            pass  # it stays pending, and whoever drains says so
