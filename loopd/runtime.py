"""Runtimes: the seats that own one current session each, and the registry that opens, replaces and disposes them."""

from __future__ import annotations

import os
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import trio

from loop_protocol.v1 import events as ev
from loop_protocol.v1.methods import RuntimeOpenParams, RuntimeRow

from .agent.tools.environment import tool_environment
from .core.guards import Operation
from .core.inputs import Invalid
from .event_log import EventLog, Pump
from .job import Job
from .opening import Opening, Wanted, directory_of, wanted_places
from .run import Run
from .services import Services
from .session import Session, nobody
from .storage import StorageError

REMEMBERED_RUNS = 256
T = TypeVar("T")


class Declined(Exception):
    """No such thing, or it stands in the way: nothing changed. ``kind`` is the protocol's word for it."""

    def __init__(self, kind: str, message: str, **data: Any) -> None:
        super().__init__(message)
        self.kind = kind
        self.data = data


class Runtime:
    """``default``: the one that a workspace's clients find; another was made with ``runtimeId: "new"``."""

    def __init__(self, id: str, events: EventLog, session: Session, *, default: bool) -> None:
        self.id = id
        self.events = events
        self.session = session
        self.default = default

    def row(self) -> RuntimeRow:
        core = self.session.core
        return RuntimeRow(
            runtime_id=self.id,
            cwd=core.cwd,
            session_id=core.id,
            kind=core.kind,
            path=core.path,
            message_count=core.committed,
            running=core.run is not None,
            has_pending_save=core.unsaved is not None,
            title=core.title,
            default=self.default,
        )


class Runtimes:
    """The registry. Sessions live in ``live``, the nursery that is drained first."""

    def __init__(self, services: Services, pump: Pump, live: trio.Nursery) -> None:
        self.services = services
        self.pump = pump
        self.by_id: dict[str, Runtime] = {}
        self.runs: OrderedDict[str, Run] = OrderedDict()
        self._live = live
        self._turns: dict[tuple[str, str], trio.Event] = {}
        self._performing: set[trio.CancelScope] = set()

    # --- looking up ---------------------------------------------------------------------------------------------------

    def runtime(self, runtime_id: str) -> Runtime:
        try:
            return self.by_id[runtime_id]
        except KeyError:
            raise Declined("runtime_not_found", f"no runtime {runtime_id}; runtime/open makes one") from None

    def session(self, session_id: str) -> Session:
        for runtime in self.by_id.values():
            if runtime.session.core.id == session_id:
                return runtime.session
        raise Declined("session_not_found", f"no open session {session_id}; runtime/open opens one")

    def at(self, directory: str | None) -> Runtime | None:
        """The runtime whose current session is in that directory, as ``opening.directory_of`` resolved it."""
        for runtime in self.by_id.values():
            place = runtime.session.place
            if place is not None and place.directory == directory:
                return runtime
        return None

    def default_of(self, cwd: str) -> Runtime | None:
        for runtime in self.by_id.values():
            if runtime.default and runtime.session.core.cwd == cwd:
                return runtime
        return None

    def remember(self, run: Run) -> None:
        self.runs[run.state.id] = run
        settled = [run_id for run_id, known in self.runs.items() if known.done.is_set()]
        for run_id in settled[: max(0, len(self.runs) - REMEMBERED_RUNS)]:
            del self.runs[run_id]

    # --- opening ------------------------------------------------------------------------------------------------------

    def start(self, work: Callable[[], Awaitable[T]]) -> Job[T]:
        """Work of the registry: a client that goes away does not leave a session half open."""
        job: Job[T] = Job()
        self._live.start_soon(self._perform, job, work)
        return job

    async def _perform(self, job: Job[T], work: Callable[[], Awaitable[T]]) -> None:
        with trio.CancelScope(shield=True) as performing:
            self._performing.add(performing)
            try:
                job.succeed(await work())
            except Exception as error:  # boundary: request tail, which raises it again
                job.fail(error)
            finally:
                self._performing.discard(performing)
        if performing.cancelled_caught:
            job.fail(Declined("draining", "the daemon ends, and the disk does not answer"))

    def give_up(self) -> None:
        """The daemon ends and waits no longer for what does not come to an end."""
        for performing in tuple(self._performing):
            performing.cancel()

    async def open(self, params: RuntimeOpenParams) -> tuple[Runtime, bool]:
        """The runtime, and whether it was made. Openings of one workspace come one after the other: of ten clients
        that start at once one creates the session and nine find it."""
        if self.services.draining:
            raise Declined("draining", "the daemon is draining and takes no new work")
        _check_session(params)
        wanted = await wanted_places(params)
        async with self._turn(("workspace", wanted.cwd)):
            find = partial(self.default_of, wanted.cwd)
            default = None if params.runtime_id == "new" else await self._lasting(find)
            if default is not None:
                return self._join(default, params, wanted), False
            return await self._create(params, wanted), True

    @asynccontextmanager
    async def _turn(self, key: tuple[str, str]) -> AsyncIterator[None]:
        while key in self._turns:
            await self._turns[key].wait()
        self._turns[key] = over = trio.Event()
        try:
            yield
        finally:
            del self._turns[key]
            over.set()

    @asynccontextmanager
    async def turn_for(self, path: str) -> AsyncIterator[Runtime | None]:
        """Nobody opens the session at that path meanwhile; answers the runtime that has it open already."""
        directory = await directory_of(path)
        async with self._turn(("session", directory or path)):
            yield await self._lasting(partial(self.at, directory))

    async def _lasting(self, find: Callable[[], Runtime | None]) -> Runtime | None:
        """What is found; a runtime that is being disposed is none, unless its last save fails and it stays."""
        while (runtime := find()) and (disposal := runtime.session.disposal):
            await disposal.settled()
        return runtime

    def _join(self, runtime: Runtime, params: RuntimeOpenParams, wanted: Wanted) -> Runtime:
        session, asked = runtime.session, params.session
        core, place = session.core, session.place
        if asked.kind == "open" and asked.path is not None:
            elsewhere = self.at(wanted.directory)
            if elsewhere is None:
                raise _conflict(runtime, "this workspace has another session open")
            if elsewhere is not runtime:
                raise locked(asked.path, elsewhere)
        elif asked.kind != "continue":
            raise _conflict(runtime, "this workspace has an open session")
        if wanted.session_dir and (place is None or os.path.dirname(place.directory) != wanted.session_dir):
            raise _conflict(runtime, "the open session is not in that sessionDir")
        if params.model not in (None, core.model):
            raise _conflict(runtime, f"the open session uses {core.model}; session/setModel changes it")
        if params.permission not in (None, core.permission):
            raise _conflict(runtime, f"the open session has {core.permission}; session/setPermission changes it")
        return runtime

    async def _create(self, params: RuntimeOpenParams, wanted: Wanted) -> Runtime:
        services, asked = self.services, params.session
        if params.model is not None:
            services.models.resolve(params.model)
        events = EventLog(str(uuid.uuid4()), clock=services.clock, wake=self.pump.wake)
        opening = self._opening_for(
            events,
            env=tool_environment(params.env, daemon_env=services.environ, extra_names=services.config.tools.env),
            cwd=wanted.cwd,
            model=params.model or services.models.default(),
            permission=params.permission or services.config.default.permission,
            session_dir=asked.session_dir,
        )
        path = await opening.most_recent() if asked.kind == "continue" else asked.path
        default = params.runtime_id != "new"
        if path is None:
            return await self._seat(await opening.new(in_memory=asked.kind == "memory"), default=default)
        directory = await directory_of(path)
        async with self._turn(("session", directory or path)):
            if elsewhere := self.at(directory):
                raise locked(path, elsewhere)
            return await self._seat(await opening.load(path), default=default)

    async def _seat(self, session: Session, *, default: bool) -> Runtime:
        if default and (other := self.default_of(session.core.cwd)):
            session.end(None)
            await session.ended.wait()
            raise _conflict(other, f"{session.core.cwd} has another session open")
        runtime = Runtime(session.events.runtime_id, session.events, session, default=default)
        self.by_id[runtime.id] = runtime
        session.on_fault = partial(self._forget, runtime)
        return runtime

    def _opening_for(self, events: EventLog, **facts: Any) -> Opening:
        return Opening(services=self.services, live=self._live, events=events, **facts)

    # --- replacing and disposing --------------------------------------------------------------------------------------

    def new_session(self, runtime: Runtime) -> Job[Session]:
        """Replace the session by an empty one that keeps model, cwd and kind (R-1). Raises ``Refused`` at once."""
        old = runtime.session
        return old.start(Operation.REPLACE, partial(self._replace, runtime, old))

    async def _replace(self, runtime: Runtime, old: Session) -> Session:
        """In the order of R-4; a failed preparation leaves the old session in place (R-3)."""
        core = old.core
        opening = self._opening_for(
            runtime.events,
            env=old.env,
            cwd=core.cwd,
            model=core.model,
            # What the config says, not what the old session had: a new one never inherits more.
            permission=self.services.config.default.permission,
            session_dir=old.place.session_dir if old.place else None,
        )
        new = await opening.new(in_memory=core.kind == "memory")
        new.on_fault = partial(self._forget, runtime)
        runtime.session = new
        runtime.events.publish(new.core.id, ev.SessionReplaced(core.id, new.core.state()))
        runtime.events.end_unfollowing()
        old.on_fault = nobody
        old.end(None)
        return new

    def dispose(self, runtime: Runtime) -> Job[None]:
        """R-6. Raises ``Refused`` at once; from here on nothing else takes the session. A second disposal is the first
        one. The job fails with ``StorageError`` when the stopped run's save fails: then everything stays open."""
        session = runtime.session
        session.require(Operation.DISPOSE)
        if session.disposal is None:
            session.core.disposing = True
            session.disposal = self.start(partial(self._dispose, runtime, session))
        return session.disposal

    async def _dispose(self, runtime: Runtime, session: Session) -> None:
        try:
            await session.dispose()
        except StorageError:
            session.core.disposing, session.disposal = False, None
            raise
        self._forget(runtime)

    def _forget(self, runtime: Runtime, _: Session | None = None) -> None:
        """The references are cut: a closed session with a large history must not wait for the garbage collector."""
        self.by_id.pop(runtime.id, None)
        runtime.session.on_fault = nobody
        runtime.events.close()


def _check_session(params: RuntimeOpenParams) -> None:
    asked = params.session
    if (asked.kind == "open") != (asked.path is not None):
        raise Invalid("a path goes with kind open, and only with it", "session.path")
    if asked.session_dir is not None and asked.kind in ("open", "memory"):
        raise Invalid("sessionDir goes with kind new or continue", "session.sessionDir")


def _conflict(stands: Runtime, reason: str) -> Declined:
    """What stands in the way is named, so that the client can join it."""
    message = f"{reason}; join it, or pass runtimeId: new"
    return Declined("conflict", message, runtimeId=stands.id, sessionId=stands.session.core.id)


def locked(path: str, runtime: Runtime) -> Declined:
    return Declined("session_locked", f"{path} is open in another runtime; join it", runtimeId=runtime.id)
