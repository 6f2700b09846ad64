"""A session as clients see it, from its state."""

from __future__ import annotations

from loop_protocol.v1.types import Draft, RunInfo, SessionState

from .runs import RunState
from .state import SessionCore
from .transcript import Transcript


def snapshot(core: SessionCore) -> SessionState:
    """As of now. The log must be flushed first, or the draft is ahead of the events."""
    return SessionState(
        session_id=core.id,
        runtime_id=core.runtime_id,
        path=core.path,
        cwd=core.cwd,
        kind=core.kind,
        model=core.model,
        permission=core.permission,
        unread=core.unread,
        title=core.titles.current,
        title_error=core.titles.error,
        title_usage=core.titles.usage,
        pinned_at=core.pinned_at,
        created_at=core.created_at,
        updated_at=core.updated_at,
        message_count=core.committed,
        user_message_count=core.committed_user,
        live_count=core.history.messages,
        timings=core.history.timings,
        operation=core.slot.value if core.slot else None,
        run=_run(core.run) if core.run else None,
        last_run=core.last_run,
        draft=_draft(core.transcript),
        tools=[tool.shown() for tool in core.transcript.tools.values()],
        queue=core.queue.state(),
        approvals=core.approvals.state(),
        grants=list(core.approvals.grants),
        has_pending_save=core.unsaved is not None,
        save_error=core.unsaved,
        recoverable=core.recoverable,
        usage=core.history.usage,
    )


def _run(run: RunState) -> RunInfo:
    timing = run.watch.timing
    return RunInfo(run_id=run.id, started_at=timing.started_at, timing=timing, item_id=run.item_id)


def _draft(transcript: Transcript) -> Draft | None:
    streaming = transcript.streaming
    return Draft(streaming.message_id, streaming.blocks()) if streaming else None
