"""A session's state and every transition of it: what happens, decided at once, and the events that tell it.

Transitions come in pairs (``begin_run``/``complete_run``/``settle_run``, ``complete_save``/``fail_save``). None waits:
``session.py`` performs what takes time between them.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from msgspec.structs import replace

from loop_protocol.v1 import events as ev
from loop_protocol.v1.types import (
    Draft,
    ErrorInfo,
    ModelRef,
    Outcome,
    Permission,
    QueueState,
    RunInfo,
    RunResult,
    SessionKind,
    SessionState,
    Title,
    UserBlock,
    UserMessage,
)

from .announce import Announce
from .guards import Condition, Operation, check
from .history import History, RunRecord
from .messages import with_save_error
from .timings import Clock, Stopwatch, begin
from .transcript import Transcript


@dataclass(slots=True)
class RunState:
    """One accepted prompt. The outcome is ``cancelled`` if and only if ``stop_requested`` (I-1)."""

    id: str
    operation: Operation
    watch: Stopwatch
    request_id: str | None = None
    digest: str | None = None
    generating: bool = True
    stop_requested: bool = False
    result: RunResult | None = None


@dataclass(slots=True)
class SessionCore:
    """``committed`` counts messages on disk; ``unsaved`` is what the last failed save said, None when all is well.
    ``stored_title`` is a title of its own, not the fallback that the history gives."""

    id: str
    kind: SessionKind
    cwd: str
    path: str | None
    runtime_id: str | None
    created_at: int
    updated_at: int
    model: ModelRef
    permission: Permission
    unread: bool
    history: History
    announce: Announce
    clock: Clock
    pinned_at: int | None = None
    stored_title: Title | None = None
    committed: int = 0
    committed_user: int = 0
    slot: Operation | None = None
    disposing: bool = False
    run: RunState | None = None
    settled: RunState | None = None
    closed: bool = False
    unsaved: str | None = None
    transcript: Transcript = field(init=False)

    def __post_init__(self) -> None:
        self.transcript = Transcript(self.history, self.announce, self.clock)

    # --- guards -------------------------------------------------------------------------------------------------------

    def conditions(self) -> Condition:
        now = Condition(0)
        if self.closed:
            now |= Condition.CLOSED
        if self.slot is Operation.REPLACE:
            now |= Condition.REPLACING
        if self.slot is not None or self.disposing:
            now |= Condition.BUSY
        if self.unsaved is not None:
            now |= Condition.UNSAVED
        return now

    def require(self, operation: Operation, *, draining: bool) -> None:
        """Raise ``Refused`` when ``operation`` may not happen now."""
        now = self.conditions() | (Condition.DRAINING if draining else Condition(0))
        holder = self.slot or (Operation.DISPOSE if self.disposing else None)
        check(operation, now, holder.value if holder else None)

    def take_slot(self, operation: Operation) -> None:
        self.slot = operation
        self._changed()

    def free_slot(self) -> None:
        self.slot = None
        self._changed()

    # --- a run --------------------------------------------------------------------------------------------------------

    def started_by(self, request_id: str) -> tuple[str, str | None] | None:
        """The run that a request with that id started, with its content's digest; also one of before a restart."""
        if self.run and self.run.request_id == request_id:
            return self.run.id, self.run.digest
        record = self.history.requests.get(request_id)
        return (record.run_id, record.digest) if record else None

    def user_message(self, content: list[UserBlock]) -> UserMessage:
        return UserMessage(index=self.history.messages, content=content, timestamp=self.clock.now_ms())

    def begin_run(self, message: UserMessage, *, request_id: str | None, digest: str | None) -> RunState:
        """Accept a prompt: from here on it is kept whatever happens (I-2). Publishes nothing, or the reply that names
        the run would come after its first event (D-2)."""
        self.history.append(message)
        run_id = str(uuid.uuid4())
        watch = begin(self.clock, id=run_id, user_message_index=message.index, message_start_index=message.index)
        self.run = RunState(run_id, Operation.PROMPT, watch, request_id, digest)
        self.slot = Operation.PROMPT
        return self.run

    def announce_run(self, run: RunState, message: UserMessage) -> None:
        self.announce.publish(ev.RunStarted(run.id, run.operation.value))
        self.announce.publish(ev.PromptTimingEvent(run.watch.timing))
        first = self.history.fallback
        gave_title = self.stored_title is None and first is not None and first.message_indices == [message.index]
        self.transcript.announce_message(message, title=first if gave_title else None)

    def complete_run(self, run: RunState, error: ErrorInfo | None) -> None:
        """Generation has ended: keep what was visible, answer open calls, finish the timing. No await in it."""
        run.generating = False
        outcome: Outcome = "cancelled" if run.stop_requested else "error" if error else "success"
        self.transcript.keep_partial_text(outcome, error, model=self.model)
        self.transcript.answer_open_calls()
        timing = run.watch.finish(self.clock, messages=self.history.messages, stopped=run.stop_requested)
        reported = error if outcome == "error" else None
        self.history.append_run(
            RunRecord(
                run_id=run.id,
                outcome=outcome,
                timing=timing,
                error=reported,
                request_id=run.request_id,
                digest=run.digest,
            )
        )
        run.watch = Stopwatch(timing, run.watch.boot_ms)
        self.announce.publish(ev.PromptTimingEvent(timing))

    def settle_run(self, run: RunState) -> RunResult:
        """The last event of a run; the slot is free from here on."""
        record = self.history.runs[run.id]
        result = record.result(saved=self.unsaved is None)
        if self.unsaved is not None:
            result = replace(result, error=with_save_error(record.error, self.unsaved))
        run.result, self.settled = result, run
        self.run, self.slot = None, None
        self.announce.publish(
            ev.RunSettled(run_id=run.id, outcome=result.outcome, saved=result.saved, error=result.error)
        )
        return result

    def abandon_run(self, run: RunState) -> None:
        """Settle a run that a fault kept from it (I-2); what is kept of it must be paired all the same (I-8)."""
        run.generating = False
        self.transcript.answer_open_calls()
        error = ErrorInfo("internal", "a fault in the daemon ended the run; its log has the details")
        outcome: Outcome = "cancelled" if run.stop_requested else "error"
        run.result, self.settled = RunResult(run_id=run.id, outcome=outcome, saved=False, error=error), run
        self.run, self.slot = None, None
        self.announce.publish(ev.RunSettled(run_id=run.id, outcome=outcome, saved=False, error=error))

    @property
    def last_run(self) -> RunResult | None:
        return self.settled.result if self.settled else None

    # --- saving, settings, closing ------------------------------------------------------------------------------------

    @property
    def has_new_output(self) -> bool:
        """Any non-user message beyond the last commit (S-8)."""
        return self.history.messages - self.history.user_messages > self.committed - self.committed_user

    def complete_save(self, *, messages: int, user_messages: int, updated_at: int, unread: bool) -> None:
        self.committed, self.committed_user = messages, user_messages
        self.updated_at, self.unread, self.unsaved = updated_at, unread, None
        if self.settled is not None and (result := self.settled.result) is not None and not result.saved:
            self.settled.result = result.once_saved()
        self.announce.publish(ev.SessionSaved(messages, user_messages, updated_at, unread))

    def fail_save(self, reason: str) -> None:
        self.unsaved = reason
        self.announce.publish(ev.SaveFailed(reason))

    def apply(self, *, updated_at: int, model: ModelRef | None = None, permission: Permission | None = None) -> None:
        """A setting that was just saved becomes true; freeing the slot announces it."""
        self.updated_at = updated_at
        self.model = model or self.model
        self.permission = permission or self.permission

    def apply_read(self) -> None:
        self.unread = False
        self._changed()

    def apply_pin(self, pinned_at: int | None) -> None:
        self.pinned_at = pinned_at
        self._changed()

    def apply_title(self, title: Title) -> None:
        self.stored_title = title
        self.announce.publish(ev.SessionTitle(title=title))

    @property
    def title(self) -> Title | None:
        """None for a session without eligible text: clients show ``New session`` (T-4)."""
        return self.stored_title or self.history.fallback

    def _changed(self) -> None:
        if self.closed:
            return  # a pin may end after the last event, or after the first one of the session that follows
        self.announce.publish(
            ev.SessionChanged(
                model=self.model,
                permission=self.permission,
                unread=self.unread,
                updated_at=self.updated_at,
                pinned_at=self.pinned_at,
                operation=self.slot.value if self.slot else None,
            )
        )

    def close(self, reason: str, rescue: str | None = None) -> None:
        """The last event."""
        self.closed = True
        self.announce.publish(ev.SessionClosed(reason=reason, rescue=rescue))

    def state(self) -> SessionState:
        """A snapshot. The log must be flushed first, or the draft is ahead of the events."""
        run = self.run
        return SessionState(
            session_id=self.id,
            runtime_id=self.runtime_id,
            path=self.path,
            cwd=self.cwd,
            kind=self.kind,
            model=self.model,
            permission=self.permission,
            unread=self.unread,
            title=self.title,
            pinned_at=self.pinned_at,
            created_at=self.created_at,
            updated_at=self.updated_at,
            message_count=self.committed,
            user_message_count=self.committed_user,
            live_count=self.history.messages,
            timings=self.history.timings,
            operation=self.slot.value if self.slot else None,
            run=RunInfo(run_id=run.id, started_at=run.watch.timing.started_at, timing=run.watch.timing)
            if run
            else None,
            last_run=self.last_run,
            draft=Draft(self.transcript.streaming.message_id, self.transcript.streaming.blocks())
            if self.transcript.streaming
            else None,
            tools=[tool.shown() for tool in self.transcript.tools.values()],
            queue=QueueState([]),
            approvals=[],
            has_pending_save=self.unsaved is not None,
            save_error=self.unsaved,
            usage=self.history.usage,
        )


def is_seen(message_count: int, *, saved: int) -> bool:
    """Whether somebody who saw so many messages has seen the conversation; an empty one is never read (S-6)."""
    return message_count == saved > 0


def pin_of(pinned_at: int | None, *, pinned: bool, now_ms: int) -> int | None:
    """The stamp of a session that shall be ``pinned``, or not: what is pinned already keeps its own (S-7)."""
    return (pinned_at or now_ms) if pinned else None
