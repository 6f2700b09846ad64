"""At a terminal: a conversation that cannot be saved is not left behind by accident, and an answer seen is read."""

from __future__ import annotations

import signal
import subprocess
from typing import Any

import pytest
from scripted_daemon import Answer, Loopctl, Peer, ScriptedDaemon, answering, conversation, running, says, state
from typing_person import at_terminal

from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.types import Recoverable

FULL = {"kind": "save_failed", "message": "disk full"}
SAVED = {"type": "session_saved", "messageCount": 2, "userMessageCount": 1, "updatedAt": 1, "unread": True}
KEPT = "the daemon keeps it in memory"


def failing(cwd: str, *flushes: Answer, **settled: Any) -> dict[str, Answer]:
    """A run whose save fails, and what each ``session/flush`` is answered."""
    tries = iter(flushes)
    events = conversation(*says("the answer"), timing(2, 4), saved=False, error=FULL, **settled)
    return answering(cwd, *events) | {"session/flush": lambda *_: next(tries), "session/markRead": {"read": True}}


def met(cwd: str, peers: list[Peer]) -> dict[str, Answer]:
    """The connection of the prompt, for a test that has more to say on it."""

    def accept(_: Any, peer: Peer) -> Any:
        peers.append(peer)
        return failing(cwd)["session/prompt"]

    return {"session/prompt": accept}


def timing(start: int, end: int, *, run_id: str = "run1") -> dict[str, Any]:
    facts = {"id": run_id, "userMessageIndex": start, "messageStartIndex": start, "messageEndIndex": end}
    return {"type": "prompt_timing", "timing": facts | {"startedAt": 1, "finishedAt": 2}}


# --- an unsaved conversation (S-25) -----------------------------------------------------------------------------------


def test_flush_is_tried_until_it_is_saved_and_then_the_run_ends_as_it_did(socket_path: str, cwd: str) -> None:  # S-25
    script = failing(cwd, RpcError("save_failed", "still full"), {"flushed": True})
    with ScriptedDaemon(socket_path, script) as daemon, at_terminal("prompt", "hello") as terminal:
        terminal.waits_for("disk full")
        terminal.waits_for(KEPT)
        terminal.waits_for("/flush or /quit> ")
        terminal.type("/flush\n")
        terminal.waits_for("still full")
        terminal.waits_for("/flush or /quit> ")
        terminal.type("  /flush \n")
        terminal.waits_for("saved")
        assert terminal.ends() == 0
    assert daemon.asked("session/flush") == [{"sessionId": "s1"}] * 2
    assert len(daemon.asked("session/prompt")) == 1  # S-16: nothing is run again


@pytest.mark.parametrize(("outcome", "code"), [("error", 1), ("cancelled", 1)])
def test_after_a_flush_a_run_that_failed_is_still_a_failed_run(
    socket_path: str, cwd: str, outcome: str, code: int
) -> None:  # S-17
    script = failing(cwd, {"flushed": True}, outcome=outcome)
    with ScriptedDaemon(socket_path, script), at_terminal("prompt", "hello") as terminal:
        terminal.waits_for("/quit> ")
        terminal.type("/flush\n")
        assert terminal.ends() == code


def test_the_ctrl_c_that_stopped_the_run_is_no_wish_to_leave(socket_path: str, cwd: str) -> None:  # S-25
    def stop(_: Any, peer: Peer) -> Any:
        peer.event(conversation(outcome="cancelled", saved=False, error=FULL)[-1])
        return {"stopped": True}

    result = {"runId": "run1", "outcome": "cancelled", "saved": False, "error": FULL}
    script = answering(cwd, *conversation(*says("half"))[:-1])
    script |= {"session/stop": stop, "run/wait": result, "session/flush": {"flushed": True}}
    with ScriptedDaemon(socket_path, script), at_terminal("prompt", "hello") as terminal:
        terminal.waits_for("half")
        terminal.process.send_signal(signal.SIGINT)
        terminal.waits_for("/quit> ")
        terminal.type("/quit\n")
        terminal.waits_for("not yet")
        terminal.waits_for("/quit> ")
        terminal.type("/flush\n")
        assert terminal.ends() == 130


def test_leaving_is_refused_once_with_the_reason_and_then_obeyed(socket_path: str, cwd: str) -> None:  # S-25
    with ScriptedDaemon(socket_path, failing(cwd)) as daemon, at_terminal("prompt", "hello") as terminal:
        terminal.waits_for("/quit> ")
        terminal.type("/quit\n")
        terminal.waits_for("not yet: only the daemon's memory has the conversation")
        terminal.waits_for("/quit> ")
        terminal.type("what now?\n")
        terminal.waits_for("/flush saves the conversation, /quit leaves")
        terminal.waits_for("/quit> ")
        terminal.type("/quit\n")
        terminal.waits_for("`loopctl flush` tries again")
        assert terminal.ends() == 5
    assert daemon.asked("session/flush") == []
    assert daemon.asked("session/markRead") == []  # S-15: refused while a save is pending


@pytest.mark.parametrize("key", ["Ctrl-C", "Ctrl-D"])
def test_no_key_leaves_however_often_it_is_pressed(socket_path: str, cwd: str, key: str) -> None:  # S-25
    with ScriptedDaemon(socket_path, failing(cwd)), at_terminal("prompt", "hello") as terminal:
        for _ in range(3):
            terminal.waits_for("/quit> ")
            if key == "Ctrl-D":
                terminal.type("\x04")
            else:
                terminal.process.send_signal(signal.SIGINT)
            terminal.waits_for("not yet")
        terminal.waits_for("/quit> ")
        terminal.type("/quit\n")
        assert terminal.ends() == 5


def test_what_another_client_saves_is_noticed(socket_path: str, cwd: str) -> None:  # S-25
    peers: list[Peer] = []
    script = failing(cwd) | met(cwd, peers)
    with ScriptedDaemon(socket_path, script) as daemon, at_terminal("prompt", "hello") as terminal:
        terminal.waits_for("/quit> ")
        peers[0].event(SAVED)
        terminal.waits_for("saved")
        assert terminal.ends() == 0
    assert daemon.asked("session/flush") == []


def test_a_session_that_is_closed_meanwhile_says_where_the_rescue_copy_is(socket_path: str, cwd: str) -> None:  # S-25
    peers: list[Peer] = []
    with ScriptedDaemon(socket_path, failing(cwd) | met(cwd, peers)), at_terminal("prompt", "hello") as terminal:
        terminal.waits_for("/quit> ")
        peers[0].event({"type": "session_closed", "reason": "shutdown", "rescue": "/r/history.jsonl"})
        terminal.waits_for("what was unsaved is in /r/history.jsonl")
        assert terminal.ends() == 5


def test_a_terminal_that_is_closed_ends_it(socket_path: str, cwd: str) -> None:
    with ScriptedDaemon(socket_path, failing(cwd)), at_terminal("prompt", "hello") as terminal:
        terminal.waits_for("/quit> ")
        terminal.hang_up()
        assert terminal.process.wait(20) == 5


@pytest.mark.parametrize("side", ["stdin", "stdout"])
def test_where_nobody_can_be_asked_it_ends_with_5_at_once(socket_path: str, cwd: str, side: str) -> None:  # S-25
    elsewhere = subprocess.DEVNULL
    with ScriptedDaemon(socket_path, failing(cwd)), at_terminal("prompt", "hello", **{side: elsewhere}) as terminal:
        assert terminal.ends() == 5
    assert KEPT in terminal.shown
    assert "/quit" not in terminal.shown


# --- an answer that was seen (S-6) ------------------------------------------------------------------------------------


def answered(cwd: str, *, start: int = 2, end: int = 4, events: list[Any] | None = None, **before: Any) -> Any:
    run = conversation(*says("the answer"), timing(start, end), SAVED)
    return answering(cwd, *(events or run), **before) | {"session/markRead": {"read": True}}


def test_an_answer_that_a_person_saw_is_read(socket_path: str, cwd: str) -> None:  # S-6
    with ScriptedDaemon(socket_path, answered(cwd)) as daemon, at_terminal("prompt", "hello") as terminal:
        assert terminal.ends() == 0
    assert daemon.asked("session/markRead") == [{"sessionId": "s1", "messageCount": 4}]


def test_what_went_to_a_pipe_or_was_left_alone_was_seen_by_nobody(
    socket_path: str, cwd: str, loopctl: Loopctl
) -> None:  # S-6
    with ScriptedDaemon(socket_path, answered(cwd)) as daemon:
        assert loopctl("prompt", "hello").code == 0
        for arguments in (["--no-wait"], ["--json"]):
            with at_terminal("prompt", "hello", *arguments) as terminal:
                assert terminal.ends() == 0
    assert daemon.asked("session/markRead") == []


@pytest.mark.parametrize(
    "unseen",
    [
        {"unread": True},
        {"start": 4, "end": 6},  # another client's run came in between
        {"path": None, "kind": "memory"},
        {"events": [*conversation()[:1], {"type": "events_lost", "from": 2, "to": 3}, timing(2, 4), conversation()[1]]},
    ],
    ids=["before", "between", "in memory", "a gap"],
)
def test_what_was_not_shown_stays_unread(socket_path: str, cwd: str, unseen: dict[str, Any]) -> None:  # S-6
    script = answered(cwd, **unseen) | {"session/state": state(cwd, run=running("run1")), "runtime/dispose": {}}
    with ScriptedDaemon(socket_path, script) as daemon, at_terminal("prompt", "hello") as terminal:
        assert terminal.ends() == 0
    assert daemon.asked("session/markRead") == []


def test_a_receipt_that_fails_is_no_failure_of_the_prompt(socket_path: str, cwd: str) -> None:  # S-6
    script = answered(cwd) | {"session/markRead": RpcError("pending_save", "not now")}
    with ScriptedDaemon(socket_path, script), at_terminal("prompt", "hello") as terminal:
        assert terminal.ends() == 0
    assert "not now" not in terminal.shown


# --- what a crash cut off (S-26) --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("typed", "recoveries"), [("\n", 1), ("n\n", 0)])
def test_a_prompt_asks_before_it_leaves_behind_what_a_crash_cut_off(
    socket_path: str, cwd: str, typed: str, recoveries: int
) -> None:
    cut = Recoverable(run_id="run0", started_at=1, messages=3)
    script = answering(cwd, *conversation(*says("the answer"), timing(2, 4)), recoverable=cut)
    script |= {"session/recover": {"runId": "run0", "messages": 3}, "session/markRead": {"read": True}}
    with ScriptedDaemon(socket_path, script) as daemon, at_terminal("prompt", "hello") as terminal:
        terminal.waits_for("3 messages of a run of ")
        terminal.waits_for("take them over first? [Y/n]")
        assert daemon.asked("session/prompt") == []
        terminal.type(typed)
        terminal.waits_for("the answer")
        assert terminal.ends() == 0
    assert daemon.asked("session/recover") == [{"sessionId": "s1"}] * recoveries
