"""``server/watch``: what changes in the list of sessions, saves that fail and drains, for who shows more than one."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from asking import Asking, answer, asks, pending
from inprocess import PlayedModel, Probe, Wire, World, call, running, text

from loop_protocol.client import Client
from loop_protocol.trio_client import open_client
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.events import (
    ApprovalRequested,
    ApprovalResolved,
    DaemonState,
    EventsLost,
    ServerEventParams,
    SessionListed,
    SessionRemoved,
)
from loop_protocol.v1.types import ApprovalRequest, SessionRow
from loopd import event_log
from loopd.agent import TextDelta
from loopd.storage.fs import FileSystem


class Full(FileSystem):
    is_full = False

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(fd, data, offset)


async def _told(wire: Wire) -> list[Any]:
    """The events of the daemon that have come since the last time."""
    await wire.call("server/status")  # an answer comes after what happened before it
    told = [message["params"] for message in wire.log if message.get("method") == "server/event"]
    wire.log.clear()
    return [msgspec.convert(params, ServerEventParams).event for params in told]


async def _rows(wire: Wire) -> list[SessionRow]:
    told = await _told(wire)
    assert all(isinstance(event, SessionListed) for event in told), told
    return [event.session for event in told]


async def _listed(wire: Wire, world: World) -> list[SessionRow]:
    listing = await wire.call("session/list", {"cwd": world.cwd})
    return msgspec.convert(listing["sessions"], list[SessionRow])


async def test_who_watches_hears_of_the_sessions_of_others_as_the_list_shows_them(tmp_path: Path) -> None:
    async with running(tmp_path, model=PlayedModel([call(), text("hi")]), tools=[Probe()]) as world:
        watcher, wire = await world.connect(), await world.connect()
        assert await watcher.call("server/watch") == {}
        opened = await wire.open(world)
        ids = {"sessionId": opened["sessionId"]}
        rows = await _rows(watcher)
        assert rows[-1:] == await _listed(watcher, world)
        assert (rows[-1].live, rows[-1].message_count, rows[-1].path) == (True, 0, opened["path"])
        await wire.prompt(opened["sessionId"], wait=True)
        [saved] = await _rows(watcher)  # one save, and nothing of the run itself
        assert [saved] == await _listed(watcher, world)
        assert (saved.message_count, saved.unread) == (4, True)
        await wire.call("session/setPermission", {**ids, "permission": "workspace-write"})
        await wire.call("session/setModel", {**ids, "model": {"provider": "other", "id": "m"}})
        rows = await _rows(watcher)
        assert len(rows) == 2
        assert rows[-1:] == await _listed(watcher, world)
        replaced = await wire.call("runtime/newSession", {"runtimeId": opened["runtimeId"]})
        rows = await _rows(watcher)
        assert {row.session_id: row.live for row in rows} == {opened["sessionId"]: False, replaced["sessionId"]: True}
        await wire.call("runtime/switchSession", {"runtimeId": opened["runtimeId"], "path": opened["path"]})
        rows = await _rows(watcher)
        assert {row.session_id: row.live for row in rows} == {opened["sessionId"]: True, replaced["sessionId"]: False}
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        assert [(row.session_id, row.live) for row in await _rows(watcher)] == [(opened["sessionId"], False)]
        assert not watcher.events


async def test_a_session_is_told_to_be_gone_when_the_list_lacks_it_though_its_deletion_failed(tmp_path: Path) -> None:
    """S-28: what is left of it is no session, and nothing further would tell of it."""

    class Clinging(FileSystem):
        clings = False

        def unlink(self, name: str, *, dir_fd: int) -> None:
            if self.clings:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().unlink(name, dir_fd=dir_fd)

    disk = Clinging()
    async with running(tmp_path, model=PlayedModel([text("hi")]), fs=disk) as world:
        watcher, wire = await world.connect(), await world.connect()
        opened = await wire.open(world, attach=False)
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        await watcher.call("server/watch")
        disk.clings = True
        with pytest.raises(RpcError) as failed:
            await wire.call("session/delete", {"path": opened["path"]})
        assert failed.value.kind == "save_failed"
        assert await _listed(wire, world) == []
        assert await _told(watcher) == [SessionRemoved(opened["path"], opened["sessionId"])]


async def test_a_draft_is_told_of_once_it_is_saved_and_memory_never(tmp_path: Path) -> None:  # S-3
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        watcher, wire = await world.connect(), await world.connect()
        await watcher.call("server/watch")
        for kind in ("memory", "draft"):
            opened = await wire.open(world, kind=kind)
            await wire.call("session/setPermission", {"sessionId": opened["sessionId"], "permission": "read-only"})
            assert await _rows(watcher) == []
            await wire.prompt(opened["sessionId"], wait=True)
            rows = await _rows(watcher)
            assert rows == await _listed(watcher, world)
            assert len(rows) == (kind == "draft")
            await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})


async def test_a_save_that_fails_is_told_with_what_is_pending_and_so_is_its_end(tmp_path: Path) -> None:  # S-25
    disk = Full()
    async with running(tmp_path, model=PlayedModel([text("hi")]), fs=disk) as world:
        watcher, wire = await world.connect(), await world.connect()
        await watcher.call("server/watch")
        opened = await wire.open(world)
        await _rows(watcher)
        disk.is_full = True
        await wire.prompt(opened["sessionId"], wait=True)
        [event] = await _told(watcher)
        status = await watcher.call("server/status")
        assert isinstance(event, DaemonState)
        assert msgspec.to_builtins(event.pending_saves) == status["pendingSaves"]
        assert event.pending_saves[0].session_id == opened["sessionId"]
        for _ in range(4):
            with pytest.raises(RpcError, match="ENOSPC"):
                await wire.call("session/flush", {"sessionId": opened["sessionId"]})
        # What is refused may have changed once, from the append to the writing anew; the same again is no news.
        assert len(await _told(watcher)) <= 1
        disk.is_full = False
        await wire.call("session/flush", {"sessionId": opened["sessionId"]})
        saved, made_up = await _told(watcher)
        assert saved.session.message_count == 2
        assert made_up == DaemonState(draining=False, runs=0, pending_saves=[])


async def test_a_drain_is_told_from_its_beginning_over_each_run_to_its_end(tmp_path: Path) -> None:  # D-4
    gates = [trio.Event(), trio.Event()]
    waiting = list(gates)

    async def gated(*_: Any) -> Any:
        await waiting.pop(0).wait()
        return text("hi")

    async with running(tmp_path, model=PlayedModel([gated])) as world:
        watcher, wire = await world.connect(), await world.connect()
        await watcher.call("server/watch")
        for _ in range(2):
            new = {"cwd": world.cwd, "session": {"kind": "memory"}, "runtimeId": "new"}
            opened = await wire.call("runtime/open", new)
            await wire.prompt(opened["sessionId"])
        idle = await wire.call("runtime/open", {"cwd": world.cwd, "session": {"kind": "memory"}, "runtimeId": "new"})
        await wire.call("runtime/dispose", {"runtimeId": idle["runtimeId"]})
        assert await _told(watcher) == []  # that runs come and go is no news outside a drain
        drain = await wire.request("server/drain", {"deadlineMs": 60_000})
        await wire.call("server/status")
        assert await _told(watcher) == [DaemonState(draining=True, runs=2, pending_saves=[])]
        gates[0].set()
        told = []
        while not told:
            told = await _told(watcher)
        assert told == [DaemonState(draining=True, runs=1, pending_saves=[])]
        gates[1].set()
        assert (await wire.answer(drain))["quiet"]
        assert await _told(watcher) == [DaemonState(draining=True, runs=0, pending_saves=[])]
        await wire.call("server/drain", {"cancel": True})
        assert await _told(watcher) == [DaemonState(draining=False, runs=0, pending_saves=[])]


async def test_what_tools_of_all_sessions_ask_is_told_with_what_it_came_to(tmp_path: Path) -> None:  # A-1 A-2
    async with running(tmp_path, model=PlayedModel([asks(), asks(), text("hi")]), tools=[Asking()]) as world:
        watcher, wire = await world.connect(), await world.connect()
        await watcher.call("server/watch")
        runs: list[str] = []
        told: list[Any] = []
        for _ in range(2):
            new = {"cwd": world.cwd, "session": {"kind": "memory"}, "runtimeId": "new"}
            opened = await wire.call("runtime/open", new)
            runs.append(await wire.prompt(opened["sessionId"]))
            with trio.fail_after(10):
                while len(told) < len(runs):  # one after the other, or the second could be the first that asks
                    told += await _told(watcher)
        listed = msgspec.convert(await pending(watcher), list[ApprovalRequest])
        assert told == [ApprovalRequested(request) for request in listed]
        assert listed[0].session_id != listed[1].session_id
        await answer(wire, listed[0].approval_id, "rejected", feedback="no")
        await wire.call("session/abort", {"sessionId": listed[1].session_id})
        rejected, cancelled = await _told(watcher)
        assert (rejected.approval_id, rejected.outcome, rejected.feedback) == (listed[0].approval_id, "rejected", "no")
        assert rejected.by.startswith("a client (pid ")
        assert cancelled == ApprovalResolved(listed[1].approval_id, listed[1].session_id, "cancelled")
        await wire.call("run/wait", {"runId": runs[0]})
        assert await _told(watcher) == []


async def test_only_who_asked_is_told_in_order_from_then_on_and_asking_again_changes_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        one, two, wire = [await world.connect() for _ in range(3)]
        await one.call("server/watch")
        opened = await wire.open(world)
        await one.call("server/watch")
        await two.call("server/watch")
        await wire.prompt(opened["sessionId"], wait=True)
        for watcher, count in ((one, 2), (two, 1), (wire, 0)):
            await watcher.call("server/status")
            told = [message["params"] for message in watcher.log if message.get("method") == "server/event"]
            assert len(told) == count
            assert [params["seq"] for params in told] == list(range(3 - count, 3)) if count else True
            assert all(set(params) == {"seq", "at", "event"} for params in told)


async def test_in_a_batch_it_is_refused_like_every_subscription(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        wire = await world.connect()
        await wire.send(b'[{"jsonrpc":"2.0","id":9,"method":"server/watch"}]\n')
        [answer] = await wire.receive()
        assert answer["error"]["data"]["kind"] == "invalid_request"


async def test_a_watcher_that_does_not_read_costs_a_bounded_log_and_is_told_what_it_missed(  # K-50
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "EVENTS", 64)
    async with running(tmp_path) as world:
        watcher, wire = await world.connect(), await world.connect()
        await watcher.call("server/watch")
        opened = await wire.open(world)
        watch = world.services.watch
        for number in range(5000):
            watch.removed(f"/{number}/" + "x" * 1000, opened["sessionId"])
        assert watch.log.size < 2 * event_log.BYTES
        told = await _told(watcher)
        lost = [event for event in told if isinstance(event, EventsLost)]
        assert lost
        assert lost[0].last - lost[0].first > 1000
        assert isinstance(told[-1], SessionRemoved)
        assert told[-1].path.startswith("/4999/")


async def test_without_a_watcher_nothing_is_kept(tmp_path: Path) -> None:
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        await wire.prompt(opened["sessionId"], wait=True)
        assert world.services.watch.log.head == 0
        watcher = await world.connect()
        await watcher.call("server/watch")
        await watcher.aclose()
        while world.services.watch.log.cursors:  # noqa: ASYNC110 nothing tells
            await trio.lowlevel.checkpoint()


async def test_both_python_clients_read_them_apart_from_the_events_of_runtimes(tmp_path: Path) -> None:
    async def streams(_: Any, say: Any) -> Any:
        say(TextDelta("hi"))
        await trio.lowlevel.checkpoint()
        return text("hi")

    def blocking() -> list[Any]:
        with Client.connect(world.socket) as client:
            client.call("server/watch")
            opened = client.call("runtime/open", {"cwd": world.cwd, "session": {"kind": "continue"}})
            client.call("runtime/attach", {"runtimeId": opened.runtime_id})
            client.call("session/prompt", {"sessionId": opened.session_id, "content": "x", "wait": True})
            events = [client.next_event(timeout=5) for _ in range(3)]
            told = client.next_server_event(timeout=5)
            assert client.next_server_event(timeout=0) is None
            return [*events, told]

    async with running(tmp_path, model=PlayedModel([streams])) as world, open_client(world.socket) as client:
        await client.call("server/watch")
        opened = await client.call("runtime/open", {"cwd": world.cwd, "session": {"kind": "new"}})
        await client.call("runtime/attach", {"runtimeId": opened.runtime_id})
        await client.run(opened.session_id, "x")
        assert (await anext(client.events())).event.run_id
        first, second = await client.next_server_event(), await client.next_server_event()
        assert (first.seq, second.seq) == (1, 2)
        assert [told.event.session.message_count for told in (first, second)] == [0, 2]
        *events, told = await trio.to_thread.run_sync(blocking)
        assert all(params.runtime_id == opened.runtime_id for params in events)
        assert told.event.session.message_count == 4
