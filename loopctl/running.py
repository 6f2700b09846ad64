"""Follows one run from its acceptance to its end, whatever happens in between, and gives the exit code.

All commands that start a run end in :func:`followed` or :func:`left_alone`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from loop_protocol.backlog import Notification
from loop_protocol.client import Client, LostConnection
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.events import (
    ApprovalRequested,
    ApprovalResolved,
    EventParams,
    EventsLost,
    PromptTimingEvent,
    QueueChanged,
    RunSettled,
    RunStarted,
    SaveFailed,
    SessionClosed,
)
from loop_protocol.v1.types import ErrorInfo, PromptTiming, QueueState, RunResult, SessionState

from .asking import Asking
from .exits import INTERRUPTED, OK, REFUSED, RUN_FAILED, TIMED_OUT, UNREACHABLE, Failure
from .interrupts import Interrupts
from .reach import ANSWER
from .terminal import document, is_terminal, note, out_line
from .unsaved import until_saved
from .view import View, outcome
from .waiting import tell_if_paused


@dataclass(slots=True)
class Following:
    """One run being watched. Events of other runs are not shown.

    ``ours``: it has begun. ``timing`` is its finished one, ``gap`` says that not all of it was shown, ``unsaved`` is
    why it was not saved, and ``queue`` what waits behind it. ``asking``: somebody is here who can approve.
    """

    client: Client
    session_id: str
    run_id: str
    json: bool
    view: View = field(default_factory=View)
    asking: Asking | None = None
    ours: bool = False
    closed: bool = False
    stopped_by: int | None = None
    result: RunResult | None = None
    timing: PromptTiming | None = None
    gap: bool = False
    unsaved: str | None = None
    queue: QueueState | None = None

    def until_settled(self, interrupts: Interrupts, *, deadline: float | None) -> RunResult:
        try:
            return self._until_settled(interrupts, deadline=deadline)
        finally:
            if self.asking is not None:
                self.asking.end()
            self.view.end_line()

    def _until_settled(self, interrupts: Interrupts, *, deadline: float | None) -> RunResult:
        while self.result is None:
            taken = news(self.client, interrupts, deadline, self.asking)
            if isinstance(taken, int):
                self._stop(taken)
            else:
                self.take(taken)
        return self.result

    def take(self, notification: Notification[EventParams]) -> None:
        params = notification.params
        # A loss is told of the session that was there last, which may be the next one already.
        told = params is not None and (params.session_id == self.session_id or isinstance(params.event, EventsLost))
        if params is not None and told:
            if isinstance(params.event, QueueChanged):
                self.queue = QueueState(params.event.items, params.event.paused, params.event.error)
            self.ours = self.ours or isinstance(params.event, EventsLost) or _begins(params, self.run_id)
        if not self.ours:
            return
        if self.json:
            out_line(notification.raw.decode())
        if params is not None and told:
            self._follow(params)

    def _follow(self, params: EventParams) -> None:
        match params.event:
            case ApprovalRequested() as requested if self.asking is not None:
                self.view.end_line()
                self.asking.requested(requested)
            case ApprovalResolved() as resolved if self.asking is not None:
                self.asking.resolved(resolved)
            case ApprovalRequested() | ApprovalResolved():
                self.view.show(params)  # with --json too: whoever waits must know for what
            case _ if not self.json:
                self.view.show(params)
        match params.event:
            case PromptTimingEvent(timing=timing) if timing.id == self.run_id and timing.finished_at is not None:
                self.timing = timing
            case RunSettled(run_id=self.run_id) as settled:
                self.result = RunResult(
                    run_id=self.run_id, outcome=settled.outcome, saved=settled.saved, error=settled.error
                )
            case SaveFailed(reason=reason):
                self.unsaved = reason
            case EventsLost():
                self.gap = True
                self._look_whether_it_settled()
            case SessionClosed(reason=reason):
                error = ErrorInfo("session_closed", f"the session was closed: {reason}")
                self.closed = True
                self.result = RunResult(run_id=self.run_id, outcome="error", saved=True, error=error)

    def _look_whether_it_settled(self) -> None:
        """The end of the run may be among the events that were lost: nobody would tell it a second time."""
        try:
            state: SessionState = self.client.call("session/state", {"sessionId": self.session_id}, timeout=ANSWER)
        except RpcError as error:
            if error.kind != "session_not_found":
                raise
            self._settle()
            return
        self.queue = state.queue
        if self.asking is not None:
            self.asking.found(state.approvals)
        if state.run is None or state.run.run_id != self.run_id:
            self._settle()

    def _stop(self, code: int) -> None:
        """Ask for the end, and take what comes until then; a run that was just over keeps its own outcome."""
        request = {"sessionId": self.session_id, "runId": self.run_id}
        try:
            stopped = self.client.call("session/stop", request, timeout=ANSWER).stopped
        except TimeoutError:
            raise Failure(f"run {self.run_id} did not stop in {ANSWER:.0f} s and goes on", code) from None
        self.stopped_by = code if stopped else OK
        self._settle()

    def _settle(self) -> None:
        # The events up to the end were written before this answer (I-3), so they are here now.
        result: RunResult = self.client.call("run/wait", {"runId": self.run_id}, timeout=ANSWER)
        while self.result is None and (notification := self.client.next_notification(timeout=0)) is not None:
            self.take(notification)
        self.result = self.result or result


def news(
    client: Client, interrupts: Interrupts, deadline: float | None, asking: Asking | None = None
) -> Notification[EventParams] | int:
    """The next event, or the exit code of whoever does not wait for it any more. Meanwhile ``asking`` gets its
    answers."""
    while True:
        # First what the person wants: a fast stream always has one more event.
        if interrupts.asked:
            return INTERRUPTED
        if deadline is not None and time.monotonic() >= deadline:
            return TIMED_OUT
        if (notification := client.next_notification(timeout=0)) is not None:
            return notification
        if asking is not None and asking.has_typed():
            asking.take_typed()  # after all news: what is settled by now takes no answer
            continue
        sources = asking.sources() if asking is not None else []
        interrupts.wait(client, *sources, timeout=None if deadline is None else deadline - time.monotonic())


def _begins(params: EventParams, run_id: str) -> bool:
    return isinstance(params.event, RunStarted) and params.event.run_id == run_id


def followed(
    following: Following, before: SessionState, interrupts: Interrupts, *, deadline: float | None, of: str = ""
) -> int:
    """To its end, which is told. The exit code. ``before``: the session when the run was sent; ``of``: the option that
    names it, where one is needed."""
    interrupts.farewell = f"run {following.run_id} may go on: `loopctl attach` watches it, `loopctl stop` stops it"
    result = following.until_settled(interrupts, deadline=deadline)
    tell(following, result)
    if not following.closed:
        tell_if_paused(following.queue or before.queue, of)
    if not result.saved and not until_saved(following.client, following.session_id, interrupts):
        return REFUSED  # before any other outcome: nothing else is lost by being missed (S-25)
    mark_read(following, before)
    return exit_code(following, result)


def left_alone(ids: dict[str, str], *, json: bool) -> int:
    """What was started, or waits, by its ids."""
    if json:
        document(msgspec.json.encode(ids))
    else:
        out_line("\n".join(f"{name} {id}" for name, id in ids.items()))
    return OK


@contextmanager
def crash_told(state: SessionState) -> Iterator[None]:
    """Whoever just sends the next prompt would leave the run behind (S-26)."""
    try:
        yield
    except LostConnection as lost:
        if state.path is None:
            raise
        raise Failure(
            f"{lost}. What was saved of the conversation is kept, and\n"
            f"`loopctl recover --session {state.session_id}`\n"
            "takes over what is left of a run that was cut off.",
            UNREACHABLE,
        ) from None


def exit_code(following: Following, result: RunResult) -> int:
    """Of a run that is saved."""
    if following.stopped_by:
        return following.stopped_by
    match result.outcome:
        case "success":
            return OK
        case "error" | "cancelled":
            return RUN_FAILED
        case _:
            assert_never(result.outcome)


def tell(following: Following, result: RunResult) -> None:
    """How it ended, if not well."""
    match following.stopped_by:
        case code if code == INTERRUPTED:
            note("stopped")
        case code if code == TIMED_OUT:
            note("stopped: the time given by --timeout is over")
        case _ if not following.closed or following.json:
            outcome(result.outcome, None if _is_shown(following, result.error) else result.error)


def _is_shown(following: Following, error: ErrorInfo | None) -> bool:
    """The failure of the save alone was told as it happened."""
    return not following.json and error is not None and error.message == following.unsaved


def mark_read(following: Following, before: SessionState) -> None:
    """Whoever saw a run whole at a terminal has read it (S-6). What was unread before, or came from somebody else in
    between, was not seen, and keeps the session unread. A receipt that fails is no failure of the prompt."""
    timing = following.timing
    if timing is None or following.gap or following.json or before.unread or not is_terminal(sys.stdout):
        return
    if before.path is None or timing.message_start_index != before.live_count:
        return
    request = {"sessionId": following.session_id, "messageCount": timing.message_end_index}
    with suppress(RpcError, LostConnection, TimeoutError):
        following.client.call_raw("session/markRead", request, timeout=ANSWER)
