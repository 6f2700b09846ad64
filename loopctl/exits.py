"""Exit codes, and the failures that carry one. What each code means is part of the interface."""

from __future__ import annotations

from typing import Any

OK = 0
RUN_FAILED = 1
USAGE = 2
TIMED_OUT = 3
NO_SESSION = 4
REFUSED = 5
UNREACHABLE = 69
INTERRUPTED = 130

_BY_KIND = {
    "invalid_params": USAGE,
    "method_not_found": USAGE,
    "model_unavailable": USAGE,
    "unsupported_input": USAGE,
    "session_not_found": NO_SESSION,
    "runtime_not_found": NO_SESSION,
    "run_not_found": NO_SESSION,
    "queue_item_not_found": NO_SESSION,
    "session_closed": NO_SESSION,
    "draining": REFUSED,
    "session_busy": REFUSED,
    "approvals_pending": REFUSED,
    "pending_save": REFUSED,
    "save_failed": REFUSED,
    "replacing": REFUSED,
    "conflict": REFUSED,
    "queue_item_started": REFUSED,
    "nothing_to_resume": REFUSED,
    "approval_not_pending": REFUSED,
    "session_locked": REFUSED,
    "unsupported_version": UNREACHABLE,
}

# What a person can do about a refusal that they can do something about.
_REMEDY = {
    "pending_save": "`loopctl flush` does that.",
    "save_failed": "What is unsaved now, if anything, the daemon keeps: see `loopctl status`, `loopctl flush`.",
    "approvals_pending": "`loopctl approvals` shows what waits for an answer, `loopctl stop` ends its run.",
    "session_busy": "`loopctl attach` watches it, `loopctl stop` ends it.",
    "draining": "If it does not end, `loopctl drain --cancel` lets it take work again.",
    "session_not_found": "`loopctl sessions` lists what is saved, `loopctl runtimes` what is open.",
    "queue_item_not_found": "`loopctl queue` lists what waits.",
    "queue_item_started": "`loopctl attach` watches the run, `loopctl stop` ends it.",
    "nothing_to_resume": "`loopctl messages --last 2` shows where it ended.",
    "model_unavailable": "`loopctl models` shows what can be chosen, and why the rest cannot.",
}


def of_kind(kind: str) -> int:
    """The exit code for an error answer of the daemon."""
    return _BY_KIND.get(kind, RUN_FAILED)


class Failure(Exception):
    """Ends the command with this message on stderr and this exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class OutputClosed(Exception):
    """Nobody reads our output any more; whatever the daemon does goes on."""


class OutputFailed(Exception):
    """What we print cannot be written; whatever the daemon does goes on."""


def refusal(kind: str, message: str, data: dict[str, Any]) -> Failure:
    """An error answer as a line for people, and one with what to do where there is something."""
    remedy = _REMEDY.get(kind, "")
    if kind == "conflict" and (queued := data.get("queued")):
        message = f"{'1 queued input' if queued == 1 else f'{queued} queued inputs'} would be lost"
        remedy = "`loopctl queue` shows what waits; `new`, `switch` and `dispose` drop it with --discard-queue."
    return Failure(f"{message}\n{remedy}" if remedy else message, of_kind(kind))
