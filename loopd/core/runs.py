"""A run as the session's state knows it."""

from __future__ import annotations

from dataclasses import dataclass

from loop_protocol.v1.types import RunResult

from .guards import Operation
from .timings import Stopwatch


@dataclass(slots=True)
class RunState:
    """One accepted prompt. The outcome is ``cancelled`` if and only if ``stop_requested`` (I-1).

    ``journalled``: what it finishes is kept beside the session; None before its first message, False once that failed
    (S-26).
    """

    id: str
    operation: Operation
    watch: Stopwatch
    request_id: str | None = None
    digest: str | None = None
    generating: bool = True
    stop_requested: bool = False
    journalled: bool | None = None
    result: RunResult | None = None
