"""Which directories of a workspace git takes its hooks and settings from, which run later with all rights (A-7)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from loopd.agent.tools.files import open_regular


def git_directories(workspace: str) -> Iterator[str]:
    """`.git`, and what it names where it is a file (``git init --separate-git-dir``), with what a worktree shares.

    Real paths, and only what lies below the workspace: a command may have made it a link to the host's ``/proc``, which
    must not be mounted over the command's own.
    """
    git = found = os.path.realpath(os.path.join(workspace, ".git"))
    if (named := _line_of(git)).startswith("gitdir: "):
        found = os.path.realpath(os.path.join(workspace, named.removeprefix("gitdir: ")))
    common = os.path.realpath(os.path.join(found, _line_of(os.path.join(found, "commondir"))))
    for path in (git, found, common):
        if path != workspace and within(path, workspace) and os.path.exists(path):
            yield path


def _line_of(path: str) -> str:
    """The first line of a small file; none of what is no file."""
    with suppress(OSError), open(open_regular(path), "rb") as file:
        return os.fsdecode(file.read(4096).partition(b"\n")[0].replace(b"\0", b""))
    return ""


def within(path: str, directory: str | None) -> bool:
    return directory is not None and (path == directory or path.startswith(directory.rstrip("/") + "/"))
