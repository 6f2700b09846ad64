"""``runtime/*``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from loop_protocol.v1 import methods as m
from loop_protocol.v1.errors import RpcError

from ..core.guards import Declined, Operation
from ..job import Job
from ..opening import directory_of
from ..seat import Runtime
from ..session import Session
from .call import Call


def runtime_open(call: Call, params: m.RuntimeOpenParams) -> Callable[[], Awaitable[m.RuntimeOpenResult]]:
    job = call.runtimes.start(partial(call.runtimes.open, params))

    async def opened() -> m.RuntimeOpenResult:
        runtime, created = await job.wait()
        return m.RuntimeOpenResult(created=created, **_seat(runtime))

    return opened


def _seat(runtime: Runtime) -> dict[str, Any]:
    state = runtime.session.state()
    return {"runtime_id": runtime.id, "session_id": state.session_id, "path": state.path, "state": state}


def runtime_list(call: Call, _: m.NoParams) -> m.RuntimeListResult:
    return m.RuntimeListResult([runtime.row() for runtime in call.runtimes.by_id.values()])


def runtime_new_session(call: Call, params: m.NewSessionParams) -> Callable[[], Awaitable[m.ReplaceResult]]:
    runtime = call.runtimes.runtime(params.runtime_id)
    _require_consent(runtime.session, Operation.REPLACE, discard=params.discard_queue)
    return _replaced(runtime, call.runtimes.new_session(runtime, params), runtime.session, created=True)


def runtime_switch_session(call: Call, params: m.SwitchParams) -> Callable[[], Awaitable[m.ReplaceResult]]:
    runtime = call.runtimes.runtime(params.runtime_id)
    session = runtime.session
    if params.path != session.core.path:
        try:
            _require_consent(session, Operation.REPLACE, discard=params.discard_queue)
        except Declined as declined:
            return partial(_unless_its_own, runtime, session, params.path, declined)
    return _replaced(runtime, call.runtimes.switch_session(runtime, params), session, created=False)


async def _unless_its_own(runtime: Runtime, session: Session, path: str, declined: Declined) -> m.ReplaceResult:
    """Nothing is lost where the path is its own, only spelled in another way; and nothing is begun to find that out."""
    directory = await directory_of(path)
    if runtime.session is session and session.place is not None and session.place.directory == directory:
        return m.ReplaceResult(cancelled=False, created=False, **_seat(runtime))
    raise declined


def _require_consent(session: Session, operation: Operation, *, discard: bool) -> None:
    """What waits goes with its session: not unasked."""
    session.require(operation)
    queued = len(session.core.queue.items)
    if queued and not discard:
        text = f"{queued} queued input{'s' * (queued > 1)} would be lost; pass discardQueue: true to drop them"
        raise Declined("conflict", text, queued=queued)


def _replaced(
    runtime: Runtime, job: Job[Session], old: Session, *, created: bool
) -> Callable[[], Awaitable[m.ReplaceResult]]:
    """Answers once the old session is released, unless it is still the one."""

    async def replaced() -> m.ReplaceResult:
        if await job.wait() is not old:
            await old.ended.wait()
        return m.ReplaceResult(cancelled=False, created=created, **_seat(runtime))

    return replaced


def runtime_dispose(call: Call, params: m.DisposeParams) -> Callable[[], Awaitable[m.Nothing]]:
    runtime = call.runtimes.runtime(params.runtime_id)
    _require_consent(runtime.session, Operation.DISPOSE, discard=params.discard_queue)
    job = call.runtimes.dispose(runtime)

    async def disposed() -> m.Nothing:
        await job.wait()
        return m.Nothing()

    return disposed


def runtime_attach(call: Call, params: m.AttachParams) -> m.AttachResult:
    """The subscription starts at the snapshot's ``seq``, so nothing is missed and nothing comes twice (R-7)."""
    runtime = call.runtimes.runtime(params.runtime_id)
    log = runtime.events
    state = runtime.session.state()
    if params.since is not None and params.since > log.head:
        raise RpcError("invalid_params", f"since is beyond the last event, {log.head} - at `$.since`")
    replayed = params.since is not None and params.since + 1 >= log.first
    position = params.since if replayed and params.since is not None else log.head
    outbox = call.client.outbox
    can = call.client.can_approve
    outbox.subscribe(log.subscribe(position=position, follow=params.follow, notify=outbox.push, can_approve=can))
    return m.AttachResult(seq=position, state=None if replayed else state, replayed=replayed)


def runtime_detach(call: Call, params: m.RuntimeParams) -> m.Nothing:
    call.client.outbox.unsubscribe(params.runtime_id)
    return m.Nothing()
