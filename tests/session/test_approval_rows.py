"""What a tool asks and what becomes of it: A-1…A-6 and K-42…K-44, at the wire."""

from __future__ import annotations

import gc
import hashlib
import os
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from asking import RULE, UNPARSED, Asking, answer, asks, pending, person, requested, resolved, twice
from inprocess import Wire, call, running, text
from seats import Held, Seat, seated

from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.types import TextBlock
from loopd.agent import Ask, ToolOutcome, ToolScope
from loopd.agent.tools.write import Write
from loopd.config import Config, DaemonSettings
from loopd.core import approvals as core_approvals
from loopd.core.state import SessionCore
from loopd.daemon import IDLE_SESSION_S, TIDY_S


@asynccontextmanager
async def asked(root: Path, *plays: Any, tool: Any = None, **options: Any) -> AsyncIterator[tuple[Seat, Asking]]:
    tool = tool or Asking()
    async with seated(root, *plays, tools=[tool], **options) as seat:
        yield seat, tool


async def refusal(wire: Wire, method: str, **params: Any) -> RpcError:
    with pytest.raises(RpcError) as refused:
        await wire.call(method, params)
    return refused.value


def lives(wire: Wire) -> dict[str, list[str]]:
    """What was told of each request, in order."""
    told: dict[str, list[str]] = {}
    for params in wire.events:
        match params.event.__struct_config__.tag:
            case "approval_requested":
                told.setdefault(params.event.request.approval_id, []).append("requested")  # type: ignore[union-attr]
            case "approval_resolved":
                told.setdefault(params.event.approval_id, []).append(params.event.outcome)  # type: ignore[union-attr]
    return told


async def results(seat: Seat) -> list[str]:
    return [message["content"][0]["text"] for message in await seat.messages() if message["role"] == "toolResult"]


# --- a request and its answers ----------------------------------------------------------------------------------------


async def test_a_request_has_what_is_needed_to_decide_it_everywhere_the_same(tmp_path: Path) -> None:
    async with asked(tmp_path, asks("touch x", rules=[RULE]), text("fine")) as (seat, tool):
        tool.diff = "-a\n+b\n"
        run_id = await seat.prompt()
        event = (await seat.wire.event("approval_requested")).event
        [listed] = await pending(seat.wire)
        assert listed == {
            "approvalId": event.request.approval_id,  # type: ignore[union-attr]
            "runtimeId": seat.runtime_id,
            "sessionId": seat.id,
            "runId": run_id,
            "toolCallId": "c1",
            "toolName": "ask",
            "arguments": {"what": "touch x", "rules": [RULE]},
            "operation": "command",
            "reason": "it changes things",
            "cwd": seat.world.cwd,
            "sandbox": "nothing",
            "createdAt": listed["createdAt"],
            "rules": [RULE],
            "diff": "-a\n+b\n",
        }
        state = await seat.state()
        assert state["approvals"] == [listed]
        assert (await seat.wire.call("runtime/attach", {"runtimeId": seat.runtime_id}))["state"] == state
        assert (await seat.wire.call("server/status"))["pendingApprovals"] == 1
        assert (await seat.wire.call("runtime/list"))["runtimes"][0]["pendingApprovals"] == 1
        assert await answer(seat.wire, listed["approvalId"]) == {
            "approvalId": listed["approvalId"],
            "outcome": "allowed-once",
        }
        assert (await seat.over(run_id))["outcome"] == "success"
        assert (await seat.state())["approvals"] == await pending(seat.wire) == []
        assert (await seat.wire.call("server/status"))["pendingApprovals"] == 0
        assert tool.done == ["touch x"]
        assert lives(seat.wire) == {listed["approvalId"]: ["requested", "allowed-once"]}


async def test_a_request_of_a_write_names_the_file_its_hash_and_the_change(tmp_path: Path) -> None:  # A-1 A-8
    writes = call("write", path="file", content="new\n")
    async with asked(tmp_path, writes, text("fine"), tool=Write()) as (seat, _):
        path = Path(seat.world.cwd, "file")
        path.write_text("old\n")
        run_id = await seat.prompt()
        approval_id = await requested(seat.wire)
        [listed] = await pending(seat.wire)
        assert (listed["operation"], listed["path"]) == ("write", str(path))
        assert listed["sha256Before"] == hashlib.sha256(b"old\n").hexdigest()
        assert listed["diff"] == "@@ -1,1 +1,1 @@\n-old\n+new"
        assert listed["rules"] == [f"write {path}"]
        await answer(seat.wire, approval_id)
        assert (await seat.over(run_id))["outcome"] == "success"
        assert path.read_text() == "new\n"


async def test_a_rejection_is_told_to_the_model_with_its_feedback_and_the_run_goes_on(tmp_path: Path) -> None:
    async with asked(tmp_path, asks(), asks(id="c2"), text("fine")) as (seat, tool):
        run_id = await seat.prompt()
        await answer(seat.wire, await requested(seat.wire), "rejected", feedback="use make")
        event = await resolved(seat.wire)
        assert (event.outcome, event.feedback) == ("rejected", "use make")
        await answer(seat.wire, await requested(seat.wire), "rejected")
        assert (await seat.over(run_id))["outcome"] == "success"
        with_feedback, without = await results(seat)
        assert with_feedback == without + " They said: use make"
        assert "rejected" in without
        assert tool.done == []


async def test_allowed_for_the_session_is_not_asked_again_as_long_as_it_is_open(tmp_path: Path) -> None:  # A-2 A-5
    other = [RULE, "ask: rm"]
    async with asked(tmp_path, twice(rules=[RULE]), text("x"), asks(rules=other), text("x")) as (seat, tool):
        run_id = await seat.prompt()
        await answer(seat.wire, await requested(seat.wire), "allowed-session")
        await seat.over(run_id)
        assert tool.done == ["one", "two"]
        assert len(lives(seat.wire)) == 1
        run_id = await seat.prompt()
        await answer(seat.wire, await requested(seat.wire), "allowed-once")  # one of its rules is another
        await seat.over(run_id)
        seat.model.turns = 2
        await seat.prompt()
        await requested(seat.wire)  # once was once


async def test_what_was_allowed_outlasts_a_change_of_the_model_and_the_same_preset_again(tmp_path: Path) -> None:
    async with asked(tmp_path, asks(rules=[RULE]), text("x")) as (seat, tool):
        run_id = await seat.prompt()
        await answer(seat.wire, await requested(seat.wire), "allowed-session")
        await seat.over(run_id)
        await seat.ask("session/setModel", model={"provider": "other", "id": "m"})
        await seat.ask("session/setPermission", permission="read-only")
        seat.model.turns = 0
        with trio.fail_after(5):
            await seat.over(await seat.prompt())
        assert (tool.done, len(lives(seat.wire))) == (["it", "it"], 1)


@pytest.mark.parametrize("ending", ["dispose", "new session", "switch away and back", "restart", "preset"])
async def test_what_was_allowed_ends_with_the_opening_and_with_the_preset(ending: str, tmp_path: Path) -> None:
    async with asked(tmp_path / "a", asks(rules=[RULE]), text("x")) as (seat, tool):
        run_id = await seat.prompt()
        await answer(seat.wire, await requested(seat.wire), "allowed-session")
        await seat.over(run_id)
        runtime = {"runtimeId": seat.runtime_id}
        match ending:
            case "dispose":
                await seat.reopen()
            case "new session":
                seat.opened |= await seat.wire.call("runtime/newSession", runtime)
            case "switch away and back":
                await seat.wire.call("runtime/newSession", runtime)
                await seat.wire.call("runtime/switchSession", {**runtime, "path": seat.opened["path"]})
            case "preset":
                await seat.ask("session/setPermission", permission="read-only")
                seat.model.turns = 0
                await seat.prompt(wait=True)  # it had that one already
                await seat.ask("session/setPermission", permission="workspace-write")
        if ending != "restart":
            seat.model.turns = 0
            await seat.prompt()
            await requested(seat.wire)
            assert tool.done == ["it"] * (1 + (ending == "preset"))
            return
    seat.model.turns = 0
    async with running(tmp_path / "a", model=seat.model, tools=[tool]) as world:
        await seat.reopen(world)
        await seat.prompt()
        await requested(seat.wire)


async def test_the_first_answer_wins_and_later_ones_are_told_who_gave_it(tmp_path: Path) -> None:  # A-2 K-42
    async with asked(tmp_path, asks(), text("fine")) as (seat, tool):
        one, two = await person(seat.world, "vim", attach=seat.runtime_id), await person(seat.world, "emacs")
        run_id = await seat.prompt()
        approval_id = await requested(one)
        await answer(two, approval_id, "rejected", feedback="no")  # not attached to it: any client may answer
        late = [await refusal(one, "approval/resolve", approvalId=approval_id, decision="allowed-once")]
        assert await resolved(one) == await resolved(seat.wire)
        await seat.over(run_id)
        late.append(await refusal(two, "approval/resolve", approvalId=approval_id, decision="rejected"))
        await seat.wire.call("runtime/newSession", {"runtimeId": seat.runtime_id})
        late.append(await refusal(one, "approval/resolve", approvalId=approval_id, decision="rejected"))
        await seat.wire.call("runtime/dispose", {"runtimeId": seat.runtime_id})
        late.append(await refusal(one, "approval/resolve", approvalId=approval_id, decision="rejected"))
        assert {error.kind for error in late} == {"approval_not_pending"}
        assert {(error.data["outcome"], error.data["by"]) for error in late} == {
            ("rejected", f"emacs (pid {os.getpid()})")
        }
        assert tool.done == []


async def test_what_is_remembered_of_settled_ones_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_approvals, "REMEMBERED", 2)
    async with asked(tmp_path, *(asks(id=f"c{n}") for n in range(4)), text("x")) as (seat, _):
        await seat.prompt()
        ids = []
        for _ in range(4):
            ids.append(await requested(seat.wire))
            await answer(seat.wire, ids[-1])
        late = [await refusal(seat.wire, "approval/resolve", approvalId=id, decision="rejected") for id in ids]
        assert [error.data.get("outcome") for error in late] == [None, None, "allowed-once", "allowed-once"]
        assert {error.kind for error in late} == {"approval_not_pending"}


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"decision": "cancelled"}, "decision"),
        ({"decision": "allowed-once", "feedback": "x"}, "feedback"),
        ({"decision": "allowed-session", "feedback": "x"}, "feedback"),
        ({"decision": "allowed-session"}, UNPARSED),
        ({"decision": "rejected", "feedback": "x" * 65537}, "feedback"),
        ({"decision": "rejected", "reason": "x"}, "reason"),
        ({}, "decision"),
    ],
)
async def test_an_answer_that_it_cannot_have_changes_nothing(  # A-2 I-10
    params: dict[str, Any], says: str, tmp_path: Path
) -> None:
    async with asked(tmp_path, asks(), text("fine")) as (seat, _):
        await seat.prompt()
        approval_id = await requested(seat.wire)
        before, head = await seat.state(), seat.world.session().events.head
        error = await refusal(seat.wire, "approval/resolve", approvalId=approval_id, **params)
        assert error.kind == "invalid_params"
        assert says in error.message
        unknown = await refusal(seat.wire, "approval/resolve", approvalId="nothing", decision="rejected")
        assert (unknown.kind, unknown.data.get("outcome")) == ("approval_not_pending", None)
        assert (await seat.state(), seat.world.session().events.head) == (before, head)
        assert seat.world.session().core.approvals.grants == {}
        await answer(seat.wire, approval_id)


async def test_requests_are_listed_the_oldest_first_of_all_sessions_or_of_one(tmp_path: Path) -> None:  # D-5
    async with asked(tmp_path, asks(), asks(), text("x")) as (seat, tool):
        other = await seat.wire.open(seat.world, kind="memory", runtimeId="new")
        second = await seat.wire.prompt(other["sessionId"])  # it was opened later, and asks first
        its = await requested(seat.wire)
        await trio.sleep(0.002)  # they are as old as their milliseconds
        first = await seat.prompt()
        mine = await requested(seat.wire)
        assert [one["approvalId"] for one in await pending(seat.wire)] == [its, mine]
        assert [one["approvalId"] for one in await pending(seat.wire, sessionId=other["sessionId"])] == [its]
        error = await refusal(seat.wire, "approval/list", sessionId="nothing")
        assert error.kind == "session_not_found"
        await answer(seat.wire, its)
        assert (await seat.over(second))["outcome"] == "success"
        assert [one["approvalId"] for one in await pending(seat.wire)] == [mine]
        # The other session works while this one waits for a person.
        await seat.wire.prompt(other["sessionId"], wait=True)
        await seat.wire.call("session/setPermission", {"sessionId": other["sessionId"], "permission": "read-only"})
        assert await seat.stop(first)
        assert tool.done == ["it"]


async def test_what_one_call_asks_at_once_is_counted_answered_and_cancelled_each(
    tmp_path: Path,
) -> None:  # A-1 A-4
    class Twofold(Asking):
        async def run(self, _: Any, scope: ToolScope) -> ToolOutcome:
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(scope.ask, Ask(operation="command", reason="r", sandbox="s"))
            raise AssertionError

    async with asked(tmp_path, asks(), text("fine"), tool=Twofold()) as (seat, _):
        run_id = await seat.prompt()
        first, second, third = [await requested(seat.wire) for _ in range(3)]
        assert (await seat.wire.call("server/status"))["pendingApprovals"] == 3
        assert (await seat.wire.call("runtime/list"))["runtimes"][0]["pendingApprovals"] == 3
        await answer(seat.wire, second)
        assert {one["approvalId"] for one in await pending(seat.wire)} == {first, third}
        assert await seat.stop(run_id)
        told = lives(seat.wire)
        assert told.pop(second) == ["requested", "allowed-once"]
        assert list(told.values()) == [["requested", "cancelled"]] * 2


async def test_an_answer_at_the_moment_of_the_closing_changes_nothing(tmp_path: Path) -> None:  # A-4 I-10
    async with asked(tmp_path, asks(), text("fine")) as (seat, tool):
        run_id = await seat.prompt()
        approval_id = await requested(seat.wire)
        core = seat.world.session().core
        core.closed = True  # said to be so: what cancels it comes right after
        late = await refusal(seat.wire, "approval/resolve", approvalId=approval_id, decision="allowed-session")
        assert (late.kind, list(core.approvals.pending)) == ("session_closed", [approval_id])
        core.closed = False
        await answer(seat.wire, approval_id)
        assert (await seat.over(run_id))["outcome"] == "success"
        assert tool.done == ["it"]


async def test_answers_may_stand_in_a_batch(tmp_path: Path) -> None:
    async with asked(tmp_path, asks(), text("fine")) as (seat, tool):
        run_id = await seat.prompt()
        approval_id = await requested(seat.wire)
        one = '{"jsonrpc":"2.0","id":%d,"method":"approval/resolve","params":{"approvalId":"%s","decision":"%s"}}'
        batch = ",".join(one % (id, approval_id, way) for id, way in ((7, "allowed-once"), (8, "rejected")))
        await seat.wire.send(f"[{batch}]\n".encode())
        while not isinstance(answers := await seat.wire.receive(), list):
            pass
        assert answers[0]["result"]["outcome"] == "allowed-once"
        assert answers[1]["error"]["data"]["outcome"] == "allowed-once"
        await seat.over(run_id)
        assert tool.done == ["it"]


async def test_large_arguments_and_a_large_diff_arrive_whole(tmp_path: Path) -> None:
    async with asked(tmp_path, asks("x" * 1_000_000), text("fine")) as (seat, tool):
        tool.diff = "+y\n" * 500_000
        run_id = await seat.prompt()
        await requested(seat.wire)
        [listed] = await pending(seat.wire)
        assert (listed["arguments"]["what"], listed["diff"]) == ("x" * 1_000_000, tool.diff)
        await answer(seat.wire, listed["approvalId"])
        assert (await seat.over(run_id))["outcome"] == "success"


async def test_a_name_that_cannot_be_decoded_is_shown_and_cannot_be_allowed_for_the_session(tmp_path: Path) -> None:
    class Undecodable(Asking):
        async def run(self, _: Any, scope: ToolScope) -> ToolOutcome:
            path = os.fsdecode(b"/caf\xe9")
            ask = Ask(operation="write", reason="r", sandbox="s", path=path, diff="+" + path, rules=["write " + path])
            return ToolOutcome([TextBlock(str(await scope.ask(ask)))])

    async with asked(tmp_path, asks(), text("fine"), tool=Undecodable()) as (seat, _):
        run_id = await seat.prompt()
        approval_id = await requested(seat.wire)
        [listed] = await pending(seat.wire)
        assert (listed["path"], listed["diff"], listed.get("rules")) == ("/caf\ufffd", "+/caf\ufffd", None)
        error = await refusal(seat.wire, "approval/resolve", approvalId=approval_id, decision="allowed-session")
        assert "cannot be shown" in error.message
        await answer(seat.wire, approval_id)
        assert (await seat.over(run_id))["outcome"] == "success"


# --- who is there, and who comes and goes -----------------------------------------------------------------------------


async def test_with_reject_and_nobody_there_it_is_unavailable_at_once(tmp_path: Path) -> None:
    async with asked(tmp_path, asks(), text("fine")) as (seat, tool):
        run_id = await seat.prompt(approvals="reject")
        assert (await seat.over(run_id))["outcome"] == "success"
        [life] = lives(seat.wire).values()
        assert life == ["requested", "unavailable"]
        assert "nobody is there" in (await results(seat))[0]
        assert tool.done == []
        [id] = lives(seat.wire)
        late = await refusal(seat.wire, "approval/resolve", approvalId=id, decision="allowed-once")
        assert (late.data["outcome"], late.data.get("by")) == ("unavailable", None)


async def test_only_who_can_approve_and_is_attached_now_counts_as_there(tmp_path: Path) -> None:
    async with asked(tmp_path, asks(), text("fine")) as (seat, _):

        async def outcome() -> str | None:
            """None: it waits; then it is stopped."""
            seat.model.turns = 0
            seen = len(lives(seat.wire))
            run_id = await seat.prompt(approvals="reject")
            await requested(seat.wire)
            await seat.wire.call("server/status")
            waits = (await seat.state())["approvals"]
            if waits:
                await seat.stop(run_id)
            await seat.over(run_id)
            assert len(lives(seat.wire)) == seen + 1
            return None if waits else list(lives(seat.wire).values())[-1][-1]

        one = await person(seat.world)
        assert await outcome() == "unavailable"  # it can, and is not attached
        await one.call("server/watch")
        assert await outcome() == "unavailable"  # watching is not attaching
        other = await one.open(seat.world, kind="memory", runtimeId="new")
        assert await outcome() == "unavailable"  # attached to another one
        await one.call("runtime/attach", {"runtimeId": seat.runtime_id})
        assert await outcome() is None
        await one.call("runtime/detach", {"runtimeId": other["runtimeId"]})
        assert await outcome() is None
        await one.call("runtime/detach", {"runtimeId": seat.runtime_id})
        assert await outcome() == "unavailable"
        # One that leaves with the session.
        await one.call("runtime/attach", {"runtimeId": seat.runtime_id, "follow": False})
        assert await outcome() is None
        seat.opened |= await seat.wire.call("runtime/newSession", {"runtimeId": seat.runtime_id})
        assert await outcome() == "unavailable"
        log = seat.world.daemon.runtimes.by_id[seat.runtime_id].events
        slow = log.subscribe(position=log.head, follow=False, notify=lambda: None, can_approve=True)
        assert log.has_approver
        log.end_unfollowing()  # though it has not read up to there
        assert not log.has_approver
        log.cursors.discard(slow)
        await one.call("runtime/attach", {"runtimeId": seat.runtime_id})
        await one.aclose()
        while seat.world.daemon.connections > 1:  # noqa: ASYNC110 nothing tells
            await trio.lowlevel.checkpoint()
        assert await outcome() == "unavailable"


async def test_with_wait_it_waits_for_whoever_comes_and_outlives_who_goes(tmp_path: Path) -> None:  # A-5 A-6 K-42 K-43
    async with asked(tmp_path, asks(), text("fine")) as (seat, tool):
        one = await person(seat.world, "one", attach=seat.runtime_id)
        run_id = await seat.prompt(approvals="reject")  # somebody is there when it is asked
        approval_id = await requested(one)
        seen = one.events[-1].seq
        await one.aclose()
        while seat.world.daemon.connections > 1:  # noqa: ASYNC110 nothing tells
            await trio.lowlevel.checkpoint()
        await seat.wire.aclose()
        while seat.world.daemon.connections:  # noqa: ASYNC110 nothing tells
            await trio.lowlevel.checkpoint()
        two = seat.wire = await person(seat.world, "two")
        attached = await two.call("runtime/attach", {"runtimeId": seat.runtime_id})
        assert [request["approvalId"] for request in attached["state"]["approvals"]] == [approval_id]
        assert [request["approvalId"] for request in await pending(two)] == [approval_id]
        await answer(two, approval_id)
        # The first one comes back where it was: it sees what became of it, and is told who answered.
        back = await person(seat.world, "one", attach=seat.runtime_id, since=seen)
        assert (await resolved(back)).by == f"two (pid {os.getpid()})"
        late = await refusal(back, "approval/resolve", approvalId=approval_id, decision="rejected")
        assert late.data["by"] == f"two (pid {os.getpid()})"
        assert (await seat.over(run_id))["outcome"] == "success"
        assert await pending(back) == (await seat.state())["approvals"] == []
        assert tool.done == ["it"]


# --- deadlines --------------------------------------------------------------------------------------------------------


async def test_a_deadline_is_each_requests_own_and_an_outcome(  # A-1 A-2
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    async with asked(tmp_path, asks(), asks(id="c2"), text("fine"), kind="memory") as (seat, tool):
        run_id = await seat.prompt(approvalTimeoutMs=60_000)
        approval_id = await requested(seat.wire)
        [listed] = await pending(seat.wire)
        assert listed["expiresAt"] == listed["createdAt"] + 60_000
        mock_clock.jump(59.9)
        await seat.wire.call("server/status")
        assert await pending(seat.wire) == [listed]
        mock_clock.jump(0.2)
        assert (await resolved(seat.wire)).outcome == "timed-out"
        late = await refusal(seat.wire, "approval/resolve", approvalId=approval_id, decision="allowed-once")
        assert (late.kind, late.data["outcome"], late.data.get("by")) == ("approval_not_pending", "timed-out", None)
        second = await requested(seat.wire)
        mock_clock.jump(59.9)
        await answer(seat.wire, second)
        assert (await seat.over(run_id))["outcome"] == "success"
        assert tool.done == ["it"]
        assert "nobody answered in time" in (await results(seat))[0]
        # The next run has none.
        seat.model.turns = 0
        await seat.prompt()
        third = await requested(seat.wire)
        mock_clock.jump(10_000_000)
        await seat.wire.call("server/status")
        [listed] = await pending(seat.wire)
        assert (listed["approvalId"], listed.get("expiresAt")) == (third, None)
        await answer(seat.wire, third)


# --- what ends it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["session/stop", "session/abort", "runtime/dispose", "server/drain", "end", "TERM"])
async def test_whatever_ends_the_run_cancels_what_it_asks_before_it_saves(how: str, tmp_path: Path) -> None:  # A-4 I-3
    config = Config(daemon=DaemonSettings(drain_deadline_s=1))  # so that a TERM stops it at once
    async with asked(tmp_path, asks(), text("fine"), config=config) as (seat, tool):
        run_id = await seat.prompt()
        approval_id = await requested(seat.wire)
        params: dict[str, Any] = {"sessionId": seat.id}
        if how == "session/stop":
            params["runId"] = run_id
        if how == "runtime/dispose":
            params = {"runtimeId": seat.runtime_id}
        if how == "server/drain":
            params = {"deadlineMs": 0}
        if how == "end":
            seat.world.daemon.end()
        elif how == "TERM":
            await seat.world.daemon._terminate()
        else:
            await seat.wire.call(how, params)
        settled = (await seat.wire.event("run_settled")).event
        assert settled.outcome == "cancelled"  # type: ignore[union-attr]
        assert lives(seat.wire) == {approval_id: ["requested", "cancelled"]}
        tags = [params.event.__struct_config__.tag for params in seat.wire.events]
        ending = ["approval_resolved", "tool_execution_end", "message_start", "message_end", "prompt_timing"]
        assert tags[tags.index("approval_resolved") :][:7] == [*ending, "session_saved", "run_settled"]
        assert tool.done == tool.told == []


async def test_after_a_stop_while_asked_the_next_prompt_works(tmp_path: Path) -> None:  # K-44
    async with asked(tmp_path, asks(), text("fine")) as (seat, _):
        run_id = await seat.prompt()
        approval_id = await requested(seat.wire)
        assert await seat.stop(run_id)
        late = await refusal(seat.wire, "approval/resolve", approvalId=approval_id, decision="allowed-once")
        assert late.data["outcome"] == "cancelled"
        assert (await seat.prompt(wait=True)) is not None
        assert (await seat.brief())[-1] == "assistant: fine"


async def test_a_drain_waits_for_the_answer_and_the_socket_takes_it(tmp_path: Path) -> None:  # D-4
    async with asked(tmp_path, asks(), text("fine")) as (seat, tool):
        run_id = await seat.prompt()
        approval_id = await requested(seat.wire)
        drain = await seat.wire.request("server/drain", {"deadlineMs": 60_000})
        other = await seat.world.connect()
        assert (await other.call("server/status"))["draining"]
        assert (await refusal(other, "session/prompt", sessionId=seat.id, content="x")).kind == "draining"
        await answer(other, approval_id)
        assert (await seat.wire.answer(drain))["quiet"]
        assert (await seat.over(run_id))["outcome"] == "success"
        assert tool.done == ["it"]


async def test_a_tool_that_shields_what_it_does_is_told_that_it_was_stopped(tmp_path: Path) -> None:
    class Shielded(Asking):
        async def run(self, _: Any, scope: ToolScope) -> ToolOutcome:
            with trio.CancelScope(shield=True):
                for rules in ([], [RULE]):  # the second time after the stop: not even what was allowed before
                    self.told.append(await scope.ask(Ask(operation="command", reason="r", sandbox="s", rules=rules)))
            return ToolOutcome([TextBlock("x")])

    async with asked(tmp_path, asks(), text("fine"), tool=Shielded()) as (seat, tool):
        run_id = await seat.prompt()
        await requested(seat.wire)
        seat.world.session().core.approvals.grants[RULE] = None
        with trio.fail_after(5):
            assert await seat.stop(run_id)
        assert ["cancelled" in str(told) for told in tool.told] == [True, True]
        assert [life[-1] for life in lives(seat.wire).values()] == ["cancelled"]


@pytest.mark.parametrize("fault", [False, True])
async def test_what_a_tool_left_asking_is_cancelled_before_its_run_is_timed_or_abandoned(
    fault: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # A-4 I-3
    left: list[str | None] = []

    async with trio.open_nursery() as nursery:

        class Leaving(Asking):
            async def run(self, _: Any, scope: ToolScope) -> ToolOutcome:
                async def asks_on() -> None:
                    left.append(await scope.ask(Ask(operation="command", reason="r", sandbox="s")))

                nursery.start_soon(asks_on)
                while not seat.world.session().core.approvals.pending:  # noqa: ASYNC110 nothing tells
                    await trio.lowlevel.checkpoint()
                return ToolOutcome([TextBlock("x")])

        async with asked(tmp_path, asks(), text("fine"), tool=Leaving()) as (seat, _):
            if fault:
                monkeypatch.setattr(SessionCore, "complete_run", None)  # a bug
            await seat.prompt()
            with trio.fail_after(5):
                await seat.wire.event("run_settled")
            tags = [params.event.__struct_config__.tag for params in seat.wire.events]
            before = "run_settled" if fault else "prompt_timing"
            assert tags.count("approval_resolved") == 1
            assert tags.index("approval_resolved") < len(tags) - 1 - tags[::-1].index(before)
            assert [life[-1] for life in lives(seat.wire).values()] == ["cancelled"]
    assert ["cancelled" in str(told) for told in left] == [True]


async def test_a_tool_whose_run_has_ended_asks_nobody(tmp_path: Path) -> None:
    kept: list[Any] = []

    class Keeping(Asking):
        async def run(self, _: Any, scope: ToolScope) -> ToolOutcome:
            kept.append(scope.ask)
            return ToolOutcome([TextBlock("x")])

    async with asked(tmp_path, asks(), text("fine"), tool=Keeping()) as (seat, _):
        await seat.prompt(wait=True)
        with pytest.raises(RuntimeError, match="has ended"), trio.fail_after(5):
            await kept[0](Ask(operation="command", reason="r", sandbox="s"))
        assert (lives(seat.wire), await pending(seat.wire)) == ({}, [])


async def test_nobody_is_asked_once_the_session_is_being_closed(tmp_path: Path) -> None:
    """At the same moment: what stops the run comes a little later, here after the question."""

    class Closing(Asking):
        async def run(self, _: Any, scope: ToolScope) -> ToolOutcome:
            with trio.CancelScope(shield=True):
                seat.world.session().core.closed = True
                self.told.append(await scope.ask(Ask(operation="command", reason="r", sandbox="s")))
                seat.world.session().end("shutdown")
            return ToolOutcome([TextBlock("x")])

    async with asked(tmp_path, asks(), text("fine"), tool=Closing()) as (seat, tool):
        await seat.prompt()
        with trio.fail_after(5):
            await seat.wire.event("session_closed")
        assert ["cancelled" in str(told) for told in tool.told] == [True]
        assert lives(seat.wire) == {}


async def test_a_tool_that_gives_up_asking_leaves_no_request_behind(tmp_path: Path) -> None:
    class Impatient(Asking):
        async def run(self, _: Any, scope: ToolScope) -> ToolOutcome:
            async def breaks() -> None:
                await trio.sleep(0.02)
                raise LookupError("a bug")

            async with trio.open_nursery() as nursery:
                nursery.start_soon(scope.ask, Ask(operation="command", reason="r", sandbox="s"))
                nursery.start_soon(breaks)
            raise AssertionError

    async with asked(tmp_path, asks(), text("fine"), tool=Impatient()) as (seat, _):
        run_id = await seat.prompt()
        assert (await seat.over(run_id))["outcome"] == "success"
        assert [life for life in lives(seat.wire).values()] == [["requested", "cancelled"]]
        tags = [params.event.__struct_config__.tag for params in seat.wire.events]
        assert tags.index("approval_resolved") < tags.index("tool_execution_end")  # not first at the end of the run
        assert (await seat.state())["approvals"] == []
        assert "fault" in (await results(seat))[0]


# --- beside the queue, titles and repeats -----------------------------------------------------------------------------


async def test_what_is_queued_while_it_asks_waits_and_what_steers_enters_after_the_answer(
    tmp_path: Path,
) -> None:  # A-3 Q-2
    async with asked(tmp_path, asks(), text("one"), text("two"), text("three")) as (seat, _):
        run_id = await seat.prompt("go")
        approval_id = await requested(seat.wire)
        assert "runId" not in await seat.add("later")
        await seat.add("now", steer=True)
        assert (await seat.queue()).get("paused") is None
        await answer(seat.wire, approval_id)
        await seat.over(run_id)
        await seat.quiet()
        while await seat.waiting():
            await seat.wire.event("run_settled")
        await seat.quiet()
        users = [line for line in await seat.brief() if line.startswith("user")]
        assert users == ["user: go", "user: now", "user: later"]


@pytest.mark.parametrize("way", ["started", "edited", "paused", "refused head", "steered", "moved"])
async def test_a_queued_input_keeps_what_it_says_of_approvals(way: str, tmp_path: Path) -> None:  # A-6 Q-2 Q-3
    first = Held("half")
    async with asked(tmp_path, first, asks(), text("fine")) as (seat, _):
        run_id = await seat.begin(first)
        item = await seat.add("x", approvals="reject", approvalTimeoutMs=60_000, steer=way == "steered")
        match way:
            case "edited":
                await seat.ask("queue/edit", itemId=item["itemId"], revision=1, content="y")
            case "moved":
                await seat.ask("queue/move", itemId=item["itemId"], to=0)
            case "refused head":
                await seat.ask("queue/edit", itemId=item["itemId"], revision=1, steer=True, content=[_PNG])
                first.go.set()
                await seat.over(run_id)
                await seat.quiet()
                assert (await seat.queue())["paused"] == "error"
                revision = (await seat.queue())["items"][0]["revision"]
                await seat.ask("queue/edit", itemId=item["itemId"], revision=revision, content=[_TEXT])
                await seat.resume()
        if way in ("paused", "steered"):
            await seat.stop(run_id)  # what was to steer is the head now
            seat.model.turns = 1
            seat.model.plays[1:1] = [text("resumed")]
            await seat.over(await seat.resume())
        else:
            first.go.set()
        requested_at = await seat.wire.event("approval_requested")
        request = requested_at.event.request  # type: ignore[union-attr]
        assert request.expires_at == request.created_at + 60_000
        assert (await resolved(seat.wire)).outcome == "unavailable"


_PNG = {"type": "image", "data": "aGVsbG8h", "mimeType": "image/png"}
_TEXT = {"type": "text", "text": "y"}


async def test_a_resumed_run_has_the_policy_that_came_with_its_resumption(tmp_path: Path) -> None:  # A-6 Q-4
    first = Held("half")
    async with asked(tmp_path, first, asks(), text("fine")) as (seat, _):
        await seat.stop(await seat.begin(first))
        run_id = (await seat.ask("session/resume", approvals="reject"))["runId"]
        assert (await seat.over(run_id))["outcome"] == "success"
        assert (await resolved(seat.wire)).outcome == "unavailable"


async def test_a_repeated_request_is_the_same_run_whatever_it_says_of_approvals(tmp_path: Path) -> None:
    async with asked(tmp_path, asks(), text("fine")) as (seat, tool):
        run_id = await seat.prompt(requestId="r")
        approval_id = await requested(seat.wire)
        assert await seat.prompt(requestId="r", approvals="reject", approvalTimeoutMs=1) == run_id
        assert [one["approvalId"] for one in await pending(seat.wire)] == [approval_id]
        await answer(seat.wire, approval_id)
        await seat.over(run_id)
        assert tool.done == ["it"]


# --- nothing is kept --------------------------------------------------------------------------------------------------


async def test_nothing_of_it_is_in_any_file(tmp_path: Path) -> None:
    words = [b"SECRETDIFF", b"SECRETRULE", b"it changes things", b"allowed-session", b"approvalId"]

    def written() -> bytes:
        files = (path for path in tmp_path.rglob("*") if path.is_file())
        return b"".join(path.read_bytes() for path in files)

    async with asked(tmp_path, asks(), asks(id="c2"), text("x"), tool=Ruled()) as (seat, tool):
        tool.diff = "SECRETDIFF"
        run_id = await seat.prompt()
        first = await requested(seat.wire)
        found = written()  # the journal of the run
        assert b'"c1"' in found
        await answer(seat.wire, first, "allowed-session")
        await seat.over(run_id)
        found += written()
        core = seat.world.session().core
        core.unsaved = "said so"
        rescued = await seat.world.session().saving.rescue()
        assert Path(rescued).is_relative_to(tmp_path)
        found += written()
        core.unsaved = None
        assert first.encode() not in found
        assert Counter(word for word in words if word in found) == Counter()
        await seat.reopen()
        assert (await seat.state())["approvals"] == []


class Ruled(Asking):
    """Its rule is not of its arguments, which are part of the conversation."""

    async def run(self, _: Any, scope: ToolScope) -> ToolOutcome:
        ask = Ask(operation="command", reason="it changes things", sandbox="n", rules=["SECRETRULE"], diff=self.diff)
        return ToolOutcome([TextBlock(str(await scope.ask(ask)))])


async def test_what_was_allowed_keeps_no_session_open_and_a_request_does(  # A-4 A-5
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    async with asked(tmp_path, asks(rules=[RULE]), text("x")) as (seat, _):

        async def away() -> None:
            """For longer than an idle session stays open; the daemon looks around in between."""
            await seat.wire.call("runtime/detach", {"runtimeId": seat.runtime_id})
            for seconds in (TIDY_S, IDLE_SESSION_S + TIDY_S):
                mock_clock.jump(seconds)
                await trio.testing.wait_all_tasks_blocked()

        run_id = await seat.prompt()
        approval_id = await requested(seat.wire)
        await away()
        [listed] = await pending(seat.wire)
        assert listed["approvalId"] == approval_id
        await answer(seat.wire, approval_id, "allowed-session")
        await seat.over(run_id)
        await away()
        assert (await seat.wire.call("runtime/list"))["runtimes"] == []


async def test_runs_that_are_remembered_keep_nothing_of_a_closed_session(tmp_path: Path) -> None:
    async with asked(tmp_path, asks(), text("x")) as (seat, _):
        await seat.prompt(approvals="reject", wait=True)
        announce = weakref.ref(seat.world.session().core.announce)
        await seat.wire.call("runtime/dispose", {"runtimeId": seat.runtime_id})
        while seat.wire.events[-1].event.__struct_config__.tag != "session_closed":
            await seat.wire.receive()
        await seat.wire.call("server/status")
        await trio.testing.wait_all_tasks_blocked()
        gc.collect()
        assert announce() is None
        assert (await seat.over(next(iter(seat.world.daemon.runtimes.runs))))["outcome"] == "success"
