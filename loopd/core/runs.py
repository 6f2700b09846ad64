"""A run as the session's state knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from loop_protocol.v1.types import RunResult

from .guards import Operation
from .history import Request
from .timings import Stopwatch


@dataclass(slots=True, frozen=True)
class ApprovalPolicy:
    """What becomes of a run's requests for approval: ``reject`` settles them at once while nobody is there who could
    answer (A-6); each waits for ``timeout_ms`` at most."""

    mode: Literal["wait", "reject"] = "wait"
    timeout_ms: int | None = None


WAITING = ApprovalPolicy()


@dataclass(slots=True)
class RunState:
    """One accepted prompt, or the resumption of one. The outcome is ``cancelled`` if and only if ``stop_requested``
    (I-1). ``aborted``: what still enters it asks for no title either. ``item_id``: it was queued. ``steered``: the
    requests of queued inputs that entered it later.

    ``journalled``: what it finishes is kept beside the session; None before its first message, False once that failed
    (S-26).
    """

    id: str
    operation: Operation
    watch: Stopwatch
    request: Request | None = None
    item_id: str | None = None
    approvals: ApprovalPolicy = WAITING
    steered: list[Request] = field(default_factory=list)
    generating: bool = True
    stop_requested: bool = False
    aborted: bool = False
    journalled: bool | None = None
    result: RunResult | None = None

    def requested(self, request_id: str) -> Request | None:
        """What a client sent under that id, if it is part of this run."""
        return next((one for one in (self.request, *self.steered) if one and one.request_id == request_id), None)
