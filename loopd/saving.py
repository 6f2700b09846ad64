"""A session's writes: one after the other, in a thread of its own, and none is waited for beyond its deadline."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import trio

from loop_protocol.v1.types import Title, Usage

from .core.guards import Operation
from .core.marks import is_seen, pin_of
from .core.runs import RunState
from .core.state import SessionCore
from .core.timings import following
from .services import Services
from .storage import CutOff, Metadata, Snapshot, StorageError, Store
from .watch import row

# A disk that does not answer for so long counts as failed. Its thread cannot be cancelled: the next write waits for it.
STORAGE_DEADLINE_S = 20.0
# For all places together: with the drain's deadline of at most 8 s it leaves a TERM within its 10 s (D-4).
RESCUE_DEADLINE_S = 1.5
# A session that ends does not wait longer for a change that failed before.
SETTLING_S = 1.0
# A run does not wait longer for its journal, which is a convenience: the save decides.
JOURNAL_DEADLINE_S = 1.0

log = logging.getLogger("loopd.saving")


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
        self._turns: set[trio.CancelScope] = set()
        # The last write has not answered: it failed, or goes on.
        self._in_doubt = False
        # A hung disk occupies this session's thread and no other's.
        self._thread = trio.CapacityLimiter(1)

    @property
    def unsaved(self) -> bool:
        """There is history that no file has yet."""
        return self._saved_lines < len(self._core.history.lines)

    async def save(self, *, rewrite: bool = False) -> None:
        """Commit all of the history. A failure is told by events and ``core.unsaved``, and kept for ``flush``."""
        try:
            async with self._turn():
                was_pending, snapshot = self._core.unsaved is not None, self._snapshot()
                await self._write(partial(self._commit, snapshot, rewrite=rewrite))
                self._attempt, self._saved_lines = None, snapshot.count
                self._core.complete_save(
                    messages=snapshot.messages,
                    user_messages=snapshot.user_messages,
                    updated_at=snapshot.changes["updated_at"],
                    unread=snapshot.changes["unread"],
                )
                self._services.catalog.note(self._core.cwd, self._core.updated_at)
                if was_pending:
                    self._services.watch.state_changed()
        except StorageError as error:
            # No await since the turn ended: whoever has the next one finds the save pending.
            if str(error) != self._core.unsaved:  # a drain tries several times a second
                log.error("session %s: %s", self._core.id, error)
            self._core.fail_save(str(error))
            self._services.watch.state_changed()

    def _commit(self, snapshot: Snapshot, *, rewrite: bool) -> Metadata:
        meta = self._store.commit(snapshot, rewrite=rewrite)
        self._store.journal.remove()
        return meta

    async def flush(self) -> bool:
        """Write what a failed write left in memory (S-16); False when there is nothing. Raises ``StorageError``."""
        if self._core.unsaved is not None:
            await self.save(rewrite=True)
            if self._core.unsaved is not None:
                raise StorageError(self._core.unsaved)
            return True
        async with self._turn():
            if not self._in_doubt:
                return False
            await self._update(rewrite=True)
            return True

    # Settings are saved first, then true, so that a failure leaves both as they were.

    async def set(self, **changes: Any) -> None:
        """Change model or permission, which counts as activity (S-9)."""
        async with self._turn():
            updated_at = self._next_update()
            await self._update(**changes, updated_at=updated_at)
            self._services.catalog.note(self._core.cwd, updated_at)
            self._core.apply(updated_at=updated_at, **changes)

    async def rename(self, title: Title) -> None:
        await self.retitle(title, lambda: True)

    async def retitle(self, title: Title, accept: Callable[[], bool], spent: Usage | None = None) -> bool:
        """``accept`` is asked in the title's turn, right before its write: nobody takes it back after that, and what
        supersedes it is written later (T-10). Answers whether it was written. ``spent``: what it took."""
        async with self._turn():
            if not accept():
                return False
            await self._update(title=title)
            self._core.titles.change(title, spent)
            return True

    async def pin(self, pinned: bool) -> int | None:
        """S-7: answers the stamp. May happen during a run and while a save is pending."""
        async with self._turn():
            core = self._core
            core.require(Operation.SET_PINNED, draining=self._services.draining)
            stamp = pin_of(core.pinned_at, pinned=pinned, now_ms=self._services.clock.now_ms())
            if stamp != core.pinned_at:
                await self._update(pinned_at=stamp)
                core.apply_pin(stamp)
            return stamp

    async def mark_read(self, message_count: int) -> bool:
        """S-6. Decided only now: a save that was under way may have added messages, or failed."""
        async with self._turn():
            core = self._core
            core.require(Operation.MARK_READ, draining=self._services.draining)
            seen = is_seen(message_count, saved=core.committed)
            if seen and core.unread:
                await self._update(unread=False)
                core.apply_read()
            return seen

    async def journal(self, run: RunState, line: bytes) -> None:
        """Keep a message that ``run`` finished, before anybody sees it, for the case of a crash (S-26). Bounded, and it
        cannot fail: a disk that refuses or hangs costs this run its journal."""
        if run.journalled is False or self._store.path is None:
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
        async with self._turn():
            store = self._store
            take = partial(store.journal.take, store.meta.committed.commit_id, self._core.history)
            return await trio.to_thread.run_sync(take, limiter=self._thread, abandon_on_cancel=True)

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
        for turn in tuple(self._turns):
            turn.cancel()

    async def settle(self) -> None:
        """A change that failed may stand on disk all the same. Before the session is let go the disk is told once more
        what holds (I-6). Bounded, and it cannot fail: on a disk that is still broken the doubt stays."""
        if self._in_doubt and self._core.unsaved is None:
            with suppress(StorageError):
                async with self._turn(limit_s=SETTLING_S):
                    await self._update()

    def close(self) -> None:
        """Release the lock, unless a write hangs: that one keeps it, and its descriptors, until it ends."""
        if not self._thread.borrowed_tokens:
            self._store.close()

    def _snapshot(self) -> Snapshot:
        """What a save shall publish now; one whose save failed keeps its identity through every retry."""
        core, history = self._core, self._core.history
        output = core.unread or core.has_new_output
        if self._attempt is None or self._attempt.count != len(history.lines):
            self._attempt = Snapshot(
                commit_id=str(uuid.uuid4()),
                lines=history.lines,
                count=len(history.lines),
                messages=history.messages,
                user_messages=history.user_messages,
                fallback=history.fallback,
                changes={"updated_at": self._next_update()},
            )
        # What was set since a failed attempt is not taken back by the next one.
        return replace(self._attempt, changes=self._settings() | {"unread": output} | self._attempt.changes)

    def _settings(self) -> dict[str, Any]:
        """Every write says all of them, so that one that failed, published or not, costs only itself (I-6)."""
        core = self._core
        return {
            "model": core.model,
            "permission": core.permission,
            "pinned_at": core.pinned_at,
            "title": core.titles.stored,
        }

    def _next_update(self) -> int:
        """Clock steps change the order neither within a session nor between sessions (S-9)."""
        highest = self._services.catalog.highest_known(self._core.cwd)
        return following(self._services.clock.now_ms(), self._core.updated_at, highest)

    @asynccontextmanager
    async def _turn(self, *, limit_s: float | None = None) -> AsyncIterator[None]:
        """After the writes that came before. Raises ``StorageError`` where the disk does not answer in time."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + (limit_s or STORAGE_DEADLINE_S)) as turn:
            self._turns.add(turn)
            try:
                async with self._lock:
                    yield
            finally:
                self._turns.discard(turn)
        if turn.cancelled_caught:
            raise StorageError(f"{self._store.path}: the disk did not answer in time; check it, then flush")

    async def _update(self, *, rewrite: bool = False, **changes: Any) -> None:
        """Metadata alone. ``unread`` and the time belong to a pending save: it may be published after all."""
        settings = self._settings()
        if self._core.unsaved is None:
            settings |= {"unread": self._core.unread, "updated_at": self._core.updated_at}
        await self._write(partial(self._store.update, settings | changes, rewrite=rewrite))

    async def _write(self, call: Callable[[], object]) -> None:
        self._in_doubt = True
        await trio.to_thread.run_sync(call, limiter=self._thread, abandon_on_cancel=True)
        self._in_doubt = False
        self.show(live=True)

    def show(self, *, live: bool) -> None:
        """Tell who watches how a list of sessions shows this one, if any does: it was written, opened or closed."""
        meta, path = self._store.meta, self._store.path
        if path is not None and (self._core.kind != "draft" or meta.committed.messages):
            self._services.watch.changed(row(path, meta, live=live))
