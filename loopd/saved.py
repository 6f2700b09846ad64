"""Sessions that are not open, by path: read without a lock, marked, renamed and deleted under the lock of a writer."""

from __future__ import annotations

import os.path
from collections.abc import Callable
from functools import partial
from threading import Event
from typing import Any, TypeVar

import trio

from loop_protocol.v1.types import Title

from .core.marks import is_seen, pin_of
from .core.state import SessionCore
from .restoring import restored
from .services import Services
from .storage import Metadata, SessionMissing, files, legacy, unopened
from .storage.document import META
from .storage.journal import recoverable_at
from .storage.places import id_of
from .threads import in_thread
from .watch import row

T = TypeVar("T")


class SavedSession:
    """A session on disk. Whoever changes it has the registry's turn for it, so that nobody opens it meanwhile."""

    def __init__(self, path: str, services: Services) -> None:
        self.path = path
        self._services = services

    async def read(self) -> SessionCore:
        """Its state as of the last commit. Raises what opening raises, except that a lock does not matter."""
        return await trio.to_thread.run_sync(
            self._read,
            abandon_on_cancel=True,  # it only reads, and the disk may hang
            limiter=self._services.reading,
        )

    def _read(self) -> SessionCore:
        """Reading is no opening: a session of an earlier version stays where it is (S-18)."""
        services = self._services
        if self.path.endswith(legacy.SUFFIX):
            chosen = services.config.default.permission
            path, meta, history = legacy.read(
                services.fs, self.path, model=services.models.default(), permission=chosen
            )
        else:
            path = self.path
            meta, history = files.read_session(services.fs, path)
        core = restored(meta, history, kind="persistent", path=path, clock=services.clock)
        if path.endswith(META):
            core.recoverable = recoverable_at(services.fs, path, meta, history)
        return core

    # The same rules as for an open one (``saving.py``); the threads are abandoned only when the daemon ends.

    async def mark_read(self, message_count: int) -> bool:
        """S-6."""
        seen = False

        def decide(meta: Metadata) -> dict[str, Any]:
            nonlocal seen
            seen = is_seen(message_count, saved=meta.committed.messages)
            return {"unread": False} if seen else {}

        await self._change(decide)
        return seen

    async def pin(self, pinned: bool) -> int | None:
        """S-7: answers the stamp."""
        now = self._services.clock.now_ms()
        meta = await self._change(lambda meta: {"pinned_at": pin_of(meta.pinned_at, pinned=pinned, now_ms=now)})
        return meta.pinned_at

    async def rename(self, title: Title) -> None:
        await self._change(lambda _: {"title": title})

    async def delete(self) -> None:
        """Raises what opening raises, though damage is no obstacle."""
        path, services = self._present(), self._services
        gone = Event()
        try:
            await self._perform(partial(unopened.delete, services.fs, path, gone=gone.set, durable=services.durable))
        finally:
            if gone.is_set():  # whatever failed after that
                services.watch.removed(path, id_of(path))

    async def _change(self, decide: Callable[[Metadata], dict[str, Any]]) -> Metadata:
        path, services = self._present(), self._services
        change = partial(unopened.change_metadata, services.fs, path, decide, durable=services.durable)
        meta = await self._perform(change)
        services.watch.changed(row(path, meta, live=False))
        return meta

    async def _perform(self, call: Callable[[], T]) -> T:
        def perform() -> T:
            try:
                return call()
            except SessionMissing:
                if self.path.endswith(legacy.SUFFIX):
                    legacy.refuse_unmoved(self._services.fs, self.path)
                raise

        return await in_thread(("change", self.path), perform)

    def _present(self) -> str:
        """Where a session of an earlier version is once it was opened."""
        is_old = self.path.endswith(legacy.SUFFIX)
        return os.path.join(self.path.removesuffix(legacy.SUFFIX), META) if is_old else self.path
