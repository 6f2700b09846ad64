"""Titles, receipts and pins of open sessions: what is stored, what is told, what moves nothing else (S-6, S-7, T-8)."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from inprocess import PlayedModel, Wire, World, running, text
from test_saving import AtCall, Breaking, _refusal
from test_session_facts import SetClock

from loop_protocol.v1.errors import RpcError
from loopd import saving
from loopd.agent import ModelError
from loopd.storage import Metadata, files
from loopd.storage.fs import FileSystem

BY_HAND = {"text": "By hand", "source": "user", "messageIndices": []}


def _meta(opened: Any) -> Metadata:
    return files.read_session(FileSystem(), opened["path"])[0]


def _history(opened: Any) -> bytes:
    return Path(opened["path"]).with_name("history.jsonl").read_bytes()


async def _say(wire: Wire, opened: Any, content: Any = "Explain the project") -> Any:
    return await wire.call("session/prompt", {"sessionId": opened["sessionId"], "content": content, "wait": True})


async def _state(wire: Wire, opened: Any) -> Any:
    return await wire.call("session/state", {"sessionId": opened["sessionId"]})


async def _pin(wire: Wire, opened: Any, pinned: bool = True) -> Any:
    return await wire.call("session/setPinned", {"sessionId": opened["sessionId"], "pinned": pinned})


async def _read(wire: Wire, opened: Any, count: int) -> bool:
    ask = {"sessionId": opened["sessionId"], "messageCount": count}
    read: bool = (await wire.call("session/markRead", ask))["read"]
    return read


async def _rename(wire: Wire, opened: Any, title: str = "By hand") -> Any:
    return await wire.call("title/rename", {"sessionId": opened["sessionId"], "text": title})


def _require_agreement(world: World, opened: Any) -> None:
    """I-6: at rest the metadata is a function of the state."""
    core, meta = world.session_of(opened["sessionId"]).core, _meta(opened)
    assert (meta.model, meta.permission, meta.title, meta.pinned_at, meta.unread, meta.updated_at) == (
        core.model,
        core.permission,
        core.titles.stored,
        core.pinned_at,
        core.unread,
        core.updated_at,
    )
    assert (meta.committed.messages, meta.committed.fallback) == (core.committed, core.history.fallback)


# --- titles


async def test_the_first_text_is_the_title_at_once_in_the_list_and_after_reopening(tmp_path: Path) -> None:
    """T-2, T-12, S-4"""
    image = [{"type": "image", "data": "AAAA", "mimeType": "image/png"}]
    async with running(tmp_path, model=PlayedModel([text("hi")], input=frozenset({"text", "image"}))) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        await _say(wire, opened, image)
        assert "title" not in await _state(wire, opened)
        [row] = (await wire.call("session/list", {"cwd": world.cwd}))["sessions"]
        assert "title" not in row
        await _say(wire, opened, "  Explain the\nproject ")
        await _say(wire, opened, "and the rest")
        title = {"text": "Explain the project", "source": "fallback", "messageIndices": [2]}
        assert (await _state(wire, opened))["title"] == title
        [row] = (await wire.call("session/list", {"cwd": world.cwd}))["sessions"]
        [seat] = (await wire.call("runtime/list"))["runtimes"]
        assert row["title"] == seat["title"] == title
        told = [params.event for params in wire.events if params.event.__struct_config__.tag == "session_title"]
        assert msgspec.to_builtins(told) == [{"type": "session_title", "title": title}]
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        saved = await wire.call("session/state", {"path": opened["path"]})
        reopened = await wire.open(world, kind="continue")
        assert saved["title"] == reopened["state"]["title"] == title


async def test_an_old_history_has_its_title_without_a_write_and_its_row_after_the_next_save(tmp_path: Path) -> None:
    """T-5"""
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        await _say(wire, opened)
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        path = Path(opened["path"])
        old = msgspec.json.decode(path.read_bytes())
        del old["committed"]["fallback"]
        path.write_bytes(msgspec.json.encode(old))
        before = path.read_bytes()
        opened = await wire.open(world, kind="continue")
        assert opened["state"]["title"]["text"] == "Explain the project"
        assert path.read_bytes() == before
        ask = {"cwd": world.cwd}
        assert "title" not in (await wire.call("session/list", ask))["sessions"][0]
        await _say(wire, opened, "more")
        assert (await wire.call("session/list", ask))["sessions"][0]["title"] == opened["state"]["title"]


async def test_a_rename_is_stored_before_it_is_told_and_moves_no_time(tmp_path: Path) -> None:  # T-8, T-12, S-9, S-13
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        await _say(wire, opened)
        before, history = await _state(wire, opened), _history(opened)
        assert await _rename(wire, opened, " By\thand\x1b[0m") == {"title": BY_HAND}
        event = (await wire.event("session_title")).event  # the fallback's
        event = (await wire.event("session_title")).event
        assert msgspec.to_builtins(event) == {"type": "session_title", "title": BY_HAND}
        after = await _state(wire, opened)
        assert after == before | {"title": BY_HAND}
        assert _history(opened) == history
        _require_agreement(world, opened)
        # It is pinned against what comes by itself.
        await _say(wire, opened, "something else")
        assert (await _state(wire, opened))["title"] == BY_HAND
        [row] = (await wire.call("session/list", {"cwd": world.cwd}))["sessions"]
        assert row["title"] == BY_HAND
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        assert (await wire.open(world, kind="continue"))["state"]["title"] == BY_HAND


async def test_a_session_that_was_named_before_its_first_prompt_keeps_that_name(tmp_path: Path) -> None:  # T-8
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        await _rename(wire, opened)
        await _say(wire, opened)
        kinds = [params.event.__struct_config__.tag for params in wire.events]
        assert kinds.count("session_title") == 1
        assert (await _state(wire, opened))["title"] == BY_HAND
        _require_agreement(world, opened)


async def test_a_rename_to_nothing_or_during_a_run_or_over_a_failed_save_is_refused(tmp_path: Path) -> None:  # T-8
    async def hang(*_: Any) -> Any:
        await trio.sleep_forever()

    disk = Breaking()
    async with running(tmp_path, model=PlayedModel([hang]), fs=disk) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        session = {"sessionId": opened["sessionId"]}
        assert await _refusal(wire, "title/rename", **session, text="\u200b \x07") == "invalid_params"
        run_id = await wire.prompt(opened["sessionId"])
        assert await _refusal(wire, "title/rename", **session, text="x") == "session_busy"
        disk.error = errno.ENOSPC
        await wire.call("session/stop", {**session, "runId": run_id})
        assert await _refusal(wire, "title/rename", **session, text="x") == "pending_save"
        disk.error = None
        await wire.call("session/flush", session)
        disk.error = errno.EIO
        assert await _refusal(wire, "title/rename", **session, text="x") == "save_failed"
        assert (await _state(wire, opened))["title"]["source"] == "fallback"
        disk.error = None
        await _rename(wire, opened)
        _require_agreement(world, opened)


@pytest.mark.parametrize("indices", [[0], [1, 2], [-1]])
async def test_a_title_made_of_messages_that_were_never_saved_is_none(indices: list[int], tmp_path: Path) -> None:
    """T-4, storage rule 13: a crash between its write and the first commit. It does not come back to life later."""
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        path = Path(opened["path"])
        stale = {"text": "Stale", "source": "model", "messageIndices": indices, "model": {"provider": "p", "id": "m"}}
        path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | {"title": stale}))
        assert "title" not in await wire.call("session/state", {"path": opened["path"]})
        [row] = (await wire.call("session/list", {"cwd": world.cwd}))["sessions"]
        assert "title" not in row
        opened = await wire.open(world, kind="continue")
        assert "title" not in opened["state"]
        await _say(wire, opened)
        await _say(wire, opened)
        assert (await _state(wire, opened))["title"]["text"] == "Explain the project"
        _require_agreement(world, opened)


async def test_a_title_of_saved_messages_is_kept_with_its_model(tmp_path: Path) -> None:  # T-4
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        await _say(wire, opened)
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        path = Path(opened["path"])
        title = {"text": "Good", "source": "model", "messageIndices": [0], "model": {"provider": "p", "id": "m"}}
        path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | {"title": title}))
        opened = await wire.open(world, kind="continue")
        await _say(wire, opened)
        assert (await _state(wire, opened))["title"] == title
        _require_agreement(world, opened)


# --- receipts


async def test_only_who_has_seen_all_that_is_saved_marks_it_read(tmp_path: Path) -> None:  # S-6, S-9
    disk = Breaking()
    async with running(tmp_path, model=PlayedModel([text("hi")]), fs=disk) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        assert not await _read(wire, opened, 0)
        await _say(wire, opened)
        before, history = await _state(wire, opened), _history(opened)
        assert before["unread"]
        for stale in (0, 1, 3):
            assert not await _read(wire, opened, stale)
        assert (await _state(wire, opened)) == before
        assert await _read(wire, opened, 2)
        assert (await _state(wire, opened)) == before | {"unread": False}
        assert not (await wire.event("session_changed")).event.unread  # type: ignore[union-attr]
        written, head = disk.written, world.runtime().events.head
        assert await _read(wire, opened, 2)  # already
        assert (disk.written, world.runtime().events.head) == (written, head)
        assert _history(opened) == history
        [row] = (await wire.call("session/list", {"cwd": world.cwd}))["sessions"]
        assert not row["unread"]
        await _say(wire, opened)
        assert (await _state(wire, opened))["unread"]
        assert not await _read(wire, opened, 2)
        _require_agreement(world, opened)


async def test_a_receipt_during_a_run_counts_what_is_saved_and_a_run_without_output_keeps_it(tmp_path: Path) -> None:
    """S-6, S-8"""
    release = trio.Event()

    async def waits(*_: Any) -> Any:
        await release.wait()
        raise OSError

    async with running(tmp_path, model=PlayedModel([text("hi"), waits])) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        await _say(wire, opened)
        run_id = await wire.prompt(opened["sessionId"])
        assert not await _read(wire, opened, 3)  # the prompt of this run is not saved
        assert await _read(wire, opened, 2)
        release.set()
        await wire.call("run/wait", {"runId": run_id})
        state = await _state(wire, opened)
        assert (state["messageCount"], state["unread"]) == (3, False)
        _require_agreement(world, opened)


# --- pins


async def test_a_pin_keeps_its_stamp_and_moves_nothing_else(tmp_path: Path) -> None:  # S-7, S-9, S-13
    clock = SetClock()
    async with running(tmp_path, model=PlayedModel([text("hi")]), clock=clock) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        await _say(wire, opened)
        before, history = await _state(wire, opened), _history(opened)
        clock.now += 1000
        stamp = clock.now
        assert await _pin(wire, opened) == {"pinnedAt": stamp}
        assert (await wire.event("session_changed")).event.pinned_at == stamp  # type: ignore[union-attr]
        clock.now += 1000
        assert await _pin(wire, opened) == {"pinnedAt": stamp}
        assert (await _state(wire, opened)) == before | {"pinnedAt": stamp}
        [row] = (await wire.call("session/list", {"cwd": world.cwd}))["sessions"]
        assert (row["pinnedAt"], row["updatedAt"]) == (stamp, before["updatedAt"])
        _require_agreement(world, opened)
        assert await _pin(wire, opened, False) == await _pin(wire, opened, False) == {}
        assert (await _state(wire, opened)) == before
        assert await _pin(wire, opened) == {"pinnedAt": clock.now}
        assert _history(opened) == history
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        assert (await wire.open(world, kind="continue"))["state"]["pinnedAt"] == clock.now


async def test_a_pin_during_a_run_and_over_a_pending_save_survives_and_takes_nothing_back(tmp_path: Path) -> None:
    """S-7, S-15, storage rule 3: at every call of the save that can fail, before and after it took effect."""
    hit = 0
    for at in range(1, 30):
        disk, root = AtCall(), tmp_path / str(at)
        root.mkdir()
        async with running(root, model=PlayedModel([text("answer")]), fs=disk) as world:
            wire = await world.connect()
            opened = await wire.open(world)
            await _say(wire, opened)
            await _read(wire, opened, 2)
            disk.calls, disk.at = 0, at
            saved = (await _say(wire, opened))["saved"]
            reached, disk.at = disk.calls >= at, None
            if not reached:
                break
            if saved:
                continue  # it was a call for the journal, whose failure is no failed save (S-26)
            hit += 1
            revision = _meta(opened).committed.revision
            assert await _refusal(wire, "session/markRead", sessionId=opened["sessionId"], messageCount=2) == (
                "pending_save"
            )
            stamp = (await _pin(wire, opened))["pinnedAt"]
            state, meta = await _state(wire, opened), _meta(opened)
            assert (state["hasPendingSave"], state["pinnedAt"], meta.pinned_at) == (True, stamp, stamp)
            assert meta.committed.revision == revision
            assert meta.unread is (meta.committed.messages == 4)  # what was published after all is whole
            assert await wire.call("session/flush", {"sessionId": opened["sessionId"]}) == {"flushed": True}
            assert (await _state(wire, opened))["pinnedAt"] == stamp
            _require_agreement(world, opened)
            assert _meta(opened).committed.messages == 4
    print(f"{hit} points hit")
    assert hit >= 5


async def test_two_clients_at_once_agree_on_one_stamp_and_both_see_it(tmp_path: Path) -> None:  # S-7, S-10
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        one, other = await world.connect(), await world.connect()
        opened = await one.open(world)
        await other.call("runtime/attach", {"runtimeId": opened["runtimeId"]})
        await _say(one, opened)
        for number in range(20):
            ask = {"sessionId": opened["sessionId"]}
            pinned, title = number % 2 == 0, f"title {number}"
            first = await one.request("session/setPinned", {**ask, "pinned": pinned})
            second = await other.request("session/setPinned", {**ask, "pinned": pinned})
            third = await other.request("session/markRead", {**ask, "messageCount": 2})
            fourth = await one.request("title/rename", {**ask, "text": title})
            assert await one.answer(first) == await other.answer(second)
            assert (await other.answer(third))["read"]
            assert (await one.answer(fourth))["title"]["text"] == title
            _require_agreement(world, opened)
        seen = [[(p.seq, p.event) for p in wire.events if p.seq > 20] for wire in (one, other)]
        await one.call("server/status")
        await other.call("server/status")
        shorter = min(map(len, seen))
        assert shorter > 20
        assert seen[0][:shorter] == seen[1][:shorter]


# --- interleavings


@pytest.mark.parametrize("failing", [None, "first", "second"])
@pytest.mark.parametrize("second", ["pin", "unpin", "read", "model", "rename"])
@pytest.mark.parametrize("first", ["prompt", "pin", "read", "model", "rename"])
async def test_two_writes_at_once_leave_what_the_state_says(
    first: str, second: str, failing: str | None, tmp_path: Path
) -> None:
    """I-6, S-10: the second is asked for while the first is on its way to the disk, and one of them may fail."""
    disk = Held()
    async with running(tmp_path, model=PlayedModel([text("hi")]), fs=disk) as world:
        wire, other = await world.connect(), await world.connect()
        opened = await wire.open(world)
        await _say(wire, opened)
        await _pin(wire, opened)
        if first == "pin":
            await _pin(wire, opened, False)
        disk.hold(fail={None: set(), "first": {1}, "second": {2}}[failing])
        one = await wire.request(*_request(first, opened))
        await disk.reached()
        two = await other.request(*_request(second, opened))
        await other.call("server/status")  # it was decided
        disk.release()
        outcomes = [await _outcome(wire, one), await _outcome(other, two)]
        if world.session().core.unsaved is not None:
            await wire.call("session/flush", {"sessionId": opened["sessionId"]})
        if "save_failed" in outcomes:
            # What failed may be on disk all the same, and what it would have cost is the next write's to repair.
            await _pin(wire, opened, "pinnedAt" not in await _state(wire, opened))
        _require_agreement(world, opened)
        core = world.session().core
        if failing is None and first == "prompt":
            expected = {"pin": "ok", "unpin": "ok", "read": False, "model": "session_busy", "rename": "session_busy"}
            assert outcomes == ["ok", expected[second]]
            assert core.unread
        if failing is None and second in ("pin", "unpin"):
            assert outcomes[1] == "ok"
            assert (core.pinned_at is not None) is (second == "pin")
        if failing == "first" and first == "prompt" and second == "read":
            assert outcomes[1] == "pending_save"
        expected_lines = world.session().core.history.lines
        assert _history(opened) == b"".join(expected_lines)


@pytest.mark.parametrize("first", ["pin", "unpin", "read"])
async def test_a_save_that_waits_for_a_mark_takes_it_along(first: str, tmp_path: Path) -> None:  # I-6, S-8, S-10
    async def fails(*_: Any) -> Any:  # noqa: ASYNC124 async as its port is
        raise ModelError("provider", "no")

    disk = Held()
    async with running(tmp_path, model=PlayedModel([text("hi"), fails]), fs=disk) as world:
        wire, other = await world.connect(), await world.connect()
        opened = await wire.open(world)
        await _say(wire, opened)
        await _pin(wire, opened, first == "unpin")
        await wire.event("run_settled")
        disk.hold(fail=set())
        mark = await other.request(*_request(first, opened))
        await disk.reached()
        await wire.prompt(opened["sessionId"])
        for _ in ("its start", "its end, right before the save"):
            await wire.event("prompt_timing")
        disk.release()
        await wire.event("run_settled")
        await other.answer(mark)
        _require_agreement(world, opened)
        state = await _state(wire, opened)
        assert (state["unread"], "pinnedAt" in state) == (first != "read", first == "pin")


async def test_whoever_gives_up_a_hung_mark_gives_up_what_waits_behind_it(tmp_path: Path) -> None:  # D-4, D-5
    disk = Held()
    async with running(tmp_path, model=PlayedModel([text("hi")]), fs=disk) as world:
        wire, other = await world.connect(), await world.connect()
        opened = await wire.open(world)
        disk.hold(fail=set())
        pins = [await wire.request(*_request("pin", opened)) for _ in range(5)]
        await disk.reached()
        run_id = await other.prompt(opened["sessionId"])
        for _ in ("its start", "its end, right before the save"):
            await wire.event("prompt_timing")
        world.session().give_up()
        with trio.fail_after(2):
            assert [await _outcome(wire, pin) for pin in pins] == ["save_failed"] * 5
            assert not (await other.call("run/wait", {"runId": run_id}))["saved"]
        disk.release()
        await other.call("session/flush", {"sessionId": opened["sessionId"]})
        _require_agreement(world, opened)


class Held(FileSystem):
    """The first sync of a file waits until it is released; whole writes can be told to fail after their rename."""

    def __init__(self) -> None:
        self._gate: threading.Event | None = None
        self._reached = threading.Event()
        self._fail: set[int] = set()
        self._writes = 0

    def hold(self, *, fail: set[int]) -> None:
        self._gate, self._fail, self._writes = threading.Event(), fail, 0

    async def reached(self) -> None:
        await trio.to_thread.run_sync(self._reached.wait, 10)

    def release(self) -> None:
        assert self._gate is not None
        self._gate.set()

    def fsync(self, fd: int) -> None:
        if self._gate is not None and not self._gate.is_set():
            self._reached.set()
            self._gate.wait(10)
        super().fsync(fd)

    def rename(self, source: str, target: str, *, dir_fd: int) -> None:
        super().rename(source, target, dir_fd=dir_fd)
        self._writes += 1
        if self._writes in self._fail:
            raise OSError(errno.EIO, "the device said no")


def _request(act: str, opened: Any) -> tuple[str, Any]:
    session = {"sessionId": opened["sessionId"]}
    return {
        "prompt": ("session/prompt", {**session, "content": "more", "wait": True}),
        "pin": ("session/setPinned", {**session, "pinned": True}),
        "unpin": ("session/setPinned", {**session, "pinned": False}),
        "read": ("session/markRead", {**session, "messageCount": 2}),
        "model": ("session/setModel", {**session, "model": {"provider": "other", "id": "m"}}),
        "rename": ("title/rename", {**session, "text": "By hand"}),
    }[act]


async def _outcome(wire: Wire, id: int) -> Any:
    try:
        return (await wire.answer(id)).get("read", "ok")
    except RpcError as error:
        return error.kind


# --- what hangs and what is damaged


async def test_a_pin_that_hangs_delays_its_session_only_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D-5: and what queues behind it is given up with it, so that the end of the daemon waits for neither."""
    monkeypatch.setattr(saving, "STORAGE_DEADLINE_S", 0.3)
    disk = Breaking()
    async with running(tmp_path, model=PlayedModel([text("hi")]), fs=disk) as world:
        wire, other = await world.connect(), await world.connect()
        opened = await wire.open(world)
        await _say(wire, opened)
        disk.gate = threading.Event()
        pin = await wire.request("session/setPinned", {"sessionId": opened["sessionId"], "pinned": True})
        read = await wire.request("session/markRead", {"sessionId": opened["sessionId"], "messageCount": 2})
        with trio.fail_after(0.25):
            await other.call("server/status")
        with trio.fail_after(2):
            assert [await _outcome(wire, pin), await _outcome(wire, read)] == ["save_failed", "save_failed"]
        disk.gate.set()
        state = await _state(wire, opened)
        assert (state["unread"], "pinnedAt" in state, state["hasPendingSave"]) == (True, False, False)
        # Whatever of it is on disk by now: a flush makes that what the state says.
        assert await wire.call("session/flush", {"sessionId": opened["sessionId"]}) == {"flushed": True}
        _require_agreement(world, opened)
        assert await wire.call("session/flush", {"sessionId": opened["sessionId"]}) == {"flushed": False}


@pytest.mark.parametrize("damage", [b"\0" * 413, None], ids=["nul", "removed"])
async def test_metadata_damaged_under_an_open_session_is_named_and_a_flush_writes_it_anew(
    damage: bytes | None, tmp_path: Path
) -> None:  # S-16, K-8
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        await _say(wire, opened)
        path, before = Path(opened["path"]), _meta(opened)
        path.unlink() if damage is None else path.write_bytes(damage)
        model = {"provider": "other", "id": "m"}
        assert await _refusal(wire, "session/setModel", sessionId=opened["sessionId"], model=model) == "save_failed"
        assert await wire.call("session/flush", {"sessionId": opened["sessionId"]}) == {"flushed": True}
        assert _meta(opened) == before
        assert await wire.call("session/flush", {"sessionId": opened["sessionId"]}) == {"flushed": False}
        _require_agreement(world, opened)


async def test_a_client_that_goes_away_cancels_no_pin(tmp_path: Path) -> None:  # R-7, I-10
    disk = Breaking()
    async with running(tmp_path, model=PlayedModel([text("hi")]), fs=disk) as world:
        wire, other = await world.connect(), await world.connect()
        opened = await wire.open(world)
        disk.gate = threading.Event()
        await wire.request("session/setPinned", {"sessionId": opened["sessionId"], "pinned": True})
        await wire.call("server/status")
        await wire.aclose()
        disk.gate.set()
        await other.call("session/flush", {"sessionId": opened["sessionId"]})  # after it in the queue
        assert (await _state(other, opened))["pinnedAt"] == _meta(opened).pinned_at


class HeldSession(FileSystem):
    """Syncs of files in the directory of ``session_id`` wait."""

    def __init__(self) -> None:
        self.session_id = ""
        self.gate = threading.Event()

    def fsync(self, fd: int) -> None:
        if self.session_id and self.session_id in os.readlink(f"/proc/self/fd/{fd}"):
            self.gate.wait(10)
        super().fsync(fd)


async def test_a_pin_that_ends_after_a_replacement_is_stored_and_says_nothing_to_the_new_session(
    tmp_path: Path,
) -> None:
    """R-5"""
    disk = HeldSession()
    async with running(tmp_path, model=PlayedModel([text("hi")]), fs=disk) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        disk.session_id = opened["sessionId"]
        pin = await wire.request("session/setPinned", {"sessionId": opened["sessionId"], "pinned": True})
        replacing = await wire.request("runtime/newSession", {"runtimeId": opened["runtimeId"]})
        await wire.event("session_replaced")
        disk.gate.set()
        stamp = (await wire.answer(pin))["pinnedAt"]
        new = await wire.answer(replacing)
        await wire.call("server/status")
        told = [params.session_id for params in wire.events]
        replaced = [params.event.__struct_config__.tag for params in wire.events].index("session_replaced")
        assert set(told[replaced:]) == {new["sessionId"]}
        assert _meta(opened).pinned_at == stamp


async def test_in_memory_the_same_holds_without_a_file(tmp_path: Path) -> None:  # S-2
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        opened = await wire.open(world, kind="memory")
        await _say(wire, opened)
        assert await _read(wire, opened, 2)
        await _pin(wire, opened)
        await _rename(wire, opened)
        await _say(wire, opened)
        state = await _state(wire, opened)
        assert (state["title"], state["unread"], "pinnedAt" in state) == (BY_HAND, True, True)
        assert not list(tmp_path.rglob("meta.json"))


@pytest.mark.parametrize("how", ["dispose", "replace", "end"])
async def test_what_a_failed_change_left_on_disk_is_taken_back_before_the_session_is_let_go(
    how: str, tmp_path: Path
) -> None:
    """I-6: the write failed after its rename, so it stands there, and memory has it not."""
    disk = Held()
    async with running(tmp_path, model=PlayedModel([text("hi")]), fs=disk) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        disk.hold(fail={1})
        disk.release()
        assert await _refusal(wire, "session/setPinned", sessionId=opened["sessionId"], pinned=True) == "save_failed"
        assert _meta(opened).pinned_at is not None
        if how == "dispose":
            await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        elif how == "replace":
            await wire.call("runtime/newSession", {"runtimeId": opened["runtimeId"]})
    assert _meta(opened).pinned_at is None
