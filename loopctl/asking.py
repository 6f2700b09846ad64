"""Asks the person at this terminal for approval, while everything else goes on.

One question at a time. Whatever settles a request elsewhere (another client's answer, its deadline, a stop) takes its
question back, and says so. Lines are read as the terminal gives them, so its settings are never touched, and what was
typed before a question was there is no answer to it.
"""

from __future__ import annotations

import os
import select
import sys
import termios
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TextIO

from loop_protocol.client import Client
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.events import ApprovalRequested, ApprovalResolved
from loop_protocol.v1.types import ApprovalRequest, Decision

from .approvals import became, described, how_to_answer, summary
from .exits import USAGE, of_kind
from .reach import ANSWER
from .terminal import err, note, somebody_is_there

_WHY = "why, for the model (Enter: no reason)> "


def _width() -> int:
    """Of the terminal that the question is shown at."""
    with suppress(OSError):
        return max(40, os.get_terminal_size(sys.stderr.fileno()).columns or 80)
    return 80


def _forget_typed() -> None:
    with suppress(termios.error):
        termios.tcflush(sys.stdin, termios.TCIFLUSH)


@dataclass(slots=True)
class Asking:
    """The requests that wait, the first one being asked. ``left``: whoever was there is gone; nothing is asked then."""

    client: Client
    waiting: list[ApprovalRequest] = field(default_factory=list)
    left: bool = False
    _asks: str | None = None  # the request of which the question stands there
    _cut: bool = False  # not all of it is shown
    _rejecting: bool = False

    def requested(self, event: ApprovalRequested) -> None:
        if event.request.approval_id in (one.approval_id for one in self.waiting):
            return  # it is told twice to who looks at a list and at changes
        self.waiting.append(event.request)
        self._ask_next()

    def resolved(self, event: ApprovalResolved) -> None:
        """Settled elsewhere; our own answers are told where they are given."""
        found = next((one for one in self.waiting if one.approval_id == event.approval_id), None)
        if found is not None:
            self._take_back(found, became(event, found))

    def found(self, requests: list[ApprovalRequest]) -> None:
        """What waits now, where events were lost."""
        for request in [one for one in self.waiting if one not in requests]:
            self._take_back(request, f"settled meanwhile: {summary(request)}")
        for request in requests:
            self.requested(ApprovalRequested(request))

    def sources(self) -> list[TextIO]:
        """What to wait for, beside the daemon."""
        return [sys.stdin] if self._asks else []

    def has_typed(self) -> bool:
        if not self.sources():
            return False
        poll = select.poll()
        poll.register(sys.stdin, select.POLLIN)
        return bool(poll.poll(0))

    def take_typed(self) -> None:
        """One line: a terminal gives no more at a time."""
        raw = b""
        with suppress(OSError):  # the terminal was closed
            raw = os.read(sys.stdin.fileno(), 65536)
        request = self.waiting[0]
        line = raw.decode("utf-8", "replace").strip()
        if not raw:
            self._leave()
        elif self._rejecting:
            self._answer(request, "rejected", feedback=line)
        else:
            self._take_key(request, line)

    def end(self) -> None:
        """Nobody asks any more: what comes next begins in a line of its own."""
        self._end_question()
        self._asks = None

    def _take_key(self, request: ApprovalRequest, key: str) -> None:
        match key.lower():
            case "y" | "yes":
                return self._answer(request, "allowed-once")
            case "s" if request.rules:
                return self._answer(request, "allowed-session")
            case "s":
                note(f"it cannot be allowed for the session: {request.rules_refused or 'no rule can be made of it'}")
            case "n" | "no":
                self._rejecting = True
            case "v":
                err(described(request, whole=True, width=_width())[0])
            case "":
                pass
            case _:
                note(f"y allows it this time, n rejects it{', s also allows what is like it' * bool(request.rules)}")
                note("v shows all of it; Ctrl-D asks no more here, and the request waits on")
        return self._prompt(request)

    def _ask_next(self) -> None:
        if self._asks is not None or not self.waiting:
            return
        request = self.waiting[0]
        if self.left or not somebody_is_there():
            note(f"waits for an approval: {summary(request)}\n{how_to_answer(request)}")
            return
        shown, self._cut = described(request, whole=False, width=_width())
        err(f"loopctl: {shown}")
        _forget_typed()  # before anybody could know the question
        self._asks = request.approval_id
        self._prompt(request)

    def _prompt(self, request: ApprovalRequest) -> None:
        keys = ["y once", *["s for the session"] * bool(request.rules), "n no", *["v shows all"] * self._cut]
        err(_WHY if self._rejecting else f"{', '.join(keys)}> ")

    def _answer(self, request: ApprovalRequest, decision: Decision, *, feedback: str = "") -> None:
        self._rejecting = False
        params = {"approvalId": request.approval_id, "decision": decision} | (
            {"feedback": feedback} if feedback else {}
        )
        try:
            self.client.call("approval/resolve", params, timeout=ANSWER)
        except RpcError as error:
            note(error.message)
            if of_kind(error.kind) == USAGE:
                return self._prompt(request)
        except TimeoutError as error:
            note(str(error))
            return self._prompt(request)
        return self._done(request)

    def _done(self, request: ApprovalRequest) -> None:
        self.waiting.remove(request)
        if self._asks == request.approval_id:
            self._asks = None
            self._rejecting = False
            self._ask_next()
        elif self._asks is not None:  # the question that stands there goes on
            self._prompt(self.waiting[0])

    def _take_back(self, request: ApprovalRequest, said: str) -> None:
        if self._asks == request.approval_id:
            _forget_typed()  # else what was half typed as an answer would be the beginning of the shell's next command
        self._end_question()
        note(said)
        self._done(request)

    def _end_question(self) -> None:
        if self._asks is not None:
            err("\n")

    def _leave(self) -> None:
        self._end_question()
        self.left = True
        for request in self.waiting:
            note(f"still waits for an approval: {summary(request)}\n{how_to_answer(request)}")
        self._asks = None
