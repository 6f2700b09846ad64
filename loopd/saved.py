"""Sessions that are not open, read by path: the same records and checks as opening, without a lock."""

from __future__ import annotations

import trio

from .core.state import SessionCore
from .services import Services
from .session import restored
from .storage import files
from .storage.journal import recoverable_at


class SavedSession:
    """A session on disk."""

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
        fs = self._services.fs
        meta, history = files.read_session(fs, self.path)
        core = restored(meta, history, kind="persistent", path=self.path, clock=self._services.clock)
        core.recoverable = recoverable_at(fs, self.path, meta, history)
        return core
