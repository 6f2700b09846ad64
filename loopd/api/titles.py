"""``title/*``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from loop_protocol.v1 import methods as m
from loop_protocol.v1.types import Title

from ..core.guards import Operation
from ..core.inputs import Invalid
from ..core.titles import normalised
from ..job import Job
from ..session import Session
from .call import Call
from .sessions import changing


def title_rename(call: Call, params: m.RenameParams) -> Callable[[], Awaitable[m.TitleResult]]:
    text = normalised(params.text)
    if not text:
        raise Invalid("nothing of this can be seen", "text")
    title = Title(text=text, source="user", message_indices=[])

    def opened(session: Session) -> Job[None]:
        return session.start(Operation.RENAME_TITLE, partial(session.saving.rename, title))

    job = changing(call, params, opened, lambda saved: saved.rename(title))

    async def renamed() -> m.TitleResult:
        await job.wait()
        return m.TitleResult(title)

    return renamed


def title_refresh(call: Call, params: m.SessionParams) -> Callable[[], Awaitable[m.TitleResult]]:
    job = call.runtimes.session(params.session_id).refresh_title()

    async def refreshed() -> m.TitleResult:
        return m.TitleResult(await job.wait())

    return refreshed


def title_wait(call: Call, params: m.SessionParams) -> Callable[[], Awaitable[m.TitleWaitResult]]:
    session = call.runtimes.session(params.session_id)

    async def waited() -> m.TitleWaitResult:
        await session.title_settled()
        titles = session.core.titles
        return m.TitleWaitResult(title=titles.current, title_error=titles.error)

    return waited


def title_cancel(call: Call, params: m.SessionParams) -> Callable[[], Awaitable[m.TitleCancelResult]]:
    session = call.runtimes.session(params.session_id)
    session.require(Operation.CANCEL_TITLE)
    cancelled, end = session.titles.cancel(), session.titles.end

    async def drained() -> m.TitleCancelResult:
        await end()
        return m.TitleCancelResult(cancelled)

    return drained
