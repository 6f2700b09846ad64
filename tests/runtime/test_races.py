"""Two things at one moment in the registry: each once went wrong."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from inprocess import PlayedModel, Wire, running, text

from loop_protocol import jsonrpc
from loop_protocol.v1.errors import RpcError
from loopd import opening
from loopd.session import Session
from loopd.storage.fs import FileSystem


async def _outcome(wire: Wire, id: int) -> str:
    try:
        await wire.answer(id)
    except RpcError as error:
        return error.kind
    return "ok"


async def _pipelined(wire: Wire, *requests: tuple[str, Any]) -> list[str]:
    """Sent in one piece, so that the reader decides them in one go."""
    bodies, ids = b"", []
    for method, params in requests:
        wire._next_id += 1
        ids.append(wire._next_id)
        bodies += jsonrpc.request_body(wire._next_id, method, params)
    await wire.send(bodies)
    return [await _outcome(wire, id) for id in ids]


async def test_a_disposal_takes_its_session_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        opened = await wire.open(world, attach=False)
        runtime = {"runtimeId": opened["runtimeId"]}
        prompt = {"sessionId": opened["sessionId"], "content": "x"}
        outcomes = await _pipelined(
            wire, ("runtime/dispose", runtime), ("runtime/newSession", runtime), ("session/prompt", prompt)
        )
        assert outcomes == ["ok", "session_busy", "session_busy"]
        again = await wire.open(world, kind="continue", attach=False)
        assert again["path"] == opened["path"]


async def test_an_opening_during_a_disposal_waits_for_it(tmp_path: Path) -> None:
    async def obeys(request: Any, _: Any) -> Any:
        if request.input.turn[0].content[0].text == "hang":
            await trio.sleep_forever()
        return text("hi")

    async with running(tmp_path, model=PlayedModel([obeys])) as world:
        wire = await world.connect()
        for _ in range(20):
            opened = await wire.open(world, kind="continue", attach=False)
            await wire.prompt(opened["sessionId"], "hang")
            ask = {"cwd": world.cwd, "session": {"kind": "continue"}}
            dispose, reopen = ("runtime/dispose", {"runtimeId": opened["runtimeId"]}), ("runtime/open", ask)
            assert await _pipelined(wire, dispose, reopen) == ["ok", "ok"]
            runtime = world.runtime()
            assert runtime.id != opened["runtimeId"]
            await wire.prompt(runtime.session.core.id, wait=True)
            await wire.call("runtime/dispose", {"runtimeId": runtime.id})


async def test_two_openings_of_one_path_from_two_directories_find_each_other(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    async with running(tmp_path) as world:
        wire = await world.connect()
        opened = await wire.open(world, attach=False)
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        session = {"kind": "open", "path": opened["path"]}
        for _ in range(10):
            first = await wire.request("runtime/open", {"cwd": world.cwd, "session": session, "runtimeId": "new"})
            second = await wire.request(
                "runtime/open", {"cwd": str(tmp_path / "other"), "session": session, "runtimeId": "new"}
            )
            named = set()
            for id in (first, second):
                try:
                    named.add((await wire.answer(id))["runtimeId"])
                except RpcError as error:
                    named.add(error.data.get("runtimeId", error.kind))
            assert named == {world.runtime().id}
            await wire.call("runtime/dispose", {"runtimeId": world.runtime().id})


async def test_a_directory_whose_real_name_is_not_utf_8_is_refused(tmp_path: Path) -> None:  # D-1
    os.mkdir(os.fsencode(tmp_path) + b"/\xff")
    os.symlink(os.fsencode(tmp_path) + b"/\xff", tmp_path / "link")
    async with running(tmp_path) as world:
        wire = await world.connect()
        for kind in ("memory", "new"):
            request = await wire.request("runtime/open", {"cwd": str(tmp_path / "link"), "session": {"kind": kind}})
            assert await _outcome(wire, request) == "invalid_params"
        assert await wire.call("runtime/list") == {"runtimes": []}


async def test_only_a_meta_json_names_an_open_session(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        wire = await world.connect()
        opened = await wire.open(world, attach=False)
        beside = str(Path(opened["path"]).with_name("nope"))
        assert await _outcome(wire, await wire.request("session/state", {"path": beside})) == "session_not_found"
        assert (await wire.call("session/state", {"path": opened["path"]}))["runtimeId"] == opened["runtimeId"]


async def test_a_session_dir_below_the_data_directory_is_kept_by_a_replacement(tmp_path: Path) -> None:  # S-2, R-1
    own = tmp_path / "data" / "mine"
    async with running(tmp_path) as world:
        wire = await world.connect()
        session = {"kind": "new", "sessionDir": str(own)}
        opened = await wire.call("runtime/open", {"cwd": world.cwd, "session": session})
        replaced = await wire.call("runtime/newSession", {"runtimeId": opened["runtimeId"]})
        assert Path(replaced["path"]).parent.parent == own


async def test_a_closed_session_gives_its_memory_back_without_the_garbage_collector(tmp_path: Path) -> None:
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        gone: list[weakref.ref[Session]] = []
        gc.disable()
        try:
            for replace in (False, True):
                opened = await wire.open(world, attach=False)
                await wire.prompt(opened["sessionId"], wait=True)
                gone.append(weakref.ref(world.session()))
                if replace:
                    await wire.call("runtime/newSession", {"runtimeId": opened["runtimeId"]})
                await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
            await trio.testing.wait_all_tasks_blocked()
            assert [reference() for reference in gone] == [None, None]
        finally:
            gc.enable()


async def test_a_path_on_a_disk_that_hangs_holds_up_its_own_request_only(  # D-5
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    directory: Callable[[str], str | None] = opening._directory

    def hanging(path: str) -> str | None:
        if "hung" in path:
            gate.wait(20)
        return directory(path)

    monkeypatch.setattr(opening, "_directory", hanging)
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        opened = await wire.open(world, attach=False)
        hung = str(tmp_path / "hung" / "meta.json")
        waiting = [await wire.request(method, {"path": hung}) for method in ("session/state", "session/messages")]
        waiting.append(
            await wire.request("runtime/open", {"cwd": world.cwd, "session": {"kind": "open", "path": hung}})
        )
        with trio.fail_after(5):
            assert (await wire.call("server/status"))["runtimes"] == 1
            await wire.prompt(opened["sessionId"], wait=True)
        gate.set()
        outcomes = [await _outcome(wire, id) for id in waiting]
        assert outcomes == ["session_not_found", "session_not_found", "conflict"]


async def test_a_dead_place_that_is_asked_about_again_and_again_holds_up_nobody_else(tmp_path: Path) -> None:
    """D-5: a thread that waits for a disk cannot be cancelled, so clients that come and go must not use them up."""

    class Dead(FileSystem):
        gate = threading.Event()

        def open(self, name: str, flags: int, *, dir_fd: int | None = None) -> int:
            if name.startswith(dead):
                self.gate.wait(20)
            return super().open(name, flags, dir_fd=dir_fd)

    dead, disk = str(tmp_path / "dead"), Dead()
    async with running(tmp_path, model=PlayedModel([text("hi")]), fs=disk) as world:
        wire = await world.connect()
        opened = await wire.open(world, attach=False)
        path = {"kind": "open", "path": f"{dead}/x/meta.json"}
        for _ in range(50):
            poor = await world.connect()
            await poor.request("session/list", {"cwd": world.cwd, "sessionDir": dead})
            await poor.request("session/setPinned", {"path": f"{dead}/x/meta.json", "pinned": True})
            await poor.request("runtime/open", {"cwd": world.cwd, "session": path, "runtimeId": "new"})
            await poor.call("server/status")
            await poor.aclose()
        try:
            with trio.fail_after(5):
                await wire.prompt(opened["sessionId"], wait=True)
                assert len((await wire.call("session/list", {"cwd": world.cwd}))["sessions"]) == 1
                assert (await wire.call("session/state", {"path": opened["path"]}))["messageCount"] == 2
                draft = {"cwd": world.cwd, "session": {"kind": "draft"}, "runtimeId": "new"}
                await wire.call("runtime/open", draft)
            assert threading.active_count() < 20
        finally:
            disk.gate.set()


async def test_a_flush_makes_the_last_runs_result_true(tmp_path: Path) -> None:  # S-16
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        opened = await wire.open(world, attach=False)
        place = Path(opened["path"]).parent
        place.rename(tmp_path / "aside")
        ask = {"sessionId": opened["sessionId"], "content": "x", "requestId": "r", "wait": True}
        failed = await wire.call("session/prompt", ask)
        assert (failed["saved"], failed["error"]["kind"]) == (False, "save_failed")
        (tmp_path / "aside").rename(place)
        await wire.call("session/flush", {"sessionId": opened["sessionId"]})
        saved = {"runId": failed["runId"], "outcome": "success", "saved": True}
        assert await wire.call("run/wait", {"runId": failed["runId"]}) == saved
        assert await wire.call("session/prompt", ask) == saved
        assert (await wire.call("session/state", {"sessionId": opened["sessionId"]}))["lastRun"] == saved
