"""Inputs that wait, steer a run, or are paused (Q-1…Q-3, Q-5), from outside."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from inprocess import call, running, text
from seats import IMAGES, PNG, Held, Seat, seated, words
from stepping import Steps
from test_saving import Breaking

from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.events import QueueChanged
from loopd.agent import ModelError, Reply
from loopd.models import ModelUnavailable


def with_calls(*ids: str) -> Reply:
    return Reply([block for id in ids for block in call(id=id).content], call().usage, "toolUse")


# --- what people do with what waits -----------------------------------------------------------------------------------


async def test_what_waits_is_edited_moved_and_removed_and_starts_one_by_one(tmp_path: Path) -> None:  # Q-1 Q-2
    first = Held()
    async with seated(tmp_path, first, text("r1"), text("r2")) as seat:
        run_id = await seat.begin(first, "hi")
        a, b, c = [await seat.add(word) for word in "abc"]
        assert {"itemId", "revision", "content", "steer", "createdAt"} == set(a)
        assert len({item["itemId"] for item in (a, b, c)}) == 3
        assert (a["revision"], a["content"], a["steer"]) == (1, [words("a")], False)
        edited = await seat.ask("queue/edit", itemId=b["itemId"], revision=1, content="b2")
        assert (edited["revision"], edited["content"]) == (2, [words("b2")])
        assert (await seat.ask("queue/move", itemId=c["itemId"], to=0))["itemId"] == c["itemId"]
        assert await seat.waiting() == ["c", "a", "b2"]
        await seat.ask("queue/move", itemId=a["itemId"], to=99)
        assert await seat.waiting() == ["c", "b2", "a"]
        assert (await seat.ask("queue/remove", itemId=a["itemId"]))["content"] == [words("a")]
        rows = (await seat.wire.call("runtime/list"))["runtimes"]
        assert [row["queued"] for row in rows] == [2]
        first.go.set()
        await seat.over(run_id)
        await seat.quiet()
        assert await seat.brief() == [
            "user: hi",
            "assistant: held",
            "user: c",
            "assistant: r1",
            "user: b2",
            "assistant: r2",
        ]
        ids = {"b": b["itemId"], "c": c["itemId"]}
        told = seat.told()
        assert told[told.index("settled success") :] == [
            "settled success",
            f"started {ids['c']}",
            f"message {ids['c']}",
            "end user",
            f"queue [{ids['b']}]",
            "end assistant",
            "settled success",
            f"started {ids['b']}",
            f"message {ids['b']}",
            "end user",
            "queue []",
            "end assistant",
            "settled success",
        ]
        state = await seat.state()
        assert [one["userMessageIndex"] for one in state["timings"]] == [0, 2, 4]  # P-1: a prompt like any other
        assert state["queue"] == {"items": []}


async def test_an_idle_unpaused_queue_starts_at_once_and_answers_the_run(tmp_path: Path) -> None:  # Q-2 D-2
    turn = Held()
    async with seated(tmp_path, turn, text("x")) as seat:
        added = await seat.add("now", requestId="r")
        await turn.asked.wait()
        state = await seat.state()
        assert (state["run"]["runId"], state["run"]["itemId"]) == (added["runId"], added["itemId"])
        assert state["queue"] == {"items": []}
        for method, more in (("edit", {"revision": 1, "content": "x"}), ("move", {"to": 0}), ("remove", {})):
            refused = await seat.refusal(f"queue/{method}", itemId=added["itemId"], **more)
            assert (refused.kind, refused.data["runId"]) == ("queue_item_started", added["runId"])
        turn.go.set()
        assert (await seat.over(added["runId"]))["outcome"] == "success"
        assert seat.told()[:2] == [f"started {added['itemId']}", f"message {added['itemId']}"]
        assert not [line for line in seat.told() if line.startswith("queue")]
        # The answer came before the first event of the run.
        answers = [n for n, one in enumerate(seat.wire.log) if one.get("result", {}).get("runId") == added["runId"]]
        events = [n for n, one in enumerate(seat.wire.log) if one.get("method") == "event"]
        assert answers[0] < events[0]


async def test_one_that_need_not_wait_is_refused_like_a_prompt(tmp_path: Path) -> None:  # Q-2 P-4 I-10
    disk = Breaking()
    async with seated(tmp_path, text("a"), fs=disk) as seat:
        assert (await seat.refusal("queue/add", content=[PNG])).kind == "unsupported_input"
        assert (await seat.refusal("queue/add", content=" ")).kind == "invalid_params"
        _unavailable(seat)
        assert (await seat.refusal("queue/add", content="x")).kind == "model_unavailable"
        assert (await seat.refusal("queue/add", content="x", steer=True)).kind == "model_unavailable"
        assert await seat.messages() == []


async def test_work_is_not_started_from_a_batch(tmp_path: Path) -> None:  # D-2
    async with seated(tmp_path, text("a")) as seat:
        for method in ("queue/add", "session/resume"):
            params = {"sessionId": seat.id} | ({"content": "x"} if method == "queue/add" else {})
            one = {"jsonrpc": "2.0", "id": 99, "method": method, "params": params}
            await seat.wire.send(b"[%s]\n" % msgspec.json.encode(one))
            answer = await seat.wire.receive()
            assert answer[0]["error"]["data"]["kind"] == "invalid_request"


async def test_changes_of_what_is_stale_gone_or_started_are_refused_by_name(tmp_path: Path) -> None:  # Q-1 I-10
    turns = [Held(), Held()]
    async with seated(tmp_path, *turns) as seat:
        await seat.begin(turns[0])
        a, b = await seat.add("a"), await seat.add("b")
        await seat.ask("queue/edit", itemId=a["itemId"], revision=1, steer=True)
        await seat.ask("queue/edit", itemId=a["itemId"], revision=2, steer=False)
        stale = await seat.refusal("queue/edit", itemId=a["itemId"], revision=1, content="x")
        assert (stale.kind, stale.data["revision"]) == ("conflict", 3)
        await seat.ask("queue/remove", itemId=b["itemId"])
        for gone in (b["itemId"], "0" * 8):
            for method, more in (("edit", {"revision": 1, "content": "x"}), ("move", {"to": 0}), ("remove", {})):
                assert (await seat.refusal(f"queue/{method}", itemId=gone, **more)).kind == "queue_item_not_found"
        turns[0].go.set()
        await turns[1].asked.wait()
        run_id = (await seat.state())["run"]["runId"]
        started = await seat.refusal("queue/edit", itemId=a["itemId"], revision=3, content="x")
        assert (started.kind, started.data["runId"]) == ("queue_item_started", run_id)
        turns[1].go.set()


async def test_images_are_shown_by_size_kept_by_an_edit_of_the_text_and_sent_whole(tmp_path: Path) -> None:
    turn = Held()
    async with seated(tmp_path, turn, text("x"), input=IMAGES) as seat:
        await seat.begin(turn)
        item = await seat.add([words("look"), PNG])
        by_size = {"type": "image", "mimeType": "image/png", "bytes": 6}
        assert item["content"] == [words("look"), by_size]
        assert (await seat.queue())["items"][0]["content"] == item["content"]
        edited = await seat.ask("queue/edit", itemId=item["itemId"], revision=1, content="see")
        assert edited["content"] == [words("see"), by_size]
        other = await seat.add([words("two"), PNG])
        blocks = await seat.ask("queue/edit", itemId=other["itemId"], revision=1, content=[words("none")])
        assert blocks["content"] == [words("none")]
        turn.go.set()
        await seat.wire.event("run_settled")
        await seat.quiet()
        events = [message for message in seat.wire.log if message.get("method") == "event"]
        assert PNG["data"] not in repr(events)
        sent = [message["content"] for message in await seat.messages() if message["role"] == "user"]
        assert sent[1:] == [[words("see"), PNG], [words("none")]]


async def test_the_text_of_an_image_can_be_taken_away(tmp_path: Path) -> None:
    turn = Held()
    async with seated(tmp_path, turn, input=IMAGES) as seat:
        await seat.begin(turn)
        item = (await seat.add([{"type": "text", "text": "look"}, PNG]))["itemId"]
        edited = await seat.ask("queue/edit", itemId=item, revision=1, content="")
        assert [block["type"] for block in edited["content"]] == ["image"]
        bare = (await seat.add("words"))["itemId"]
        assert (await seat.refusal("queue/edit", itemId=bare, revision=1, content="")).kind == "invalid_params"
        turn.go.set()


async def test_what_is_too_large_for_a_message_is_refused_at_once(tmp_path: Path) -> None:  # Q-1 P-4 I-10
    turn = Held()
    large = [{**PNG, "data": "aGVs" * (25 << 18)}]
    async with seated(tmp_path, turn, input=IMAGES) as seat:
        await seat.begin(turn)
        item = (await seat.add("a"))["itemId"]
        for steer in (False, True):
            refused = await seat.refusal("queue/add", content=large, steer=steer)
            assert (refused.kind, refused.data["limit"]) == ("limit_exceeded", "message")
        refused = await seat.refusal("queue/edit", itemId=item, revision=1, content=large)
        assert (refused.kind, refused.data["limit"]) == ("limit_exceeded", "message")
        turn.go.set()


async def test_a_queue_without_room_refuses_and_changes_nothing(tmp_path: Path) -> None:  # Q-1 I-10
    turn = Held()
    async with seated(tmp_path, turn) as seat:
        await seat.begin(turn)
        long = await seat.add("x" * 200_000)
        small = await seat.add("y")
        refused = await seat.refusal("queue/add", content="z" * 70_000)
        assert (refused.kind, refused.data["limit"]) == ("limit_exceeded", "queue")
        refused = await seat.refusal("queue/edit", itemId=small["itemId"], revision=1, content="z" * 70_000)
        assert (refused.kind, refused.data["limit"]) == ("limit_exceeded", "queue")
        await seat.ask("queue/remove", itemId=long["itemId"])
        for _ in range(255):
            await seat.add("z")
        assert (await seat.refusal("queue/add", content="z")).data["limit"] == "queue"
        await seat.ask("session/abort")


# --- the same request twice -------------------------------------------------------------------------------------------


async def test_a_repeat_is_the_same_item_while_it_waits_and_named_by_its_run_afterwards(tmp_path: Path) -> None:
    turns = [Held(), Held()]
    async with seated(tmp_path, *turns) as seat:
        await seat.begin(turns[0], "hi", requestId="p")
        item = await seat.add("a", requestId="r")
        head = seat.world.session().events.head
        assert await seat.add("a", requestId="r") == item
        assert seat.world.session().events.head == head
        other = await seat.refusal("queue/add", content="b", requestId="r")
        assert (other.kind, other.data["itemId"]) == ("conflict", item["itemId"])
        prompted = await seat.refusal("session/prompt", content="a", requestId="r")
        assert (prompted.kind, prompted.data["itemId"]) == ("conflict", item["itemId"])
        # The id of a prompt is taken too.
        assert (await seat.refusal("queue/add", content="hi", requestId="p")).kind == "queue_item_started"
        assert (await seat.refusal("queue/add", content="other", requestId="p")).kind == "conflict"
        # Edited, it is still what that request asked for.
        edited = await seat.ask("queue/edit", itemId=item["itemId"], revision=1, content="a2")
        assert await seat.add("a", requestId="r") == edited
        turns[0].go.set()
        await turns[1].asked.wait()
        run_id = (await seat.state())["run"]["runId"]
        for _ in range(2):  # while it runs, and when it is settled
            again = await seat.refusal("queue/add", content="a", requestId="r")
            assert (again.kind, again.data["runId"]) == ("queue_item_started", run_id)
            assert await seat.prompt("a", requestId="r") == run_id
            turns[1].go.set()
            await seat.over(run_id)
        assert await seat.brief() == ["user: hi", "assistant: held", "user: a2", "assistant: held"]
        await seat.reopen()
        again = await seat.refusal("queue/add", content="a", requestId="r")
        assert (again.kind, again.data["runId"]) == ("queue_item_started", run_id)
    async with running(tmp_path) as world:
        await seat.reopen(world)
        again = await seat.refusal("queue/add", content="a", requestId="r")
        assert (again.kind, again.data["runId"]) == ("queue_item_started", run_id)
        assert (await seat.refusal("queue/add", content="b", requestId="r")).kind == "conflict"


async def test_a_repeat_of_what_steered_names_that_run_also_after_a_restart(tmp_path: Path) -> None:  # Q-1 Q-2
    turn = Held()
    async with seated(tmp_path, turn, text("b")) as seat:
        run_id = await seat.begin(turn)
        await seat.add("s", steer=True, requestId="r")
        turn.go.set()
        await seat.over(run_id)
        again = await seat.refusal("queue/add", content="s", requestId="r")
        assert (again.kind, again.data["runId"]) == ("queue_item_started", run_id)
        assert await seat.brief() == ["user: hi", "assistant: held", "user: s", "assistant: b"]
    async with running(tmp_path) as world:
        await seat.reopen(world)
        again = await seat.refusal("queue/add", content="s", requestId="r")
        assert (again.kind, again.data["runId"]) == ("queue_item_started", run_id)
        assert await seat.prompt("s", requestId="r") == run_id


async def test_a_removed_item_leaves_its_request_free(tmp_path: Path) -> None:
    turn = Held()
    async with seated(tmp_path, turn) as seat:
        await seat.begin(turn)
        item = await seat.add("a", requestId="r")
        await seat.ask("queue/remove", itemId=item["itemId"])
        assert (await seat.add("a", requestId="r"))["itemId"] != item["itemId"]
        await seat.ask("session/abort")


# --- steering ---------------------------------------------------------------------------------------------------------


async def test_what_steers_enters_after_all_results_and_before_the_next_request(tmp_path: Path) -> None:  # Q-2 I-8
    turn = Held(reply=with_calls("c1", "c2"))
    async with seated(tmp_path, turn, text("done")) as seat:
        run_id = await seat.begin(turn)
        later = await seat.add("later")
        s, t = await seat.add("s", steer=True), await seat.add("t")
        await seat.ask("queue/edit", itemId=t["itemId"], revision=1, steer=True)
        turn.go.set()
        await seat.over(run_id)
        await seat.quiet()
        steered = [
            "user: hi",
            "assistant: probeprobe",
            "toolResult: probed",
            "toolResult: probed",
            "user: s",
            "user: t",
        ]
        assert seat.model.sent[1] == steered
        assert await seat.brief() == [*steered, "assistant: done", "user: later", "assistant: done"]
        ids = {"s": s["itemId"], "t": t["itemId"], "later": later["itemId"]}
        told = seat.told()
        place = told.index(f"message {ids['s']}")
        assert told[place - 1] == "end toolResult"
        assert told[place : place + 8] == [
            f"message {ids['s']}",
            "end user",
            f"queue [{ids['later']} {ids['t']}]",
            f"message {ids['t']}",
            "end user",
            f"queue [{ids['later']}]",
            "end assistant",
            "settled success",
        ]
        timings = (await seat.state())["timings"]
        ranges = [(one["userMessageIndex"], one["messageStartIndex"], one["messageEndIndex"]) for one in timings]
        assert ranges == [(0, 0, 7), (7, 7, 9)]  # P-1: one for each run, whatever steered it


async def test_what_steers_after_the_final_answer_keeps_the_run_going(tmp_path: Path) -> None:  # Q-2 P-1
    turns = [Held("one"), Held("two")]
    async with seated(tmp_path, *turns, text("three")) as seat:
        run_id = await seat.begin(turns[0])
        for turn, word in zip(turns, ("s", "t"), strict=True):
            await turn.asked.wait()
            await seat.add(word, steer=True)
            turn.go.set()
        assert (await seat.over(run_id))["outcome"] == "success"
        talk = ["user: hi", "assistant: one", "user: s", "assistant: two", "user: t"]
        assert seat.model.sent[1:] == [talk[:3], talk]
        assert await seat.brief() == [*talk, "assistant: three"]
        assert [line for line in seat.told() if line.startswith(("started", "settled"))] == [
            "started -",
            "settled success",
        ]


async def test_a_paused_queue_steers_a_prompt_all_the_same_and_stays_paused(tmp_path: Path) -> None:  # Q-2 Q-3
    turns = [Held("half"), Held("one")]
    async with seated(tmp_path, *turns, text("two")) as seat:
        run_id = await seat.begin(turns[0])
        await seat.add("waits")
        await seat.stop(run_id)
        prompted = await seat.begin(turns[1], "next")
        assert (await seat.queue())["paused"] == "stopped"
        await seat.add("s", steer=True)
        turns[1].go.set()
        await seat.over(prompted)
        assert (await seat.brief())[2:] == ["user: next", "assistant: one", "user: s", "assistant: two"]
        assert (await seat.waiting(), (await seat.queue())["paused"]) == (["waits"], "stopped")


async def test_what_is_to_steer_a_run_that_saves_is_the_head_of_what_follows(tmp_path: Path) -> None:
    disk = Breaking()
    turn = Held()
    async with seated(tmp_path, turn, text("r"), fs=disk) as seat:
        run_id = await seat.begin(turn)
        await seat.add("ordinary")
        gate = disk.gate = threading.Event()
        turn.go.set()
        while not _is_over(await seat.state()):
            await seat.wire.receive()
        item = await seat.add("s", steer=True)
        assert item["steer"]
        gate.set()
        await seat.over(run_id)
        await seat.quiet()
        assert [line for line in await seat.brief() if line.startswith("user")] == [
            "user: hi",
            "user: s",
            "user: ordinary",
        ]
        changes = [one.event for one in seat.wire.events if one.event.__struct_config__.tag == "queue_changed"]
        moved = next(event for event in changes if event.items[0].item_id == item["itemId"])
        assert [one.steer for one in moved.items] == [False, False]


def _is_over(state: Any) -> bool:
    return "finishedAt" in state["run"]["timing"]


async def test_a_title_comes_from_the_first_text_that_steers(tmp_path: Path) -> None:  # T-2 T-12 Q-2
    turn = Held()
    async with seated(tmp_path, turn, text("x"), input=IMAGES) as seat:
        run_id = await seat.begin(turn, [PNG])
        assert "title" not in await seat.state()
        item = await seat.add("Name this", steer=True)
        turn.go.set()
        await seat.over(run_id)
        title = {"text": "Name this", "source": "fallback", "messageIndices": [2]}
        assert (await seat.state())["title"] == title
        tags: list[Any] = [one.event for one in seat.wire.events]
        titled = next(n for n, event in enumerate(tags) if event.__struct_config__.tag == "session_title")
        assert tags[titled - 1].item_id == item["itemId"]
        assert tags[titled + 1].__struct_config__.tag == "message_end"
        (row,) = (await seat.wire.call("session/list", {"cwd": seat.world.cwd}))["sessions"]
        assert row["title"] == title
        await seat.reopen()
        assert (await seat.state())["title"] == title


async def test_an_input_that_the_model_does_not_take_waits_as_the_head_and_the_run_goes_on(  # Q-2 Q-3
    tmp_path: Path,
) -> None:
    turn = Held(reply=call())
    async with seated(tmp_path, turn, text("fine")) as seat:
        run_id = await seat.begin(turn)
        waits = await seat.add("waits")
        bad = await seat.add([words("see"), PNG], steer=True)
        good = await seat.add("good", steer=True)
        turn.go.set()
        assert (await seat.over(run_id))["outcome"] == "success"
        await seat.quiet()
        assert (await seat.brief())[-2:] == ["user: good", "assistant: fine"]
        queue = await seat.queue()
        assert [item["itemId"] for item in queue["items"]] == [bad["itemId"], waits["itemId"]]
        assert (queue["paused"], queue["error"]["kind"]) == ("error", "unsupported_input")
        assert not queue["items"][0]["steer"]
        told = seat.told()
        place = told.index(f"message {good['itemId']}")
        assert told[place - 1] == f"queue [{bad['itemId']} {waits['itemId']} {good['itemId']}] error"
        # It is tried again when somebody asks, and refused without a change.
        refused = await seat.refusal("session/resume")
        assert refused.kind == "unsupported_input"
        await seat.ask("queue/edit", itemId=bad["itemId"], revision=1, content=[words("see")])
        await seat.over(await seat.resume())
        await seat.quiet()
        assert [line for line in (await seat.brief())[5:] if line.startswith("user")] == ["user: see", "user: waits"]


async def test_wherever_a_stop_comes_nothing_is_lost_doubled_or_taken_in_after_it(
    tmp_path: Path,
) -> None:  # Q-2 Q-3 I-1
    at, reached = 0, True
    seen: set[tuple[bool, bool]] = set()
    while reached:
        at += 1
        reached = await _stopped_at(tmp_path / str(at), at, seen)
    assert at > 20
    assert {(True, True), (True, False), (False, True)} <= seen  # stopped and entered, only stopped, too late for both


async def _stopped_at(root: Path, at: int, seen: set[tuple[bool, bool]]) -> bool:
    acted: list[bool] = []
    stops: list[Any] = []
    turn = Held(reply=call())
    async with seated(root, turn, text("one"), text("two")) as seat:
        queue = seat.world.session().core.queue
        item: list[str] = []

        def act() -> None:
            run = seat.world.session().runs.stop()
            stops.append(run)
            acted.append(item[0] in queue._started or all(one.id != item[0] for one in queue.items))

        steps = Steps(at=at, act=act)
        first = await seat.begin(turn)
        item.append((await seat.add("s", steer=True))["itemId"])
        trio.lowlevel.add_instrument(steps)
        turn.go.set()
        await seat.over(first)
        await seat.quiet()
        trio.lowlevel.remove_instrument(steps)
        brief, waiting = await seat.brief(), await seat.waiting()
        assert (brief.count("user: s"), waiting.count("s")) in ((1, 0), (0, 1))
        if acted:
            entered = "user: s" in brief
            assert entered == acted[0], "it entered a run that somebody had stopped"
            assert (await seat.queue()).get("paused") == ("stopped" if waiting else None)
            outcome = (await seat.over(first))["outcome"]
            stopped = stops[0] is not None and stops[0].state.id == first and stops[0].state.stop_requested
            assert (outcome == "cancelled") == stopped
            seen.add((stopped, entered))
        return bool(acted)


# --- pauses -----------------------------------------------------------------------------------------------------------


async def test_a_stop_keeps_what_waits_pauses_it_and_a_resume_goes_on_with_all(tmp_path: Path) -> None:  # Q-3 Q-4 S-12
    turn = Held("half an ", "answer")
    async with seated(tmp_path, turn, text("whole"), text("r")) as seat:
        run_id = await seat.begin(turn, "do")
        a, s = await seat.add("a"), await seat.add("s", steer=True)
        assert await seat.stop(run_id)
        queue = await seat.queue()
        assert [(one["itemId"], one["steer"]) for one in queue["items"]] == [(s["itemId"], False), (a["itemId"], False)]
        assert queue["paused"] == "stopped"
        assert (await seat.state()).get("run") is None
        await seat.over(await seat.resume())
        await seat.quiet()
        assert seat.model.sent[1] == ["user: do"]
        assert await seat.brief() == [
            "user: do",
            "assistant: half an answer",
            "assistant: whole",
            "user: s",
            "assistant: r",
            "user: a",
            "assistant: r",
        ]
        assert await seat.queue() == {"items": []}


async def test_what_is_added_to_a_paused_queue_waits_behind_it(tmp_path: Path) -> None:  # Q-2 Q-3
    turn = Held("half")
    async with seated(tmp_path, turn, text("x")) as seat:
        run_id = await seat.begin(turn)
        await seat.add("a")
        await seat.stop(run_id)
        for steer in (False, True):
            assert "runId" not in await seat.add("b", steer=steer)
        assert ((await seat.state()).get("run"), await seat.waiting()) == (None, ["a", "b", "b"])
        (a, b, _) = (await seat.queue())["items"]
        for one in (a, b):
            await seat.ask("queue/remove", itemId=one["itemId"])
        assert (await seat.queue())["paused"] == "stopped"
        (last,) = (await seat.queue())["items"]
        await seat.ask("queue/remove", itemId=last["itemId"])
        assert await seat.queue() == {"items": []}
        assert "runId" in await seat.add("now")  # an empty queue is not paused
        await seat.quiet()


async def test_a_run_that_fails_pauses_what_waits(tmp_path: Path) -> None:
    started = trio.Event()
    go = trio.Event()

    async def fails(_: Any, __: Any) -> Reply:
        started.set()
        await go.wait()
        raise ModelError("provider", "no")

    async with seated(tmp_path, fails, text("x")) as seat:
        run_id = await seat.prompt()
        await started.wait()
        await seat.add("a")
        go.set()
        assert (await seat.over(run_id))["outcome"] == "error"
        await seat.quiet()
        queue = await seat.queue()
        assert (await seat.waiting(), queue["paused"], queue.get("error")) == (["a"], "error", None)
        told = seat.told()
        assert told[-2:] == [f"queue [{queue['items'][0]['itemId']}] error", "settled error"]


async def test_a_failed_save_pauses_and_a_flush_lets_it_go_on(tmp_path: Path) -> None:  # Q-3 S-15 S-16
    disk, turn = Breaking(), Held()
    async with seated(tmp_path, turn, text("x"), fs=disk) as seat:
        run_id = await seat.begin(turn)
        await seat.add("a")
        disk.error = errno.ENOSPC
        turn.go.set()
        assert not (await seat.over(run_id))["saved"]
        await seat.quiet()
        assert (await seat.waiting(), (await seat.queue())["paused"]) == (["a"], "save_failed")
        # While a save is pending it can be added to and changed; nothing starts.
        added = await seat.add("b")
        assert "runId" not in added
        assert (await seat.refusal("session/resume")).kind == "pending_save"
        disk.error = None
        assert await seat.ask("session/flush") == {"flushed": True}
        await seat.quiet()
        assert [line for line in await seat.brief() if line.startswith("user")] == ["user: hi", "user: a", "user: b"]
        assert await seat.queue() == {"items": []}


async def test_an_input_for_a_session_with_a_pending_save_waits_for_the_flush(tmp_path: Path) -> None:
    disk = Breaking()
    async with seated(tmp_path, text("x"), fs=disk) as seat:
        disk.error = errno.ENOSPC
        await seat.prompt("hi", wait=True)
        added = await seat.add("a")
        assert "runId" not in added
        assert (await seat.queue())["paused"] == "save_failed"
        disk.error = None
        await seat.ask("session/flush")
        await seat.quiet()
        assert (await seat.brief())[2:] == ["user: a", "assistant: x"]


async def test_after_a_stop_and_a_failed_save_a_flush_starts_nothing(tmp_path: Path) -> None:
    disk, turn = Breaking(), Held("half")
    async with seated(tmp_path, turn, text("x"), fs=disk) as seat:
        run_id = await seat.begin(turn)
        await seat.add("a")
        disk.error = errno.ENOSPC
        assert await seat.stop(run_id)
        disk.error = None
        await seat.ask("session/flush")
        assert ((await seat.state()).get("run"), (await seat.queue())["paused"]) == (None, "stopped")
        assert (await seat.brief())[1:] == ["assistant: half"]


@pytest.mark.parametrize("reason", ["error", "save_failed"])
async def test_an_abort_when_idle_is_stronger_than_what_paused_before(tmp_path: Path, reason: str) -> None:  # Q-3 T-9
    disk, turn = Breaking(), Held()
    async with seated(tmp_path, turn, text("x"), fs=disk) as seat:
        if reason == "error":
            turn.reply = Reply([], text("x").usage, "stop")  # an empty answer is an error
        run_id = await seat.begin(turn)
        await seat.add("a")
        disk.error = errno.ENOSPC if reason == "save_failed" else None
        turn.go.set()
        await seat.over(run_id)
        await seat.quiet()
        assert (await seat.queue())["paused"] == reason
        assert await seat.ask("session/abort") == {"stopped": False}
        assert (await seat.queue())["paused"] == "stopped"
        disk.error = None
        await seat.ask("session/flush")
        assert ((await seat.state()).get("run"), await seat.waiting()) == (None, ["a"])


async def test_an_abort_pauses_what_waits_for_something_else_than_a_run(tmp_path: Path) -> None:  # Q-3 T-9
    disk = Breaking()
    async with seated(tmp_path, text("x"), fs=disk) as seat:
        for aborts in (True, False):
            gate = disk.gate = threading.Event()
            setting = await seat.wire.request(
                "session/setPermission", {"sessionId": seat.id, "permission": "workspace-write"}
            )
            await seat.add("a")
            assert await seat.queue() | {"items": 0} == {"items": 0}
            if aborts:
                assert await seat.ask("session/abort") == {"stopped": False}
            gate.set()
            await seat.wire.answer(setting)
            disk.gate = None
            await seat.quiet()
            assert await seat.waiting() == (["a"] if aborts else [])
            if aborts:
                await seat.over(await seat.resume())
                await seat.quiet()
        assert [line for line in await seat.brief() if line.startswith("user")] == ["user: a", "user: a"]


async def test_an_abort_of_an_idle_session_does_not_pause_what_comes_later(tmp_path: Path) -> None:
    async with seated(tmp_path, text("x")) as seat:
        assert await seat.ask("session/abort") == {"stopped": False}
        assert "runId" in await seat.add("a")
        await seat.quiet()


async def test_a_stop_while_it_saves_comes_too_late_for_the_run_and_pauses_all_the_same(tmp_path: Path) -> None:
    disk, turn = Breaking(), Held()
    async with seated(tmp_path, turn, text("x"), fs=disk) as seat:
        run_id = await seat.begin(turn)
        await seat.add("a")
        gate = disk.gate = threading.Event()
        turn.go.set()
        while not _is_over(await seat.state()):
            await seat.wire.receive()
        stopping = await seat.wire.request("session/stop", {"sessionId": seat.id, "runId": run_id})
        assert (await seat.queue())["paused"] == "stopped"
        gate.set()
        assert await seat.wire.answer(stopping) == {"stopped": False}
        assert (await seat.over(run_id))["outcome"] == "success"
        assert ((await seat.state()).get("run"), await seat.waiting()) == (None, ["a"])
        # The answer is whole, so a resume goes on with what waits.
        await seat.over(await seat.resume())
        assert (await seat.brief())[2:] == ["user: a", "assistant: x"]


async def test_a_stop_of_a_run_that_is_over_leaves_the_next_one_alone(tmp_path: Path) -> None:  # Q-3 I-1
    turns = [Held(), Held()]
    async with seated(tmp_path, *turns, text("x")) as seat:
        run_id = await seat.begin(turns[0])
        await seat.add("a")
        await seat.add("b")
        turns[0].go.set()
        await turns[1].asked.wait()
        assert not await seat.stop(run_id)
        assert "paused" not in await seat.queue()
        turns[1].go.set()
        await seat.wire.event("run_settled")
        await seat.quiet()
        assert await seat.waiting() == []


def _unavailable(seat: Seat) -> Callable[[], None]:
    models: Any = seat.world.services.models

    def resolve(ref: Any) -> None:
        raise ModelUnavailable(f"{ref} is not configured")

    before, models.resolve = models.resolve, resolve
    return lambda: setattr(models, "resolve", before)


async def test_an_input_whose_model_is_gone_pauses_and_a_resume_tries_again(tmp_path: Path) -> None:  # Q-3 P-4
    turn = Held()
    async with seated(tmp_path, turn, text("x")) as seat:
        run_id = await seat.begin(turn)
        await seat.add("a")
        back = _unavailable(seat)
        turn.go.set()
        assert (await seat.over(run_id))["outcome"] == "success"
        queue = await seat.queue()
        assert (await seat.waiting(), queue["paused"], queue["error"]["kind"]) == (["a"], "error", "model_unavailable")
        assert (await seat.refusal("session/resume")).kind == "model_unavailable"
        back()
        await seat.over(await seat.resume())
        assert (await seat.brief())[2:] == ["user: a", "assistant: x"]
        assert [one["userMessageIndex"] for one in (await seat.state())["timings"]] == [0, 2]


async def test_a_drain_pauses_and_one_that_is_cancelled_goes_on(tmp_path: Path) -> None:  # Q-3 D-4
    turn = Held()
    async with seated(tmp_path, turn, text("x")) as seat:
        run_id = await seat.begin(turn)
        await seat.add("a")
        draining = await seat.wire.request("server/drain", {"deadlineMs": 60_000})
        assert (await seat.refusal("session/resume")).kind == "draining"
        turn.go.set()
        assert (await seat.over(run_id))["outcome"] == "success"
        assert (await seat.wire.answer(draining))["queued"] == 1
        assert (await seat.waiting(), (await seat.queue())["paused"]) == (["a"], "draining")
        late = await seat.add("b")  # it may be added to
        assert "runId" not in late
        await seat.wire.call("server/drain", {"cancel": True})
        await seat.wire.event("run_started")
        await seat.quiet()
        assert [line for line in await seat.brief() if line.startswith("user")] == ["user: hi", "user: a", "user: b"]


async def test_an_idle_session_takes_what_waits_while_it_drains_and_starts_it_afterwards(tmp_path: Path) -> None:  # D-4
    async with seated(tmp_path, text("x")) as seat:
        await seat.wire.call("server/drain", {})
        assert "runId" not in await seat.add("a")
        assert (await seat.queue())["paused"] == "draining"
        await seat.wire.call("server/drain", {"cancel": True})
        await seat.quiet()
        assert await seat.brief() == ["user: a", "assistant: x"]


async def test_a_stop_outlasts_a_drain(tmp_path: Path) -> None:  # Q-3 D-4
    turn = Held("half")
    async with seated(tmp_path, turn, text("x")) as seat:
        run_id = await seat.begin(turn)
        await seat.add("a")
        await seat.stop(run_id)
        await seat.wire.call("server/drain", {})
        await seat.wire.call("server/drain", {"cancel": True})
        assert ((await seat.state()).get("run"), (await seat.queue())["paused"]) == (None, "stopped")


async def test_a_drain_that_must_not_exit_lets_the_queue_go_on(tmp_path: Path) -> None:  # D-4 S-25 Q-3
    disk, turn = Breaking(), Held()
    async with seated(tmp_path, text("x"), turn, text("y"), kind="memory", fs=disk) as seat:
        other = await seat.wire.open(seat.world, kind="new", runtimeId="new", attach=False)
        disk.error = errno.ENOSPC
        await seat.wire.call("session/prompt", {"sessionId": other["sessionId"], "content": "x", "wait": True})
        run_id = await seat.begin(turn)
        await seat.add("a")
        draining = await seat.wire.request("server/drain", {"deadlineMs": 60_000, "exit": True})
        turn.go.set()
        assert (await seat.over(run_id))["outcome"] == "success"
        answer = await seat.wire.answer(draining)
        assert (answer["exiting"], answer["draining"]) == (False, False)
        assert [one["sessionId"] for one in answer["pendingSaves"]] == [other["sessionId"]]
        await seat.quiet()
        assert (await seat.brief())[2:] == ["user: a", "assistant: y"]
        paused = [one.event.paused for one in seat.wire.events if isinstance(one.event, QueueChanged)]
        assert "draining" in paused


async def test_what_waits_for_a_run_that_a_drain_stops_stays_paused_when_it_is_cancelled(tmp_path: Path) -> None:  # D-4
    turn = Held("half")
    async with seated(tmp_path, turn, text("x")) as seat:
        run_id = await seat.begin(turn)
        await seat.add("a")
        await seat.wire.call("server/drain", {"deadlineMs": 0})
        assert (await seat.over(run_id))["outcome"] == "cancelled"
        await seat.wire.call("server/drain", {"cancel": True})
        assert ((await seat.state()).get("run"), (await seat.queue())["paused"]) == (None, "stopped")


# --- who comes and goes -----------------------------------------------------------------------------------------------


async def test_it_goes_on_without_clients_and_is_there_for_those_who_come_back(tmp_path: Path) -> None:  # Q-5 R-7
    turns = [Held(), Held()]
    async with seated(tmp_path, *turns, text("x")) as seat:
        await seat.begin(turns[0])
        a, b = await seat.add("a"), await seat.add("b")
        await seat.wire.aclose()
        turns[0].go.set()
        await turns[1].asked.wait()
        seat.wire = await seat.world.connect()
        attached = await seat.wire.call("runtime/attach", {"runtimeId": seat.runtime_id})
        assert [item["itemId"] for item in attached["state"]["queue"]["items"]] == [b["itemId"]]
        assert attached["state"]["run"]["itemId"] == a["itemId"]
        turns[1].go.set()
        await seat.wire.event("run_settled")
        await seat.quiet()
        assert [line for line in await seat.brief() if line.startswith("user")] == ["user: hi", "user: a", "user: b"]


async def test_it_does_not_survive_the_daemon(tmp_path: Path) -> None:
    turn = Held("half")
    async with seated(tmp_path, turn) as seat:
        await seat.begin(turn)
        item = await seat.add("a")
    async with running(tmp_path) as world:
        await seat.reopen(world)
        assert await seat.queue() == {"items": []}
        assert (await seat.refusal("queue/remove", itemId=item["itemId"])).kind == "queue_item_not_found"
        assert await seat.brief() == ["user: hi", "assistant: half"]


async def test_of_two_clients_each_sees_what_the_other_does(tmp_path: Path) -> None:  # Q-1 R-7
    turn = Held()
    async with seated(tmp_path, turn) as seat:
        other = await seat.world.connect()
        await other.call("runtime/attach", {"runtimeId": seat.runtime_id})
        await seat.begin(turn)
        item = await seat.add("a")
        assert (await other.event("queue_changed")).event.items[0].item_id == item["itemId"]  # type: ignore[union-attr]
        await other.call("queue/edit", {"sessionId": seat.id, "itemId": item["itemId"], "revision": 1, "content": "b"})
        with pytest.raises(RpcError, match="edited since"):
            await seat.ask("queue/edit", itemId=item["itemId"], revision=1, content="c")
        assert await seat.waiting() == ["b"]
        await seat.ask("session/abort")
