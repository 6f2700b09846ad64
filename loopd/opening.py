"""The ways to a session (S-2): a new one, one in memory, one that is on disk. What comes out is served and locked."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from functools import partial

import trio

from loop_protocol.v1.types import ModelRef, Permission, SessionKind

from .core.history import History
from .event_log import EventLog
from .services import Services
from .session import Session, SessionLog, restored
from .storage import Store, files
from .storage.document import first_metadata
from .storage.memory import MemoryStore

# The threads here are abandoned on cancellation, which comes only when the daemon ends and a disk does not answer.


class CwdMissing(Exception):
    """The directory of a session does not exist (S-5)."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Opening:
    """What a session is opened with; ``model`` and ``permission`` are for a new one only."""

    services: Services
    live: trio.Nursery
    events: EventLog
    env: dict[str, str]
    cwd: str
    model: ModelRef
    permission: Permission
    session_dir: str | None = None

    async def new(self, *, in_memory: bool = False) -> Session:
        if in_memory:
            store: Store = MemoryStore(
                first_metadata(
                    id=str(uuid.uuid4()),
                    cwd=self.cwd,
                    model=self.model,
                    permission=self.permission,
                    created_at=self.services.clock.now_ms(),
                )
            )
        else:
            store = await trio.to_thread.run_sync(self._create, abandon_on_cancel=True)
            self.services.catalog.note(self.cwd, store.meta.updated_at)
        return await self._serve(store, History(), "memory" if in_memory else "persistent")

    async def most_recent(self) -> str | None:
        newest = self.services.catalog.most_recent
        return await trio.to_thread.run_sync(newest, self.cwd, self.session_dir, abandon_on_cancel=True)

    async def load(self, path: str) -> Session:
        """Raises what opening a file raises, and :class:`CwdMissing`."""
        store, history = await trio.to_thread.run_sync(self._open, path, abandon_on_cancel=True)
        return await self._serve(store, history, "persistent")

    def _create(self) -> Store:
        services, now = self.services, self.services.clock.now_ms()
        return files.create(
            services.fs,
            services.data_dir,
            meta_id=str(uuid.uuid4()),
            cwd=self.cwd,
            model=self.model,
            permission=self.permission,
            now_ms=now,
            updated_at=max(now, services.catalog.highest(self.cwd, self.session_dir) + 1),
            session_dir=self.session_dir,
            durable=services.durable,
        )

    def _open(self, path: str) -> tuple[Store, History]:
        store, history = files.open_session(self.services.fs, path, durable=self.services.durable)
        if not os.path.isdir(store.meta.cwd):
            store.close()
            raise CwdMissing(f"{store.meta.cwd}, the directory of this session, does not exist any more")
        place = os.path.dirname(os.path.dirname(path))
        self.services.catalog.highest(store.meta.cwd, place)
        return store, history

    async def _serve(self, store: Store, history: History, kind: SessionKind) -> Session:
        core = restored(
            store.meta,
            history,
            kind=kind,
            path=store.path,
            clock=self.services.clock,
            runtime_id=self.events.runtime_id,
            announce=SessionLog(self.events, store.meta.id),
        )
        session = Session(core, store, self.services, self.events, self.env)
        await self.live.start(partial(session.serve))
        return session


def resolved(path: str) -> str:
    return os.path.realpath(path)


def place_of(path: str) -> str:
    """The session directory of a ``meta.json``, however it is spelled; the file itself must not be a link."""
    return resolved(os.path.dirname(path))


async def canonical(cwd: str) -> str:
    """The workspace that ``cwd`` names, however it is spelled (K-11)."""

    def resolve() -> str:
        if not os.path.isdir(cwd):
            raise CwdMissing(f"{cwd} is no directory")
        return os.path.realpath(cwd)

    return await trio.to_thread.run_sync(resolve, abandon_on_cancel=True)
