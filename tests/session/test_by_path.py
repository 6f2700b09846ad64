"""Sessions by their path, open or not: read, marked, renamed, deleted, and what happens at the same moment (S-28)."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from inprocess import PlayedModel, Wire, World, running, text
from test_marks import Held, HeldSession
from test_saving import Breaking

from loop_protocol import jsonrpc
from loop_protocol.v1.errors import RpcError
from loopd.storage import Metadata, files
from loopd.storage.fs import FileSystem


async def _error(wire: Wire, method: str, params: Any) -> RpcError:
    with pytest.raises(RpcError) as caught:
        await wire.call(method, params)
    return caught.value


async def _outcome(wire: Wire, id: int) -> str:
    try:
        await wire.answer(id)
    except RpcError as error:
        return error.kind
    return "ok"


async def _at_once(wire: Wire, *requests: tuple[str, Any]) -> list[str]:
    """Sent in one piece, so that nothing gets between them."""
    await wire.send(b"".join(jsonrpc.request_body(1000 + at, *request) for at, request in enumerate(requests)))
    return [await _outcome(wire, 1000 + at) for at in range(len(requests))]


async def _saved(world: World, wire: Wire) -> dict[str, Any]:
    """A session of one prompt that is not open any more."""
    opened = await wire.open(world, attach=False)
    await wire.prompt(opened["sessionId"], "Explain the project", wait=True)
    await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
    return opened


def _meta(opened: Any) -> Metadata:
    return files.read_session(FileSystem(), opened["path"])[0]


def _bytes(opened: Any) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in Path(opened["path"]).parent.iterdir()}


def _changes(path: str) -> list[tuple[str, dict[str, Any]]]:
    return [
        ("session/setPinned", {"path": path, "pinned": True}),
        ("session/markRead", {"path": path, "messageCount": 2}),
        ("title/rename", {"path": path, "text": "By hand"}),
    ]


async def test_a_closed_session_is_marked_and_renamed_and_nothing_else_of_it_moves(tmp_path: Path) -> None:
    """S-6, S-7, S-9, S-13"""
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        opened = await _saved(world, wire)
        path, before, history = opened["path"], _meta(opened), _bytes(opened)["history.jsonl"]
        for stale in (0, 1, 3):
            assert not (await wire.call("session/markRead", {"path": path, "messageCount": stale}))["read"]
        assert _meta(opened) == before
        pin = (await wire.call("session/setPinned", {"path": path, "pinned": True}))["pinnedAt"]
        assert await wire.call("session/setPinned", {"path": path, "pinned": True}) == {"pinnedAt": pin}
        for _ in range(2):
            assert await wire.call("session/markRead", {"path": path, "messageCount": 2}) == {"read": True}
        title = (await wire.call("title/rename", {"path": path, "text": "By  hand"}))["title"]
        assert title == {"text": "By hand", "source": "user", "messageIndices": []}
        assert _bytes(opened) == {"meta.json": _bytes(opened)["meta.json"], "history.jsonl": history}
        [row] = (await wire.call("session/list", {"cwd": world.cwd}))["sessions"]
        assert (row["title"], row["pinnedAt"], row["unread"]) == (title, pin, False)
        assert row["updatedAt"] == before.updated_at
        assert await _kind(wire, "title/rename", path=path, text="\x1b") == "invalid_params"
        assert await wire.call("session/setPinned", {"path": path, "pinned": False}) == {}
        assert await wire.call("runtime/list") == {"runtimes": []}  # nothing was opened for it
        state = (await wire.open(world, kind="open", session={"kind": "open", "path": path}))["state"]
        assert (state["title"], state["unread"], state["updatedAt"]) == (title, False, before.updated_at)


async def _kind(wire: Wire, method: str, **params: Any) -> str:
    return (await _error(wire, method, params)).kind


async def test_the_path_of_an_open_session_reaches_the_open_one(tmp_path: Path) -> None:  # S-28, K-11
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        (tmp_path / "link").symlink_to(tmp_path / "data")
        wire = await world.connect()
        opened = await wire.open(world)
        await wire.prompt(opened["sessionId"], wait=True)
        path = opened["path"].replace(str(tmp_path / "data"), str(tmp_path / "link"))
        for method, params in _changes(path):
            await wire.call(method, params)
        core = world.session().core
        assert core.titles.stored is not None
        assert (core.titles.stored.text, core.unread, core.pinned_at) == ("By hand", False, _meta(opened).pinned_at)
        assert (await wire.event("session_title")).event.title.source == "fallback"  # type: ignore[union-attr]
        assert (await wire.event("session_title")).event.title == core.titles.stored  # type: ignore[union-attr]
        error = await _error(wire, "session/delete", {"path": path})
        assert (error.kind, error.data["runtimeId"]) == ("session_locked", opened["runtimeId"])
        assert core.closed is False


async def test_a_path_that_is_no_sessions_and_both_or_no_name_are_refused(tmp_path: Path) -> None:  # S-2, D-1
    async with running(tmp_path) as world:
        wire = await world.connect()
        no_names = [f"/{'y' * 300}/meta.json", f"/{'y' * 300}.jsonl", f"{tmp_path}/gone.jsonl"]
        for path in (f"{tmp_path}/meta.json", f"{tmp_path}/ws", f"{tmp_path}/ws/./meta.json", "/", *no_names):
            for method, params in [*_changes(path), ("session/delete", {"path": path})]:
                assert await _kind(wire, method, **params) == "session_not_found"
        for method, params in _changes(f"{tmp_path}/meta.json"):
            assert await _kind(wire, method, **params, sessionId="x") == "invalid_params"
            del params["path"]
            assert await _kind(wire, method, **params) == "invalid_params"
            assert await _kind(wire, method, **params, sessionId="x") == "session_not_found"
        assert sorted(os.listdir(tmp_path)) == ["ws"]


async def test_a_session_of_another_process_is_locked_for_every_change_and_reads_on(tmp_path: Path) -> None:
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        opened = await _saved(world, wire)
        before = _bytes(opened)
        store, _ = files.open_session(FileSystem(), opened["path"])
        for method, params in [*_changes(opened["path"]), ("session/delete", {"path": opened["path"]})]:
            error = await _error(wire, method, params)
            assert (error.kind, error.data["holder"]) == ("session_locked", os.getpid())
        assert (await wire.call("session/state", {"path": opened["path"]}))["messageCount"] == 2
        assert _bytes(opened) == before
        store.close()
        await wire.call("session/delete", {"path": opened["path"]})


async def test_a_failing_disk_is_an_error_that_changes_nothing_and_the_next_try_works(tmp_path: Path) -> None:
    disk = Breaking()
    async with running(tmp_path, model=PlayedModel([text("hi")]), fs=disk) as world:
        wire = await world.connect()
        opened = await _saved(world, wire)
        before, disk.error = _bytes(opened), errno.ENOSPC
        for method, params in _changes(opened["path"]):
            error = await _error(wire, method, params)
            assert error.kind == "save_failed"
            assert "then try again" in error.message
        disk.error = None
        assert _bytes(opened) == before
        for method, params in _changes(opened["path"]):
            await wire.call(method, params)
        assert _meta(opened).title is not None


async def test_a_damaged_session_cannot_be_marked_and_can_be_deleted(tmp_path: Path) -> None:  # K-8
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        opened = await _saved(world, wire)
        other = await _saved(world, wire)
        Path(opened["path"]).write_bytes(bytes(413))
        for method, params in _changes(opened["path"]):
            assert await _kind(wire, method, **params) == "session_malformed"
        listed = await wire.call("session/list", {"cwd": world.cwd})
        assert [one["path"] for one in listed["damaged"]] == [opened["path"]]
        notes = Path(opened["path"]).with_name("notes")
        notes.write_text("mine")
        error = await _error(wire, "session/delete", {"path": opened["path"]})
        assert (error.kind, "notes" in error.message) == ("session_malformed", True)
        notes.unlink()
        assert await wire.call("session/delete", {"path": opened["path"]}) == {}
        listed = await wire.call("session/list", {"cwd": world.cwd})
        assert ([row["path"] for row in listed["sessions"]], listed["damaged"]) == ([other["path"]], [])
        assert await _kind(wire, "session/delete", path=opened["path"]) == "session_not_found"
        assert await _kind(wire, "session/state", path=opened["path"]) == "session_not_found"


# --- at the same moment


async def test_an_opening_during_a_change_waits_for_it_and_finds_it_done(tmp_path: Path) -> None:
    disk = Breaking()
    async with running(tmp_path, model=PlayedModel([text("hi")]), fs=disk) as world:
        wire, other = await world.connect(), await world.connect()
        for number in range(5):
            opened = await _saved(world, wire)
            disk.gate = threading.Event()
            pin = await wire.request("session/setPinned", {"path": opened["path"], "pinned": True})
            rename = await wire.request("title/rename", {"path": opened["path"], "text": f"title {number}"})
            await wire.call("server/status")
            ask = {"cwd": world.cwd, "session": {"kind": "open", "path": opened["path"]}}
            opening = await other.request("runtime/open", ask)
            await other.call("server/status")
            disk.gate.set()
            stamp = (await wire.answer(pin))["pinnedAt"]
            await wire.answer(rename)
            joined = await other.answer(opening)
            # Before the opening or after it, on disk or in the open session: nothing is lost.
            state = await other.call("session/state", {"sessionId": joined["sessionId"]})
            assert (state["pinnedAt"], state["title"]["text"]) == (stamp, f"title {number}")
            assert (_meta(opened).pinned_at, _meta(opened).title.text) == (stamp, f"title {number}")  # type: ignore[union-attr]
            await other.call("runtime/dispose", {"runtimeId": joined["runtimeId"]})


async def test_a_change_during_a_disposal_waits_for_it(tmp_path: Path) -> None:
    async def hang(*_: Any) -> Any:
        await trio.sleep_forever()

    async with running(tmp_path, model=PlayedModel([hang])) as world:
        wire = await world.connect()
        for method, params in [("session/setPinned", {"pinned": True}), ("session/delete", {})]:
            opened = await wire.open(world, attach=False)
            await wire.prompt(opened["sessionId"])
            dispose = ("runtime/dispose", {"runtimeId": opened["runtimeId"]})
            assert await _at_once(wire, dispose, (method, {**params, "path": opened["path"]})) == ["ok", "ok"]
        assert not Path(opened["path"]).parent.exists()


@pytest.mark.parametrize("method", ["session/setPinned", "session/delete"])
async def test_a_change_by_path_waits_until_the_seat_that_goes_on_has_let_go(method: str, tmp_path: Path) -> None:
    """S-28, S-22: between a replacement and the release of the old session's files nobody else has it open."""
    disk = HeldSession()
    async with running(tmp_path, model=PlayedModel([text("hi")]), fs=disk) as world:
        wire, other = await world.connect(), await world.connect()
        opened = await wire.open(world)
        disk.session_id = opened["sessionId"]
        held = await wire.request("session/setPinned", {"sessionId": opened["sessionId"], "pinned": True})
        replacing = await wire.request("runtime/newSession", {"runtimeId": opened["runtimeId"]})
        await wire.event("session_replaced")
        params = {"path": opened["path"]} | ({"pinned": False} if "Pinned" in method else {})
        change = await other.request(method, params)
        await other.call("server/status")
        disk.gate.set()
        assert await _outcome(other, change) == "ok"
        assert "pinnedAt" in await wire.answer(held)
        await wire.answer(replacing)
        assert Path(opened["path"]).exists() is (method != "session/delete")


async def test_of_a_deletion_and_an_opening_at_once_either_wins_and_the_other_is_told(tmp_path: Path) -> None:
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire, other = await world.connect(), await world.connect()
        seen = set()
        for number in range(20):
            opened = await _saved(world, wire)
            ask = {"cwd": world.cwd, "session": {"kind": "open", "path": opened["path"]}}
            first = ("session/delete", {"path": opened["path"]})
            second = ("runtime/open", ask)
            if number % 2:
                first, second = second, first
            one, two = await wire.request(*first), await other.request(*second)
            outcomes = [await _outcome(wire, one), await _outcome(other, two)]
            deleted, made = outcomes[:: -1 if number % 2 else 1]
            seen.add((deleted, made))
            assert (deleted, made) in {("ok", "session_not_found"), ("session_locked", "ok")}
            assert Path(opened["path"]).exists() is (made == "ok")
            for runtime in tuple(world.daemon.runtimes.by_id):
                await wire.call("runtime/dispose", {"runtimeId": runtime})
        print(seen)


class HeldDeletion(FileSystem):
    """A deletion waits right before its session is gone."""

    def __init__(self) -> None:
        self.reached, self.gate = threading.Event(), threading.Event()

    def rename(self, source: str, target: str, *, dir_fd: int) -> None:
        if target.endswith(".loopd-deleted"):
            self.reached.set()
            self.gate.wait(10)
        super().rename(source, target, dir_fd=dir_fd)


@pytest.mark.parametrize("others", [0, 1])
async def test_continue_during_the_deletion_of_the_latest_session_takes_the_next_one_or_a_new_one(
    others: int, tmp_path: Path
) -> None:
    """S-2, S-28"""
    disk = HeldDeletion()
    async with running(tmp_path, model=PlayedModel([text("hi")]), fs=disk) as world:
        wire, other = await world.connect(), await world.connect()
        kept = [(await _saved(world, wire))["sessionId"] for _ in range(others)]
        latest = await _saved(world, wire)
        deletion = await wire.request("session/delete", {"path": latest["path"]})
        assert await trio.to_thread.run_sync(disk.reached.wait, 10)
        ask = {"cwd": world.cwd, "session": {"kind": "continue"}}
        continuing = await other.request("runtime/open", ask)
        [turn] = world.daemon.runtimes._turns
        while len(world.daemon.runtimes._turns) == 1:  # until it is at it, and has found the latest
            await other.call("server/status")
        assert turn[0] == "session"
        await trio.testing.wait_all_tasks_blocked(0.05)
        disk.gate.set()
        assert await wire.answer(deletion) == {}
        opened = await other.answer(continuing)
        assert opened["sessionId"] != latest["sessionId"]
        assert opened["state"]["messageCount"] == (2 if others else 0)
        assert not others or [opened["sessionId"]] == kept


async def test_two_clients_delete_one_session_once(tmp_path: Path) -> None:
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire, other = await world.connect(), await world.connect()
        opened, kept = await _saved(world, wire), await _saved(world, wire)
        ask = ("session/delete", {"path": opened["path"]})
        one, two = await wire.request(*ask), await other.request(*ask)
        assert sorted([await _outcome(wire, one), await _outcome(other, two)]) == ["ok", "session_not_found"]
        listed = await wire.call("session/list", {"cwd": world.cwd})
        assert [row["path"] for row in listed["sessions"]] == [kept["path"]]
        assert await _at_once(wire, ask) == ["session_not_found"]
        place = Path(kept["path"]).parents[1]
        assert os.listdir(place) == [kept["sessionId"]]


async def test_a_client_that_goes_away_cancels_no_deletion(tmp_path: Path) -> None:  # I-10
    disk = Held()
    async with running(tmp_path, model=PlayedModel([text("hi")]), fs=disk) as world:
        wire, other = await world.connect(), await world.connect()
        opened = await _saved(world, wire)
        disk.hold(fail=set())
        await wire.request("session/delete", {"path": opened["path"]})
        await disk.reached()
        await wire.aclose()
        disk.release()
        assert await _kind(other, "session/delete", path=opened["path"]) == "session_not_found"
        assert os.listdir(Path(opened["path"]).parents[1]) == []
