"""Each storage call of each operation fails, in each way, under a daemon on a real socket: nothing is lost or doubled.

After the fault the daemon answers, what it says of the session is true, and the files read as N or N+1 (I-4). Then the
disk is repaired, and the conversation goes on (S-14…S-16, I-5, I-6, storage rule 15). A new operation is a row of
``OPERATIONS``.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from disks import Faulty, Steps
from inprocess import Wire, World, running

from loop_protocol.v1.errors import RpcError
from loopd.agent.tools import session_tools
from loopd.core.history import RunRecord
from loopd.storage import SessionMissing, legacy
from loopd.storage.files import open_session, read_session
from loopd.storage.places import place_of

OTHER = {"provider": "practice", "id": "other"}
TITLE = "By hand"
# What one prompt that reads a file adds: the prompt, the call, its result, the answer.
TURN = 4


@dataclass(slots=True)
class Talk:
    """A client, its workspace, and what it knows to have been accepted."""

    world: World
    wire: Wire
    disk: Faulty
    cwd: str
    opened: dict[str, Any] | None = None
    told: dict[str, list[str]] = field(default_factory=dict)
    path: str = ""
    other: str = ""
    model: Any = None
    saved: bool = True
    pinned: bool = False
    titled: bool = False
    read: bool = False
    deleting: bool = False

    @property
    def ids(self) -> dict[str, Any]:
        assert self.opened is not None
        return {"sessionId": self.opened["sessionId"]}

    @property
    def said(self) -> list[str]:
        """What the session at ``path`` was asked."""
        return self.told.setdefault(self.path, [])

    # --- operations; a refusal is raised

    async def new(self) -> None:
        await self._open({"kind": "new"})

    async def draft(self) -> None:
        await self._open({"kind": "draft"})

    async def reopen(self) -> None:
        await self._open({"kind": "open", "path": self.path})

    async def proceed(self) -> None:
        await self._open({"kind": "continue"})

    async def _open(self, session: dict[str, Any]) -> None:
        self.opened = await self.wire.call("runtime/open", {"cwd": self.cwd, "session": session})
        self.path, self.model = self.opened["path"], self.opened["state"]["model"]
        await self.wire.call("runtime/attach", {"runtimeId": self.opened["runtimeId"]})

    async def prompt(self) -> None:
        asked = f"read note-{len(self.said)}"
        answer = await self.wire.call("session/prompt", {**self.ids, "content": asked, "wait": True})
        self.said.append(asked)
        assert answer["outcome"] == "success"
        self.saved, self.read = answer["saved"], False
        assert self.saved or answer["error"]["kind"] == "save_failed"

    async def flush(self) -> None:
        assert (await self.wire.call("session/flush", self.ids))["flushed"] is not self.saved
        self.saved = True

    async def set_model(self) -> None:
        await self.wire.call("session/setModel", {**self.ids, "model": OTHER})
        self.model = OTHER

    async def replace(self) -> None:
        assert self.opened is not None
        self.opened = await self.wire.call("runtime/newSession", {"runtimeId": self.opened["runtimeId"]})
        self.path = self.opened["path"]

    async def switch(self) -> None:
        assert self.opened is not None
        seat = {"runtimeId": self.opened["runtimeId"], "path": self.other}
        self.opened = await self.wire.call("runtime/switchSession", seat)
        self.path = self.other

    async def pin(self) -> None:
        assert (await self.wire.call("session/setPinned", {**self._named, "pinned": True}))["pinnedAt"]
        self.pinned = True

    async def mark_read(self) -> None:
        count = TURN * len(self.said)
        assert (await self.wire.call("session/markRead", {**self._named, "messageCount": count}))["read"]
        self.read = True

    async def rename(self) -> None:
        await self.wire.call("title/rename", {**self._named, "text": TITLE})
        self.titled = True

    async def mark(self) -> None:
        await self.pin()
        await self.mark_read()
        await self.rename()

    @property
    def _named(self) -> dict[str, Any]:
        return {"path": self.path} if self.opened is None else self.ids

    async def delete(self) -> None:
        """One that failed may have got as far as to make it a session no more; the next one removes what is left."""
        self.deleting = True
        try:
            await self.wire.call("session/delete", {"path": self.path})
        except RpcError as error:
            if error.kind != "session_not_found":
                raise
        assert not os.listdir(os.path.dirname(os.path.dirname(self.path)))
        self.told.pop(self.path, None)

    async def recover(self) -> None:
        """As with a prompt, what is taken over is history, whether it could be saved or not."""
        refusal = None
        try:
            await self.wire.call("session/recover", self.ids)
        except RpcError as error:
            refusal = error
        self.saved = not (await self.wire.call("session/state", self.ids))["hasPendingSave"]
        if refusal is not None and self.saved:
            raise refusal
        assert self.saved is (refusal is None)
        self.said.append("read note-1")

    async def dispose(self) -> None:
        assert self.opened is not None
        await self.wire.call("runtime/dispose", {"runtimeId": self.opened["runtimeId"]})
        self.opened = None

    async def read_closed(self) -> None:
        await self.wire.call("session/state", {"path": self.path})

    async def list(self) -> None:
        """A session that cannot be read now may be named as damaged, but must not be missing."""
        listed = await self.wire.call("session/list", {"cwd": self.cwd})
        assert self.path in {one["path"] for one in [*listed["sessions"], *listed["damaged"]]}

    # --- what leads to them

    async def begin(self) -> None:
        await self.new()
        await self.prompt()

    async def close(self) -> None:
        await self.begin()
        await self.dispose()

    async def two(self) -> None:
        """One that is closed, and one that is open."""
        await self.close()
        self.other = self.path
        await self.begin()

    async def earlier(self) -> None:
        """A session of an earlier version, in one file."""
        place = Path(place_of(self.world.services.data_dir, self.cwd))
        place.mkdir(parents=True)
        ask = {"type": "toolCall", "id": "c", "name": "read", "arguments": {"path": "note-0"}}
        timing = {"id": "t", "userMessageIndex": 0, "startedAt": 5, "finishedAt": 6}
        head = {"format": "loop-session", "version": 2, "cwd": self.cwd, "updatedAt": 7, "promptTimings": [timing]}
        lines: list[Any] = [
            head,
            {"role": "user", "content": "read note-0"},
            {"role": "assistant", "content": [ask], "stopReason": "toolUse"},
            {"role": "toolResult", "toolCallId": "c", "content": "note 0 says so"},
            {"role": "assistant", "content": "it says so"},
        ]
        (place / "old.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.path = str(place / "old.jsonl")
        self.told = {path: ["read note-0"] for path in (self.path, str(place / "old" / "meta.json"))}
        self.read = True

    async def crash(self) -> None:
        """All that is left of the second turn is its journal; the session is open again."""
        await self.begin()
        directory = Path(self.path).parent
        before = directory.with_name(".before")
        shutil.copytree(directory, before)
        await self.prompt()
        *lines, record = self.world.session_of(self.ids["sessionId"]).core.history.lines[-TURN - 1 :]
        await self.dispose()
        shutil.rmtree(directory)
        before.rename(directory)
        self.said.pop()
        store, _ = open_session(Steps(), self.path)
        store.journal.begin(store.meta.committed.commit_id, msgspec.json.decode(record, type=RunRecord), lines[0])
        for line in lines[1:]:
            store.journal.append(line)
        store.close()
        await self.reopen()
        assert self.opened is not None
        assert self.opened["state"]["recoverable"]["messages"] == TURN

    async def fail(self) -> None:
        """Leave a save pending."""
        await self.begin()
        await self._prompt_in_vain()

    async def fail_draft(self) -> None:
        await self.draft()
        await self._prompt_in_vain()

    async def _prompt_in_vain(self) -> None:
        self.disk.arm(1, errno.EIO, lasting=True)
        await self.prompt()
        self.disk.disarm()
        assert not self.saved


async def nothing(_: Talk) -> None:
    pass


# name → what comes before, what is done while the disk fails
OPERATIONS: dict[str, tuple[Callable[[Talk], Awaitable[None]], Callable[[Talk], Awaitable[None]]]] = {
    "new session": (nothing, Talk.new),
    "first prompt": (Talk.new, Talk.prompt),
    "prompt": (Talk.begin, Talk.prompt),
    "setModel": (Talk.begin, Talk.set_model),
    "flush": (Talk.fail, Talk.flush),
    "newSession": (Talk.begin, Talk.replace),
    "open": (Talk.close, Talk.reopen),
    "continue": (Talk.close, Talk.proceed),
    "state by path": (Talk.close, Talk.read_closed),
    "list": (Talk.close, Talk.list),
    "marks": (Talk.begin, Talk.mark),
    "pin while a save is pending": (Talk.fail, Talk.pin),
    "draft's first save": (Talk.draft, Talk.prompt),
    "draft's flush": (Talk.fail_draft, Talk.flush),
    "switchSession": (Talk.two, Talk.switch),
    "migration": (Talk.earlier, Talk.reopen),
    "recover": (Talk.crash, Talk.recover),
    "marks by path": (Talk.close, Talk.mark),
    "delete": (Talk.close, Talk.delete),
}
# What stays until somebody repairs it, and what may also pass by itself.
STAY = ["ENOSPC", "EDQUOT", "EROFS", "EIO", "EMFILE", "EFBIG", "EACCES", "short write"]
PASS = ["EIO", "EMFILE", "short write"]
READS = {"open", "continue", "state by path", "list", "switchSession", "delete"}  # they write no byte
# These have every way to fail at every call. The others have EIO and short writes at every one, and each of the further
# ways at every fourth, beginning with another: none of those leads to code of its own.
THOROUGH = {"new session", "first prompt", "prompt", "flush"}
MATRIX = [
    (operation, kind, lasting)
    for operation in OPERATIONS
    for lasting, kinds in (("until repaired", STAY), ("once", PASS))
    for kind in kinds
    if not (kind == "short write" and operation in READS)
]


@pytest.mark.parametrize(("operation", "kind", "lasting"), MATRIX)
async def test_any_storage_call_that_fails_loses_and_doubles_nothing(
    operation: str, kind: str, lasting: str, tmp_path: Path
) -> None:
    short = kind == "short write"
    number = errno.ENOSPC if short else getattr(errno, kind)
    before, perform = OPERATIONS[operation]
    hits: Counter[str] = Counter()
    stride = 1 if kind in ("EIO", "short write") or operation in THOROUGH else 4
    async with _client(tmp_path) as (world, wire, disk):
        for k in count(1 + STAY.index(kind) % stride, stride):
            talk = Talk(world, wire, disk, str(tmp_path / f"ws-{k}"))
            _workspace(talk)
            await before(talk)
            disk.arm(k, number, short=short, lasting=lasting != "once")
            refusal = await _refusal(perform, talk)
            assert refusal is None or (refusal.kind == "save_failed" and errno.errorcode[number] in str(refusal))
            if disk.hit is not None:
                hits[disk.hit] += 1
            reached = disk.reached
            await _tells_the_truth(talk)
            disk.disarm()
            await _repaired(talk, perform if refusal else nothing)
            await _goes_on(talk)
            if not reached:
                break
    print(f"{operation}, {kind} {lasting}: {hits.total()} points hit: {dict(hits)}")
    assert hits


@asynccontextmanager
async def _client(root: Path) -> AsyncIterator[tuple[World, Wire, Faulty]]:
    disk = Faulty()
    async with running(root, tools=session_tools(bash_timeout_s=20), fs=disk) as world:
        yield world, await world.connect(), disk


def _workspace(talk: Talk) -> None:
    Path(talk.cwd).mkdir()
    for number in range(5):
        (Path(talk.cwd) / f"note-{number}").write_text(f"note {number} says so\n")
    talk.wire.events.clear()
    talk.wire.log.clear()


async def _refusal(perform: Callable[[Talk], Awaitable[None]], talk: Talk) -> RpcError | None:
    try:
        await perform(talk)
    except RpcError as error:
        return error
    return None


async def _tells_the_truth(talk: Talk) -> None:
    """Whatever the disk does now: the daemon answers, and files and state agree."""
    status = await talk.wire.call("server/status")
    pending = {one["sessionId"] for one in status["pendingSaves"]}
    if talk.opened is None:
        assert not pending
        _is_there_or_gone(talk)
        return
    state = await talk.wire.call("session/state", talk.ids)
    assert state["hasPendingSave"] is not talk.saved
    assert pending == (set() if talk.saved else {state["sessionId"]})
    live = await _messages(talk)
    assert [one for one in live if one["role"] == "user"] == live[::TURN]
    n = state["messageCount"]
    assert len(live) == state["liveCount"] == n + (0 if talk.saved else TURN)
    try:
        meta, stored = read_session(Steps(), talk.path)
    except SessionMissing:
        assert (state["kind"], n) == ("draft", 0)
    else:
        assert stored.messages in {n, len(live)}
        lines = talk.world.session_of(state["sessionId"]).core.history.lines
        assert stored.lines == lines[: len(stored.lines)]
        assert msgspec.to_builtins(meta.model) in (talk.model, OTHER)
    assert state["model"] == talk.model
    _shows_the_marks(talk, state)
    told = [one.event.__struct_config__.tag for one in talk.wire.events if one.session_id == state["sessionId"]]
    saves = [tag for tag in told if tag in ("session_saved", "save_failed")]
    assert not saves or (saves[-1] == "save_failed") is not talk.saved


def _is_there_or_gone(talk: Talk) -> None:
    """A session that is not open: whole where it was, unless it was to be deleted."""
    if talk.path not in talk.told:
        return
    try:
        if talk.path.endswith(legacy.SUFFIX):
            model = talk.world.services.models.default()
            _, _, stored = legacy.read(Steps(), talk.path, model=model, permission="read-only")
        else:
            _, stored = read_session(Steps(), talk.path)
    except SessionMissing:
        assert talk.deleting
    else:
        assert stored.messages == TURN * len(talk.said)


def _shows_the_marks(talk: Talk, state: Any) -> None:
    assert ("pinnedAt" in state) is talk.pinned
    assert (state.get("title", {}).get("text") == TITLE) is talk.titled
    if talk.saved:
        assert state["unread"] is (bool(talk.said) and not talk.read)


async def _messages(talk: Talk) -> list[Any]:
    page = await talk.wire.call("session/messages", talk.ids)
    assert len(page["messages"]) == page["total"]
    messages: list[Any] = page["messages"]
    return messages


async def _repaired(talk: Talk, again: Callable[[Talk], Awaitable[None]]) -> None:
    """What failed works now, and so does what a failed prompt asks for."""
    await again(talk)
    if not talk.saved:
        await talk.flush()
    if talk.opened is None:
        await (talk.reopen() if talk.path in talk.told else talk.new())


async def _goes_on(talk: Talk) -> None:
    """The next prompt, and a later daemon, find every turn once."""
    await talk.prompt()
    assert talk.saved
    await _all_there_once(talk)
    await talk.dispose()
    assert not talk.world.daemon.sessions()
    listed = await talk.wire.call("session/list", {"cwd": talk.cwd})
    assert not listed["damaged"]
    assert not listed["legacy"]
    counted = {row["path"]: row["messageCount"] for row in listed["sessions"]}
    assert counted[talk.path] == TURN * len(talk.said)
    for talk.path, messages in counted.items():  # also one whose creation was refused after it was on disk
        await talk.reopen()
        if messages:
            await _all_there_once(talk)
        await talk.dispose()


async def _all_there_once(talk: Talk) -> None:
    messages = await _messages(talk)
    assert [one["content"][0]["text"] for one in messages[::TURN]] == talk.said
    assert [one["role"] for one in messages] == ["user", "assistant", "toolResult", "assistant"] * len(talk.said)
    meta, stored = read_session(Steps(), talk.path)
    state = await talk.wire.call("session/state", talk.ids)
    assert not state["hasPendingSave"]
    assert [msgspec.json.decode(stored.line(index)) for index in range(stored.messages)] == messages
    assert len(stored.timings) == len({timing.id for timing in stored.timings}) == len(talk.said)
    assert msgspec.to_builtins(meta.model) == state["model"]
    assert (meta.updated_at, meta.unread) == (state["updatedAt"], state["unread"])
    told = (meta.pinned_at, msgspec.to_builtins(meta.title or meta.committed.fallback))
    assert told == (state.get("pinnedAt"), state["title"])
