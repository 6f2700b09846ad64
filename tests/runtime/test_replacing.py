"""Replacing and disposing the session of a runtime (R-1…R-6)."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import trio
from inprocess import PlayedModel, Wire, running, text

from loop_protocol.v1.errors import RpcError
from loopd.storage.fs import FileSystem


async def _refused(wire: Wire, method: str, **params: Any) -> str:
    with pytest.raises(RpcError) as caught:
        await wire.call(method, params)
    return caught.value.kind


async def test_a_new_session_keeps_model_cwd_and_kind_but_not_the_permission(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        wire = await world.connect()
        for kind in ("persistent", "memory"):
            asked = "new" if kind == "persistent" else kind
            opened = await wire.open(
                world, kind=asked, permission="danger-full-access", model={"provider": "other", "id": "m"}
            )
            replaced = await wire.call("runtime/newSession", {"runtimeId": opened["runtimeId"]})
            assert replaced["cancelled"] is False
            assert replaced["runtimeId"] == opened["runtimeId"]
            assert replaced["sessionId"] != opened["sessionId"]
            state = replaced["state"]
            assert state["kind"] == kind
            assert state["model"] == {"provider": "other", "id": "m"}
            assert state["permission"] == "read-only"
            assert ("path" in replaced) is (kind == "persistent")
            assert await _refused(wire, "session/prompt", sessionId=opened["sessionId"], content="x") == (
                "session_not_found"
            )
            await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})


async def test_every_client_hears_of_the_replacement_before_the_new_session_and_nothing_old_after(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wires = [await world.connect() for _ in range(3)]
        opened = await wires[0].open(world)
        for wire in wires[1:]:
            await wire.call("runtime/attach", {"runtimeId": opened["runtimeId"], "follow": wire is not wires[2]})
        await wires[0].prompt(opened["sessionId"], wait=True)
        replaced = await wires[0].call("runtime/newSession", {"runtimeId": opened["runtimeId"]})
        await wires[0].prompt(replaced["sessionId"], wait=True)
        for wire in wires:
            event = await wire.event("session_replaced")
            assert event.event.old == opened["sessionId"]  # type: ignore[union-attr]
            assert event.event.new.session_id == replaced["sessionId"]  # type: ignore[union-attr]
        for wire in wires[:2]:
            await wire.event("run_settled")
            at = [params.event.__struct_config__.tag for params in wire.events].index("session_replaced")
            assert {params.session_id for params in wire.events[:at]} == {opened["sessionId"]}
            assert {params.session_id for params in wire.events[at:]} == {replaced["sessionId"]}
        await wires[2].call("server/status")
        assert wires[2].events[-1].event.__struct_config__.tag == "session_replaced"


async def test_a_busy_runtime_refuses_a_replacement_and_there_is_no_queue(tmp_path: Path) -> None:
    async def hang(*_: Any) -> Any:
        await trio.sleep_forever()

    async with running(tmp_path, model=PlayedModel([hang])) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        run_id = await wire.prompt(opened["sessionId"])
        assert await _refused(wire, "runtime/newSession", runtimeId=opened["runtimeId"]) == "session_busy"
        assert await _refused(wire, "session/prompt", sessionId=opened["sessionId"], content="x") == "session_busy"
        await wire.call("session/stop", {"sessionId": opened["sessionId"], "runId": run_id})
        assert world.session().core.id == opened["sessionId"]


async def test_a_failed_preparation_leaves_the_old_session_usable(tmp_path: Path) -> None:
    class NoMore(FileSystem):
        full = False

        def mkdir(self, path: str) -> None:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().mkdir(path)

    disk = NoMore()
    async with running(tmp_path, model=PlayedModel([text("hi")]), fs=disk) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        disk.full = True
        with pytest.raises(RpcError, match="then try again") as caught:  # there is nothing that a flush could write
            await wire.call("runtime/newSession", {"runtimeId": opened["runtimeId"]})
        assert caught.value.kind == "save_failed"
        disk.full = False
        await wire.prompt(opened["sessionId"], wait=True)
        assert (await wire.call("session/state", {"sessionId": opened["sessionId"]}))["messageCount"] == 2
        assert "session_replaced" not in [params.event.__struct_config__.tag for params in wire.events]


async def test_disposal_stops_the_run_saves_and_releases(tmp_path: Path) -> None:
    async def hang(*_: Any) -> Any:
        await trio.sleep_forever()

    async with running(tmp_path, model=PlayedModel([hang])) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        await wire.prompt(opened["sessionId"])
        one = await wire.request("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        two = await wire.request("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        assert await wire.answer(one) == {}
        assert await wire.answer(two) == {}
        kinds = [params.event.__struct_config__.tag for params in wire.events]
        assert kinds[-2:] == ["run_settled", "session_closed"]
        assert await _refused(wire, "runtime/dispose", runtimeId=opened["runtimeId"]) == "runtime_not_found"
        reopened = await wire.call(
            "runtime/open", {"cwd": world.cwd, "session": {"kind": "open", "path": opened["path"]}}
        )
        assert reopened["state"]["messageCount"] == 1
        assert reopened["state"]["timings"][0]["stopped"]


async def test_disposal_whose_save_fails_leaves_the_session_open(tmp_path: Path) -> None:  # R-6, S-25
    class Full(FileSystem):
        full = False

        def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(fd, data, offset)

    async def hang(*_: Any) -> Any:
        await trio.sleep_forever()

    disk = Full()
    async with running(tmp_path, model=PlayedModel([hang]), fs=disk) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        await wire.prompt(opened["sessionId"])
        disk.full = True
        assert await _refused(wire, "runtime/dispose", runtimeId=opened["runtimeId"]) == "save_failed"
        state = await wire.call("session/state", {"sessionId": opened["sessionId"]})
        assert state["hasPendingSave"]
        assert await _refused(wire, "runtime/dispose", runtimeId=opened["runtimeId"]) == "pending_save"
        disk.full = False
        await wire.call("session/flush", {"sessionId": opened["sessionId"]})
        assert await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]}) == {}
