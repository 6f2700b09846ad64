"""Runtimes: the seats that own one current session each, and the registry that opens, replaces and disposes them."""

from __future__ import annotations

import os
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar, assert_never

import trio

from loop_protocol.v1 import events as ev
from loop_protocol.v1.methods import OpenSession, RuntimeOpenParams, RuntimeRow

from .agent.tools.environment import tool_environment
from .core.guards import Operation
from .core.inputs import Invalid
from .event_log import EventLog, Pump
from .job import Job
from .opening import Opening, canonical, place_of, resolved
from .run import Run
from .services import Services
from .session import Session
from .storage import SessionLocked

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
        self._opening: dict[str, trio.Event] = {}
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

    def at(self, path: str) -> Runtime | None:
        """The runtime whose current session is that file."""
        place = place_of(path)
        for runtime in self.by_id.values():
            if runtime.session.core.path and place_of(runtime.session.core.path) == place:
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
            raise Declined("draining", "the daemon is shutting down and takes no new work")
        cwd = await canonical(params.cwd)
        _check_session(params)
        while cwd in self._opening:
            await self._opening[cwd].wait()
        self._opening[cwd] = opened = trio.Event()
        try:
            default = None if params.runtime_id == "new" else self.default_of(cwd)
            if default is not None:
                return self._join(default, params), False
            return await self._create(params, cwd), True
        finally:
            del self._opening[cwd]
            opened.set()

    def _join(self, runtime: Runtime, params: RuntimeOpenParams) -> Runtime:
        core, asked = runtime.session.core, params.session
        if asked.kind == "open" and asked.path is not None:
            elsewhere = self.at(asked.path)
            if elsewhere is None:
                raise _conflict(runtime, "this workspace has another session open")
            if elsewhere is not runtime:
                raise _locked(asked.path, elsewhere)
        elif asked.kind != "continue":
            raise _conflict(runtime, "this workspace has an open session")
        if asked.session_dir and (
            core.path is None or os.path.dirname(place_of(core.path)) != resolved(asked.session_dir)
        ):
            raise _conflict(runtime, "the open session is not in that sessionDir")
        if params.model not in (None, core.model):
            raise _conflict(runtime, f"the open session uses {core.model}; session/setModel changes it")
        if params.permission not in (None, core.permission):
            raise _conflict(runtime, f"the open session has {core.permission}; session/setPermission changes it")
        return runtime

    async def _create(self, params: RuntimeOpenParams, cwd: str) -> Runtime:
        if params.model is not None:
            self.services.models.resolve(params.model)
        runtime_id, default = str(uuid.uuid4()), params.runtime_id != "new"
        events = EventLog(runtime_id, clock=self.services.clock, wake=self.pump.wake)
        opening = self._opening_for(
            events,
            env=tool_environment(
                params.env, daemon_env=self.services.environ, extra_names=self.services.config.tools.env
            ),
            cwd=cwd,
            model=params.model or self.services.models.default(),
            permission=params.permission or self.services.config.default.permission,
            session_dir=params.session.session_dir,
        )
        session = await self._session_for(params.session, opening)
        if default and (other := self.default_of(session.core.cwd)):
            session.end(None)
            await session.ended.wait()
            raise _conflict(other, f"{session.core.cwd} has another session open")
        runtime = Runtime(runtime_id, events, session, default=default)
        self.by_id[runtime_id] = runtime
        session.on_fault = partial(self._forget, runtime)
        return runtime

    def _opening_for(self, events: EventLog, **facts: Any) -> Opening:
        return Opening(services=self.services, live=self._live, events=events, **facts)

    async def _session_for(self, asked: OpenSession, opening: Opening) -> Session:
        match asked.kind:
            case "open":
                assert asked.path is not None
                return await self._load(asked.path, opening)
            case "continue":
                recent = await opening.most_recent()
                return await (self._load(recent, opening) if recent else opening.new())
            case "new":
                return await opening.new()
            case "memory":
                return await opening.new(in_memory=True)
            case _:
                assert_never(asked.kind)

    async def _load(self, path: str, opening: Opening) -> Session:
        if elsewhere := self.at(path):
            raise _locked(path, elsewhere)
        try:
            return await opening.load(path)
        except SessionLocked:
            if elsewhere := self.at(path):  # another client of ours was faster
                raise _locked(path, elsewhere) from None
            raise

    # --- replacing and disposing --------------------------------------------------------------------------------------

    def new_session(self, runtime: Runtime) -> Job[Session]:
        """Replace the session by an empty one that keeps model, cwd and kind (R-1). Raises ``Refused`` at once."""
        old = runtime.session
        return old.start(Operation.REPLACE, partial(self._replace, runtime, old))

    async def _replace(self, runtime: Runtime, old: Session) -> Session:
        """In the order of R-4; a failed preparation leaves the old session in place (R-3)."""
        core = old.core
        session_dir = None
        if core.path and not core.path.startswith(os.path.join(self.services.data_dir, "")):
            session_dir = os.path.dirname(os.path.dirname(core.path))
        opening = self._opening_for(
            runtime.events,
            env=old.env,
            cwd=core.cwd,
            model=core.model,
            # What the config says, not what the old session had: a new one never inherits more.
            permission=self.services.config.default.permission,
            session_dir=session_dir,
        )
        new = await opening.new(in_memory=core.kind == "memory")
        new.on_fault = partial(self._forget, runtime)
        runtime.session = new
        runtime.events.publish(new.core.id, ev.SessionReplaced(core.id, new.core.state()))
        runtime.events.end_unfollowing()
        old.end(None)
        return new

    async def dispose(self, runtime: Runtime) -> None:
        """R-6. Raises ``StorageError`` when the stopped run's save fails: then everything stays open."""
        await runtime.session.dispose()
        self._forget(runtime)

    def _forget(self, runtime: Runtime, _: Session | None = None) -> None:
        self.by_id.pop(runtime.id, None)
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


def _locked(path: str, runtime: Runtime) -> Declined:
    return Declined("session_locked", f"{path} is open in another runtime; join it", runtimeId=runtime.id)
