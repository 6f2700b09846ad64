"""The order of a replacement (R-4): reserve the old session, prepare the new one, swap, rebind, close the old one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from inprocess import PlayedModel, Wire, World, running, text

from loop_protocol.v1.errors import RpcError
from loopd import saving
from loopd.storage import SessionLocked, files
from loopd.storage.fs import FileSystem


class Watched(FileSystem):
    """Notes when the lock of a session is taken and given back, with what ``tell`` says at that moment. Whoever takes
    one waits for ``gate``, or where a session is ``held``, what syncs its files."""

    def __init__(self) -> None:
        self.moments: list[tuple[str, str, Any]] = []
        self.tell: Callable[[], Any] = lambda: None
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()
        self.held = ""
        self._locked: dict[int, str] = {}

    def lock(self, fd: int) -> None:
        super().lock(fd)
        self._locked[fd] = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        self.moments.append(("locked", self._locked[fd], self.tell()))
        if not self.held:
            self.reached.set()
            self.gate.wait(10)

    def fsync(self, fd: int) -> None:
        if self.held and self.held in Path(os.readlink(f"/proc/self/fd/{fd}")).parts:
            self.reached.set()
            self.gate.wait(10)
        super().fsync(fd)

    def close(self, fd: int) -> None:
        if fd in self._locked:
            self.moments.append(("let go", self._locked.pop(fd), self.tell()))
        super().close(fd)

    def hold(self, session_id: str = "") -> None:
        self.held = session_id
        self.gate.clear()
        self.reached.clear()

    async def arrived(self) -> None:
        assert await trio.to_thread.run_sync(self.reached.wait, 10)


async def _kind(wire: Wire, method: str, **params: Any) -> str:
    with pytest.raises(RpcError) as caught:
        await wire.call(method, params)
    return caught.value.kind


async def _kept(wire: Wire, world: World) -> dict[str, Any]:
    """A session that is closed again."""
    opened = await wire.open(world, attach=False)
    await wire.prompt(opened["sessionId"], wait=True)
    await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
    return opened


def _is_open(path: str) -> bool:
    try:
        store, _ = files.open_session(FileSystem(), path)
    except SessionLocked:
        return True
    store.close()
    return False


@pytest.mark.parametrize("method", ["runtime/newSession", "runtime/switchSession"])
async def test_a_replacement_reserves_prepares_swaps_rebinds_and_only_then_closes_the_old_session(
    method: str, tmp_path: Path
) -> None:
    """R-4, R-2, R-5"""
    disk = Watched()
    async with running(tmp_path, model=PlayedModel([text("hi")]), fs=disk) as world:
        wire, other = await world.connect(), await world.connect()
        target = await _kept(wire, world)
        opened = await wire.open(world)
        await wire.prompt(opened["sessionId"], wait=True)
        runtime, old = world.runtime(), opened["sessionId"]
        seat = {"runtimeId": opened["runtimeId"]}
        disk.tell = lambda: (runtime.session.core.id, any(b"session_replaced" in body for body in _log(world)))
        disk.moments.clear()
        disk.hold()
        request = await wire.request(method, seat | ({"path": target["path"]} if "switch" in method else {}))
        await disk.arrived()  # the new one is being prepared; the old one is reserved, whole and ours
        state = await other.call("session/state", {"sessionId": old})
        assert (state["operation"], state["messageCount"]) == ("replace", 2)
        assert await _kind(other, "session/prompt", sessionId=old, content="x") == "replacing"
        assert await _kind(other, "title/rename", sessionId=old, text="x") == "replacing"
        assert await _kind(other, "runtime/dispose", **seat) == "replacing"
        assert await _kind(other, method, **seat, **({"path": target["path"]} if "switch" in method else {})) == (
            "replacing"
        )
        assert (await other.call("session/setPinned", {"sessionId": old, "pinned": True}))["pinnedAt"]
        assert _is_open(opened["path"])
        disk.gate.set()
        new = (await wire.answer(request))["sessionId"]
        await other.call("title/rename", {"path": opened["path"], "text": "By hand"})  # by path: after it was closed
        assert disk.moments[:2] == [("locked", new, (old, False)), ("let go", old, (new, True))]
        assert files.read_session(FileSystem(), opened["path"])[0].pinned_at is not None


def _log(world: World) -> list[bytes]:
    events = world.runtime().events
    return [events.entry(seq) for seq in range(events.first, events.head + 1)]


async def test_a_session_that_a_fault_is_just_closing_is_opened_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-22, D-5"""

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(saving, "JOURNAL_DEADLINE_S", 0.05)
    disk = Watched()
    async with running(tmp_path, model=PlayedModel([text("hi")]), fs=disk) as world:
        wire, other = await world.connect(), await world.connect()
        opened = await wire.open(world)
        await wire.prompt(opened["sessionId"], wait=True)
        disk.hold(opened["sessionId"])
        pin = await other.request("session/setPinned", {"sessionId": opened["sessionId"], "pinned": True})
        await disk.arrived()
        monkeypatch.setattr(saving.Saving, "save", broken)
        await wire.prompt(opened["sessionId"])
        assert (await wire.event("session_closed")).event.reason == "fault"  # type: ignore[union-attr]
        monkeypatch.undo()
        session = {"kind": "open", "path": opened["path"]}
        opening = await wire.request("runtime/open", {"cwd": world.cwd, "session": session})
        await wire.call("server/status")
        disk.gate.set()
        stamp = (await other.answer(pin))["pinnedAt"]
        again = (await wire.answer(opening))["state"]
        assert (again["pinnedAt"], again["messageCount"]) == (stamp, 2)


async def test_clients_that_cannot_follow_a_replacement_do_not_undo_it_or_hold_it_up(tmp_path: Path) -> None:
    """R-5: one of them has gone, one does not read any more, one goes at that moment."""
    async with running(tmp_path, model=PlayedModel([text("word " * 50_000)])) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        gone, stuck, going = [await world.connect() for _ in range(3)]
        for client in (gone, stuck, going):
            await client.call("runtime/attach", {"runtimeId": opened["runtimeId"]})
        for _ in range(8):
            await wire.prompt(opened["sessionId"], wait=True)  # more than the socket of who does not read takes
        await gone.aclose()
        replacing = await wire.request("runtime/newSession", {"runtimeId": opened["runtimeId"]})
        await going.aclose()
        with trio.fail_after(5):
            new = await wire.answer(replacing)
            await wire.event("session_replaced")
            await wire.prompt(new["sessionId"], wait=True)
            again = await stuck.call("runtime/attach", {"runtimeId": opened["runtimeId"]})
        assert again["state"]["sessionId"] == world.session().core.id == new["sessionId"]
        assert len(world.runtime().events.cursors) == 2
