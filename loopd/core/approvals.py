"""What waits for a person's answer: requests of one session's tools, in memory only (A-1…A-6).

Each is settled exactly once, by whatever comes first: an answer, its deadline, a stop, the end of its run. What was
allowed for the session is kept as rules, and they are what the person was shown; they go with the opening, and with the
preset in which it was allowed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from loop_protocol.v1.events import ApprovalRequested, ApprovalResolved, Event
from loop_protocol.v1.types import ApprovalOutcome, ApprovalRequest, Decision

from .announce import Announce
from .guards import Declined
from .inputs import Invalid

REMEMBERED = 256
# Arguments of a call as JSON, in bytes: they are told with the request and with the running tool, and a state has both.
ASKED = 8 * 1024 * 1024


@dataclass(slots=True, frozen=True)
class Resolution:
    """``by``: the client that answered, if one did."""

    outcome: ApprovalOutcome
    by: str | None = None
    feedback: str | None = None


@dataclass(slots=True)
class Pending:
    """A request, and what it came to. ``wake`` tells who waits for that; it must not wait itself."""

    request: ApprovalRequest
    wake: Callable[[], None]
    resolution: Resolution | None = None


def _nobody(_: Any) -> None:
    """Listens."""


class Settled:
    """What the last ``REMEMBERED`` requests came to: of all sessions, since who answers late may find another one open
    (K-43)."""

    def __init__(self) -> None:
        self._resolutions: OrderedDict[str, Resolution] = OrderedDict()

    def remember(self, approval_id: str, resolution: Resolution) -> None:
        self._resolutions[approval_id] = resolution
        if len(self._resolutions) > REMEMBERED:
            self._resolutions.popitem(last=False)

    def refusal(self, approval_id: str) -> Declined:
        """Of an answer to what does not wait: with what it came to and who answered, if that is remembered (A-2)."""
        settled = self._resolutions.get(approval_id)
        if settled is None:
            return Declined("approval_not_pending", f"no approval {approval_id} waits for an answer")
        by = {} if settled.by is None else {"by": settled.by}
        text = f"this approval is settled: {settled.outcome}" + (f", by {settled.by}" if settled.by else "")
        return Declined("approval_not_pending", text, outcome=settled.outcome, **by)


@dataclass(slots=True)
class Approvals:
    """``observe`` is told what ``announce`` is told: it is for people who look at all sessions. ``settled`` is what all
    sessions remember."""

    announce: Announce
    observe: Callable[[Event], None] = _nobody
    settled: Settled = field(default_factory=Settled)
    pending: dict[str, Pending] = field(default_factory=dict)
    grants: dict[str, None] = field(default_factory=dict)  # in the order in which they were given

    def state(self) -> list[ApprovalRequest]:
        return [one.request for one in self.pending.values()]

    def grant_covers(self, rules: Sequence[str]) -> bool:
        """Everything of it was allowed for the session before. What has no rule never is."""
        return bool(rules) and self.grants.keys() >= set(rules)

    def ask(self, request: ApprovalRequest, wake: Callable[[], None]) -> Pending:
        pending = self.pending[request.approval_id] = Pending(request, wake)
        self._tell(ApprovalRequested(request))
        return pending

    def answer(self, approval_id: str, decision: Decision, *, by: str, feedback: str | None) -> None:
        """Of one that is pending. Raises ``Invalid`` for an answer that it cannot have: then it still waits."""
        pending = self.pending[approval_id]
        request = pending.request
        if feedback is not None and decision != "rejected":
            raise Invalid("feedback goes with rejected: what is allowed runs as it is", "feedback")
        if decision == "allowed-session" and not request.rules:
            reason = request.rules_refused or "no rule can be made of it"
            raise Invalid(f"this cannot be allowed for the session: {reason}; allowed-once can", "decision")
        if decision == "allowed-session":
            self.grants.update(dict.fromkeys(request.rules))
        self.settle(pending, Resolution(decision, by, feedback))

    def settle(self, pending: Pending, resolution: Resolution) -> None:
        """Does nothing where it is settled: the first one holds."""
        if pending.resolution is not None:
            return
        pending.resolution = resolution
        approval_id = pending.request.approval_id
        del self.pending[approval_id]
        self.settled.remember(approval_id, resolution)
        session_id, outcome = pending.request.session_id, resolution.outcome
        self._tell(ApprovalResolved(approval_id, session_id, outcome, resolution.by, resolution.feedback))
        pending.wake()

    def cancel(self) -> None:
        """Whatever waits: nobody wants it any more (A-4)."""
        for pending in tuple(self.pending.values()):
            self.settle(pending, Resolution("cancelled"))

    def _tell(self, event: Event) -> None:
        self.announce.publish(event)
        self.observe(event)
