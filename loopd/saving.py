"""A session's writes: one after the other, in a thread of its own, and none is waited for beyond its deadline."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import trio

from .core.state import RunState, SessionCore
from .services import Services
from .storage import CutOff, Metadata, Snapshot, StorageError, Store

# A disk that does not answer for so long counts as failed. Its thread cannot be cancelled: the next write waits for it.
STORAGE_DEADLINE_S = 20.0
# For all places together: with the drain's deadline of at most 8 s it leaves a TERM within its 10 s (D-4).
RESCUE_DEADLINE_S = 1.5
# A run does not wait longer for its journal, which is a convenience: the save decides.
JOURNAL_DEADLINE_S = 1.0

log = logging.getLogger("loopd.saving")
T = TypeVar("T")


class Saving:
    """What is on disk of a session, what is not yet, and the way there (S-10, S-13…S-16)."""

    def __init__(self, core: SessionCore, store: Store, services: Services) -> None:
        self._core = core
        self._store = store
        self._services = services
        self._saved_lines = len(core.history.lines)
        self._attempt: Snapshot | None = None
        # The one lock: writes are queued where everything else is refused.
        self._lock = trio.Lock()
        self._writing: trio.CancelScope | None = None
        # A hung disk occupies this session's thread and no other's.
        self._thread = trio.CapacityLimiter(1)

    @property
    def unsaved(self) -> bool:
        """There is history that no file has yet."""
        return self._saved_lines < len(self._core.history.lines)

    async def save(self, *, rewrite: bool = False) -> None:
        """Commit all of the history. A failure is told by events and ``core.unsaved``, and kept for ``flush``."""
        snapshot = self._snapshot()
        try:
            await self._write(partial(self._commit, snapshot, rewrite=rewrite))
        except StorageError as error:
            if str(error) != self._core.unsaved:  # a drain tries several times a second
                log.error("session %s: %s", self._core.id, error)
            self._core.fail_save(str(error))
            return
        self._attempt, self._saved_lines = None, snapshot.count
        self._core.complete_save(
            messages=snapshot.messages,
            user_messages=snapshot.user_messages,
            updated_at=snapshot.changes["updated_at"],
            unread=snapshot.changes["unread"],
        )
        self._services.catalog.note(self._core.cwd, self._core.updated_at)

    def _commit(self, snapshot: Snapshot, *, rewrite: bool) -> Metadata:
        meta = self._store.commit(snapshot, rewrite=rewrite)
        self._store.journal.remove()
        return meta

    async def flush(self) -> bool:
        """Write what a failed save left in memory (S-16); False when there is nothing. Raises ``StorageError``."""
        if self._core.unsaved is None:
            return False
        await self.save(rewrite=True)
        if self._core.unsaved is not None:
            raise StorageError(self._core.unsaved)
        return True

    async def set(self, **changes: Any) -> None:
        """Change settings: saved first, then true, so that a failure leaves both as they were."""
        updated_at = self._next_update()
        await self._write(partial(self._store.update, {**changes, "updated_at": updated_at}))
        self._services.catalog.note(self._core.cwd, updated_at)
        self._core.apply(updated_at=updated_at, **changes)

    async def journal(self, run: RunState, line: bytes) -> None:
        """Keep a message that ``run`` finished, before anybody sees it, for the case of a crash (S-26). Bounded, and it
        cannot fail: a disk that refuses or hangs costs this run its journal."""
        if run.journalled is False:
            return
        journal = self._store.journal
        call = partial(journal.append, line)
        if run.journalled is None:
            commit_id = self._store.meta.committed.commit_id
            call = partial(journal.begin, commit_id, self._core.record_if_cut_off(run), line)
        run.journalled, reason = False, f"{self._store.path}: the disk did not answer in time"
        with trio.CancelScope(shield=True, deadline=trio.current_time() + JOURNAL_DEADLINE_S):
            try:
                async with self._lock:
                    await trio.to_thread.run_sync(call, limiter=self._thread, abandon_on_cancel=True)
                run.journalled = True
            except StorageError as error:
                reason = str(error)
        if not run.journalled:
            log.warning("session %s: a crash in this run would lose it: %s", self._core.id, reason)

    async def cut_off(self) -> CutOff | None:
        """What a crash left, to be taken over now; None where it is gone. Raises ``StorageError``."""
        store = self._store
        return await self._write(partial(store.journal.take, store.meta.committed.commit_id, self._core.history))

    async def rescue(self) -> str:
        """Write what is unsaved beside the sessions; answers where. Raises ``StorageError`` when no place takes it."""
        snapshot = self._snapshot()
        refusals: list[str] = []
        roots = self._services.rescue_roots
        for root in roots:
            try:
                return await self._rescue_below(root, snapshot, limit_s=RESCUE_DEADLINE_S / len(roots))
            except StorageError as error:
                refusals.append(str(error))
        raise StorageError("; ".join(refusals) or "no place for a rescue copy is configured")

    async def _rescue_below(self, root: str, snapshot: Snapshot, *, limit_s: float) -> str:
        """Each place has a deadline of its own: the first is on the disk that may be the one that hangs."""
        call = partial(self._store.rescue, [root], snapshot)
        with trio.CancelScope(shield=True, deadline=trio.current_time() + limit_s):
            # A thread of its own: the session's may hang too.
            return await trio.to_thread.run_sync(call, limiter=trio.CapacityLimiter(1), abandon_on_cancel=True)
        raise StorageError(f"{root} did not answer in time")

    def give_up(self) -> None:
        """Somebody cannot wait for the disk any longer: what is being written counts as not saved."""
        if self._writing:
            self._writing.cancel()

    def close(self) -> None:
        """Release the lock, unless a write hangs: that one keeps it, and its descriptors, until it ends."""
        if not self._thread.borrowed_tokens:
            self._store.close()

    def _snapshot(self) -> Snapshot:
        """What a save shall publish now; one whose save failed keeps its identity through every retry."""
        core, history = self._core, self._core.history
        if self._attempt is None or self._attempt.count != len(history.lines):
            self._attempt = Snapshot(
                commit_id=str(uuid.uuid4()),
                lines=history.lines,
                count=len(history.lines),
                messages=history.messages,
                user_messages=history.user_messages,
                changes={
                    "model": core.model,
                    "permission": core.permission,
                    "unread": core.unread or core.has_new_output,
                    "updated_at": self._next_update(),
                },
            )
        return self._attempt

    def _next_update(self) -> int:
        """Clock steps change the order neither within a session nor between sessions (S-9)."""
        highest = self._services.catalog.highest_known(self._core.cwd)
        return max(self._services.clock.now_ms(), self._core.updated_at + 1, highest + 1)

    async def _write(self, call: Callable[[], T]) -> T:
        async with self._lock:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + STORAGE_DEADLINE_S) as self._writing:
                return await trio.to_thread.run_sync(call, limiter=self._thread, abandon_on_cancel=True)
        raise StorageError(f"{self._store.path}: the disk did not answer in time; check it, then flush")
