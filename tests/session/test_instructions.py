"""What the model was told beside the messages is kept where it changed; nothing else of the session moves (S-19)."""

from __future__ import annotations

import errno
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from inprocess import PlayedModel, Probe, Wire, World, running, text
from seats import Held
from test_saving import Breaking

from loop_protocol.v1.errors import RpcError
from loopd.agent import Reply
from loopd.agent.protected import Protected
from loopd.agent.tools.sandbox import Sandbox
from loopd.core.history import History, Malformed
from loopd.storage import files
from loopd.storage.fs import FileSystem

PRESETS = ("read-only", "workspace-write", "danger-full-access")


@dataclass(slots=True)
class Told(PlayedModel):
    """``systems`` is what each request said beside the messages."""

    systems: list[str] = field(default_factory=list)

    async def respond(self, request: Any, say: Callable[[Any], None]) -> Reply:
        self.systems.append(request.system)
        return await PlayedModel.respond(self, request, say)

    @property
    def presets(self) -> list[str]:
        return [one.split("Permission preset: ")[1].split(".")[0] for one in self.systems]


@dataclass(slots=True)
class Seat:
    world: World
    wire: Wire
    model: Told
    opened: dict[str, Any]

    async def ask(self, method: str, **params: Any) -> Any:
        return await self.wire.call(method, {"sessionId": self.opened["sessionId"], **params})

    async def prompt(self, content: str = "hi") -> Any:
        return await self.ask("session/prompt", content=content, wait=True)

    async def preset(self, permission: str) -> None:
        await self.ask("session/setPermission", permission=permission)

    async def reopen(self, path: str | None = None) -> None:
        if path is None:
            await self.wire.call("runtime/dispose", {"runtimeId": self.opened["runtimeId"]})
        session = {"kind": "open", "path": path or self.opened["path"]}
        self.opened = await self.wire.call(
            "runtime/open", {"cwd": self.world.cwd, "session": session, "runtimeId": "new"}
        )

    @property
    def lines(self) -> list[bytes]:
        return self.world.session_of(self.opened["sessionId"]).core.history.lines

    def kept(self) -> list[dict[str, Any]]:
        records = [msgspec.json.decode(line) for line in self.lines]
        return [one for one in records if one.get("type") == "instructions"]


@asynccontextmanager
async def seated(root: Path, *plays: Any, kind: str = "new", **options: Any) -> AsyncIterator[Seat]:
    model = Told(list(plays) or [text("fine")])
    async with running(root, model=model, tools=[Probe()], **options) as world:
        wire = await world.connect()
        yield Seat(world, wire, model, await wire.open(world, kind=kind))


async def test_it_says_that_no_sandbox_works_and_shows_none_of_the_daemons_own_files(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-secret")
    async with seated(tmp_path / "world") as seat:
        services = seat.world.services
        Path(seat.world.cwd, "AGENTS.md").symlink_to(key)  # as a tool may have left it
        await seat.prompt()
        services.sandbox, services.protected = Sandbox(places=str(tmp_path)), Protected([str(key)])
        await seat.prompt()
        before, after = seat.model.systems
        assert ("sk-secret" in before, "sk-secret" in after) == (True, False)
        assert ("No sandbox works here" in before, "No sandbox works here" in after) == (False, True)


@pytest.mark.parametrize("kind", ["new", "memory", "draft"])
async def test_the_next_run_tells_the_new_preset_and_keeps_only_what_changed(  # A-7, S-19
    kind: str, tmp_path: Path
) -> None:
    async with seated(tmp_path, kind=kind) as seat:
        await seat.prompt()
        await seat.prompt()
        assert len(seat.kept()) == 1
        await seat.preset("workspace-write")
        assert len(seat.kept()) == 1
        await seat.prompt()
        await seat.prompt()
        assert seat.model.presets == ["read-only"] * 2 + ["workspace-write"] * 2
        first, second = seat.kept()
        assert first["messages"] == 1
        assert "".join(f"{part}\n\n" for part in first["sections"].values())[:-1] == seat.model.systems[0]
        assert second["messages"] == 5
        assert list(second["sections"]) == ["permission"]
        assert second["sections"]["permission"] in seat.model.systems[2]
        state = await seat.ask("session/state")
        assert (state["messageCount"], state["userMessageCount"]) == (8, 4)
        assert [one["index"] for one in (await seat.ask("session/messages"))["messages"]] == list(range(8))


async def test_a_section_that_is_gone_is_kept_as_gone_and_reopening_knows_the_last_ones(  # S-19
    tmp_path: Path,
) -> None:
    (tmp_path / "ws").mkdir()
    told = tmp_path / "ws" / "AGENTS.md"
    told.write_text("mind the gap")
    async with seated(tmp_path) as seat:
        await seat.prompt()
        assert "mind the gap" in seat.kept()[0]["sections"]["instructions"]
        await seat.reopen()
        await seat.prompt()
        assert len(seat.kept()) == 1
        told.unlink()
        await seat.prompt()
        assert seat.kept()[-1] == {"type": "instructions", "messages": 5, "sections": {"instructions": ""}}
        await seat.reopen()
        await seat.prompt()
        assert len(seat.kept()) == 2


async def test_a_run_that_is_refused_leaves_none(tmp_path: Path) -> None:  # I-10
    async with seated(tmp_path) as seat:
        with pytest.raises(RpcError, match="no message yet"):
            await seat.ask("session/resume")
        seat.world.services.draining = True
        with pytest.raises(RpcError):
            await seat.prompt()
        seat.world.services.draining = False
        assert seat.lines == []


async def test_a_save_that_failed_is_flushed_with_what_was_told(tmp_path: Path) -> None:  # S-14, I-4
    disk = Breaking()
    async with seated(tmp_path, fs=disk) as seat:
        await seat.prompt()
        await seat.preset("danger-full-access")
        disk.error = errno.EIO
        assert not (await seat.prompt())["saved"]
        disk.error = None
        await seat.ask("session/flush")
        _, stored = files.read_session(FileSystem(), seat.opened["path"])
        assert stored.lines == seat.lines
        assert stored.sections == seat.world.session().core.history.sections
        assert "danger-full-access" in stored.sections["permission"]
        await seat.reopen()
        await seat.prompt()
        assert len(seat.kept()) == 2


async def test_a_crash_in_a_run_after_a_change_takes_only_its_own_checkpoint(  # S-26, S-19
    tmp_path: Path,
) -> None:
    hanging = Held()
    async with seated(tmp_path, text("fine"), hanging) as seat:
        await seat.prompt()
        await seat.preset("workspace-write")
        run_id = await seat.wire.prompt(seat.opened["sessionId"], "cut off")
        await hanging.asked.wait()
        left = tmp_path / "left" / seat.opened["sessionId"]
        shutil.copytree(Path(seat.opened["path"]).parent, left)  # all that a killed daemon leaves
        await seat.ask("session/stop", runId=run_id)
        await seat.wire.call("runtime/dispose", {"runtimeId": seat.opened["runtimeId"]})
        seat.model.plays, seat.model.turns = [text("again")], 0
        await seat.reopen(str(left / "meta.json"))
        state = seat.opened["state"]
        assert (state["permission"], state["recoverable"]["messages"]) == ("workspace-write", 1)
        assert len(seat.kept()) == 1
        await seat.ask("session/recover")
        assert len(seat.kept()) == 1
        run = await seat.ask("session/resume")
        await seat.wire.call("run/wait", {"runId": run["runId"]})
        assert seat.model.presets[-1] == "workspace-write"
        first, second = seat.kept()
        assert (first["messages"], second["messages"], list(second["sections"])) == (1, 3, ["permission"])
        _, stored = files.read_session(FileSystem(), seat.opened["path"])
        assert stored.lines == seat.lines


async def test_a_resumed_run_tells_what_holds_now(tmp_path: Path) -> None:
    hanging = Held()
    async with seated(tmp_path, hanging, text("done")) as seat:
        run_id = await seat.wire.prompt(seat.opened["sessionId"])
        await hanging.asked.wait()
        await seat.ask("session/stop", runId=run_id)
        await seat.wire.call("run/wait", {"runId": run_id})
        await seat.preset("danger-full-access")
        run = await seat.ask("session/resume")
        assert (await seat.wire.call("run/wait", {"runId": run["runId"]}))["outcome"] == "success"
        assert seat.model.presets == ["read-only", "danger-full-access"]
        assert [one["messages"] for one in seat.kept()] == [1, 1]


async def test_a_run_that_is_stopped_before_it_asks_keeps_none(tmp_path: Path) -> None:
    async with seated(tmp_path) as seat:
        run_id = await seat.wire.prompt(seat.opened["sessionId"])
        await seat.ask("session/stop", runId=run_id)
        await seat.wire.call("run/wait", {"runId": run_id})
        assert len(seat.kept()) == len(seat.model.systems)


async def test_a_damaged_one_is_refused_with_its_place_and_unknown_fields_stay(tmp_path: Path) -> None:  # S-5, S-27
    user = b'{"role":"user","index":0,"content":[],"timestamp":1}\n'
    history = History()
    history.read(user)
    line = b'{"type":"instructions","messages":1,"sections":{"role":"x"},"mood":"fine"}\n'
    history.read(line)
    assert (history.lines[1], history.sections, history.messages) == (line, {"role": "x"}, 1)
    for damaged in (
        b'{"type":"instructions","messages":2,"sections":{}}\n',
        b'{"type":"instructions","messages":-1,"sections":{}}\n',
        b'{"type":"instructions","messages":1}\n',
        b'{"type":"instructions","messages":1,"sections":{"role":5}}\n',
    ):
        with pytest.raises(Malformed):
            history.read(damaged)
        assert history.lines == [user, line]
    async with seated(tmp_path) as seat:
        await seat.prompt()
        await seat.wire.call("runtime/dispose", {"runtimeId": seat.opened["runtimeId"]})
        path = Path(seat.opened["path"]).with_name("history.jsonl")
        whole = path.read_bytes()
        start = whole.index(b'{"type":"instructions"')
        path.write_bytes(whole.replace(b'"messages":1,"sections"', b'"messages":9,"sections"'))
        with pytest.raises(RpcError) as refused:
            await seat.reopen(seat.opened["path"])
        assert (refused.value.kind, refused.value.data["offset"]) == ("session_malformed", start)
