"""What a crash leaves of a run can be taken back: all that anybody saw finished, paired, marked, when asked (S-26)."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from inprocess import PlayedModel, Probe, Wire, World, call, running, text
from stepping import Steps
from test_replica_law import Watching
from test_saving import Breaking

from loop_protocol.replica import fold
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.events import EventParams, MessageEnd
from loopd import saving
from loopd.agent import Reply, TextDelta
from loopd.storage import files
from loopd.storage.fs import FileSystem

CALLS = [*call(id="a").content, *call(id="b").content]
ASK = {"content": "do it", "requestId": "r1"}


def decoded(body: bytes) -> EventParams:
    """Of an entry of an event log."""
    return msgspec.json.decode(msgspec.json.encode(msgspec.json.decode(body)["params"]), type=EventParams)


def lines_of_messages(world: World) -> list[bytes]:
    history = world.session().core.history
    return [history.line(index) for index in range(history.messages)]


class Crash:
    """The files of the session in ``world`` as they are at one moment, which is all that a killed daemon leaves."""

    def __init__(self, world: World, root: Path) -> None:
        self.core = world.session().core
        self.directory = root / self.core.id
        shutil.copytree(Path(self.core.path or "").parent, self.directory)
        log = world.runtime().events
        bodies = [log.entry(seq) for seq in range(log.first, log.head + 1)]
        events = [decoded(body).event for body in bodies]
        self.seen = [event.index for event in events if isinstance(event, MessageEnd) and event.index is not None]

    @property
    def path(self) -> str:
        return str(self.directory / "meta.json")

    @property
    def journal(self) -> Path:
        return self.directory / "run.journal"


async def _hang(_: Any, say: Callable[[Any], None]) -> Reply:
    say(TextDelta("half an ans"))
    await trio.sleep_forever()
    raise AssertionError


async def crashed(root: Path, *, hangs: bool = True) -> Crash:
    """A saved turn, then one that was cut off: while its second call hung, or while the model did after both."""
    two = Reply(CALLS, call().usage, "toolUse")
    probe, hanging = Probe(), Probe(name="hang", hangs=True)
    if hangs:
        two = Reply([CALLS[0], *call("hang", id="b").content, *call(id="c").content], call().usage, "toolUse")
    async with running(root / "before", model=PlayedModel([text("fine"), two, _hang]), tools=[probe, hanging]) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        await wire.call("session/prompt", {"sessionId": opened["sessionId"], "content": "first", "wait": True})
        await wire.event("run_settled")
        await wire.call("session/prompt", {"sessionId": opened["sessionId"], **ASK})
        for _ in range(2 if hangs else 0):
            await wire.event("tool_execution_start")
        if not hangs:
            await wire.event("message_update")
        crash = Crash(world, root / "left")
        await wire.aclose()
    return crash


async def reopen(wire: Wire, world: World, crash: Crash, **options: Any) -> Any:
    session = {"kind": "open", "path": crash.path}
    opened = await wire.call("runtime/open", {"cwd": world.cwd, "session": session, **options})
    await wire.call("runtime/attach", {"runtimeId": opened["runtimeId"]})
    return opened


async def messages(wire: Wire, opened: Any) -> list[Any]:
    page = await wire.call("session/messages", {"sessionId": opened["sessionId"]})
    found: list[Any] = page["messages"]
    return found


async def refusal(wire: Wire, method: str, **params: Any) -> str:
    with pytest.raises(RpcError) as refused:
        await wire.call(method, params)
    return refused.value.kind


def tags(wire: Wire) -> list[str]:
    return [params.event.__struct_config__.tag for params in wire.events]  # type: ignore[misc]


async def test_it_is_offered_when_opened_and_taken_over_only_when_asked(
    tmp_path: Path,
) -> None:  # S-26, S-12, S-8, K-20
    crash = await crashed(tmp_path)
    async with running(tmp_path, model=PlayedModel([text("again")]), tools=[Probe()]) as world:
        wire = await world.connect()
        by_path = await wire.call("session/state", {"path": crash.path})
        opened = await reopen(wire, world, crash)
        ask = {"sessionId": opened["sessionId"]}
        offered = opened["state"]["recoverable"]
        assert offered == by_path["recoverable"]
        assert offered["messages"] == 3  # the prompt, the answer with three calls, one result
        assert (opened["state"]["liveCount"], opened["state"]["unread"]) == (2, True)
        recovered = await wire.call("session/recover", ask)
        assert recovered == {"runId": offered["runId"], "messages": 3}
        taken = await messages(wire, opened)
        shown = [(one["role"], one.get("toolCallId"), one.get("isError")) for one in taken[2:]]
        assert shown == [
            ("user", None, None),
            ("assistant", None, None),
            ("toolResult", "a", False),
            ("toolResult", "b", True),
            ("toolResult", "c", True),
        ]
        for one in taken[5:]:
            assert "the daemon ended in the middle of the run" in one["content"][0]["text"]
        state = await wire.call("session/state", ask)
        assert "recoverable" not in state
        assert (state["unread"], state["messageCount"], state["userMessageCount"]) == (True, 7, 2)
        assert state["lastRun"]["error"]["kind"] == "interrupted"
        # P-6: it has a start and a range, and nobody claims to know when it ended.
        timing = state["timings"][-1]
        assert timing == {
            "id": offered["runId"],
            "userMessageIndex": 2,
            "messageStartIndex": 2,
            "messageEndIndex": 7,
            "startedAt": offered["startedAt"],
        }
        assert not crash.journal.exists()
        assert await refusal(wire, "session/recover", **ask) == "nothing_to_recover"
        again = await wire.call("session/prompt", {**ask, "content": "go on", "wait": True})
        assert (again["outcome"], again["saved"]) == ("success", True)
    _, stored = files.read_session(FileSystem(), crash.path)
    assert stored.messages == 9


async def test_its_events_come_in_the_order_of_a_run(tmp_path: Path) -> None:  # I-3, S-26
    crash = await crashed(tmp_path, hangs=False)
    async with running(tmp_path) as world:
        wire = await world.connect()
        opened = await reopen(wire, world, crash)
        await wire.call("session/recover", {"sessionId": opened["sessionId"]})
        one = ["message_start", "message_end"]
        told = ["session_changed", *one * 4, "prompt_timing", "session_saved", "run_settled", "session_changed"]
        assert tags(wire) == told


async def test_a_repeat_of_its_request_finds_the_run(tmp_path: Path) -> None:
    crash = await crashed(tmp_path, hangs=False)
    async with running(tmp_path) as world:
        wire = await world.connect()
        opened = await reopen(wire, world, crash)
        ask = {"sessionId": opened["sessionId"], **ASK}
        run_id = (await wire.call("session/recover", {"sessionId": opened["sessionId"]}))["runId"]
        assert await wire.call("session/prompt", ask) == {"runId": run_id}
        result = await wire.call("session/prompt", {**ask, "wait": True})
        assert (result["outcome"], result["saved"], result["error"]["kind"]) == ("error", True, "interrupted")
        assert await refusal(wire, "session/prompt", **(ask | {"content": "else"})) == "conflict"
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        await reopen(wire, world, crash)
        assert await wire.call("run/wait", {"runId": run_id}) == {name: result[name] for name in result}


async def test_a_prompt_leaves_it_behind_and_keeps_it_for_people(tmp_path: Path) -> None:
    crash = await crashed(tmp_path)
    left = crash.journal.read_bytes()
    async with running(tmp_path, model=PlayedModel([text("new")])) as world:
        wire = await world.connect()
        opened = await reopen(wire, world, crash)
        ask = {"sessionId": opened["sessionId"]}
        await wire.call("session/setPermission", {**ask, "permission": "read-only"})  # this does not
        assert "recoverable" in await wire.call("session/state", ask)
        await wire.call("session/prompt", {**ask, "content": "other", "wait": True})
        assert "recoverable" not in await wire.call("session/state", ask)
        assert await refusal(wire, "session/recover", **ask) == "nothing_to_recover"
        assert [one["content"][0]["text"] for one in (await messages(wire, opened))[2:]] == ["other", "new"]
    assert crash.journal.with_name("run.journal.old").read_bytes() == left
    assert not crash.journal.exists()


async def test_without_a_crash_or_a_file_there_is_nothing_to_recover(tmp_path: Path) -> None:
    async with running(tmp_path, model=PlayedModel([text("x"), text("x"), _hang])) as world:
        wire = await world.connect()
        for kind in ("new", "memory"):
            opened = await wire.open(world, kind=kind, runtimeId="new", attach=kind == "new")
            ask = {"sessionId": opened["sessionId"]}
            assert await refusal(wire, "session/recover", **ask) == "nothing_to_recover"
            assert (await wire.call("session/prompt", {**ask, "content": "x", "wait": True}))["saved"]
            assert await refusal(wire, "session/recover", **ask) == "nothing_to_recover"
        head = world.session_of(opened["sessionId"]).events.head
        await wire.call("session/prompt", {**ask, "content": "x"})
        assert await refusal(wire, "session/recover", **ask) == "session_busy"  # I-10
        assert world.session_of(opened["sessionId"]).events.head >= head
        assert [path for path in tmp_path.rglob("run.journal*")] == []


async def test_a_recovery_whose_save_fails_is_pending_like_any_run(tmp_path: Path) -> None:  # S-14, S-16
    crash = await crashed(tmp_path)
    disk = Breaking()
    async with running(tmp_path, model=PlayedModel([text("new")]), fs=disk) as world:
        wire = await world.connect()
        opened = await reopen(wire, world, crash)
        ask = {"sessionId": opened["sessionId"]}
        disk.error = errno.ENOSPC
        assert await refusal(wire, "session/recover", **ask) == "save_failed"
        state = await wire.call("session/state", ask)
        assert (state["hasPendingSave"], state["liveCount"], state["messageCount"]) == (True, 7, 2)
        assert state["lastRun"]["error"]["kind"] == "run_and_save_failed"
        assert await refusal(wire, "session/recover", **ask) == "pending_save"
        # A daemon that is killed now offers it again.
        assert Crash(world, tmp_path / "again").journal.read_bytes() == crash.journal.read_bytes()
        disk.error = None
        assert await wire.call("session/flush", ask) == {"flushed": True}
        state = await wire.call("session/state", ask)
        assert (state["lastRun"]["saved"], state["lastRun"]["error"]["kind"]) == (True, "interrupted")
        assert not crash.journal.exists()
        assert (await wire.call("session/prompt", {**ask, "content": "x", "wait": True}))["saved"]
    _, stored = files.read_session(FileSystem(), crash.path)
    assert stored.messages == 9


class JournalDisk(FileSystem):
    """Its journals cannot be written (``refuses``), or hang until ``gate`` opens."""

    def __init__(self) -> None:
        self.refuses = False
        self.gate: threading.Event | None = None

    def open(self, name: str, flags: int, *, dir_fd: int | None = None) -> int:
        if name == "run.journal" and flags & os.O_RDWR:
            if self.gate is not None:
                self.gate.wait(10)
            if self.refuses:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return super().open(name, flags, dir_fd=dir_fd)


async def test_a_disk_that_refuses_the_journal_costs_the_journal_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:  # S-26, D-5
    disk = JournalDisk()
    disk.refuses = True
    async with running(tmp_path, model=PlayedModel([call(), text("fine")]), tools=[Probe()], fs=disk) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        result = await wire.call("session/prompt", {"sessionId": opened["sessionId"], "content": "x", "wait": True})
        assert (result["outcome"], result["saved"]) == ("success", True)
        assert "save_failed" not in tags(wire)
        assert len([record for record in caplog.records if "run.journal" in record.message]) == 1
        disk.refuses = False
        await wire.call("session/prompt", {"sessionId": opened["sessionId"], "content": "x", "wait": True})
        assert len([record for record in caplog.records if "run.journal" in record.message]) == 1


async def test_a_disk_that_hangs_in_the_journal_holds_up_a_run_once_and_briefly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "JOURNAL_DEADLINE_S", 0.2)
    disk = JournalDisk()
    disk.gate = threading.Event()
    async with running(tmp_path, model=PlayedModel([call(), _hang]), tools=[Probe()], fs=disk) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        run_id = await wire.prompt(opened["sessionId"])
        with trio.fail_after(2):
            await wire.event("message_update")  # two more messages have been finished, without another wait
        stopping = await wire.request("session/stop", {"sessionId": opened["sessionId"], "runId": run_id})
        disk.gate.set()
        assert await wire.answer(stopping) == {"stopped": True}
        assert (await wire.call("run/wait", {"runId": run_id}))["saved"]
        assert not Path(opened["path"]).with_name("run.journal").exists()


async def test_wherever_a_daemon_is_killed_what_was_seen_is_saved_or_recoverable(
    tmp_path: Path,
) -> None:  # S-26, I-4, I-8
    crashes: list[Crash] = []
    two = Reply(CALLS, call().usage, "toolUse")

    async def streamed(_: Any, say: Callable[[Any], None]) -> Reply:
        for word in ("a ", "few"):
            say(TextDelta(word))
            await trio.lowlevel.checkpoint()
        return text("a ", "few")

    model = PlayedModel([two, streamed])
    async with running(tmp_path, model=model, tools=[Probe()]) as world:
        wire = await world.connect()
        opened = await wire.open(world)

        class Crashing(Steps):
            def before_task_step(self, task: trio.lowlevel.Task) -> None:
                if self._is_below(task):
                    crashes.append(Crash(world, tmp_path / "left" / str(len(crashes))))

        steps = Crashing()
        trio.lowlevel.add_instrument(steps)
        await wire.prompt(opened["sessionId"])
        await wire.event("run_settled")
        trio.lowlevel.remove_instrument(steps)
        crashes.append(Crash(world, tmp_path / "left" / "last"))
        whole = lines_of_messages(world)
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        offered = set()
        for crash in crashes:
            model.plays, model.turns = [text("next")], 0
            opened = await reopen(wire, world, crash)
            left = opened["state"].get("recoverable", {"messages": 0})["messages"]
            assert all(index < opened["state"]["messageCount"] + left for index in crash.seen)
            offered.add(left)
            if left:
                await wire.call("session/recover", {"sessionId": opened["sessionId"]})
                world.session().core.history.require_paired()
                assert lines_of_messages(world)[:left] == whole[:left]
            again = await wire.call("session/prompt", {"sessionId": opened["sessionId"], "content": "x", "wait": True})
            assert (again["outcome"], again["saved"]) == ("success", True)
            await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
            files.read_session(FileSystem(), crash.path)
    print(f"{len(crashes)} moments; recoverable messages at them: {sorted(offered)}")
    assert offered == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize("action", ["disconnect", "cancel", "dispose", "drain", "end"])
async def test_at_every_await_of_a_recovery(action: str, tmp_path: Path) -> None:  # I-4, I-8, I-10, R-6
    crash, at, hit = await crashed(tmp_path), 0, True
    while hit:
        at += 1
        copy = tmp_path / str(at)
        shutil.copytree(crash.directory, copy / "s" / crash.core.id)
        hit = await _disturbed(copy, action, at)
    print(f"{action}: {at - 1} points hit")
    assert at > 5


async def _disturbed(root: Path, action: str, at: int) -> bool:
    (directory,) = (root / "s").iterdir()
    path = str(directory / "meta.json")
    async with running(root) as world, trio.open_nursery() as nursery:
        asker, other = await world.connect(), await world.connect()
        opened = await asker.call("runtime/open", {"cwd": world.cwd, "session": {"kind": "open", "path": path}})
        session = world.session()
        core = session.core

        def act() -> None:
            match action:
                case "disconnect":
                    for connection in world.daemon.clients:
                        connection._scope.cancel()
                case "end":
                    world.daemon.end()
                case "cancel":
                    nursery.start_soon(asker.send, b'{"jsonrpc":"2.0","method":"$/cancelRequest","params":{"id":3}}\n')
                case "dispose":
                    nursery.start_soon(other.request, "runtime/dispose", {"runtimeId": opened["runtimeId"]})
                case "drain":
                    nursery.start_soon(other.request, "server/drain", {"deadlineMs": 0})

        steps = Steps(at=at, act=act, of="Jobs._perform")
        trio.lowlevel.add_instrument(steps)
        assert await asker.request("session/recover", {"sessionId": opened["sessionId"]}) == 3
        with trio.fail_after(5):
            with suppress(RpcError, trio.EndOfChannel, trio.BrokenResourceError):
                await asker.answer(3)
            assert session._job is not None
            await session._job.settled()
        trio.lowlevel.remove_instrument(steps)
        assert (core.committed, core.unsaved, core.slot) == (7, None, None)
        core.history.require_paired()
        _, stored = files.read_session(FileSystem(), path)
        assert stored.lines == core.history.lines
        nursery.cancel_scope.cancel()
    assert not directory.joinpath("run.journal").exists()
    return steps.count >= at


async def test_a_replica_equals_the_snapshot_through_a_recovery(tmp_path: Path) -> None:  # I-9
    crash = await crashed(tmp_path)
    disk = Breaking()
    async with running(tmp_path, model=PlayedModel([text("x")]), fs=disk) as world:
        wire = await world.connect()
        opened = await reopen(wire, world, crash)
        first = Crash(world, tmp_path / "first")
        ask = {"sessionId": opened["sessionId"]}
        watching = Watching(world)
        trio.lowlevel.add_instrument(watching)
        disk.error = errno.ENOSPC
        await refusal(wire, "session/recover", **ask)
        disk.error = None
        await wire.call("session/flush", ask)
        await wire.call("session/prompt", {**ask, "content": "x", "wait": True})
        trio.lowlevel.remove_instrument(watching)
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        _check(watching)
        opened = await reopen(wire, world, first)
        watching = Watching(world)
        trio.lowlevel.add_instrument(watching)
        await wire.call("session/prompt", {**ask, "content": "x", "wait": True})
        trio.lowlevel.remove_instrument(watching)
        _check(watching)


def _check(watching: Watching) -> None:
    points = sorted(watching.snapshots)
    events = {seq: decoded(body) for seq, body in watching.bodies.items()}
    for start in points:
        state = watching.snapshots[start]
        for seq in range(start + 1, points[-1] + 1):
            state = fold(state, events[seq])
            if seq in watching.snapshots:
                assert state == watching.snapshots[seq], f"attached at {start}, folded to {seq}"
    assert watching.snapshots[points[0]].recoverable is not None
    assert watching.snapshots[points[-1]].recoverable is None


async def test_a_recovered_prompt_tells_of_the_title_that_it_gives(tmp_path: Path) -> None:  # S-26 T-2 I-9
    async with running(tmp_path / "before", model=PlayedModel([_hang])) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        await wire.prompt(opened["sessionId"], "the first of all")
        await wire.event("message_update")
        crash = Crash(world, tmp_path / "left")
        await wire.aclose()
    async with running(tmp_path) as world:
        wire = await world.connect()
        opened = await reopen(wire, world, crash)
        watching = Watching(world)
        trio.lowlevel.add_instrument(watching)
        await wire.call("session/recover", {"sessionId": opened["sessionId"]})
        trio.lowlevel.remove_instrument(watching)
        _check(watching)
        assert "session_title" in tags(wire)


async def test_a_repeat_of_what_had_steered_it_finds_the_run(tmp_path: Path) -> None:  # S-26 Q-2
    async with running(tmp_path / "before", model=PlayedModel([_hang, _hang]), tools=[Probe(name="hang")]) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        ask = {"sessionId": opened["sessionId"]}
        gate = trio.Event()

        async def gated(_: Any, say: Callable[[Any], None]) -> Reply:
            say(TextDelta("so"))
            await gate.wait()
            return text("so")

        world.services.models.model.plays = [gated, _hang]  # type: ignore[attr-defined]
        await wire.prompt(opened["sessionId"], "first")
        await wire.event("message_update")
        steering = {"content": "that way", "steer": True, "requestId": "s1"}
        await wire.call("queue/add", {**ask, **steering})
        gate.set()
        await wire.event("message_update")
        crash = Crash(world, tmp_path / "left")
        await wire.aclose()
    async with running(tmp_path) as world:
        wire = await world.connect()
        opened = await reopen(wire, world, crash)
        ask = {"sessionId": opened["sessionId"]}
        await wire.call("session/recover", ask)
        assert await refusal(wire, "queue/add", **ask, **steering) == "queue_item_started"
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        await reopen(wire, world, crash)
        assert await refusal(wire, "queue/add", **ask, **steering) == "queue_item_started"
        assert [one["role"] for one in await messages(wire, opened)] == ["user", "assistant", "user"]
