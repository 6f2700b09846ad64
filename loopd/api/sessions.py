"""``session/*``, but for what starts and ends runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import msgspec
from msgspec import Raw

from loop_protocol.v1 import methods as m
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.types import DamagedSession, SessionState

from ..core.guards import Operation
from ..core.history import History
from ..core.snapshot import snapshot
from ..job import Job
from ..opening import directory_of
from ..saved import SavedSession
from ..seat import locked
from ..session import Session
from ..storage.catalog import Listing
from ..threads import in_thread
from ..watch import row
from .call import PAGE, Call

T = TypeVar("T")


def session_list(call: Call, params: m.SessionListParams) -> Callable[[], Awaitable[Raw]]:
    catalog = call.daemon.services.catalog
    live = frozenset(runtime.session.core.id for runtime in call.runtimes.by_id.values())

    def listing() -> Raw:
        return _encoded(catalog.list(params.cwd, params.session_dir, params.limit), live)

    async def listed() -> Raw:
        return await in_thread(("list", params.cwd, params.session_dir), listing)

    return listed


def _encoded(listing: Listing, live: frozenset[str]) -> Raw:
    """In the thread that read it, row by row: 10,000 rows at once would hold the loop for 60 ms."""
    result = m.SessionListResult(
        sessions=[],
        damaged=[DamagedSession(one.path, one.reason) for one in listing.damaged],
        legacy=listing.legacy,
        unsupported=listing.unsupported,
    )
    encode = msgspec.json.Encoder().encode
    body = bytearray(b'{"sessions":[')
    for one in listing.rows:
        body += encode(row(one.path, one.meta, live=one.meta.id in live)) + b","
    if listing.rows:
        del body[-1:]
    body += encode(result).removeprefix(b'{"sessions":[')
    return Raw(body)


def session_state(call: Call, params: m.SessionOrPathParams) -> SessionState | Callable[[], Awaitable[SessionState]]:
    _require_one(params.session_id, params.path)
    if params.session_id is not None:
        return call.runtimes.session(params.session_id).state()

    async def read() -> SessionState:
        found = await _at(call, params.path)
        return found.state() if isinstance(found, Session) else snapshot(await found.read())

    return read


def session_messages(
    call: Call, params: m.MessagesParams
) -> m.MessagesResult | Callable[[], Awaitable[m.MessagesResult]]:
    _require_one(params.session_id, params.path)
    if params.session_id is not None:
        core = call.runtimes.session(params.session_id).core
        return _page(core.history, core.committed, params)

    async def read() -> m.MessagesResult:
        found = await _at(call, params.path)
        core = found.core if isinstance(found, Session) else await found.read()
        return _page(core.history, core.committed, params)

    return read


def _require_one(session_id: str | None, path: str | None) -> None:
    if (session_id is None) == (path is None):
        raise RpcError("invalid_params", "exactly one of sessionId and path - at `$.sessionId`")


async def _at(call: Call, path: str | None) -> Session | SavedSession:
    assert path is not None
    runtime = call.runtimes.at(await directory_of(path))
    return runtime.session if runtime else SavedSession(path, call.daemon.services)


def _page(history: History, committed: int, params: m.MessagesParams) -> m.MessagesResult:
    """At most 1 MiB or one message; lines go out as they are stored."""
    total = history.messages
    end = total if params.limit is None else min(total, params.start + params.limit)
    lines: list[Raw] = []
    size = 0
    for index in range(params.start, end):
        line = history.line(index)
        size += len(line)
        if lines and size > PAGE:
            break
        lines.append(Raw(line))
    return m.MessagesResult(start=params.start, total=total, committed=committed, messages=lines)


def session_flush(call: Call, params: m.SessionParams) -> Callable[[], Awaitable[m.FlushResult]]:
    session = call.runtimes.session(params.session_id)
    job = session.start(Operation.FLUSH, session.flush)

    async def flushed() -> m.FlushResult:
        return m.FlushResult(await job.wait())

    return flushed


def session_recover(call: Call, params: m.SessionParams) -> Callable[[], Awaitable[m.RecoverResult]]:
    return call.runtimes.session(params.session_id).recover().wait


def session_set_model(call: Call, params: m.SetModelParams) -> Callable[[], Awaitable[m.SetModelResult]]:
    session = call.runtimes.session(params.session_id)
    session.require(Operation.SET_MODEL)
    model = params.model.ref
    call.daemon.services.models.resolve(model)
    job = session.start(Operation.SET_MODEL, partial(session.saving.set, model=model))

    async def done() -> m.SetModelResult:
        await job.wait()
        return m.SetModelResult(model)

    return done


def session_set_permission(call: Call, params: m.SetPermissionParams) -> Callable[[], Awaitable[m.SetPermissionResult]]:
    session = call.runtimes.session(params.session_id)
    job = session.start(Operation.SET_PERMISSION, partial(session.saving.set, permission=params.permission))

    async def done() -> m.SetPermissionResult:
        await job.wait()
        return m.SetPermissionResult(params.permission)

    return done


# --- sessions that are open or not ------------------------------------------------------------------------------------


def changing(
    call: Call,
    params: m.MarkReadParams | m.SetPinnedParams | m.RenameParams,
    opened: Callable[[Session], Job[T]],
    saved: Callable[[SavedSession], Awaitable[T]],
) -> Job[T]:
    """A change of the session that ``params`` names: by its id or, open or not, by its path (S-28)."""
    _require_one(params.session_id, params.path)
    if params.session_id is not None:
        return opened(call.runtimes.session(params.session_id))

    async def change() -> T:
        path = params.path
        assert path is not None
        async with call.runtimes.turn_for(path) as runtime:
            if runtime is None:
                return await saved(SavedSession(path, call.daemon.services))
            job = opened(runtime.session)
        return await job.wait()

    return call.runtimes.start(change)


def session_mark_read(call: Call, params: m.MarkReadParams) -> Callable[[], Awaitable[m.MarkReadResult]]:
    def opened(session: Session) -> Job[bool]:
        return session.start_beside(Operation.MARK_READ, partial(session.saving.mark_read, params.message_count))

    job = changing(call, params, opened, lambda saved: saved.mark_read(params.message_count))

    async def marked() -> m.MarkReadResult:
        return m.MarkReadResult(await job.wait())

    return marked


def session_set_pinned(call: Call, params: m.SetPinnedParams) -> Callable[[], Awaitable[m.SetPinnedResult]]:
    def opened(session: Session) -> Job[int | None]:
        return session.start_beside(Operation.SET_PINNED, partial(session.saving.pin, params.pinned))

    job = changing(call, params, opened, lambda saved: saved.pin(params.pinned))

    async def pinned() -> m.SetPinnedResult:
        return m.SetPinnedResult(await job.wait())

    return pinned


def session_delete(call: Call, params: m.DeleteParams) -> Callable[[], Awaitable[m.Nothing]]:
    async def delete() -> m.Nothing:
        async with call.runtimes.turn_for(params.path) as runtime:
            if runtime is not None:
                raise locked(params.path, runtime)
            await SavedSession(params.path, call.daemon.services).delete()
        return m.Nothing()

    return call.runtimes.start(delete).wait
