"""Saves that fail: what is pending is kept, said, refused around, and written by a flush (S-14…S-17)."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import trio
from inprocess import PlayedModel, World, running, text

from loop_protocol.v1.errors import RpcError
from loopd import saving
from loopd.agent import ModelError
from loopd.storage import files
from loopd.storage.fs import FileSystem


class Breaking(FileSystem):
    """Every write and fsync fails with ``error`` while it is set; ``gate`` makes fsync wait."""

    def __init__(self) -> None:
        self.error: int | None = None
        self.gate: threading.Event | None = None
        self.written = 0
        self.fsyncs = 0

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        self.written += len(data)
        return super().write(fd, data, offset)

    def fsync(self, fd: int) -> None:
        self.fsyncs += 1
        if self.gate is not None:
            self.gate.wait(10)
        super().fsync(fd)


class AtCall(FileSystem):
    """Fails call number ``at`` of those that change something."""

    def __init__(self) -> None:
        self.calls = 0
        self.at: int | None = None
        self.hit = ""

    def _step(self, fd: int) -> None:
        self.calls += 1
        if self.calls == self.at:
            self.hit = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        self._step(fd)
        return super().write(fd, data, offset)

    def truncate(self, fd: int, size: int) -> None:
        self._step(fd)
        super().truncate(fd, size)

    def fsync(self, fd: int) -> None:
        self._step(fd)
        super().fsync(fd)

    def rename(self, source: str, target: str, *, dir_fd: int) -> None:
        super().rename(source, target, dir_fd=dir_fd)
        self._step(dir_fd)  # after it: an error does not mean "not done" (trap 11)


def _digest(world: World) -> str:
    place = Path(world.session().core.path or "").parent
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(place.iterdir()) if path.is_file())).hexdigest()


async def _refusal(wire: Any, method: str, **params: Any) -> str:
    with pytest.raises(RpcError) as refused:
        await wire.call(method, params)
    return refused.value.kind


async def test_a_failed_save_is_pending_until_a_flush_and_nothing_runs_again(tmp_path: Path) -> None:  # S-14 S-15 S-16
    disk = Breaking()
    model = PlayedModel([text("one"), text("two"), text("three")])
    async with running(tmp_path, model=model, fs=disk) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        session_id = opened["sessionId"]
        await wire.call("session/prompt", {"sessionId": session_id, "content": "a", "wait": True})
        disk.error = errno.ENOSPC
        failed = await wire.call("session/prompt", {"sessionId": session_id, "content": "b", "wait": True})
        assert (failed["outcome"], failed["saved"]) == ("success", False)
        assert failed["error"]["kind"] == "save_failed"
        assert "space" in (await wire.event("save_failed")).event.reason  # type: ignore[union-attr]
        before = await wire.call("session/state", {"sessionId": session_id})
        assert before["hasPendingSave"]
        assert (before["messageCount"], before["liveCount"]) == (2, 4)
        # The previous committed range reads on, from outside too.
        _, stored = files.read_session(FileSystem(), opened["path"])
        assert stored.messages == 2
        digest, head = _digest(world), world.runtime().events.head
        model_ref = {"provider": "scripted", "id": "model"}
        assert await _refusal(wire, "session/prompt", sessionId=session_id, content="c") == "pending_save"
        assert await _refusal(wire, "session/setModel", sessionId=session_id, model=model_ref) == "pending_save"
        assert (
            await _refusal(wire, "session/setPermission", sessionId=session_id, permission="read-only")
            == "pending_save"
        )
        assert await _refusal(wire, "runtime/newSession", runtimeId=opened["runtimeId"]) == "pending_save"
        elsewhere = {"runtimeId": opened["runtimeId"], "path": str(tmp_path / "x" / "meta.json")}
        assert await _refusal(wire, "runtime/switchSession", **elsewhere) == "pending_save"
        assert await _refusal(wire, "title/rename", sessionId=session_id, text="x") == "pending_save"
        assert await _refusal(wire, "session/markRead", path=opened["path"], messageCount=2) == "pending_save"
        assert await _refusal(wire, "session/delete", path=opened["path"]) == "session_locked"
        assert await _refusal(wire, "runtime/dispose", runtimeId=opened["runtimeId"]) == "pending_save"
        assert (await wire.call("server/status"))["pendingSaves"][0]["sessionId"] == session_id
        # I-10: a refusal changes nothing.
        assert (_digest(world), world.runtime().events.head) == (digest, head)
        assert await wire.call("session/state", {"sessionId": session_id}) == before
        assert await _refusal(wire, "session/flush", sessionId=session_id) == "save_failed"
        disk.error = None
        turns = model.turns
        assert await wire.call("session/flush", {"sessionId": session_id}) == {"flushed": True}
        assert model.turns == turns
        after = await wire.call("session/state", {"sessionId": session_id})
        assert not after["hasPendingSave"]
        assert after["timings"] == before["timings"]  # P-6
        assert after["unread"]
        assert await wire.call("session/flush", {"sessionId": session_id}) == {"flushed": False}
        _, stored = files.read_session(FileSystem(), opened["path"])
        assert stored.lines == world.session().core.history.lines
        await wire.aclose()


async def test_a_run_and_its_save_that_fail_both_give_one_error_with_both(tmp_path: Path) -> None:  # S-17
    async def fails(*_: Any) -> Any:
        await trio.lowlevel.checkpoint()
        raise ModelError("provider", "come back later")

    disk = Breaking()
    async with running(tmp_path, model=PlayedModel([fails]), fs=disk) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        disk.error = errno.EIO
        run_id = await wire.prompt(opened["sessionId"])
        result = await wire.call("run/wait", {"runId": run_id})
        assert (result["outcome"], result["saved"]) == ("error", False)
        assert [part["kind"] for part in result["error"]["errors"]] == ["provider", "save_failed"]
        disk.error = None
        await wire.call("session/flush", {"sessionId": opened["sessionId"]})
        await wire.aclose()


async def test_a_fault_at_every_storage_call_of_a_prompt_then_a_flush_loses_and_doubles_nothing(  # I-4, S-14
    tmp_path: Path,
) -> None:
    hit = 0
    for at in range(1, 30):
        disk, root = AtCall(), tmp_path / str(at)
        root.mkdir()
        async with running(root, model=PlayedModel([text("answer")]), fs=disk) as world:
            wire = await world.connect()
            opened = await wire.open(world)
            ask = {"sessionId": opened["sessionId"], "content": "hi", "wait": True}
            await wire.call("session/prompt", ask)
            disk.calls, disk.at = 0, at
            saved = (await wire.call("session/prompt", ask))["saved"]
            lines = list(world.session().core.history.lines)
            _, stored = files.read_session(FileSystem(), opened["path"])
            assert stored.lines in (lines[:4], lines)  # N or N+1
            reached, disk.at = disk.calls >= at, None
            hit += reached
            assert saved is (not reached or disk.hit == "run.journal")  # a journal that fails is no failed save (S-26)
            if not saved:
                await wire.call("session/flush", {"sessionId": opened["sessionId"]})
            await wire.call("session/prompt", ask)
            _, stored = files.read_session(FileSystem(), opened["path"])
            assert stored.lines == world.session().core.history.lines
            assert stored.lines[: len(lines)] == lines
            assert stored.messages == 6
            await wire.aclose()
        if not reached:
            break
    print(f"{hit} points hit")
    assert hit >= 5


async def test_a_disk_that_hangs_blocks_one_session_and_nobody_else(  # D-5
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "STORAGE_DEADLINE_S", 0.3)
    disk = Breaking()
    async with running(tmp_path, model=PlayedModel([text("answer")]), fs=disk) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        memory = await wire.open(world, kind="memory", runtimeId="new", attach=False)
        disk.gate = threading.Event()
        run_id = await wire.prompt(opened["sessionId"])
        await wire.event("message_end")
        with trio.fail_after(0.25):
            assert (await wire.call("server/status"))["runs"] == 1
            fine = {"sessionId": memory["sessionId"], "content": "hi", "wait": True}
            assert (await wire.call("session/prompt", fine))["saved"]
        result = await wire.call("run/wait", {"runId": run_id})
        assert (result["saved"], result["error"]["kind"]) == (False, "save_failed")
        disk.gate.set()
        disk.gate = None
        session = world.session_of(opened["sessionId"])
        # The thread that hung has written after all; the same snapshot is recognised and not appended twice.
        await wire.call("session/flush", {"sessionId": opened["sessionId"]})
        _, stored = files.read_session(FileSystem(), opened["path"])
        assert stored.lines == session.core.history.lines
        await wire.aclose()


async def test_what_a_prompt_costs_does_not_grow_with_the_history(  # S-23, I-8
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loopd import run_context as run_module
    from loopd.core import history as history_module

    counts = {"encoded": 0, "decoded": 0}
    encode, decode = history_module.encode, history_module.decode_message

    def counting_encode(record: Any) -> bytes:
        counts["encoded"] += 1
        return encode(record)

    def counting_decode(line: bytes) -> Any:
        counts["decoded"] += 1
        return decode(line)

    monkeypatch.setattr(history_module, "encode", counting_encode)
    monkeypatch.setattr(run_module, "decode_message", counting_decode)
    disk = Breaking()
    async with running(tmp_path, model=PlayedModel([text("answer")]), fs=disk) as world:
        wire = await world.connect()
        opened = await wire.open(world, attach=False)
        costs = {}
        for prompt in range(1, 301):
            before = (counts["encoded"], counts["decoded"], disk.fsyncs)
            written = disk.written
            ask = {"sessionId": opened["sessionId"], "content": f"prompt {prompt:04}", "wait": True}
            await wire.call("session/prompt", ask)
            now = (counts["encoded"], counts["decoded"], disk.fsyncs)
            costs[prompt] = (*[b - a for a, b in zip(before, now, strict=True)], (disk.written - written) // 100)
        assert costs[3][:3] == costs[300][:3]
        assert costs[3][2] == 3
        assert abs(costs[3][3] - costs[300][3]) <= 1  # counters in the metadata have more digits
        await wire.aclose()
