"""What may happen when: one table of masks, not ifs. A refusal changes nothing (I-10).

Conditions stand in the order in which a refusal names them: what a person can settle comes before what takes time.
"""

from __future__ import annotations

from enum import Enum, Flag, auto
from typing import Any


class Condition(Flag):
    """What is true of a session now, derived from its state."""

    CLOSED = auto()
    DRAINING = auto()
    APPROVING = auto()
    REPLACING = auto()
    BUSY = auto()
    UNSAVED = auto()


class Operation(Enum):
    """What a client may ask of a session; the value is what a refusal calls the holder of the slot."""

    PROMPT = "prompt"
    RESUME = "resume"
    RECOVER = "recover"
    COMPACT = "compact"
    SET_MODEL = "setModel"
    SET_PERMISSION = "setPermission"
    RENAME_TITLE = "renameTitle"
    REFRESH_TITLE = "refreshTitle"
    REPLACE = "replace"
    FLUSH = "flush"
    DISPOSE = "dispose"
    START_QUEUED = "startQueued"
    ASK_APPROVAL = "askApproval"
    MARK_READ = "markRead"
    CHANGE_QUEUE = "changeQueue"
    SET_PINNED = "setPinned"
    CANCEL_TITLE = "cancelTitle"
    ANSWER_APPROVAL = "answerApproval"
    STOP = "stop"
    ABORT = "abort"
    READ = "read"


_NONE = Condition(0)
_ALL = ~_NONE
_SETTING = _ALL & ~Condition.DRAINING

REFUSED: dict[Operation, Condition] = {
    Operation.PROMPT: _ALL,
    Operation.RESUME: _ALL,
    Operation.RECOVER: _ALL,
    Operation.COMPACT: _ALL,
    Operation.SET_MODEL: _SETTING,
    Operation.SET_PERMISSION: _SETTING,
    Operation.RENAME_TITLE: _SETTING,
    Operation.REFRESH_TITLE: _SETTING,
    Operation.REPLACE: _ALL,
    Operation.FLUSH: _SETTING & ~Condition.UNSAVED,
    # Disposal cancels approvals, and stops and awaits a run.
    Operation.DISPOSE: Condition.CLOSED | Condition.REPLACING | Condition.UNSAVED,
    Operation.START_QUEUED: _ALL,
    # Only the run's own tool phase can ask, so BUSY is no obstacle.
    Operation.ASK_APPROVAL: Condition.CLOSED,
    Operation.MARK_READ: Condition.CLOSED | Condition.UNSAVED,
    Operation.CHANGE_QUEUE: Condition.CLOSED | Condition.REPLACING,
    Operation.SET_PINNED: Condition.CLOSED,
    Operation.CANCEL_TITLE: Condition.CLOSED,
    Operation.ANSWER_APPROVAL: Condition.CLOSED,
    Operation.STOP: _NONE,
    Operation.ABORT: _NONE,
    Operation.READ: _NONE,
}

KIND: dict[Condition, str] = {
    Condition.CLOSED: "session_closed",
    Condition.DRAINING: "draining",
    Condition.APPROVING: "approvals_pending",
    Condition.REPLACING: "replacing",
    Condition.BUSY: "session_busy",
    Condition.UNSAVED: "pending_save",
}

_REASON: dict[Condition, str] = {
    Condition.CLOSED: "the session is closed",
    Condition.DRAINING: "the daemon is shutting down and takes no new work",
    Condition.APPROVING: "an approval must be answered first",
    Condition.REPLACING: "the runtime is just replacing its session",
    Condition.BUSY: "the session is busy with {holder!r}; wait for it or stop it",
    Condition.UNSAVED: "the last save failed; repair its cause and flush",
}


class Declined(Exception):
    """No such thing, or it stands in the way: nothing changed. ``kind`` is the protocol's word for it."""

    def __init__(self, kind: str, message: str, **data: Any) -> None:
        super().__init__(message)
        self.kind = kind
        self.data = data


class Refused(Exception):
    """Not now: state, disk and event numbers are as before, and nothing was queued."""

    def __init__(self, condition: Condition, operation: Operation, holder: str | None) -> None:
        super().__init__(f"{operation.value}: " + _REASON[condition].format(holder=holder or "something"))
        self.condition = condition
        self.kind = KIND[condition]
        self.operation = operation
        self.holder = holder


def check(operation: Operation, now: Condition, holder: str | None = None) -> None:
    """Raise :class:`Refused` for the first condition that stands against ``operation``."""
    for condition in REFUSED[operation] & now:
        raise Refused(condition, operation, holder)


def table() -> str:
    """The masks as the Markdown table that the documentation shows."""
    conditions = list(Condition)
    rows = ["| operation | " + " | ".join(str(condition.name) for condition in conditions) + " |"]
    rows.append("|---" * (len(conditions) + 1) + "|")
    for operation, mask in REFUSED.items():
        rows.append(f"| {operation.value} | " + " | ".join("x" if c in mask else "–" for c in conditions) + " |")
    return "\n".join(rows) + "\n"
