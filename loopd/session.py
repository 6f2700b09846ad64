"""One open session: its supervised life, and its slot.

Whatever takes the slot runs in the session's nursery and never in a connection's, so a disconnect cancels nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import trio

from loop_protocol.v1.methods import RecoverResult
from loop_protocol.v1.types import SessionState, Title

from .agent import ToolEnvironment
from .config import TitlePolicy
from .core.guards import Declined, Operation, Refused
from .core.snapshot import snapshot
from .core.state import SessionCore
from .event_log import EventLog
from .job import Job, Jobs
from .run import Run, recover
from .runs import Runs, nobody
from .saving import SETTLING_S, Saving
from .services import Services
from .storage import StorageError, Store
from .title_worker import TitleWorker

log = logging.getLogger("loopd.session")
T = TypeVar("T")
# Titles that were asked for before one of these are stale (T-10).
_OUTDATING = (Operation.SET_MODEL, Operation.RENAME_TITLE)


@dataclass(slots=True, frozen=True)
class Place:
    """Where a session is kept, links resolved; ``session_dir`` where that is not the usual place of its workspace."""

    directory: str
    session_dir: str | None


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
        title: TitlePolicy,
    ) -> None:
        self.core = core
        self.events = events
        self.env = env
        self.place = place
        self.disposal: Job[None] | None = None
        self.ended = trio.Event()
        self.on_fault: Callable[[Session], None] = nobody
        self.saving = Saving(core, store, services)
        self.titles = TitleWorker(core, self.saving, services, title)
        self.runs = Runs(core, self.saving, services, env, self.titles, events)
        core.approvals.observe, core.approvals.settled = services.watch.approval, services.approvals
        self._services = services
        self._ending = trio.Event()
        self._farewell: str | None = "shutdown"
        self._rescued: str | None = None
        self._job: Job[Any] | None = None
        self._jobs: Jobs

    # --- life ---------------------------------------------------------------------------------------------------------

    async def serve(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until the session is closed. However it ends, a run in it is stopped, saved and settled first."""
        try:
            try:
                async with trio.open_nursery() as nursery:
                    self.runs.nursery, self.runs.on_fault = nursery, self._close_after_fault
                    self.titles.nursery = nursery
                    self._jobs = Jobs(nursery, lambda: StorageError("the daemon ends, and the disk does not answer"))
                    task_status.started()
                    self.saving.show(live=True)
                    try:
                        await self._ending.wait()
                    finally:
                        # Nothing starts any more. What waits goes without a word: the runtime may tell of the session
                        # that follows already.
                        self.core.closed = True
                        self.interrupt()
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
            del self.runs.on_fault  # a closed session must not wait for the garbage collector
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
        self.runs.stop()
        self.titles.cancel()
        await self.quiet()
        if self.core.unsaved is not None:
            raise StorageError(self.core.unsaved)
        if not self.core.closed:
            self.end(reason)
        await self.ended.wait()

    @property
    def run(self) -> Run | None:
        """What goes on in it."""
        return self.runs.current

    async def quiet(self) -> None:
        """Until nothing goes on in it."""
        if self.run:
            await self.run.done.wait()
        if self._job:
            await self._job.settled()
        await self.titles.settled()

    def interrupt(self) -> None:
        """Ask what goes on in it to end."""
        self.runs.interrupt()
        self.titles.interrupt()

    @property
    def can_be_reopened(self) -> bool:
        """Nothing would be lost by closing it now, such as the id of a draft. What was allowed for the session is asked
        again: who is away for so long may not remember it."""
        core = self.core
        idle = core.slot is None and not core.queue.items and not self.titles.busy
        return core.kind == "persistent" and idle and not self.saving.unsaved

    # --- the slot -----------------------------------------------------------------------------------------------------

    def require(self, operation: Operation) -> None:
        """Raise ``Refused`` when ``operation`` may not happen now."""
        self.runs.require(operation)

    def start(self, operation: Operation, work: Callable[[], Awaitable[T]]) -> Job[T]:
        """Take the slot and perform ``work`` in it. Raises ``Refused`` at once."""
        self.require(operation)
        if operation in _OUTDATING:
            self.titles.cancel()
        self.core.take_slot(operation)

        async def in_slot() -> T:
            try:
                return await work()
            finally:
                self.core.free_slot()
                self.runs.start_queued()

        self._job = job = self._jobs.start(in_slot)
        return job

    def start_beside(self, operation: Operation, work: Callable[[], Awaitable[T]]) -> Job[T]:
        """Perform ``work`` whatever holds the slot; it only queues for the store. Raises ``Refused`` at once."""
        self.require(operation)
        return self._jobs.start(work)

    def give_up(self) -> None:
        """The daemon ends and waits no longer for a disk that does not answer."""
        self.saving.give_up()
        self._jobs.give_up()

    # --- what clients ask for -----------------------------------------------------------------------------------------

    def state(self) -> SessionState:
        """A snapshot that agrees with the event log's head."""
        self.events.flush()
        return snapshot(self.core)

    async def _close_after_fault(self, run: Run, fault: Exception) -> None:
        """What is unsaved goes to a rescue copy, which the last event names. Where no place takes one the session stays
        open, with a pending save: nothing is thrown away (S-25)."""
        log.error("session %s: a fault closes it", self.core.id, exc_info=fault)
        self.titles.cancel()  # its text may never be told, and the session may stay open
        rescued, refusal = None, None
        if self.saving.unsaved and self.core.kind != "memory":
            try:
                rescued = await self.saving.rescue()
            except StorageError as error:
                refusal = str(error)
        await self.titles.drain()  # nothing is told after the last event, and before it nothing gets the slot
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
        """Take over what a crash left of a run (S-26). Raises ``Refused`` and ``Declined`` at once. The job fails with
        ``StorageError`` when the save does: then the messages are history, pending as after any run."""
        self.require(Operation.RECOVER)
        if self.core.recoverable is None:
            raise Declined("nothing_to_recover", "no crash cut off a run of this session")
        return self.start(Operation.RECOVER, partial(recover, self.core, self.saving))

    async def flush(self) -> bool:
        """Write what a failed save left in memory, and then a title that waited for that; False when there is nothing.
        Raises ``StorageError``."""
        flushed = await self.saving.flush()
        await self.titles.write_held()
        return flushed

    def refresh_title(self) -> Job[Title]:
        """A title of what is saved, as the policy says (T-8). Raises ``Refused`` and ``Declined`` at once."""
        self.require(Operation.REFRESH_TITLE)
        if not self.core.history.texts:
            raise Declined("title_failed", "there is no text yet to make a title of", reason="no_text")
        return self.start(Operation.REFRESH_TITLE, self.titles.begin_refresh())

    async def title_settled(self) -> None:
        """Until no title is being made or written (T-9)."""
        while self.titles.busy or self.core.slot in (Operation.RENAME_TITLE, Operation.REFRESH_TITLE):
            if self._job and not self.titles.busy:
                await self._job.settled()
            await self.titles.settled()

    async def retry_save(self) -> None:
        """One more try at a save that failed, if nothing else is at work."""
        try:
            if self.core.unsaved is not None:
                await self.start(Operation.FLUSH, self.flush).wait()
        except (Refused, StorageError):
            pass  # it stays pending, and whoever drains says so
