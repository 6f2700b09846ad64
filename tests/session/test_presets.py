"""Which preset a session has, however it comes to be open: a new one the config's, any other its own (A-7)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio
from inprocess import Probe, Wire, World, call, running, text
from seats import Held, seated

from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.types import Permission
from loopd.agent import Ask
from loopd.config import Config, Default
from loopd.saving import Saving
from loopd.storage import StorageError, files
from loopd.storage.fs import FileSystem

PRESETS: tuple[Permission, ...] = ("read-only", "workspace-write", "danger-full-access")


def configured(permission: Permission) -> Config:
    return Config(default=Default(permission=permission))


async def _preset(wire: Wire, opened: dict[str, Any]) -> str:
    found: str = (await wire.call("session/state", {"sessionId": opened["sessionId"]}))["permission"]
    return found


@pytest.mark.parametrize("kind", ["new", "draft", "memory", "continue"])
@pytest.mark.parametrize("default", PRESETS)
async def test_a_new_session_has_the_configs_or_what_its_opener_says(
    tmp_path: Path, default: Permission, kind: str
) -> None:
    async with running(tmp_path, config=configured(default)) as world:
        wire = await world.connect()
        assert await _preset(wire, await wire.open(world, kind=kind, runtimeId="new")) == default
        for asked in PRESETS:
            if kind != "continue":  # there is one to continue now
                opened = await wire.open(world, kind=kind, runtimeId="new", permission=asked)
                assert await _preset(wire, opened) == asked


@pytest.mark.parametrize("default", PRESETS)
async def test_what_follows_a_session_with_all_rights_has_the_configs(tmp_path: Path, default: Permission) -> None:
    async with running(tmp_path, config=configured(default)) as world:
        wire = await world.connect()
        opened = await wire.open(world, permission="danger-full-access")
        ids = {"sessionId": opened["sessionId"]}
        await wire.call("session/setPermission", {**ids, "permission": "danger-full-access"})
        await wire.call("session/prompt", {**ids, "content": "hi", "wait": True})
        renewed = await wire.call("runtime/newSession", {"runtimeId": opened["runtimeId"]})
        assert (renewed["state"]["permission"], await _preset(wire, renewed)) == (default, default)
        meta, _ = files.read_session(FileSystem(), renewed["path"])
        assert meta.permission == default
        # The old one has what was stored with it, wherever it is opened.
        back = await wire.call("runtime/switchSession", {"runtimeId": opened["runtimeId"], "path": opened["path"]})
        assert await _preset(wire, back) == "danger-full-access"
        again = await wire.call("runtime/newSession", {"runtimeId": opened["runtimeId"]})
        assert await _preset(wire, again) == default


async def test_the_preset_that_was_set_is_stored_and_holds_after_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path, config=configured("read-only")) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        ids = {"sessionId": opened["sessionId"]}
        before = (await wire.call("session/state", ids))["updatedAt"]
        assert await wire.call("session/setPermission", {**ids, "permission": "workspace-write"}) == {
            "permission": "workspace-write"
        }
        assert (await wire.call("session/state", ids))["updatedAt"] > before  # S-9
        joined = await wire.open(world, kind="continue")
        assert (joined["sessionId"], joined["state"]["permission"]) == (opened["sessionId"], "workspace-write")
    async with running(tmp_path, config=configured("danger-full-access")) as world:
        wire = await world.connect()
        for session in ({"kind": "continue"}, {"kind": "open", "path": opened["path"]}):
            found = await wire.call("runtime/open", {"cwd": world.cwd, "session": session})
            assert (found["sessionId"], found["state"]["permission"]) == (opened["sessionId"], "workspace-write")
            await wire.call("runtime/dispose", {"runtimeId": found["runtimeId"]})


@pytest.mark.parametrize("way", ["continue", "open", "beside"])
async def test_a_saved_session_that_is_opened_with_a_preset_has_it(tmp_path: Path, way: str) -> None:
    async with running(tmp_path, config=configured("danger-full-access")) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        session = {"kind": "continue"} if way == "continue" else {"kind": "open", "path": opened["path"]}
        request = {"cwd": world.cwd, "session": session} | ({"runtimeId": "new"} if way == "beside" else {})
        found = await wire.call("runtime/open", request | {"permission": "read-only"})
        assert (found["sessionId"], found["state"]["permission"]) == (opened["sessionId"], "read-only")
        assert await _preset(wire, found) == "read-only"
        await wire.call("runtime/dispose", {"runtimeId": found["runtimeId"]})
        again = await wire.call("runtime/open", request)
        assert await _preset(wire, again) == "read-only"


async def test_a_preset_that_cannot_be_stored_opens_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: Any, **__: Any) -> None:
        await trio.lowlevel.checkpoint()
        raise StorageError("the disk is full")

    async with running(tmp_path, config=configured("danger-full-access")) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        request = {"cwd": world.cwd, "session": {"kind": "continue"}}
        with monkeypatch.context() as patch:
            patch.setattr(Saving, "set", full)
            with pytest.raises(RpcError, match="the disk is full"):
                await wire.call("runtime/open", request | {"permission": "read-only"})
        assert (await wire.call("runtime/list"))["runtimes"] == []
        again = await wire.call("runtime/open", request)
        assert await _preset(wire, again) == "danger-full-access"


def _legacy(world: World, root: Path, name: str, **header: Any) -> str:
    file = root / f"{name}.jsonl"
    lines = [
        {"format": "loop-session", "version": 2, "id": name, "cwd": world.cwd, **header},
        {"role": "user", "content": "old"},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


async def test_a_session_of_an_earlier_version_keeps_its_own_or_gets_the_configs(tmp_path: Path) -> None:  # S-18
    async with running(tmp_path, config=configured("workspace-write")) as world:
        wire = await world.connect()
        without = _legacy(world, tmp_path, "6b1f2f0e-4d7f-4b8e-9d7e-2f6f0f6b9c01")
        having = _legacy(world, tmp_path, "6b1f2f0e-4d7f-4b8e-9d7e-2f6f0f6b9c02", permission="danger-full-access")
        for path, expected in ((without, "workspace-write"), (having, "danger-full-access")):
            session = {"kind": "open", "path": path}
            opened = await wire.call("runtime/open", {"cwd": world.cwd, "session": session, "runtimeId": "new"})
            assert opened["state"]["permission"] == expected


async def test_it_changes_only_while_nothing_goes_on(tmp_path: Path) -> None:  # A-7, I-10
    turn = Held("half")
    async with seated(tmp_path, turn) as seat:
        run_id = await seat.begin(turn)
        refused = await seat.refusal("session/setPermission", permission="danger-full-access")
        assert refused.kind == "session_busy"
        turn.go.set()
        await seat.over(run_id)
        await seat.ask("session/setPermission", permission="danger-full-access")
        with pytest.raises(RpcError):
            await seat.ask("session/setPermission", permission="everything")
        assert (await seat.state())["permission"] == "danger-full-access"


class Asking(Probe):
    """Asks before it does something."""

    async def run(self, arguments: Any, scope: Any) -> Any:
        await scope.ask(Ask(operation="command", reason="a test", sandbox="nothing"))
        return await super().run(arguments, scope)


async def test_it_does_not_change_while_somebody_is_asked(tmp_path: Path) -> None:
    async with seated(tmp_path, call("probe"), text("done"), tools=[Asking()]) as seat:
        run_id = await seat.prompt()
        asked = await seat.wire.event("approval_requested")
        refused = await seat.refusal("session/setPermission", permission="danger-full-access")
        assert refused.kind == "approvals_pending"
        answer = {"approvalId": asked.event.request.approval_id, "decision": "rejected"}  # type: ignore[union-attr]
        await seat.wire.call("approval/resolve", answer)
        assert (await seat.over(run_id))["outcome"] == "success"
        await seat.ask("session/setPermission", permission="danger-full-access")
