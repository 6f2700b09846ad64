"""The ways to a session (S-2, S-3): new, draft, in memory, from disk. What comes out is served, and locked on disk."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import trio
from msgspec import structs

from loop_protocol.v1.methods import CallerParams, RuntimeOpenParams, TitleOptions
from loop_protocol.v1.types import ModelRef, Permission, SessionKind

from .agent import ToolEnvironment
from .agent.tools.environment import tool_environment
from .config import TitlePolicy
from .core.history import History
from .core.inputs import Invalid
from .core.timings import following
from .event_log import EventLog, SessionLog
from .restoring import restored
from .services import Services
from .session import Place, Session
from .storage import Store, files, legacy
from .storage.document import META, first_metadata
from .storage.draft import draft
from .storage.memory import MemoryStore
from .storage.places import place_of
from .threads import in_thread

# The threads here are abandoned on cancellation, which comes only when the daemon ends and a disk does not answer.


class CwdMissing(Exception):
    """The directory of a session does not exist (S-5)."""


@dataclass(slots=True, frozen=True)
class Wanted:
    """What an opening names, links resolved: the workspace, the session's directory, the directory of sessions."""

    cwd: str
    directory: str | None
    session_dir: str | None


@dataclass(slots=True, frozen=True, kw_only=True)
class Opening:
    """What a session is opened with; ``model`` and ``permission`` are for a new one only."""

    services: Services
    live: trio.Nursery
    events: EventLog
    env: ToolEnvironment
    cwd: str
    model: ModelRef
    permission: Permission
    title: TitlePolicy
    session_dir: str | None = None

    async def new(self, kind: SessionKind) -> Session:
        if kind == "memory":
            store: Store = MemoryStore(
                first_metadata(
                    id=str(uuid.uuid4()),
                    cwd=self.cwd,
                    model=self.model,
                    permission=self.permission,
                    created_at=self.services.clock.now_ms(),
                )
            )
            return await self._serve(store, History(), "memory", None)
        make = files.create if kind == "persistent" else draft
        store, place = await in_thread(("make", self.events.runtime_id), partial(self._made, make))
        self.services.catalog.note(self.cwd, store.meta.updated_at)
        return await self._serve(store, History(), kind, place)

    async def most_recent(self) -> str | None:
        newest = partial(self.services.catalog.most_recent, self.cwd, self.session_dir)
        return await in_thread(("newest", self.cwd, self.session_dir), newest)

    async def load(self, path: str) -> Session:
        """Raises what opening a file raises, and :class:`CwdMissing`. One of an earlier version migrates (S-18)."""
        store, history, place = await in_thread(("open", path), partial(self._open, path))
        return await self._serve(store, history, "persistent", place)

    def _made(self, make: Callable[..., Store]) -> tuple[Store, Place]:
        services, now = self.services, self.services.clock.now_ms()
        store = make(
            services.fs,
            services.data_dir,
            meta_id=str(uuid.uuid4()),
            cwd=self.cwd,
            model=self.model,
            permission=self.permission,
            now_ms=now,
            updated_at=following(now, services.catalog.highest(self.cwd, self.session_dir)),
            session_dir=self.session_dir,
            durable=services.durable,
        )
        return store, self._place(store)

    def _open(self, path: str) -> tuple[Store, History, Place]:
        fs, durable = self.services.fs, self.services.durable
        if path.endswith(legacy.SUFFIX):
            path = legacy.migrate(
                fs, path, model=self.model, permission=self.permission, require_cwd=_require_cwd, durable=durable
            )
        store, history = files.open_session(fs, path, durable=durable)
        try:
            _require_cwd(store.meta.cwd)
            place = self._place(store)
            self.services.catalog.highest(store.meta.cwd, place.session_dir)
        except BaseException:  # whatever it is, nobody has the session then, and nobody may be locked out of it
            store.close()
            raise
        return store, history, place

    def _place(self, store: Store) -> Place:
        """Resolved once and in a thread: a path may lead to a disk that hangs."""
        assert store.path is not None
        directory = os.path.realpath(os.path.dirname(store.path))
        parent = os.path.dirname(directory)
        usual = os.path.realpath(place_of(self.services.data_dir, store.meta.cwd))
        return Place(directory, None if parent == usual else parent)

    async def _serve(self, store: Store, history: History, kind: SessionKind, place: Place | None) -> Session:
        core = restored(
            store.meta,
            history,
            kind=kind,
            path=store.path,
            clock=self.services.clock,
            runtime_id=self.events.runtime_id,
            announce=SessionLog(self.events, store.meta.id),
        )
        core.recoverable = store.journal.recoverable
        session = Session(core, store, self.services, self.events, self.env, place, self.title)
        await self.live.start(partial(session.serve))
        return session


def _require_cwd(cwd: str) -> None:
    if not os.path.isdir(cwd):
        raise CwdMissing(f"{cwd}, the directory of this session, does not exist any more")


def environment_for(
    caller: CallerParams, services: Services, *, before: ToolEnvironment | None = None
) -> ToolEnvironment:
    """What tools get of the caller. What it does not say stays as ``before``, or else is the daemon's."""
    umask = before.umask if before else services.umask
    if before is not None and caller.env is None:
        variables = before.variables
    else:
        names = services.config.tools.env
        variables = tool_environment(caller.env, daemon_env=services.environ, extra_names=names)
    return ToolEnvironment(variables, umask if caller.umask is None else caller.umask)


def chosen(options: TitleOptions | None, policy: TitlePolicy) -> TitlePolicy:
    """``policy``, but for what the options say (T-1)."""
    said = {} if options is None else structs.asdict(options)
    if options is not None and options.model is not None:
        said["model"] = options.model.ref
    return structs.replace(policy, **{name: value for name, value in said.items() if value is not None})


async def wanted_places(params: RuntimeOpenParams) -> Wanted:
    """The same workspace and session however they are spelled (K-11). Raises :class:`CwdMissing` and ``Invalid``."""
    _check_session(params)

    def resolve() -> Wanted:
        if not os.path.isdir(params.cwd):
            raise CwdMissing(f"{params.cwd} is no directory")
        cwd, own = os.path.realpath(params.cwd), params.session.session_dir
        if not _is_utf8(cwd):
            raise Invalid("the directory's real name is not UTF-8, which no session can hold", "cwd")
        directory = _directory(params.session.path) if params.session.path else None
        return Wanted(cwd, directory, os.path.realpath(own) if own else None)

    return await in_thread(("places", params.cwd, params.session.path, params.session.session_dir), resolve)


def _check_session(params: RuntimeOpenParams) -> None:
    asked = params.session
    if (asked.kind == "open") != (asked.path is not None):
        raise Invalid("a path goes with kind open, and only with it", "session.path")
    if asked.session_dir is not None and asked.kind in ("open", "memory"):
        raise Invalid("sessionDir goes with kind new, draft or continue", "session.sessionDir")


async def directory_of(path: str) -> str | None:
    """The directory of the session whose ``meta.json`` or ``<id>.jsonl`` that is, None where it is no such path."""
    return await in_thread(("directory", path), partial(_directory, path))


def _directory(path: str) -> str | None:
    # Its directory may be spelled in any way; the file itself must not be a link.
    if path.endswith(legacy.SUFFIX):
        return os.path.realpath(path.removesuffix(legacy.SUFFIX))  # where it is once it has migrated
    return os.path.realpath(os.path.dirname(path)) if os.path.basename(path) == META else None


def _is_utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
