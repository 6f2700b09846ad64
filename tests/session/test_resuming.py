"""Stopped and failed work goes on from the history as it is (Q-4, P-3, S-12), also after a reopening or a crash."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from inprocess import Probe, call, running, text
from seats import IMAGES, PNG, Held, Seat, Sent, seated
from stepping import Steps
from test_recovering import Crash, reopen
from test_saving import Breaking

from loop_protocol.v1.events import SessionTitle
from loopd.agent import ModelError, Reply, TextDelta, ThinkingDelta
from loopd.core.timings import Clock
from loopd.models import ModelUnavailable
from loopd.storage import files
from loopd.storage.fs import DIRECTORY, FileSystem, opened
from loopd.storage.journal import read_journal


async def fails(_: Any, say: Callable[[Any], None]) -> Reply:
    say(TextDelta("half of it"))
    await trio.lowlevel.checkpoint()
    raise ModelError("provider", "no")


async def ranges(seat: Seat) -> list[tuple[int, int, int]]:
    timings = (await seat.state())["timings"]
    assert len({one["id"] for one in timings}) == len(timings)
    return [(one["userMessageIndex"], one["messageStartIndex"], one["messageEndIndex"]) for one in timings]


async def stopped(seat: Seat, turn: Held, content: Any = "do") -> str:
    run_id = await seat.begin(turn, content)
    assert await seat.stop(run_id)
    return run_id


# --- where the conversation ends --------------------------------------------------------------------------------------


async def test_after_a_stop_in_text_the_model_is_asked_as_if_that_had_not_been_said(tmp_path: Path) -> None:  # Q-4 S-12
    turn = Held("half an ", "answer")
    async with seated(tmp_path, turn, text("whole")) as seat:
        first = await stopped(seat, turn)
        await seat.ask("session/markRead", messageCount=2)
        seen = len(seat.wire.events)
        second = await seat.resume()
        assert second != first
        assert await seat.over(second) == {"runId": second, "outcome": "success", "saved": True}
        assert seat.model.sent == [["user: do"], ["user: do"]]
        assert await seat.brief() == ["user: do", "assistant: half an answer", "assistant: whole"]
        assert [message.get("stopReason") for message in await seat.messages()] == [None, "aborted", "stop"]
        # Its events are those of a run without a message of its own.
        tags = [one.event.__struct_config__.tag for one in seat.wire.events[seen:]]
        assert tags[:3] == ["run_started", "prompt_timing", "message_start"]
        assert tags[-4:] == ["message_end", "prompt_timing", "session_saved", "run_settled"]
        started: Any = seat.wire.events[seen].event
        assert (started.run_id, started.operation, started.item_id) == (second, "resume", None)
        assert await ranges(seat) == [(0, 0, 2), (0, 2, 3)]
        state = await seat.state()
        assert [one.get("stopped", False) for one in state["timings"]] == [True, False]
        assert [one["id"] for one in state["timings"]] == [first, second]
        assert (state["unread"], state["messageCount"], state["userMessageCount"]) == (True, 3, 1)  # S-8
        assert (await seat.refusal("session/resume")).kind == "nothing_to_resume"


async def test_after_a_stop_in_thinking_nothing_of_it_is_kept_or_sent(tmp_path: Path) -> None:  # Q-4 S-12
    asked = trio.Event()

    async def thinks(_: Any, say: Callable[[Any], None]) -> Reply:
        say(ThinkingDelta("hm"))
        asked.set()
        await trio.sleep_forever()
        raise AssertionError

    async with seated(tmp_path, thinks, text("whole")) as seat:
        run_id = await seat.prompt("do")
        await asked.wait()
        await seat.stop(run_id)
        assert await seat.brief() == ["user: do"]
        await seat.over(await seat.resume())
        assert seat.model.sent[1] == ["user: do"]
        assert await seat.brief() == ["user: do", "assistant: whole"]
        assert await ranges(seat) == [(0, 0, 1), (0, 1, 2)]


async def test_after_a_stop_in_a_tool_its_results_are_sent_and_no_call_is_made_again(
    tmp_path: Path,
) -> None:  # Q-4 S-12
    two = Reply([*call("hang", id="a").content, *call(id="b").content], call().usage, "toolUse")
    tools = [Probe(name="hang", hangs=True), Probe()]
    async with seated(tmp_path, two, text("whole"), tools=tools) as seat:
        run_id = await seat.prompt("do")
        await seat.wire.event("tool_execution_start")
        await seat.stop(run_id)
        before = await seat.brief()
        assert [line.split(":")[0] for line in before] == ["user", "assistant", "toolResult", "toolResult"]
        await seat.over(await seat.resume())
        assert seat.model.sent[1] == before
        assert await seat.brief() == [*before, "assistant: whole"]
        started = [one for one in seat.wire.events if one.event.__struct_config__.tag == "tool_execution_start"]
        assert len(started) == 1
        assert await ranges(seat) == [(0, 0, 4), (0, 4, 5)]


async def test_failed_work_goes_on_too(tmp_path: Path) -> None:
    async with seated(tmp_path, fails, fails, text("whole")) as seat:
        assert (await seat.wire.call("session/prompt", {"sessionId": seat.id, "content": "do", "wait": True}))["error"]
        assert (await seat.over(await seat.resume()))["outcome"] == "error"
        assert (await seat.over(await seat.resume()))["outcome"] == "success"
        assert seat.model.sent == [["user: do"]] * 3
        assert await ranges(seat) == [(0, 0, 2), (0, 2, 3), (0, 3, 4)]


@pytest.mark.parametrize("restart", [False, True])
async def test_after_a_reopening_by_path(tmp_path: Path, restart: bool) -> None:  # Q-4 P-3
    turn = Held("half")
    async with seated(tmp_path, text("fine"), turn, text("whole")) as seat:
        await seat.prompt("before", wait=True)
        await stopped(seat, turn)
        if not restart:
            await seat.reopen()
            await _goes_on(seat, seat.model)
    if restart:
        model = Sent([text("whole")])
        async with running(tmp_path, model=model) as world:
            await seat.reopen(world)
            await _goes_on(seat, model)


async def _goes_on(seat: Seat, model: Sent) -> None:
    await seat.over(await seat.resume())
    assert model.sent[-1] == ["user: before", "assistant: fine", "user: do"]
    assert (await seat.brief())[2:] == ["user: do", "assistant: half", "assistant: whole"]
    assert await ranges(seat) == [(0, 0, 2), (2, 2, 4), (2, 4, 5)]
    assert (await seat.state())["unread"]


async def test_each_of_many_attempts_is_kept_in_order_also_on_disk(tmp_path: Path) -> None:  # P-3 P-6
    turns = [Held("one"), Held("two"), Held(), Held("three")]
    async with seated(tmp_path, *turns, text("whole"), text("next")) as seat:
        ids = [await stopped(seat, turns[0])]
        for turn in turns[1:]:
            ids.append(await seat.resume())
            await turn.asked.wait()
            assert await seat.stop(ids[-1])
        ids.append(await seat.resume())
        await seat.over(ids[-1])
        # The third one said nothing, so its range is empty.
        expected = [(0, 0, 2), (0, 2, 3), (0, 3, 3), (0, 3, 4), (0, 4, 5)]
        assert await ranges(seat) == expected
        timings = (await seat.state())["timings"]
        assert ([one["id"] for one in timings], len(set(ids))) == (ids, 5)
        await seat.prompt("next", wait=True)
        assert await ranges(seat) == [*expected, (5, 5, 7)]
        await seat.reopen()
        assert (await seat.state())["timings"][:-1] == timings
        assert await ranges(seat) == [*expected, (5, 5, 7)]


async def test_attempts_that_were_steered_share_the_first_ones_anchor(tmp_path: Path) -> None:  # P-3 Q-2
    turns = [Held("one"), Held("two"), Held("three")]
    async with seated(tmp_path, *turns, text("whole")) as seat:
        run_id = await seat.begin(turns[0], "do")
        await seat.add("s", steer=True)
        turns[0].go.set()
        await turns[1].asked.wait()
        await seat.stop(run_id)
        resumed = await seat.resume()
        await turns[2].asked.wait()
        await seat.add("t", steer=True)
        turns[2].go.set()
        await seat.over(resumed)
        talk = ["user: do", "assistant: one", "user: s", "assistant: two", "assistant: three", "user: t"]
        assert await seat.brief() == [*talk, "assistant: whole"]
        assert seat.model.sent[2:] == [talk[:3], [*talk[:3], *talk[4:]]]
        assert await ranges(seat) == [(0, 0, 4), (0, 4, 7)]


class ByHand(Clock):
    def __init__(self) -> None:
        self.wall, self.boot = 1_000_000, 5_000

    def now_ms(self) -> int:
        return self.wall

    def boot_ms(self) -> int:
        return self.boot


async def test_each_attempt_has_its_own_wall_time_without_pauses_and_saving(tmp_path: Path) -> None:  # P-1 P-2 P-5
    clock, disk = ByHand(), Breaking()
    turns = [Held("one"), Held("two")]
    async with seated(tmp_path, *turns, text("whole"), clock=clock, fs=disk) as seat:
        run_id = await seat.begin(turns[0], "do")
        clock.boot += 700
        clock.wall -= 90_000  # somebody sets the clock back
        await seat.stop(run_id)
        clock.boot += 50_000
        clock.wall += 200_000
        resumed = await seat.resume()
        await turns[1].asked.wait()
        await seat.add("s", steer=True)
        clock.boot += 300
        gate = disk.gate = threading.Event()
        turns[1].go.set()
        while "finishedAt" not in (await seat.state())["run"]["timing"]:
            await seat.wire.receive()
        clock.boot += 9_000  # saving is no part of it
        gate.set()
        await seat.over(resumed)
        timings = (await seat.state())["timings"]
        assert [(one["startedAt"], one["finishedAt"] - one["startedAt"]) for one in timings] == [
            (1_000_000, 700),
            (1_110_000, 300),
        ]


# --- when it is refused -----------------------------------------------------------------------------------------------


async def test_where_there_is_nothing_to_resume_nothing_happens(tmp_path: Path) -> None:  # Q-4 I-10
    async with seated(tmp_path, text("fine")) as seat:
        refused = await seat.refusal("session/resume")
        assert (refused.kind, "has no message yet" in refused.message) == ("nothing_to_resume", True)
        await seat.prompt("do", wait=True)
        refused = await seat.refusal("session/resume")
        assert (refused.kind, "ends with a whole answer" in refused.message) == ("nothing_to_resume", True)
        await seat.ask("session/abort")
        assert (await seat.refusal("session/resume")).kind == "nothing_to_resume"


async def test_while_something_goes_on_or_is_unsaved_it_is_refused(tmp_path: Path) -> None:  # Q-4 S-15
    disk, turn = Breaking(), Held("half")
    async with seated(tmp_path, turn, text("whole"), fs=disk) as seat:
        run_id = await seat.begin(turn, "do")
        refused = await seat.refusal("session/resume")
        assert (refused.kind, refused.data["operation"]) == ("session_busy", "prompt")
        disk.error = errno.ENOSPC
        await seat.stop(run_id)
        assert (await seat.refusal("session/resume")).kind == "pending_save"
        disk.error = None
        await seat.ask("session/flush")
        timing = (await seat.state())["timings"][0]
        await seat.over(await seat.resume())
        assert (await seat.state())["timings"][0] == timing  # P-6
        assert await ranges(seat) == [(0, 0, 2), (0, 2, 3)]


async def test_a_model_that_is_gone_refuses_it_and_the_pause_stays(tmp_path: Path) -> None:  # Q-4 P-4
    turn = Held("half")
    async with seated(tmp_path, turn, text("whole")) as seat:
        run_id = await seat.begin(turn, "do")
        await seat.add("a")
        await seat.stop(run_id)
        models: Any = seat.world.services.models
        resolve = models.resolve

        def gone(ref: Any) -> None:
            raise ModelUnavailable(f"{ref} is not configured")

        models.resolve = gone
        assert (await seat.refusal("session/resume")).kind == "model_unavailable"
        assert (await seat.queue())["paused"] == "stopped"
        models.resolve = resolve
        await seat.over(await seat.resume())
        await seat.quiet()
        assert (await seat.brief())[2:] == ["assistant: whole", "user: a", "assistant: whole"]


async def test_another_model_goes_on_with_what_one_began(tmp_path: Path) -> None:
    turn = Held("half")
    async with seated(tmp_path, turn, text("whole")) as seat:
        await stopped(seat, turn)
        await seat.ask("session/setModel", model={"provider": "other", "id": "m"})
        await seat.over(await seat.resume())
        assert [message.get("provider") for message in await seat.messages()] == [None, "scripted", "other"]
        assert seat.model.sent[1] == ["user: do"]


# --- kinds of sessions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["draft", "memory"])
async def test_a_session_without_a_file_goes_on_too(tmp_path: Path, kind: str) -> None:  # Q-4 S-3
    disk, turn = Breaking(), Held("half")
    async with seated(tmp_path, turn, text("whole"), kind=kind, fs=disk) as seat:
        assert (await seat.refusal("session/resume")).kind == "nothing_to_resume"
        disk.error = errno.ENOSPC if kind == "draft" else None
        run_id = await seat.begin(turn, "do")
        await seat.add("a")
        await seat.stop(run_id)
        if kind == "draft":  # the first save of all failed
            assert (await seat.refusal("session/resume")).kind == "pending_save"
            disk.error = None
            await seat.ask("session/flush")
        await seat.over(await seat.resume())
        await seat.quiet()
        assert await seat.brief() == ["user: do", "assistant: half", "assistant: whole", "user: a", "assistant: whole"]
        assert (await seat.state())["kind"] == ("persistent" if kind == "draft" else "memory")
        assert await ranges(seat) == [(0, 0, 2), (0, 2, 3), (3, 3, 5)]


# --- with a queue -----------------------------------------------------------------------------------------------------


async def test_after_a_whole_answer_it_goes_on_with_what_is_paused(tmp_path: Path) -> None:  # Q-4 Q-3
    turn = Held("half")
    async with seated(tmp_path, turn, text("fine")) as seat:
        run_id = await seat.begin(turn, "do")
        item = await seat.add("a", requestId="r")
        await seat.stop(run_id)
        await seat.prompt("other", wait=True)
        resumed = await seat.resume()
        state = await seat.over(resumed)
        assert state["outcome"] == "success"
        assert (await seat.brief())[2:] == ["user: other", "assistant: fine", "user: a", "assistant: fine"]
        told = seat.told()
        assert told[told.index(f"started {item['itemId']}") - 1] == f"queue [{item['itemId']}]"
        assert (await seat.refusal("queue/add", content="a", requestId="r")).data["runId"] == resumed
        assert await ranges(seat) == [(0, 0, 2), (2, 2, 4), (4, 4, 6)]  # it is a prompt of its own


async def test_stopped_work_comes_before_what_waits_and_a_stop_of_it_pauses_again(tmp_path: Path) -> None:  # Q-4 Q-3
    turns = [Held("half"), Held("more")]
    async with seated(tmp_path, *turns, text("whole")) as seat:
        run_id = await seat.begin(turns[0], "do")
        await seat.add("a")
        await seat.stop(run_id)
        resumed = await seat.resume()
        await turns[1].asked.wait()
        assert "paused" not in await seat.queue()
        assert await seat.stop(resumed)
        assert (await seat.waiting(), (await seat.queue())["paused"]) == (["a"], "stopped")
        await seat.over(await seat.resume())
        await seat.quiet()
        assert seat.model.sent[1:3] == [["user: do"], ["user: do"]]
        assert (await seat.brief())[3:] == ["assistant: whole", "user: a", "assistant: whole"]


async def test_a_title_from_what_steered_a_resumed_run(tmp_path: Path) -> None:  # T-2 Q-2
    turns = [Held("half"), Held("more")]
    async with seated(tmp_path, *turns, text("x"), input=IMAGES) as seat:
        await stopped(seat, turns[0], [PNG])
        resumed = await seat.resume()
        await turns[1].asked.wait()
        await seat.add("Name it", steer=True)
        turns[1].go.set()
        await seat.over(resumed)
        titles = [one.event for one in seat.wire.events if isinstance(one.event, SessionTitle)]
        assert [(title.title.text, title.title.message_indices) for title in titles] == [("Name it", [3])]


async def test_a_stop_at_every_await_of_a_resumed_run_keeps_valid_attempts(tmp_path: Path) -> None:  # P-3 I-1 I-8 S-12
    at, reached, outcomes = 0, True, set()
    while reached:
        at += 1
        reached, outcome = await _stopped_at(tmp_path / str(at), at)
        outcomes.add(outcome)
    assert at > 20
    assert outcomes == {"cancelled", "success"}


async def _stopped_at(root: Path, at: int) -> tuple[bool, str]:
    turn = Held("half")
    stops: list[bool] = []
    async with seated(root, turn, call(), text("whole")) as seat:
        first = await stopped(seat, turn)

        def act() -> None:
            run = seat.world.session().runs.stop()
            stops.append(run is not None and run.state.stop_requested)

        steps = Steps(at=at, act=act)
        trio.lowlevel.add_instrument(steps)
        second = await seat.resume()
        outcome: str = (await seat.over(second))["outcome"]
        trio.lowlevel.remove_instrument(steps)
        assert (outcome == "cancelled") == (stops == [True])
        timings = (await seat.state())["timings"]
        assert [(one["id"], one.get("stopped", False)) for one in timings] == [
            (first, True),
            (second, bool(stops[:1] == [True])),
        ]
        count = (await seat.state())["messageCount"]
        assert await ranges(seat) == [(0, 0, 2), (0, 2, count)]
        if (await seat.brief())[-1] != "assistant: whole" or (await seat.messages())[-1]["stopReason"] == "aborted":
            assert (await seat.over(await seat.resume()))["outcome"] == "success"
            assert (await ranges(seat))[2] == (0, count, (await seat.state())["messageCount"])
        assert (await seat.refusal("session/resume")).kind == "nothing_to_resume"
        files.read_session(FileSystem(), seat.opened["path"])
    return bool(stops), outcome


# --- after a crash ----------------------------------------------------------------------------------------------------


async def test_what_a_crash_left_is_recovered_first_and_then_goes_on(tmp_path: Path) -> None:  # Q-4 S-26 K-20 P-3
    turn = Held("half")
    async with seated(tmp_path / "before", call(), turn) as seat:
        await seat.begin(turn, "do", requestId="p")
        crash = Crash(seat.world, tmp_path / "left")
    model = Sent([text("whole")])
    async with running(tmp_path, model=model) as world:
        wire = await world.connect()
        seat = Seat(world, wire, model, await reopen(wire, world, crash))
        run_id = seat.opened["state"]["recoverable"]["runId"]
        refused = await seat.refusal("session/resume")
        assert (refused.kind, refused.data["runId"]) == ("conflict", run_id)
        await seat.ask("session/recover")
        await seat.over(await seat.resume())
        talk = ["user: do", "assistant: probe", "toolResult: probed"]
        assert model.sent == [talk]
        assert await seat.brief() == [*talk, "assistant: whole"]
        assert await ranges(seat) == [(0, 0, 3), (0, 3, 4)]


@pytest.mark.parametrize("resumed", [False, True])
async def test_a_crash_in_a_steered_or_resumed_run_leaves_valid_messages_and_timings(  # S-26 K-20 Q-1 Q-2
    tmp_path: Path, resumed: bool
) -> None:
    turns = [Held("half"), Held("one", reply=call()), Held("two")]
    async with seated(tmp_path / "before", *turns) as seat:
        if resumed:
            await stopped(seat, turns[0])
            run_id = await seat.resume()
        else:
            seat.model.turns = 1
            run_id = await seat.prompt("do")
        await turns[1].asked.wait()
        await seat.add("s", steer=True, requestId="s")
        await seat.add("t", steer=True)
        turns[1].go.set()
        await turns[2].asked.wait()
        crash = Crash(seat.world, tmp_path / "left")
    model = Sent([text("whole")])
    async with running(tmp_path, model=model) as world:
        wire = await world.connect()
        seat = Seat(world, wire, model, await reopen(wire, world, crash))
        assert seat.opened["state"]["recoverable"] == {
            "runId": run_id,
            "startedAt": seat.opened["state"]["recoverable"]["startedAt"],
            "messages": 4 + (not resumed),
        }
        await seat.ask("session/recover")
        kept = ["user: do", "assistant: half"][: 1 + resumed]
        talk = ["assistant: probe", "toolResult: probed", "user: s", "user: t"]
        assert await seat.brief() == [*kept, *talk]
        start = 2 if resumed else 0
        assert (await ranges(seat))[-1] == (0, start, len(kept) + 4)
        # What was sent under an id is found, whether it began the run or steered it.
        again = await seat.refusal("queue/add", content="s", requestId="s")
        assert (again.kind, again.data["runId"]) == ("queue_item_started", run_id)
        await seat.over(await seat.resume())
        assert model.sent == [["user: do", *talk]]
        assert (await ranges(seat))[-1] == (0, len(kept) + 4, len(kept) + 5)
    _, stored = files.read_session(FileSystem(), crash.path)
    assert stored.messages == len(kept) + 5
    assert stored.requests["s"][0] == run_id


async def test_a_journal_that_is_torn_keeps_what_a_client_sent_with_its_id_or_neither(tmp_path: Path) -> None:  # S-26
    turns = [Held("one", reply=call()), Held("two")]
    async with seated(tmp_path / "before", *turns) as seat:
        await seat.begin(turns[0], "do")
        await seat.add("s", steer=True, requestId="s")
        turns[0].go.set()
        await turns[1].asked.wait()
        crash = Crash(seat.world, tmp_path / "left")
    whole = crash.journal.read_bytes()
    end_of_result = whole.index(b"\n", whole.index(b'"toolResult"')) + 1
    fs = FileSystem()
    seen = set()
    for cut in range(end_of_result, len(whole) + 1):
        crash.journal.write_bytes(whole[:cut])
        meta, history = files.read_session(fs, crash.path)
        with opened(fs, str(crash.directory), DIRECTORY) as directory:
            found = read_journal(fs, directory, str(crash.journal), meta.committed.commit_id, history)
        assert found is not None
        assert found.run.request_id is None
        seen.add((len(found.messages), tuple(one.request_id for one in found.run.steered)))
    assert seen == {(3, ()), (4, ("s",))}
