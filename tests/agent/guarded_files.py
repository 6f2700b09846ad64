"""A workspace beside files that are none of its own, and a person who answers what tools ask."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import trio
from agent_recording import MakeScope, call

from loop_protocol.v1.types import Permission
from loopd.agent import Ask
from loopd.agent.protected import Protected
from loopd.agent.tools.edit import Edit, EditArguments
from loopd.agent.tools.read import Read, ReadArguments
from loopd.agent.tools.write import Write, WriteArguments

Answer = Callable[[Ask], str | None]


def allow(_: Ask) -> str | None:
    return None


class Guarded:
    """``ws`` is the workspace, ``out`` somebody's files beside it, ``own`` the daemon's directory, ``key`` one file
    more, ``absent/data`` what it may still make. ``asked`` is what came to the person."""

    def __init__(self, root: Path, make_scope: MakeScope) -> None:
        self.root, self.ws, self.out, self.own = root, root / "ws", root / "out", root / "own"
        self._make_scope = make_scope
        self.asked: list[Ask] = []
        self.answer: Answer = allow
        self.permission: Permission = "workspace-write"
        for directory in (self.ws / "sub", self.ws / ".git/hooks", self.out, self.own / "deep"):
            directory.mkdir(parents=True)
        for file in (self.ws / "file", self.out / "file", self.own / "deep/file", root / "key"):
            file.write_text("old\n")
        self.protected = Protected([str(self.own), str(root / "key"), str(root / "absent/data")])

    async def write(self, path: str | Path, content: str = "new\n") -> tuple[str, bool]:
        return await self._call(Write(self.protected), WriteArguments(str(path), content))

    async def edit(self, path: str | Path, old: str = "old", new: str = "new") -> tuple[str, bool]:
        return await self._call(Edit(self.protected), EditArguments(str(path), old, new))

    async def read(self, path: str | Path) -> tuple[str, bool]:
        return await self._call(Read(self.protected), ReadArguments(str(path)))

    async def _call(self, tool: Write | Edit | Read, arguments: object) -> tuple[str, bool]:
        async def ask(asked: Ask) -> str | None:
            self.asked.append(asked)
            await trio.lowlevel.checkpoint()
            return self.answer(asked)

        scope = dataclasses.replace(self._make_scope(cwd=str(self.ws), permission=self.permission), ask=ask)
        with trio.fail_after(10):
            return await call(tool, arguments, scope)

    def everything(self) -> dict[str, str | None]:
        """Every name below the root, with what a file holds and where a link leads."""
        seen: dict[str, str | None] = {}
        for place, directories, files in os.walk(self.root):
            for name in directories + files:
                path = Path(place, name)
                if path.is_symlink():
                    content = f"-> {os.readlink(path)}"
                else:
                    content = path.read_text() if path.is_file() else None
                seen[os.fspath(path.relative_to(self.root))] = content
        return seen


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
