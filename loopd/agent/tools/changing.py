"""How write and edit change a file: what the preset allows at once, else what a person approved, only that (A-8).

In restricted presets the real target decides, so a link that leads out of the workspace asks and shows where it leads.
An approval is good for one change of one content: the permit says where the file is, what is in it and what it becomes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from loopd.agent import Ask, ToolOutcome, ToolScope
from loopd.agent.permissions import why_ask
from loopd.agent.protected import NOTHING, Identity, Protected
from loopd.agent.tools.difference import for_people
from loopd.agent.tools.files import on_disk
from loopd.agent.tools.git import git_directories
from loopd.agent.tools.outcomes import told
from loopd.agent.tools.pinned import Pinned, Seen, changed, look, pinned, real_path, replace, require_allowed

# The thread that works on the text shares the interpreter with everybody else: 25 ms at the worst, measured.
MOST = 4 * 1024 * 1024

# What the file becomes, and what the model is told then. Raises OSError or ValueError where that cannot be.
Plan = Callable[[Seen | None], tuple[bytes, str]]


@dataclass(slots=True, frozen=True)
class Permit:
    """The change that ``ask`` describes: used up by the one call that it was given to."""

    ask: Ask
    path: str
    found: tuple[Identity, ...]
    seen: Seen | None
    data: bytes
    done: str


async def change(
    operation: Literal["write", "edit"], path: str, plan: Plan, *, scope: ToolScope, protected: Protected
) -> ToolOutcome:
    """Nobody is asked for what cannot be done anyway."""
    if scope.permission == "danger-full-access":
        protected = NOTHING
    begun = await on_disk(path, partial(_begin, operation, path, plan, scope, protected))
    if isinstance(begun, ToolOutcome):
        return begun
    answer = await scope.ask(begun.ask)
    if answer is not None:
        return told(answer, is_error=True)
    return await on_disk(path, partial(_use, begun, scope, protected))


# --- in a thread ------------------------------------------------------------------------------------------------------


def _begin(
    operation: Literal["write", "edit"], path: str, plan: Plan, scope: ToolScope, protected: Protected
) -> Permit | ToolOutcome:
    """Done already, where nobody has to be asked."""
    if not os.path.isdir(scope.cwd):  # or it would be made again (K-12)
        raise FileNotFoundError(errno.ENOENT, f"the working directory {scope.cwd} does not exist any more")
    with pinned(real_path(path)) as place:
        require_allowed(place, protected)
        git = list(git_directories(scope.cwd))
        reason = why_ask(place.names, permission=scope.permission, cwd=scope.cwd, git=git)
        seen = _seen(operation, place, asks=reason is not None)
        data, done = plan(seen)
        if reason is None:
            replace(place, data, seen=seen, umask=scope.env.umask)
            return told(done)
        return Permit(_ask(operation, place, seen, data, reason, scope), place.path, place.found, seen, data, done)


def _use(permit: Permit, scope: ToolScope, protected: Protected) -> ToolOutcome:
    try:
        with pinned(permit.path) as place:
            if place.found != permit.found:
                raise changed()
            require_allowed(place, protected)
            replace(place, permit.data, seen=permit.seen, umask=scope.env.umask)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):  # a link, or a file, has taken the place of something else
            raise changed() from error
        raise
    return told(permit.done)


def _seen(operation: Literal["write", "edit"], place: Pinned, *, asks: bool) -> Seen | None:
    if place.status is None:
        return None
    if operation == "write" and not asks:  # its content matters to nobody
        return Seen(place.status)
    if operation == "edit" and place.status.st_size > MOST:
        raise ValueError(f"it has {place.status.st_size} bytes, and edit takes at most {MOST}: use a command")
    return look(place, most=MOST)


def _ask(
    operation: Literal["write", "edit"], place: Pinned, seen: Seen | None, data: bytes, reason: str, scope: ToolScope
) -> Ask:
    path = os.fsencode(place.path).decode(errors="replace")
    exact = path == place.path
    inside = scope.permission == "workspace-write"
    return Ask(
        operation=operation,
        reason=reason,
        sandbox=f"files inside {scope.cwd} but for .git" if inside else "no changes of files",
        # Two names that are no text could be shown alike.
        rules=(f"{operation} {path}",) if exact else (),
        rules_refused=None if exact else "its name is not UTF-8 text",
        path=path,
        diff=_diff(seen, data),
        sha256_before=None if seen is None else seen.sha256,
    )


def _diff(seen: Seen | None, data: bytes) -> str:
    if len(data) > MOST:  # of lines that are empty it would take 90 times as much memory
        before = "no such file" if seen is None else f"{seen.status.st_size} bytes"
        return f"[{before} before, {len(data)} bytes afterwards: too many to compare; the arguments say what is new]"
    after = data.decode()
    if seen is None:
        return for_people("", after) or "[an empty file]"
    if seen.content is None:
        return f"[{seen.status.st_size} bytes, too many to compare, are replaced by the content in the arguments]"
    try:
        before = seen.content.decode()
    except UnicodeDecodeError:
        return f"[{len(seen.content)} bytes that are no UTF-8 text are replaced by:]\n{for_people('', after)}"
    return for_people(before, after) or "[the content stays the same]"
