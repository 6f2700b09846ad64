"""``loopctl prompt --queue`` against a scripted daemon: how it waits, what ends the wait, and the exit codes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from approving import request
from queueing import added, changed, item, waiting
from scripted_daemon import Answer, Loopctl, Peer, ScriptedDaemon, Then, answering, conversation, running, says, state

from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.types import ErrorInfo, ModelRef, QueuedItem, TextBlock

OURS = item("aa11", "hello")
OTHER = item("bb22")
FIRST = [{"type": "run_started", "runId": "run2", "operation": "prompt", "itemId": "aa11"}, *says("ours")]
SETTLED = {"type": "run_settled", "runId": "run2", "outcome": "success", "saved": True}
STARTED = RpcError("queue_item_started", "it has started", runId="run2")


def busy(
    cwd: str, *events: Any, ahead: Any = (), asks: Any = (), then: Callable[[Peer], None] | None = None
) -> dict[str, Answer]:
    """A session where a run goes on and ``ahead`` waits; ``events`` come once somebody waits there."""
    queue = waiting(*ahead, OURS)

    def add(_: Any, peer: Peer) -> Any:
        peer.event(changed(queue))
        return added(OURS)

    def play(peer: Peer) -> None:
        for event in events:
            peer.event(event)
        if then is not None:
            then(peer)

    now = state(cwd, queue=queue, run=running("run1"), approvals=[*asks])
    return answering(cwd, run=running("run1")) | {"queue/add": add, "session/state": Then(now, play)}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "index": 3, "content": [{"type": "text", "text": text}], "timestamp": 1}


def enters(one: QueuedItem) -> list[Any]:
    """The message of an input that steers a run."""
    message = {"messageId": f"u{one.item_id}", "index": 3}
    [text] = [block.text for block in one.content if isinstance(block, TextBlock)]
    start = {"type": "message_start", **message, "message": {"role": "user"}, "itemId": one.item_id}
    return [start, {"type": "message_end", **message, "message": user(text)}]


def interrupt(_: Peer) -> None:
    os.kill(os.getpid(), signal.SIGINT)


# --- its turn ---------------------------------------------------------------------------------------------------------


def test_a_prompt_waits_for_its_turn_and_is_followed_as_any_other(
    socket_path: str, cwd: str, loopctl: Loopctl
) -> None:
    theirs = [*says("theirs", message="m0"), {**SETTLED, "runId": "run1"}]
    events = [*theirs, FIRST[0], changed(waiting()), *FIRST[1:], SETTLED]
    with ScriptedDaemon(socket_path, busy(cwd, *events, ahead=[OTHER])) as daemon:
        ran = loopctl("prompt", "--queue", "hello")
    assert (ran.code, ran.out) == (0, "ours\n")
    assert ran.err == "loopctl: queued behind 2; waits for its turn\n"
    [sent] = daemon.asked("queue/add")
    assert (sent["sessionId"], sent["content"]) == ("s1", "hello")
    assert sent["requestId"]
    assert daemon.asked("session/prompt") == []


def test_the_run_that_it_gets_gives_the_exit_code(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    failed = {**SETTLED, "outcome": "error", "error": {"kind": "model", "message": "no such model"}}
    left = changed(waiting(OTHER, paused="error"))
    with ScriptedDaemon(socket_path, busy(cwd, FIRST[0], left, failed)):
        ran = loopctl("prompt", "--queue", "hello")
    assert ran.code == 1
    assert "the run failed: no such model" in ran.err
    assert ran.err.endswith(
        "loopctl: 1 queued input, paused: a run failed; `loopctl resume` goes on; `loopctl queue` shows what waits\n"
    )


def test_an_idle_session_runs_it_at_once(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    def play(peer: Peer) -> None:
        for event in [*FIRST, SETTLED]:
            peer.event(event)

    script = answering(cwd, model=ModelRef("practice", "echo"), live_count=0)
    with ScriptedDaemon(socket_path, script | {"queue/add": Then(added(OURS, "run2"), play)}) as daemon:
        ran = loopctl("prompt", "--queue", "hello")
    assert (ran.code, ran.out) == (0, "ours\n")
    assert "queued" not in ran.err
    assert "practice/echo" in ran.err
    assert daemon.asked("session/state") == []


def test_json_begins_with_its_own_run(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    theirs = {**SETTLED, "runId": "run1"}
    with ScriptedDaemon(socket_path, busy(cwd, theirs, *FIRST, SETTLED)):
        lines = loopctl("prompt", "--queue", "--json", "hello").out.splitlines()
    assert [json.loads(line)["event"] for line in lines] == [*FIRST, SETTLED]


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_no_wait_prints_the_item_or_the_run(socket_path: str, cwd: str, loopctl: Loopctl, arguments: list[str]) -> None:
    for answer, name, id in ((added(OURS), "itemId", "aa11"), (added(OURS, "run2"), "runId", "run2")):
        with ScriptedDaemon(socket_path, answering(cwd) | {"queue/add": answer}):
            ran = loopctl("prompt", "--queue", "--no-wait", "hello", *arguments)
        assert (ran.code, ran.err) == (0, "")
        paused = state(cwd, queue=waiting(OURS, paused="stopped"))
        with ScriptedDaemon(socket_path, answering(cwd) | {"queue/add": answer, "session/state": paused}):
            told = loopctl("prompt", "--queue", "--no-wait", "hello", *arguments).err
        assert ("1 queued input, paused: the run was stopped" in told) == (name == "itemId")
        if arguments:
            assert json.loads(ran.out) == {name: id, "sessionId": "s1"}
        else:
            assert ran.out == f"{name} {id}\nsessionId s1\n"


def test_a_prompt_that_waits_for_a_person_too_says_so(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    with ScriptedDaemon(socket_path, busy(cwd, *FIRST, SETTLED, asks=[request()])):
        ran = loopctl("prompt", "--queue", "hello")
    assert ran.err == (
        "loopctl: queued behind 1; waits for its turn\n"
        "loopctl: the run waits for an approval; `loopctl approvals` shows it\n"
    )


def test_what_others_do_to_the_queue_does_not_end_the_wait(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    edited = item("aa11", "other words", revision=2)
    changes = [changed(waiting(edited, OTHER)), changed(waiting(OTHER, edited)), changed(waiting(edited))]
    with ScriptedDaemon(socket_path, busy(cwd, *changes, *FIRST, SETTLED)):
        ran = loopctl("prompt", "--queue", "hello")
    assert (ran.code, ran.out) == (0, "ours\n")
    assert ran.err == "loopctl: queued behind 1; waits for its turn\n"


def test_a_list_from_before_it_was_added_says_nothing_of_it(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    script = busy(cwd, *FIRST, SETTLED)
    add = script["queue/add"]

    def late(params: Any, peer: Peer) -> Any:
        peer.event(changed(waiting(OTHER)))
        return add(params, peer)

    with ScriptedDaemon(socket_path, script | {"queue/add": late}):
        assert loopctl("prompt", "--queue", "hello").code == 0


def test_an_input_that_steers_is_followed_to_the_end_of_the_run_that_it_entered(
    socket_path: str, cwd: str, loopctl: Loopctl
) -> None:
    end = {**SETTLED, "runId": "run1"}
    events = [*says("before", message="m0"), *enters(OURS), changed(waiting()), *enters(OTHER), *says("after"), end]
    started = RpcError("queue_item_started", "it has started", runId="run1")
    with ScriptedDaemon(socket_path, busy(cwd, *events) | {"queue/edit": started}):
        ran = loopctl("prompt", "--queue", "hello")
    assert (ran.code, ran.out) == (0, "after\n")
    assert ran.err.splitlines()[1:] == ["> later"]  # of others' words what is answered here, of ours nothing


def test_a_prompt_shows_what_somebody_else_steers_it_with(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    own = {"type": "message_end", "messageId": "u0", "index": 0, "message": user("hello")}
    events = [own, *says("first", message="m0"), *enters(OTHER), *says("second"), {**SETTLED, "runId": "run1"}]
    for start in ({}, {"itemId": "cc33"}):  # a prompt; an input that did not have to wait
        begun = {"type": "message_start", "messageId": "u0", "index": 0, "message": {"role": "user"}} | start
        run = {"type": "run_started", "runId": "run1", "operation": "prompt"} | start
        with ScriptedDaemon(socket_path, answering(cwd, run, begun, *events)):
            ran = loopctl("prompt", "hello")
        assert (ran.code, ran.out, ran.err) == (0, "first\nsecond\n", "> later\n")


# --- pauses -----------------------------------------------------------------------------------------------------------


def test_each_pause_is_told_once_with_what_to_do(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    stopped, goes_on = changed(waiting(OURS, paused="stopped")), changed(waiting(OURS))
    moved = changed(waiting(OURS, OTHER, paused="stopped"))
    unsaved = changed(waiting(OURS, paused="save_failed"))
    events = [stopped, moved, goes_on, stopped, unsaved, goes_on, *FIRST, SETTLED]
    with ScriptedDaemon(socket_path, busy(cwd, *events)):
        ran = loopctl("prompt", "--queue", "hello")
    assert ran.code == 0
    assert ran.err.splitlines()[1:] == [
        "loopctl: the queue is paused: the run was stopped; `loopctl resume` goes on",
        "loopctl: the queue is paused: the run was stopped; `loopctl resume` goes on",
        "loopctl: the queue is paused: the conversation is not saved; `loopctl flush` saves it and goes on",
    ]


def test_a_queue_that_is_paused_already_is_told_at_once(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    why = ErrorInfo("model_unavailable", "set X_KEY")
    queue = waiting(OTHER, OURS, paused="error", error=why)

    def play(peer: Peer) -> None:
        for event in [changed(queue), *FIRST, SETTLED]:
            peer.event(event)

    script = answering(cwd) | {"queue/add": added(OURS), "session/state": Then(state(cwd, queue=queue), play)}
    with ScriptedDaemon(socket_path, script):
        ran = loopctl("prompt", "--queue", "--session", "x/meta.json", "hello")
    assert ran.code == 0
    assert ran.err == (
        "loopctl: queued behind 1; waits for its turn\n"
        "loopctl: the queue is paused: the next one was not accepted (set X_KEY); `loopctl queue --session s1 "
        "remove` takes it out, `loopctl resume --session s1` tries again\n"
    )


# --- what ends the wait -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "then", "code", "why"),
    [([], interrupt, 130, "interrupted"), (["--timeout", "0.05"], None, 3, "the time given by --timeout is over")],
)
def test_who_does_not_wait_takes_the_input_back(
    socket_path: str, cwd: str, loopctl: Loopctl, arguments: list[str], then: Any, code: int, why: str
) -> None:
    with ScriptedDaemon(socket_path, busy(cwd, then=then) | {"queue/remove": added(OURS)}) as daemon:
        ran = loopctl("prompt", "--queue", "hello", *arguments)
    assert (ran.code, ran.out) == (code, "")
    assert ran.err.splitlines()[1:] == [f"loopctl: {why}: the input is taken out of the queue again"]
    assert daemon.asked("queue/remove") == [{"sessionId": "s1", "itemId": "aa11"}]
    assert daemon.asked("session/stop") == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_input_that_starts_as_it_is_taken_back_is_stopped(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    def stop(_: Any, peer: Peer) -> Any:
        for event in [*FIRST, {**SETTLED, "outcome": "cancelled"}]:
            peer.event(event)
        return {"stopped": True}

    script = busy(cwd, then=interrupt) | {
        "queue/remove": STARTED,
        "session/stop": stop,
        "run/wait": {"runId": "run2", "outcome": "cancelled", "saved": True},
    }
    with ScriptedDaemon(socket_path, script) as daemon:
        ran = loopctl("prompt", "--queue", "hello")
    assert (ran.code, ran.out) == (130, "ours\n")
    assert ran.err.splitlines()[1:] == ["loopctl: stopped"]
    assert daemon.asked("session/stop") == [{"sessionId": "s1", "runId": "run2"}]


def test_an_input_that_was_removed_as_it_is_taken_back_is_gone(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    script = busy(cwd, then=interrupt) | {"queue/remove": RpcError("queue_item_not_found", "no item")}
    with ScriptedDaemon(socket_path, script):
        ran = loopctl("prompt", "--queue", "hello")
    assert ran.code == 130
    assert "interrupted: the queued input was removed by somebody else already" in ran.err


@pytest.mark.parametrize(
    ("event", "code", "said"),
    [
        (changed(waiting(OTHER)), 5, "was removed by somebody else"),
        ({"type": "session_closed", "reason": "disposed"}, 5, "the session was closed"),
    ],
)
def test_an_input_that_somebody_else_drops_is_5(
    socket_path: str, cwd: str, loopctl: Loopctl, event: Any, code: int, said: str
) -> None:
    with ScriptedDaemon(socket_path, busy(cwd, event, ahead=[OTHER])):
        ran = loopctl("prompt", "--queue", "hello")
    assert ran.code == code
    assert said in ran.err


def test_a_session_that_is_replaced_takes_its_queue_along(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    def replace(peer: Peer) -> None:
        peer.event({"type": "session_replaced", "old": "s1", "new": state(cwd, session_id="s2")}, session="s2")

    with ScriptedDaemon(socket_path, busy(cwd, then=replace)):
        ran = loopctl("prompt", "--queue", "hello")
    assert ran.code == 5
    assert "another session took the place" in ran.err


def test_a_daemon_that_is_lost_has_lost_the_input(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    with ScriptedDaemon(socket_path, busy(cwd, then=lambda peer: peer.hang_up())):
        ran = loopctl("prompt", "--queue", "hello")
    assert ran.code == 69
    assert "in the daemon's memory only" in ran.err
    assert "send it again" in ran.err


@pytest.mark.parametrize("kind", ["limit_exceeded", "draining", "model_unavailable"])
def test_a_refused_input_exits_as_a_refused_prompt(socket_path: str, cwd: str, loopctl: Loopctl, kind: str) -> None:
    with ScriptedDaemon(socket_path, answering(cwd) | {"queue/add": RpcError(kind, "not now")}):
        queued = loopctl("prompt", "--queue", "hello")
    with ScriptedDaemon(socket_path, answering(cwd) | {"session/prompt": RpcError(kind, "not now")}):
        assert loopctl("prompt", "hello") == queued


# --- lost events ------------------------------------------------------------------------------------------------------


LOST = {"type": "events_lost", "from": 3, "to": 9}


def lost(cwd: str, *events: Any, after: Any, edit: RpcError) -> dict[str, Answer]:
    """Some events are lost in the wait, then come ``events``; ``after`` is the session from then on."""
    script = busy(cwd, LOST, *events)
    states = iter([script["session/state"]])
    return script | {"session/state": lambda *_: next(states, after), "queue/edit": edit}


def test_a_wait_goes_on_after_lost_events(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    still = state(cwd, queue=waiting(OURS, paused="stopped"), run=None)
    script = lost(cwd, *FIRST, SETTLED, after=still, edit=STARTED)
    with ScriptedDaemon(socket_path, script) as daemon:
        ran = loopctl("prompt", "--queue", "hello")
    assert (ran.code, ran.out) == (0, "ours\n")
    assert ran.err.splitlines()[1:] == ["loopctl: the queue is paused: the run was stopped; `loopctl resume` goes on"]
    assert daemon.asked("queue/edit") == []


def test_a_start_among_lost_events_is_found_out(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    after = state(cwd, run=running("run2"))
    with ScriptedDaemon(socket_path, lost(cwd, *FIRST[1:], SETTLED, after=after, edit=STARTED)) as daemon:
        ran = loopctl("prompt", "--queue", "hello")
    assert (ran.code, ran.out) == (0, "ours\n")
    assert "some events were lost" in ran.err
    assert daemon.asked("queue/edit") == [{"sessionId": "s1", "itemId": "aa11", "revision": 0}]


def test_a_whole_run_among_lost_events_gives_its_outcome(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    script = lost(cwd, after=state(cwd), edit=STARTED)
    script["run/wait"] = {"runId": "run2", "outcome": "error", "saved": True}
    with ScriptedDaemon(socket_path, script):
        assert loopctl("prompt", "--queue", "hello").code == 1


def test_a_removal_among_lost_events_is_found_out(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    gone = RpcError("queue_item_not_found", "no item")
    with ScriptedDaemon(socket_path, lost(cwd, after=state(cwd), edit=gone)):
        ran = loopctl("prompt", "--queue", "hello")
    assert ran.code == 5
    assert "was removed by somebody else" in ran.err


def test_a_replacement_among_lost_events_ends_the_wait(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    """What tells of the loss is said of the session that is there by then."""
    now = state(cwd, queue=waiting(OURS), run=running("run1"))
    script = busy(cwd)
    states = iter([Then(now, lambda peer: peer.event(LOST, session="s2"))])
    gone = RpcError("session_not_found", "no open session s1")
    script |= {"session/state": lambda *_: next(states, gone), "queue/edit": gone}
    with ScriptedDaemon(socket_path, script):
        ran = loopctl("prompt", "--queue", "--timeout", "20", "hello")
    assert ran.code == 5
    assert "the queued input ran before, or is gone" in ran.err


def test_a_run_whose_end_and_session_are_among_lost_events_gives_its_outcome(
    socket_path: str, cwd: str, loopctl: Loopctl
) -> None:
    gone = RpcError("session_not_found", "no open session s1")
    script = busy(cwd, FIRST[0], then=lambda peer: peer.event(LOST, session="s2"))
    states = iter([script["session/state"]])
    script |= {"session/state": lambda *_: next(states, gone)}
    script["run/wait"] = {"runId": "run2", "outcome": "error", "saved": True}
    with ScriptedDaemon(socket_path, script):
        assert loopctl("prompt", "--queue", "--timeout", "20", "hello").code == 1


# --- a plain prompt ---------------------------------------------------------------------------------------------------


def test_a_prompt_that_is_refused_as_busy_names_the_queue(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    with ScriptedDaemon(socket_path, answering(cwd) | {"session/prompt": RpcError("session_busy", "a prompt goes on")}):
        ran = loopctl("prompt", "hello")
    assert ran.code == 5
    assert "`loopctl stop` ends it" in ran.err
    assert "`loopctl prompt --queue` waits for its turn" in ran.err


def test_a_prompt_that_is_stopped_says_what_waits_behind_it(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    def stop(_: Any, peer: Peer) -> Any:
        peer.event(changed(waiting(OURS, OTHER, paused="stopped")))
        peer.event(conversation(outcome="cancelled")[-1])
        return {"stopped": True}

    def begin(peer: Peer) -> None:
        for event in [conversation()[0], changed(waiting(OURS)), changed(waiting(OURS, OTHER))]:
            peer.event(event)
        interrupt(peer)

    script = answering(cwd) | {
        "session/prompt": Then({"runId": "run1"}, begin),
        "session/stop": stop,
        "run/wait": {"runId": "run1", "outcome": "cancelled", "saved": True},
    }
    with ScriptedDaemon(socket_path, script):
        ran = loopctl("prompt", "hello")
    assert ran.code == 130
    assert ran.err == (
        "loopctl: stopped\nloopctl: 2 queued inputs, paused: the run was stopped; `loopctl resume` goes on; "
        "`loopctl queue` shows what waits\n"
    )


def test_a_run_that_ends_well_lets_the_queue_go_on_without_a_word(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    events = conversation(changed(waiting(OURS)), *says("ok"))
    with ScriptedDaemon(socket_path, answering(cwd, *events)):
        assert loopctl("prompt", "hello").err == ""


def test_a_session_in_memory_where_others_queued_something_stays_open(
    socket_path: str, cwd: str, loopctl: Loopctl
) -> None:
    refused = RpcError("conflict", "2 queued inputs would be lost", queued=2)
    with ScriptedDaemon(socket_path, answering(cwd, *conversation()) | {"runtime/dispose": refused}):
        ran = loopctl("prompt", "hello", "--no-session")
    assert ran.code == 0
    assert "`loopctl dispose --runtime r1 --discard-queue` drops them" in ran.err
