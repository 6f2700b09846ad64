"""The registry of runtimes: opens them, replaces their sessions, disposes of them."""

from __future__ import annotations

import os
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import trio

from loop_protocol.v1 import events as ev
from loop_protocol.v1.methods import CallerParams, NewSessionParams, RuntimeOpenParams, SwitchParams
from loop_protocol.v1.types import SessionKind

from .core.guards import Declined, Operation
from .core.snapshot import snapshot
from .event_log import EventLog
from .job import Job, Jobs
from .opening import Opening, Wanted, chosen, directory_of, environment_for, wanted_places
from .run import Run
from .runs import nobody
from .seat import Runtime, closed_again, conflict, copied, locked, permit
from .services import Services
from .session import Session
from .storage import SessionMissing, StorageError

REMEMBERED_RUNS = 256
T = TypeVar("T")


class Runtimes:
    """The registry. Sessions live in ``live``, the nursery that is drained first."""

    def __init__(self, services: Services, live: trio.Nursery) -> None:
        self.services = services
        self.by_id: dict[str, Runtime] = {}
        self.runs: OrderedDict[str, Run] = OrderedDict()
        self._live = live
        self._turns: dict[tuple[str, str], trio.Event] = {}
        self._jobs = Jobs(live, lambda: Declined("draining", "the daemon ends, and the disk does not answer"))
        self._leaving: dict[str, trio.Event] = {}

    # --- looking up ---------------------------------------------------------------------------------------------------

    def runtime(self, runtime_id: str) -> Runtime:
        """The one that a client asks for."""
        if runtime := self.by_id.get(runtime_id):
            runtime.touch()
            return runtime
        raise Declined("runtime_not_found", f"no runtime {runtime_id}; runtime/open makes one")

    def session(self, session_id: str) -> Session:
        """The one that a client asks for."""
        if runtime := self._with(session_id):
            runtime.touch()
            return runtime.session
        raise Declined("session_not_found", f"no open session {session_id}; runtime/open opens one")

    def _with(self, session_id: str) -> Runtime | None:
        return next((runtime for runtime in self.by_id.values() if runtime.session.core.id == session_id), None)

    def at(self, directory: str | None) -> Runtime | None:
        """The runtime whose current session is in that directory, as ``opening.directory_of`` resolved it."""
        for runtime in self.by_id.values():
            place = runtime.session.place
            if place is not None and place.directory == directory:
                runtime.touch()
                return runtime
        return None

    def default_of(self, cwd: str) -> Runtime | None:
        for runtime in self.by_id.values():
            if runtime.default and runtime.session.core.cwd == cwd:
                return runtime
        return None

    def _remember(self, run: Run) -> None:
        self.runs[run.state.id] = run
        self.services.count("runs")
        settled = [run_id for run_id, known in self.runs.items() if known.done.is_set()]
        for run_id in settled[: max(0, len(self.runs) - REMEMBERED_RUNS)]:
            del self.runs[run_id]

    # --- opening ------------------------------------------------------------------------------------------------------

    def start(self, work: Callable[[], Awaitable[T]]) -> Job[T]:
        """Work of the registry: a client that goes away does not leave a session half open."""
        return self._jobs.start(work)

    def give_up(self) -> None:
        """The daemon ends and waits no longer for what does not come to an end."""
        self._jobs.give_up()

    async def open(self, params: RuntimeOpenParams) -> tuple[Runtime, bool]:
        """The runtime, and whether it was made. Openings of one workspace come one after the other: of ten clients
        that start at once one creates the session and nine find it."""
        if self.services.draining:
            raise Declined("draining", "the daemon is draining and takes no new work")
        wanted = await wanted_places(params)
        if params.runtime_id == "new":  # nobody looks for it, so nobody has to wait for it
            return await self._create(params, wanted), True
        async with self._turn(("workspace", wanted.cwd)):
            default = await self._lasting(partial(self.default_of, wanted.cwd))
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
            runtime = await self._lasting(partial(self.at, directory))
            if runtime is None:
                await self._left(directory)
            yield runtime

    async def _left(self, directory: str | None) -> None:
        """Until a session that no runtime has any more has let go of its files."""
        if directory in self._leaving:
            await self._leaving[directory].wait()

    async def _lasting(self, find: Callable[[], Runtime | None]) -> Runtime | None:
        """What is found; a runtime that is being disposed is none, unless its last save fails and it stays."""
        while (runtime := find()) and (disposal := runtime.session.disposal):
            await disposal.settled()
        return runtime

    def _join(self, runtime: Runtime, params: RuntimeOpenParams, wanted: Wanted) -> Runtime:
        runtime.touch()
        session, asked = runtime.session, params.session
        core, place = session.core, session.place
        if asked.kind == "open" and asked.path is not None:
            elsewhere = self.at(wanted.directory)
            if elsewhere is None:
                raise conflict(runtime, "this workspace has another session open")
            if elsewhere is not runtime:
                raise locked(asked.path, elsewhere)
        elif asked.kind != "continue":
            raise conflict(runtime, "this workspace has an open session")
        if wanted.session_dir and (place is None or os.path.dirname(place.directory) != wanted.session_dir):
            raise conflict(runtime, "the open session is not in that sessionDir")
        if params.model is not None and params.model.ref != core.model:
            raise conflict(runtime, f"the open session uses {core.model}; session/setModel changes it")
        if chosen(params.title, session.titles.policy) != session.titles.policy:
            raise conflict(runtime, "the open session has another title policy")
        if params.permission not in (None, core.permission):
            raise conflict(runtime, f"the open session has {core.permission}; session/setPermission changes it")
        return runtime

    async def _create(self, params: RuntimeOpenParams, wanted: Wanted, *, missing: str | None = None) -> Runtime:
        services, asked = self.services, params.session
        if model := params.model and params.model.ref:
            services.models.resolve(model)
        events = EventLog(str(uuid.uuid4()), clock=services.clock, wake=services.pump.wake)
        opening = Opening(
            services=services,
            live=self._live,
            events=events,
            env=environment_for(params, services),
            cwd=wanted.cwd,
            model=model or services.models.default(),
            permission=params.permission or services.config.default.permission,
            title=chosen(params.title, services.config.default.title),
            session_dir=asked.session_dir,
        )
        path = await opening.most_recent() if asked.kind == "continue" else asked.path
        default = params.runtime_id != "new"
        mode: SessionKind = asked.kind if asked.kind in ("draft", "memory") else "persistent"
        if path is None:
            return await self._seat(await opening.new(mode), default=default, mode=mode)
        directory = await directory_of(path)
        async with self._turn(("session", directory or path)):
            try:
                session = await self._load(opening, path, directory)
            except SessionMissing:
                if asked.kind != "continue" or path == missing:
                    raise
            else:
                if default:
                    await self._require_only_default(session)
                await permit(session, params.permission)
                return await self._seat(session, default=default, mode=mode)
        # It was deleted since: there is another one to continue, or none.
        return await self._create(params, wanted, missing=path)

    async def _load(self, opening: Opening, path: str, directory: str | None) -> Session:
        """In that directory's turn: inside the daemon a session is open in at most one runtime (S-22)."""
        if elsewhere := self.at(directory):
            raise locked(path, elsewhere)
        await self._left(directory)
        session = await opening.load(path)
        if twin := self._with(session.core.id):  # somebody copied its directory
            await closed_again(session)
            raise copied(path, twin)
        return session

    async def _seat(self, session: Session, *, default: bool, mode: SessionKind) -> Runtime:
        if default:  # also where it was looked at before: another session may have got there meanwhile
            await self._require_only_default(session)
        runtime = Runtime(session.events.runtime_id, session.events, session, default=default, mode=mode)
        self.by_id[runtime.id] = runtime
        self._own(runtime, session)
        return runtime

    def _own(self, runtime: Runtime, session: Session) -> None:
        session.on_fault, session.runs.on_begin = partial(self._forget, runtime), self._remember

    async def _require_only_default(self, session: Session) -> None:
        """A workspace has one default runtime; a session that would make a second one is closed again."""
        if other := self.default_of(session.core.cwd):
            await closed_again(session)
            raise conflict(other, f"{session.core.cwd} has another session open")

    # --- replacing and disposing --------------------------------------------------------------------------------------

    def new_session(self, runtime: Runtime, params: NewSessionParams) -> Job[Session]:
        """Replace the session by an empty one that keeps model, cwd and mode (R-1). Raises ``Refused`` at once."""
        old = runtime.session
        return old.start(Operation.REPLACE, partial(self._renew, runtime, old, params))

    def switch_session(self, runtime: Runtime, params: SwitchParams) -> Job[Session]:
        """Replace the session by the one that is kept at that path, with its model, permission and cwd (R-1). Raises
        ``Refused`` at once, except for the path that it has already: there is nothing to do then."""
        old = runtime.session
        if params.path == old.core.path:
            job: Job[Session] = Job()
            job.succeed(old)
            return job
        return old.start(Operation.REPLACE, partial(self._switch, runtime, old, params))

    async def _renew(self, runtime: Runtime, old: Session, caller: CallerParams) -> Session:
        await old.titles.drain()
        return self._install(runtime, old, await self._succeeding(runtime, old, caller).new(runtime.mode))

    async def _switch(self, runtime: Runtime, old: Session, params: SwitchParams) -> Session:
        path = params.path
        directory = await directory_of(path)
        if old.place is not None and old.place.directory == directory:
            return old  # it was only spelled in another way
        await old.titles.drain()
        async with self._turn(("session", directory or path)):
            new = await self._load(self._succeeding(runtime, old, params), path, directory)
            # A workspace that is found by its cwd must not lead to two: the seat stays where it is.
            if runtime.default and new.core.cwd != old.core.cwd:
                await self._require_only_default(new)
            return self._install(runtime, old, new)

    def _succeeding(self, runtime: Runtime, old: Session, caller: CallerParams) -> Opening:
        core = old.core
        return Opening(
            services=self.services,
            live=self._live,
            events=runtime.events,
            env=environment_for(caller, self.services, before=old.env),
            cwd=core.cwd,
            model=core.model,
            # What the config says, not what the old session had: a new one never inherits more.
            permission=self.services.config.default.permission,
            title=chosen(caller.title, self.services.config.default.title) if caller.title else old.titles.policy,
            session_dir=old.place.session_dir if old.place else None,
        )

    def _install(self, runtime: Runtime, old: Session, new: Session) -> Session:
        """The new one is prepared, in the order of R-4: what failed before left the old one in place (R-3)."""
        self._own(runtime, new)
        runtime.session = new
        runtime.events.publish(new.core.id, ev.SessionReplaced(old.core.id, snapshot(new.core)))
        runtime.events.end_unfollowing()
        old.on_fault = nobody
        old.end(None)
        self._leave(old)
        return new

    def _leave(self, session: Session) -> None:
        """Whoever wants it from here on has to wait until it has let go of its files (``_left``)."""
        self._leaving = {place: gone for place, gone in self._leaving.items() if not gone.is_set()}
        if session.place is not None and not session.ended.is_set():
            self._leaving[session.place.directory] = session.ended

    def dispose(self, runtime: Runtime, reason: str = "disposed") -> Job[None]:
        """R-6. Raises ``Refused`` at once; from here on nothing else takes the session. A second disposal is the first
        one. The job fails with ``StorageError`` when the stopped run's save fails: then everything stays open."""
        session = runtime.session
        session.require(Operation.DISPOSE)
        if session.disposal is None:
            session.core.disposing = True
            session.disposal = self.start(partial(self._dispose, runtime, session, reason))
        return session.disposal

    async def _dispose(self, runtime: Runtime, session: Session, reason: str) -> None:
        try:
            await session.dispose(reason)
        except StorageError:
            session.core.disposing, session.disposal = False, None
            raise
        self._forget(runtime)

    def _forget(self, runtime: Runtime, _: Session | None = None) -> None:
        """The references are cut: a closed session with a large history must not wait for the garbage collector."""
        self.by_id.pop(runtime.id, None)
        self._leave(runtime.session)
        runtime.session.on_fault = nobody
        runtime.events.close()
        self.services.watch.state_changed()
