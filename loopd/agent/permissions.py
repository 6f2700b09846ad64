"""What a preset lets a tool do by itself, what takes a person, and what is never allowed (A-7)."""

from __future__ import annotations

from typing import assert_never

from loop_protocol.v1.types import ApprovalOutcome


def answer_for(outcome: ApprovalOutcome, feedback: str | None) -> str | None:
    """What the model is told of a request that came to ``outcome``; None where it was allowed."""
    match outcome:
        case "allowed-once" | "allowed-session":
            return None
        case "rejected":
            said = f" They said: {feedback}" if feedback else ""
            return f"Not done: the person rejected this.{said}"
        case "timed-out":
            return "Not done: this needs a person's approval, and nobody answered in time."
        case "unavailable":
            return "Not done: this needs a person's approval, and nobody is there who could give it."
        case "cancelled":
            return "Not done: the request for approval was cancelled."
    assert_never(outcome)
