"""What a preset lets a tool do by itself, what takes a person, and what is never allowed (A-7)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import assert_never

from loop_protocol.v1.types import ApprovalOutcome, Permission
from loopd.agent.protected import fold

DENIED = (
    "denied: the daemon's own settings, keys, sessions and socket are kept from tools in this preset, and nobody is "
    "asked for them. Only the person can lift that, for all of the session: loopctl permission danger-full-access"
)
_GIT = "it is inside .git, where hooks and settings run later with all rights"


def why_ask(names: Sequence[str], *, permission: Permission, cwd: str, git: Collection[str] = ()) -> str | None:
    """Why changing the file of that real path, by its components, takes a person; None where the preset allows it.
    ``git``: directories that are to the workspace what ``.git`` is, whatever their names."""
    match permission:
        case "danger-full-access":
            return None
        case "read-only":
            return "changing files takes a person in the preset read-only"
        case "workspace-write":
            if any(fold(name) in (".git", "git~1") for name in names):  # the second is what FAT may call the first
                return _GIT
            if any(list(names[: len(own)]) == own for own in (directory.split("/")[1:] for directory in git)):
                return _GIT
            workspace = [name for name in cwd.split("/") if name]
            return None if list(names[: len(workspace)]) == workspace else f"it is outside the workspace {cwd}"
    assert_never(permission)


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
