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
    AssistantMessage,
    ErrorInfo,
    Message,
    ModelRef,
    Outcome,
    Pause,
    Permission,
    PromptTiming,
    Recoverable,
    RunResult,
    SessionKind,
    ToolResultMessage,
    UserBlock,
    UserMessage,
)

from .announce import Announce
from .approvals import Approvals
from .guards import Condition, Declined, Operation, check
from .history import LINE, History, Request, RunRecord, encode
from .inputs import largest
from .messages import CRASHED, with_save_error
from .queue import Item, Queue
from .runs import RunState
from .timings import Clock, Stopwatch, begin
from .titling import Titles
from .transcript import Transcript


@dataclass(slots=True)
class SessionCore:
    """``committed`` counts messages on disk; ``unsaved`` is what the last failed save said, None when all is well."""

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
    committed: int = 0
    committed_user: int = 0
    slot: Operation | None = None
    disposing: bool = False
    run: RunState | None = None
    settled: RunState | None = None
    closed: bool = False
    unsaved: str | None = None
    recoverable: Recoverable | None = None
    transcript: Transcript = field(init=False)
    queue: Queue = field(init=False)
    approvals: Approvals = field(init=False)
    titles: Titles = field(init=False)

    def __post_init__(self) -> None:
        self.queue = Queue(self.announce)
        self.approvals = Approvals(self.announce)
        self.titles = Titles(self.history, self.announce)
        self.transcript = Transcript(self.history, self.announce, self.clock)

    # --- guards -------------------------------------------------------------------------------------------------------

    def conditions(self) -> Condition:
        now = Condition(0)
        if self.closed:
            now |= Condition.CLOSED
        if self.approvals.pending:
            now |= Condition.APPROVING
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
        """The run of a request with that id, with its content's digest; also one of before a restart."""
        if self.run and (found := self.run.requested(request_id)):
            return self.run.id, found.digest
        return self.history.requests.get(request_id)

    def user_message(self, content: list[UserBlock]) -> UserMessage:
        """The next message of the conversation. Raises ``Declined`` where it does not fit."""
        message = UserMessage(index=self.history.messages, content=content, timestamp=self.clock.now_ms())
        if largest(content) > LINE and len(encode(message)) > LINE:
            raise Declined("limit_exceeded", f"a message may have {LINE} bytes as JSON", limit="message")
        return message

    # These publish nothing, or the first event of a run would come before the reply that names it (D-2).

    def begin_run(self, message: UserMessage, request: Request | None) -> RunState:
        """Accept a prompt: from here on it is kept whatever happens (I-2)."""
        self.history.append(message)
        run = self._begin(Operation.PROMPT, message.index, message.index)
        run.request = request
        return run

    def begin_queued(self, message: UserMessage, item: Item) -> RunState:
        """The same of an input that was queued."""
        run = self.begin_run(message, item.request)
        run.item_id = item.id
        self.queue.begin(item, run.id)
        return run

    def begin_resume(self, anchor: int) -> RunState:
        """Go on from the history as it is: no message is added, and the timing has the first attempt's anchor (P-3)."""
        return self._begin(Operation.RESUME, anchor, self.history.messages)

    def _begin(self, operation: Operation, anchor: int, start: int) -> RunState:
        run_id = str(uuid.uuid4())
        watch = begin(self.clock, id=run_id, user_message_index=anchor, message_start_index=start)
        self.run, self.slot = RunState(run_id, operation, watch), operation
        return self.run

    def announce_run(self, run: RunState, message: UserMessage | None) -> None:
        self.announce.publish(ev.RunStarted(run.id, run.operation.value, run.item_id))
        self.announce.publish(ev.PromptTimingEvent(run.watch.timing))
        if message is not None:
            self._announce_input(message, run.item_id)

    def _announce_input(self, message: UserMessage, item_id: str | None) -> None:
        self.recoverable = None  # what a crash left belonged to the place that this message takes
        self.transcript.announce_message(message, title=self.titles.given_by(message), item_id=item_id)
        if item_id is not None:
            self.queue.end(item_id)

    def enter(self, run: RunState, item: Item, message: UserMessage, line: bytes) -> None:
        """A queued input steers the run: it becomes part of the conversation in the middle of it (Q-2)."""
        self.history.append(message, line)
        if item.request is not None:
            run.steered.append(item.request)
        self._announce_input(message, item.id)

    def complete_run(self, run: RunState, error: ErrorInfo | None) -> None:
        """Generation has ended: keep what was visible, answer open calls, finish the timing. No await in it."""
        run.generating = False
        self.approvals.cancel()
        outcome: Outcome = "cancelled" if run.stop_requested else "error" if error else "success"
        self.transcript.keep_partial_text(outcome, error, model=self.model)
        self.transcript.answer_open_calls()
        timing = run.watch.finish(self.clock, messages=self.history.messages, stopped=run.stop_requested)
        reported = error if outcome == "error" else None
        self.history.append_run(_record(run, outcome, timing, reported))
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
        self._settle_queue(result.outcome)
        self.announce.publish(
            ev.RunSettled(run_id=run.id, outcome=result.outcome, saved=result.saved, error=result.error)
        )
        return result

    def abandon_run(self, run: RunState) -> None:
        """Settle a run that a fault kept from it (I-2); what is kept of it must be paired all the same (I-8)."""
        run.generating = False
        self.approvals.cancel()
        self.transcript.answer_open_calls()
        error = ErrorInfo("internal", "a fault in the daemon ended the run; its log has the details")
        outcome: Outcome = "cancelled" if run.stop_requested else "error"
        run.result, self.settled = RunResult(run_id=run.id, outcome=outcome, saved=False, error=error), run
        self.run, self.slot = None, None
        self._settle_queue(outcome)
        self.announce.publish(ev.RunSettled(run_id=run.id, outcome=outcome, saved=False, error=error))

    def _settle_queue(self, outcome: Outcome) -> None:
        """After a stop nothing starts unasked, nor on top of what went wrong (Q-3)."""
        unsaved: Pause | None = "save_failed" if self.unsaved is not None else None
        reasons: dict[Outcome, Pause | None] = {"cancelled": "stopped", "error": "error", "success": unsaved}
        self.queue.settle(reasons[outcome])

    @property
    def last_run(self) -> RunResult | None:
        return self.settled.result if self.settled else None

    # --- a run that a crash cut off -----------------------------------------------------------------------------------

    def record_if_cut_off(self, run: RunState) -> RunRecord:
        """What there is to say of a run whose end nobody saw: it has no finish, and none is inferred (P-6)."""
        error = ErrorInfo("interrupted", "the daemon ended in the middle of this run")
        return _record(run, "error", run.watch.timing, error)

    def take_over(self, message: Message, line: bytes) -> None:
        """The next of the finished messages of a run that a crash cut off (S-26)."""
        self.recoverable = None
        match message:
            case UserMessage():
                self.history.append(message, line)
                self._announce_input(message, None)
            case AssistantMessage():
                self.transcript.append_reply(message, line)
            case ToolResultMessage():
                self.transcript.append_result(message, line)

    def complete_recovery(self, record: RunRecord) -> RunState:
        """All of them are taken over: answer what is open, record the run; ``settle_run`` follows its save."""
        self.transcript.answer_open_calls(CRASHED)
        timing = replace(record.timing, message_end_index=self.history.messages)
        self.history.append_run(replace(record, timing=timing))
        self.announce.publish(ev.PromptTimingEvent(timing))
        watch = Stopwatch(timing, self.clock.boot_ms())
        return RunState(record.run_id, Operation.RECOVER, watch, generating=False)

    # --- saving, settings, closing ------------------------------------------------------------------------------------

    @property
    def has_new_output(self) -> bool:
        """Any non-user message beyond the last commit (S-8)."""
        return self.history.messages - self.history.user_messages > self.committed - self.committed_user

    def complete_save(self, *, messages: int, user_messages: int, updated_at: int, unread: bool) -> None:
        self.committed, self.committed_user = messages, user_messages
        self.updated_at, self.unread, self.unsaved = updated_at, unread, None
        if self.kind == "draft":  # what is saved is a session like any other (S-3)
            self.kind = "persistent"
        if self.settled is not None and (result := self.settled.result) is not None and not result.saved:
            self.settled.result = result.once_saved()
        self.announce.publish(ev.SessionSaved(messages, user_messages, updated_at, unread))
        self.queue.lift("save_failed")

    def fail_save(self, reason: str) -> None:
        self.unsaved = reason
        self.announce.publish(ev.SaveFailed(reason))

    def apply(self, *, updated_at: int, model: ModelRef | None = None, permission: Permission | None = None) -> None:
        """A setting that was just saved becomes true; freeing the slot announces it."""
        self.updated_at = updated_at
        if permission not in (None, self.permission):
            self.approvals.grants.clear()  # they were given in another preset
        self.model = model or self.model
        self.permission = permission or self.permission

    def apply_read(self) -> None:
        self.unread = False
        self._changed()

    def apply_pin(self, pinned_at: int | None) -> None:
        self.pinned_at = pinned_at
        self._changed()

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


def _record(run: RunState, outcome: Outcome, timing: PromptTiming, error: ErrorInfo | None) -> RunRecord:
    request = run.request
    return RunRecord(
        run_id=run.id,
        outcome=outcome,
        timing=timing,
        error=error,
        request_id=request.request_id if request else None,
        digest=request.digest if request else None,
        steered=run.steered,
    )
