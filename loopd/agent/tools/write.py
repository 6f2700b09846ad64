"""The tool ``write``: a file becomes exactly what is given, or stays what it was.

A link is followed as a shell's ``>`` follows it: what it leads to is replaced, or made, and the link stays.
"""

from __future__ import annotations

from msgspec import Struct

from loopd.agent import ToolOutcome, ToolScope
from loopd.agent.protected import NOTHING, Protected
from loopd.agent.tools.changing import change
from loopd.agent.tools.files import locate
from loopd.agent.tools.pinned import Seen


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
        path, data = locate(arguments.path, scope), arguments.content.encode()

        def plan(seen: Seen | None) -> tuple[bytes, str]:
            size = f"{len(data)} bytes"
            if seen is None:
                return data, f"created {path}: {size}"
            return data, f"replaced {path}: {size} instead of {seen.status.st_size}"

        return await change("write", path, plan, scope=scope, protected=self._protected)
