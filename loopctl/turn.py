"""Waits for the turn of a queued input, and takes it back when nobody wants to wait for it any more."""

from __future__ import annotations

from dataclasses import dataclass

from loop_protocol.backlog import Notification
from loop_protocol.client import Client, LostConnection
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.events import (
    EventParams,
    EventsLost,
    MessageStart,
    QueueChanged,
    RunStarted,
    SessionClosed,
    SessionReplaced,
)
from loop_protocol.v1.types import QueuedItem, QueueState, SessionState

from .asking import Asking
from .exits import INTERRUPTED, REFUSED, UNREACHABLE, Failure
from .interrupts import Interrupts
from .reach import ANSWER
from .running import Following, news
from .terminal import note
from .view import View
from .waiting import pause_of, tell_if_asking

_GONE = "the queued input was removed by somebody else"


@dataclass(slots=True)
class Turn:
    """One queued input. ``of``: the option that names its session, where one is needed. ``asking``, ``waits``: what
    becomes of its run's requests for approval."""

    client: Client
    session_id: str
    item_id: str
    of: str
    json: bool
    asking: Asking | None = None
    waits: bool = True
    _seen: bool = False  # in the queue, by the events: those from before it was added come first
    _pause: str | None = None
    _following: Following | None = None

    def awaited(self, interrupts: Interrupts, *, deadline: float | None) -> Following:
        """The run that has it now. Raises :class:`Failure` where it does not get one."""
        interrupts.farewell = f"the input may still wait: `loopctl queue{self.of}` shows it"
        try:
            self._tell_place()
            while self._following is None:
                taken = news(self.client, interrupts, deadline)
                if isinstance(taken, int):
                    self._withdraw(taken)
                else:
                    self._take(taken)
        except LostConnection as lost:
            raise Failure(
                f"{lost}. An input that waits is in the daemon's memory only: where\n"
                f"`loopctl queue{self.of}` does not show it any more, send it again.",
                UNREACHABLE,
            ) from None
        return self._following

    def _tell_place(self) -> None:
        state = self._state()
        ahead = [item.item_id for item in state.queue.items]
        if self.item_id in ahead:  # else its turn has come already, and the events tell so
            before = ahead.index(self.item_id) + (state.run is not None)
            note(f"queued behind {before}; waits for its turn" if before else "queued; waits for its turn")
            self._tell_pause(state.queue)
            tell_if_asking(state)

    def _take(self, notification: Notification[EventParams]) -> None:
        params = notification.params
        if params is None:
            return
        match params.event:
            case SessionReplaced(old=self.session_id):
                raise Failure("another session took the place of this one, and the queued input is gone", REFUSED)
            case EventsLost():  # told of the session that was there last, which may be the next one already
                self._look(notification)
            case _ if params.session_id != self.session_id:
                pass
            case RunStarted(run_id=run_id, item_id=self.item_id):
                self._begin(run_id, notification)
            case MessageStart(item_id=self.item_id):  # it steers a run that was there before
                self._begin(self._run(), notification)
            case QueueChanged(items, paused, error) if self._is_among(items):
                self._tell_pause(QueueState(items, paused, error))
            case QueueChanged() if self._seen:  # and no event before this one said that it started
                raise Failure(_GONE, REFUSED)
            case SessionClosed(reason=reason):
                raise Failure(f"the session was closed, and the queued input is gone: {reason}", REFUSED)

    def _look(self, lost: Notification[EventParams]) -> None:
        """Its start may be among the events that were lost: nobody would tell it a second time."""
        try:
            queue = self._state().queue
        except RpcError as error:
            if error.kind != "session_not_found":
                raise
            raise Failure("the session was left or closed; the queued input ran before, or is gone", REFUSED) from None
        if self._is_among(queue.items):
            self._tell_pause(queue)
        else:
            self._begin(self._run(), lost)

    def _is_among(self, items: list[QueuedItem]) -> bool:
        found = any(item.item_id == self.item_id for item in items)
        self._seen = self._seen or found
        return found

    def _run(self) -> str:
        """The run that it has become part of: asked by an edit that no revision allows, and that changes nothing."""
        try:
            self.client.call("queue/edit", self._named() | {"revision": 0}, timeout=ANSWER)
        except RpcError as error:
            if error.kind == "queue_item_started":
                return str(error.data["runId"])
            if error.kind == "queue_item_not_found":
                raise Failure(_GONE, REFUSED) from None
            raise
        raise RpcError("internal", "the daemon edited an input on a revision that it never had")

    def _begin(self, run_id: str, event: Notification[EventParams] | None) -> None:
        view = View(own=self.item_id, waits=self.waits)
        self._following = Following(
            self.client, self.session_id, run_id, self.json, view, self.asking, ours=event is not None
        )
        if event is not None:
            self._following.take(event)

    def _tell_pause(self, queue: QueueState) -> None:
        """Once, and again when it is another one."""
        pause = pause_of(queue, self.of)
        if pause is not None and pause != self._pause:
            note(f"the queue is paused: {pause}")
        self._pause = pause

    def _withdraw(self, code: int) -> None:
        """One that has started by now is stopped by whoever follows it."""
        why = "interrupted" if code == INTERRUPTED else "the time given by --timeout is over"
        try:
            self.client.call("queue/remove", self._named(), timeout=ANSWER)
        except RpcError as error:
            if error.kind == "queue_item_started":
                return self._begin(str(error.data["runId"]), None)
            if error.kind != "queue_item_not_found":
                raise
            raise Failure(f"{why}: {_GONE} already", code) from None
        except TimeoutError:
            raise Failure(f"{why}, but the daemon does not answer: the input may still wait", code) from None
        raise Failure(f"{why}: the input is taken out of the queue again", code)

    def _named(self) -> dict[str, object]:
        return {"sessionId": self.session_id, "itemId": self.item_id}

    def _state(self) -> SessionState:
        state: SessionState = self.client.call("session/state", {"sessionId": self.session_id}, timeout=ANSWER)
        return state
