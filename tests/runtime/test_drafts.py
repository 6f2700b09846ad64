"""Drafts: an id and a path from the start, no file before the first message is saved (S-3)."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from inprocess import PlayedModel, Wire, World, running, text

from loop_protocol.replica import fold
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.types import SessionState
from loopd.storage.fs import FileSystem

IMAGE = {"type": "image", "data": "aGk=", "mimeType": "image/png"}


class Full(FileSystem):
    is_full = False

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(fd, data, offset)


async def _error(wire: Wire, method: str, **params: Any) -> RpcError:
    with pytest.raises(RpcError) as caught:
        await wire.call(method, params)
    return caught.value


def _files(world: World) -> list[str]:
    return sorted(str(found.relative_to(world.root)) for found in world.root.rglob("*") if found.is_file())


async def _listed(wire: Wire, world: World, **params: Any) -> list[str]:
    listing = await wire.call("session/list", {"cwd": world.cwd, **params})
    assert listing["damaged"] == []
    return [row["sessionId"] for row in listing["sessions"]]


async def test_a_draft_is_on_disk_from_its_first_saved_message_on_and_then_like_any_session(tmp_path: Path) -> None:
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        opened = await wire.open(world, kind="draft")
        assert opened["state"]["kind"] == "draft"
        assert Path(opened["path"]).parts[-2:] == (opened["sessionId"], "meta.json")
        assert _files(world) == []
        assert not Path(opened["path"]).parent.exists()
        assert await _listed(wire, world) == []
        [row] = (await wire.call("runtime/list"))["runtimes"]
        assert (row["kind"], row["path"]) == ("draft", opened["path"])
        permission = {"sessionId": opened["sessionId"], "permission": "workspace-write"}
        model = {"sessionId": opened["sessionId"], "model": {"provider": "other", "id": "m"}}
        await wire.call("session/setPermission", permission)
        await wire.call("session/setModel", model)
        assert _files(world) == []
        await wire.prompt(opened["sessionId"], wait=True)
        state = await wire.call("session/state", {"sessionId": opened["sessionId"]})
        assert (state["kind"], state["path"], state["messageCount"]) == ("persistent", opened["path"], 2)
        assert await _listed(wire, world) == [opened["sessionId"]]
        saved = await wire.call("session/state", {"path": opened["path"]})
        assert (saved["permission"], saved["model"]) == ("workspace-write", {"provider": "other", "id": "m"})
        folded = msgspec.convert(opened["state"], SessionState)
        for event in wire.events:
            folded = fold(folded, event)
        assert msgspec.to_builtins(folded) == state
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        again = await wire.open(world, kind="continue", attach=False)
        assert (again["path"], again["state"]["permission"]) == (opened["path"], "workspace-write")


async def test_an_attachment_without_a_word_makes_a_draft_a_session(tmp_path: Path) -> None:
    async with running(tmp_path, model=PlayedModel([text("hi")], input=frozenset({"text", "image"}))) as world:
        wire = await world.connect()
        opened = await wire.open(world, kind="draft", attach=False)
        await wire.prompt(opened["sessionId"], [IMAGE], wait=True)
        assert await _listed(wire, world) == [opened["sessionId"]]


async def test_an_open_draft_is_found_by_its_workspace_and_by_its_path(tmp_path: Path) -> None:  # S-22
    async with running(tmp_path) as world:
        wire, other = await world.connect(), await world.connect()
        opened = await wire.open(world, kind="draft")
        ids = (opened["runtimeId"], opened["sessionId"])
        joined = await other.open(world, kind="continue")
        assert (joined["created"], joined["runtimeId"], joined["sessionId"]) == (False, *ids)
        by_path = {"cwd": world.cwd, "session": {"kind": "open", "path": opened["path"]}}
        assert (await other.call("runtime/open", by_path))["runtimeId"] == ids[0]
        locked = await _error(other, "runtime/open", **by_path, runtimeId="new")
        assert (locked.kind, locked.data["runtimeId"]) == ("session_locked", ids[0])
        assert (await other.call("session/state", {"path": opened["path"]}))["sessionId"] == ids[1]
        for kind in ("draft", "new"):
            refused = await _error(other, "runtime/open", cwd=world.cwd, session={"kind": kind})
            assert (refused.kind, refused.data["runtimeId"]) == ("conflict", ids[0])


async def test_a_draft_may_have_a_session_directory_of_its_own(tmp_path: Path) -> None:  # S-2
    own = tmp_path / "own"
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        session = {"kind": "draft", "sessionDir": str(own)}
        opened = await wire.call("runtime/open", {"cwd": world.cwd, "session": session})
        assert not own.exists()
        await wire.prompt(opened["sessionId"], wait=True)
        assert Path(opened["path"]).parent.parent == own
        assert await _listed(wire, world, sessionDir=str(own)) == [opened["sessionId"]]
        replaced = await wire.call("runtime/newSession", {"runtimeId": opened["runtimeId"]})
        assert Path(replaced["path"]).parent.parent == own


async def test_what_follows_a_draft_is_a_draft_also_after_its_first_save(tmp_path: Path) -> None:
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        opened = await wire.open(world, kind="draft")
        seat = {"runtimeId": opened["runtimeId"]}
        second = await wire.call("runtime/newSession", seat)
        assert (second["state"]["kind"], second["created"], second["cancelled"]) == ("draft", True, False)
        assert second["path"] != opened["path"]
        assert _files(world) == []  # the first one is gone, as if it had never been
        missing = await _error(wire, "session/state", path=opened["path"])
        assert missing.kind == "session_not_found"
        await wire.prompt(second["sessionId"], wait=True)
        third = await wire.call("runtime/newSession", seat)
        assert third["state"]["kind"] == "draft"
        assert await _listed(wire, world) == [second["sessionId"]]
        # A file that it switches to is no draft, and what comes after it is one again.
        fourth = await wire.call("runtime/switchSession", {**seat, "path": second["path"]})
        assert fourth["state"]["kind"] == "persistent"
        assert (await wire.call("runtime/newSession", seat))["state"]["kind"] == "draft"


async def test_a_first_save_that_fails_is_pending_leaves_nothing_and_is_flushed(tmp_path: Path) -> None:  # S-14…S-16
    disk = Full()
    async with running(tmp_path, model=PlayedModel([text("hi")]), fs=disk) as world:
        wire = await world.connect()
        opened = await wire.open(world, kind="draft")
        ids = {"sessionId": opened["sessionId"]}
        await wire.call("session/setPermission", {**ids, "permission": "workspace-write"})
        disk.is_full = True
        failed = await wire.call("session/prompt", {**ids, "content": "x", "wait": True})
        assert (failed["saved"], failed["error"]["kind"]) == (False, "save_failed")
        assert _files(world) == []
        assert not Path(opened["path"]).parent.exists()
        assert await _listed(wire, world) == []
        state = await wire.call("session/state", ids)
        assert (state["kind"], state["hasPendingSave"], state["messageCount"]) == ("draft", True, 0)
        for method, params in (
            ("session/prompt", {**ids, "content": "y"}),
            ("runtime/newSession", {"runtimeId": opened["runtimeId"]}),
            ("runtime/switchSession", {"runtimeId": opened["runtimeId"], "path": "/x/y/meta.json"}),
            ("runtime/dispose", {"runtimeId": opened["runtimeId"]}),
        ):
            assert (await _error(wire, method, **params)).kind == "pending_save"
        assert (await _error(wire, "session/flush", **ids)).kind == "save_failed"
        disk.is_full = False
        assert await wire.call("session/flush", ids) == {"flushed": True}
        saved = await wire.call("session/state", {"path": opened["path"]})
        assert (saved["kind"], saved["messageCount"], saved["permission"]) == ("persistent", 2, "workspace-write")
        assert await _listed(wire, world) == [opened["sessionId"]]


async def test_a_draft_without_a_message_ends_with_the_daemon_and_an_unsaved_one_is_rescued(  # S-25
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as world:
        wire = await world.connect()
        empty = await wire.open(world, kind="draft")
        drained = await wire.call("server/drain", {"exit": True, "rescue": True})
        assert (drained["exiting"], drained["pendingSaves"], drained["rescued"]) == (True, [], [])
    assert (world.exit_code, _files(world)) == (0, [])
    rescue = tmp_path / "elsewhere"
    async with running(tmp_path, model=PlayedModel([text("hi")]), rescue_roots=[str(rescue)]) as world:
        wire = await world.connect()
        gone = await _error(wire, "session/state", path=empty["path"])
        assert gone.kind == "session_not_found"
        opened = await wire.open(world, kind="draft")
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / "sessions").write_text("in the way")
        await wire.prompt(opened["sessionId"], "keep this", wait=True)
        drained = await wire.call("server/drain", {"exit": True, "rescue": True, "deadlineMs": 0})
        assert drained["exiting"]
        [copy] = drained["rescued"]
    assert world.exit_code == 75
    assert os.path.dirname(copy) == str(rescue)
    assert "keep this" in (Path(copy) / "history.jsonl").read_text()
