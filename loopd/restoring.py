"""The state of a session as its files tell it."""

from __future__ import annotations

from loop_protocol.v1.types import SessionKind

from .core.announce import Announce, Silent
from .core.history import History
from .core.state import SessionCore
from .core.timings import Clock
from .storage import Metadata


def restored(
    meta: Metadata,
    history: History,
    *,
    kind: SessionKind,
    path: str | None,
    clock: Clock,
    runtime_id: str | None = None,
    announce: Announce | None = None,
) -> SessionCore:
    """Right after they were validated."""
    core = SessionCore(
        id=meta.id,
        kind=kind,
        cwd=meta.cwd,
        path=path,
        runtime_id=runtime_id,
        created_at=meta.created_at,
        updated_at=meta.updated_at,
        model=meta.model,
        permission=meta.permission,
        unread=meta.unread,
        pinned_at=meta.pinned_at,
        history=history,
        committed=history.messages,
        committed_user=history.user_messages,
        announce=announce or Silent(),
        clock=clock,
    )
    core.titles.stored = meta.valid_title
    return core
