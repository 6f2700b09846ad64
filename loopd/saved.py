"""Sessions that are not open, by path: read without a lock, marked, renamed and deleted under the lock of a writer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import trio

from loop_protocol.v1.types import Title

from .core.state import SessionCore, is_seen, pin_of
from .services import Services
from .session import restored
from .storage import Metadata, files, unopened


class SavedSession:
    """A session on disk. Whoever changes it has the registry's turn for it, so that nobody opens it meanwhile."""

    def __init__(self, path: str, services: Services) -> None:
        self.path = path
        self._services = services

    async def read(self) -> SessionCore:
        """Its state as of the last commit. Raises what opening raises, except that a lock does not matter."""
        meta, history = await trio.to_thread.run_sync(
            files.read_session,
            self._services.fs,
            self.path,
            abandon_on_cancel=True,  # it only reads, and the disk may hang
            limiter=self._services.reading,
        )
        return restored(meta, history, kind="persistent", path=self.path, clock=self._services.clock)

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
        call = partial(unopened.delete, self._services.fs, self.path, durable=self._services.durable)
        await trio.to_thread.run_sync(call, abandon_on_cancel=True)

    async def _change(self, decide: Callable[[Metadata], dict[str, Any]]) -> Metadata:
        services = self._services
        call = partial(unopened.change_metadata, services.fs, self.path, decide, durable=services.durable)
        return await trio.to_thread.run_sync(call, abandon_on_cancel=True)
