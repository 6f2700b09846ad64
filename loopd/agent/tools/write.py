"""The tool ``write``: a file becomes exactly what is given, or stays what it was.

A link is followed as a shell's ``>`` follows it: what it leads to is replaced, or made, and the link stays.
"""

from __future__ import annotations

import errno
import os
from functools import partial

from msgspec import Struct

from loopd.agent import Ask, ToolOutcome, ToolScope
from loopd.agent.protected import NOTHING, Protected
from loopd.agent.tools.files import locate, make_directories, on_disk, replace_file, require_regular
from loopd.agent.tools.outcomes import CHANGES, refused, told


class WriteArguments(Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    content: str


class Write:
    name = "write"
    description = (
        "Create a file, or replace all of it, with exactly this content; missing directories are made. "
        "To change a part of a file use edit."
    )
    parameters: type[Struct] = WriteArguments

    def __init__(self, protected: Protected = NOTHING) -> None:
        self._protected = protected

    async def run(self, arguments: WriteArguments, scope: ToolScope) -> ToolOutcome:
        path = locate(arguments.path, scope)
        if refusal := await refused(scope, Ask(operation="write", reason=CHANGES, sandbox="nothing", path=path)):
            return refusal
        work = partial(_write, path, arguments.content.encode(), cwd=scope.cwd, umask=scope.env.umask)
        return await on_disk(path, work)


# --- in a thread ------------------------------------------------------------------------------------------------------


def _write(path: str, data: bytes, *, cwd: str, umask: int) -> ToolOutcome:
    if not os.path.isdir(cwd):  # or it would be made again (K-12)
        raise FileNotFoundError(errno.ENOENT, f"the working directory {cwd} does not exist any more")
    if not os.path.basename(path):
        raise IsADirectoryError(errno.EISDIR, "a directory, not a file")
    target = os.path.realpath(path)
    before = _status(target)
    if before is None:
        make_directories(os.path.dirname(target), umask=umask)
    replace_file(target, data, before=before, umask=umask)
    done = "created" if before is None else "replaced"
    return told(f"{done} {path}: {len(data)} bytes" + ("" if before is None else f" instead of {before.st_size}"))


def _status(path: str) -> os.stat_result | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    require_regular(status, path)
    return status
