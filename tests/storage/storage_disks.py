"""For the store's tests: a conversation to store, and a disk that records what a crash may leave."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from disks import Counting as Counting
from disks import Faulty as Faulty
from disks import Steps as Steps

from loop_protocol.v1.types import (
    AssistantMessage,
    ModelRef,
    PromptTiming,
    TextBlock,
    ToolCallBlock,
    ToolResultMessage,
    Usage,
    UserMessage,
)
from loopd.core.history import History, RunRecord
from loopd.storage import Snapshot
from loopd.storage.draft import DraftStore, draft
from loopd.storage.files import FileStore, create
from loopd.storage.fs import FileSystem

MODEL = ModelRef("practice", "echo")
ID = "7c9e6679-7425-40de-944b-e07fc1f90ae7"
NOW = 1_700_000_000_000


@dataclass(slots=True)
class Conversation:
    """Says something and hands out the snapshot that a commit would get."""

    history: History = field(default_factory=History)

    def turn(self, text: str = "hello") -> Snapshot:
        history, at = self.history, self.history.messages
        call = f"call-{at}"
        history.append(UserMessage(index=at, content=[TextBlock(text)], timestamp=NOW + at))
        asked = [TextBlock("let me see"), ToolCallBlock(call, "read", {"path": text})]
        for message in (
            self._assistant(at + 1, asked, "toolUse"),
            ToolResultMessage(
                index=at + 2,
                content=[TextBlock("42")],
                timestamp=NOW + at,
                tool_call_id=call,
                tool_name="read",
                is_error=False,
            ),
            self._assistant(at + 3, [TextBlock(f"{text} \u2028 it is")], "stop"),
        ):
            history.append(message)
        timing = PromptTiming(user_message_index=at, started_at=NOW, finished_at=NOW + 5)
        history.append_run(RunRecord(run_id=f"run-{at}", outcome="success", timing=timing))
        return self.snapshot(updated_at=NOW + len(history.lines), unread=True)

    def snapshot(self, **changes: Any) -> Snapshot:
        history = self.history
        return Snapshot(
            commit_id=str(uuid.uuid4()),
            lines=history.lines,
            count=len(history.lines),
            messages=history.messages,
            user_messages=history.user_messages,
            fallback=history.fallback,
            changes=changes,
        )

    @staticmethod
    def _assistant(index: int, content: Any, stop: Any) -> AssistantMessage:
        return AssistantMessage(
            index=index,
            content=content,
            timestamp=NOW + index,
            provider=MODEL.provider,
            model=MODEL.id,
            usage=Usage(3, 4),
            stop_reason=stop,
        )


def create_in(fs: FileSystem, root: Path, id: str = ID, **options: Any) -> FileStore:
    return create(fs, str(root / "data"), meta_id=id, **_facts(root, options))


def draft_in(fs: FileSystem, root: Path, id: str = ID, **options: Any) -> DraftStore:
    return draft(fs, str(root / "data"), meta_id=id, **_facts(root, options))


def _facts(root: Path, options: dict[str, Any]) -> dict[str, Any]:
    return {"cwd": str(root), "model": MODEL, "permission": "read-only", "now_ms": NOW} | options


# --- crashes ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Node:
    label: str
    is_directory: bool
    done: list[tuple[Any, ...]] = field(default_factory=list)  # what was asked of it
    synced: int = 0  # how much of that is surely on the disk


class Recording(Steps):
    """Keeps, for every file and directory, what was asked of it and what of that is durable, at each moment.

    ``drop`` names files or directories whose fsync is lost: the disk says yes and does nothing.
    """

    def __init__(self, root: Path, drop: str | None = None) -> None:
        self.drop = drop
        self.nodes = [_Node("root", True)]
        self._known = {self._identity(os.stat(root)): 0}
        self._fds: dict[int, int] = {}
        self.acknowledged = 0
        self.moments: list[tuple[int, list[tuple[int, int]]]] = []

    @staticmethod
    def _identity(stat: os.stat_result) -> tuple[int, int]:
        return stat.st_dev, stat.st_ino

    def _moment(self) -> None:
        self.moments.append((self.acknowledged, [(len(node.done), node.synced) for node in self.nodes]))

    def acknowledge(self) -> None:
        self.acknowledged += 1
        self._moment()

    def _do(self, node: int, *what: Any) -> None:
        self.nodes[node].done.append(what)
        self._moment()

    def _new(self, stat: os.stat_result, name: str, *, is_directory: bool) -> int:
        self.nodes.append(_Node(name, is_directory))
        self._known[self._identity(stat)] = len(self.nodes) - 1
        return len(self.nodes) - 1

    # The calls that change something, one override each.

    def open(self, name: str, flags: int, *, dir_fd: int | None = None) -> int:
        is_new = bool(flags & os.O_CREAT) and not os.access(name, os.F_OK, dir_fd=dir_fd)
        fd = FileSystem.open(self, name, flags, dir_fd=dir_fd)
        if is_new:
            assert dir_fd is not None
            self._do(self._fds[dir_fd], "link", name, self._new(os.fstat(fd), name, is_directory=False))
        self._fds[fd] = self._known[self._identity(os.fstat(fd))]
        return fd

    def mkdir(self, path: str) -> None:
        FileSystem.mkdir(self, path)
        parent, name = os.path.split(path)
        node = self._new(os.stat(path), name, is_directory=True)
        self._do(self._known[self._identity(os.stat(parent))], "link", name, node)

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        self._do(self._fds[fd], "write", offset, bytes(data))
        return FileSystem.write(self, fd, data, offset)

    def truncate(self, fd: int, size: int) -> None:
        self._do(self._fds[fd], "truncate", size)
        FileSystem.truncate(self, fd, size)

    def rename(self, source: str, target: str, *, dir_fd: int) -> None:
        self._do(self._fds[dir_fd], "rename", source, target)
        FileSystem.rename(self, source, target, dir_fd=dir_fd)

    def unlink(self, name: str, *, dir_fd: int) -> None:
        FileSystem.unlink(self, name, dir_fd=dir_fd)
        self._do(self._fds[dir_fd], "unlink", name, None)

    def rmdir(self, path: str) -> None:
        FileSystem.rmdir(self, path)
        parent, name = os.path.split(path)
        self._do(self._known[self._identity(os.stat(parent))], "unlink", name, None)

    def fsync(self, fd: int) -> None:
        node = self.nodes[self._fds[fd]]
        if self.drop != node.label:
            node.synced = len(node.done)
        self._moment()

    # --- what a crash can leave behind

    def crashes(self) -> Iterator[tuple[int, dict[str, bytes | None]]]:
        """Each distinct state: how much was acknowledged, and path → content (None for a directory)."""
        seen = set()
        for acknowledged, extents in self.moments:
            variants = [list(self._variants(node, *extent)) for node, extent in enumerate(extents)]
            for chosen in product(*variants):
                tree = dict(self._tree(0, "", chosen))
                key = (acknowledged, frozenset(tree.items()))
                if key not in seen:
                    seen.add(key)
                    yield acknowledged, tree

    def _variants(self, number: int, done: int, synced: int) -> Iterator[Any]:
        node = self.nodes[number]
        if node.is_directory:  # unsynced entries are kept as a prefix
            for kept in range(synced, done + 1):
                yield _entries(node.done[:kept])
            return
        for kept in range(synced, done + 1):  # an unsynced write is absent or full …
            yield _content(node.done[:kept])
            if kept < done and node.done[kept][0] == "write":  # … or half, or its length without its bytes
                _, offset, data = node.done[kept]
                yield _content([*node.done[:kept], ("write", offset, data[: len(data) // 2])])
                yield _content([*node.done[:kept], ("write", offset, bytes(len(data)))])

    def _tree(self, number: int, path: str, chosen: tuple[Any, ...]) -> Iterator[tuple[str, bytes | None]]:
        for name, node in chosen[number].items():
            below = f"{path}{name}"
            if node >= len(chosen):
                continue
            yield below, None if self.nodes[node].is_directory else chosen[node]
            if self.nodes[node].is_directory:
                yield from self._tree(node, below + "/", chosen)


def _entries(done: list[tuple[Any, ...]]) -> dict[str, int]:
    entries: dict[str, int] = {}
    for what, name, value in done:
        if what == "link":
            entries[name] = value
        elif what == "unlink":
            del entries[name]
        else:
            entries[value] = entries.pop(name)
    return entries


def _content(done: list[tuple[Any, ...]]) -> bytes:
    content = bytearray()
    for what, at, *data in done:
        if what == "truncate":
            content[at:] = bytes(max(0, at - len(content)))
        else:
            content.extend(bytes(max(0, at - len(content))))
            content[at : at + len(data[0])] = data[0]
    return bytes(content)


def lay_out(tree: dict[str, bytes | None], root: Path) -> None:
    for path, content in tree.items():
        if content is None:
            (root / path).mkdir(parents=True)
        else:
            (root / path).write_bytes(content)
