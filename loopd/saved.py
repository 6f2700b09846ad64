"""Sessions that are not open, read by path: the same records and checks as opening, without a lock."""

from __future__ import annotations

import trio

from .core.history import History
from .core.state import SessionCore
from .services import Services
from .session import restored
from .storage import Metadata, files, legacy


class SavedSession:
    """A session on disk."""

    def __init__(self, path: str, services: Services) -> None:
        self.path = path
        self._services = services

    async def read(self) -> SessionCore:
        """Its state as of the last commit. Raises what opening raises, except that a lock does not matter."""
        path, meta, history = await trio.to_thread.run_sync(
            self._read,
            abandon_on_cancel=True,  # it only reads, and the disk may hang
            limiter=self._services.reading,
        )
        return restored(meta, history, kind="persistent", path=path, clock=self._services.clock)

    def _read(self) -> tuple[str, Metadata, History]:
        """Reading is no opening: a session of an earlier version stays where it is (S-18)."""
        services = self._services
        if self.path.endswith(legacy.SUFFIX):
            chosen = services.config.default.permission
            return legacy.read(services.fs, self.path, model=services.models.default(), permission=chosen)
        return self.path, *files.read_session(services.fs, self.path)
