"""``loopctl resume`` against a scripted daemon: what it goes on with, how it is followed, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from queueing import changed, item, waiting
from scripted_daemon import (
    NO_SESSIONS,
    Loopctl,
    Peer,
    ScriptedDaemon,
    Then,
    answering,
    conversation,
    opened,
    row,
    saved,
    says,
    state,
)
from typing_person import at_terminal

from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.types import Recoverable

LEFT = Recoverable(run_id="run0", started_at=1_700_000_000_000, messages=3)
AT_WORK = [{"type": "run_started", "runId": "run1", "operation": "resume"}, *says("and so on")]
SETTLED = conversation()[-1]


def resuming(cwd: str, *events: Any, **changes: Any) -> dict[str, Any]:
    """A session that is open here, and goes on with these events."""
    script = answering(cwd, *events, **changes)
    return script | {"runtime/list": {"runtimes": [row(cwd)]}, "session/resume": script.pop("session/prompt")}


@pytest.mark.parametrize(
    ("settled", "code"),
    [({}, 0), ({"outcome": "error", "error": {"kind": "model", "message": "x"}}, 1), ({"saved": False}, 5)],
)
def test_the_answer_streams_and_the_exit_code_tells_the_outcome(
    socket_path: str, cwd: str, loopctl: Loopctl, settled: dict[str, Any], code: int
) -> None:
    with ScriptedDaemon(socket_path, resuming(cwd, *AT_WORK, SETTLED | settled)) as daemon:
        ran = loopctl("resume")
        lines = loopctl("resume", "--json").out.splitlines()
    assert (ran.code, ran.out) == (code, "and so on\n")
    assert [json.loads(line)["event"]["type"] for line in lines][::5] == ["run_started", "message_update"]
    assert daemon.asked("session/resume")[0] == {"sessionId": "s1", "approvals": "reject"}  # nobody is here
    assert daemon.asked("runtime/open") == []


def test_no_wait_prints_the_ids(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    with ScriptedDaemon(socket_path, resuming(cwd)):
        assert loopctl("resume", "--no-wait").out == "runId run1\nsessionId s1\n"
        assert loopctl("resume", "--no-wait", "--timeout", "1").code == 2


@pytest.mark.parametrize(("arguments", "code"), [(["--timeout", "0.05"], 3), ([], 130)])
def test_it_is_stopped_as_a_prompt_is(
    socket_path: str, cwd: str, loopctl: Loopctl, arguments: list[str], code: int
) -> None:
    def begin(peer: Peer) -> None:
        peer.event(AT_WORK[0])
        if not arguments:
            os.kill(os.getpid(), signal.SIGINT)

    def stop(_: Any, peer: Peer) -> Any:
        peer.event(changed(waiting(item("aa11"), paused="stopped")))
        peer.event(SETTLED | {"outcome": "cancelled"})
        return {"stopped": True}

    script = resuming(cwd) | {
        "session/resume": Then({"runId": "run1"}, begin),
        "session/stop": stop,
        "run/wait": {"runId": "run1", "outcome": "cancelled", "saved": True},
    }
    with ScriptedDaemon(socket_path, script):
        ran = loopctl("resume", *arguments)
    assert ran.code == code
    assert "1 queued input, paused: the run was stopped; `loopctl resume` goes on" in ran.err


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        ("nothing_to_resume", 5, "`loopctl messages --last 2`"),
        ("session_busy", 5, "`loopctl attach` watches it"),
        ("pending_save", 5, "`loopctl flush`"),
        ("model_unavailable", 2, "`loopctl models`"),
    ],
)
def test_a_refusal_is_told_with_what_to_do(
    socket_path: str, cwd: str, loopctl: Loopctl, kind: str, code: int, said: str
) -> None:
    script = resuming(cwd) | {"session/resume": RpcError(kind, "not so"), "model/list": {"models": []}}
    with ScriptedDaemon(socket_path, script):
        ran = loopctl("resume")
    assert ran.code == code
    assert ran.err.startswith("loopctl: not so\n")
    assert said in ran.err


# --- where it goes ----------------------------------------------------------------------------------------------------


def test_the_latest_saved_session_is_opened_for_this_directory(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    script = resuming(cwd, *AT_WORK, SETTLED) | {"runtime/list": {"runtimes": []}, "runtime/open": opened(cwd)}
    script["session/list"] = NO_SESSIONS | {"sessions": [saved("/a/s9/meta.json", cwd)]}
    with ScriptedDaemon(socket_path, script) as daemon:
        assert loopctl("resume").code == 0
    [request] = daemon.asked("runtime/open")
    assert request["session"] == {"kind": "open", "path": "/a/s9/meta.json"}
    assert "runtimeId" not in request
    assert request["env"]


def test_a_named_session_is_opened_beside_the_one_of_this_directory(
    socket_path: str, cwd: str, loopctl: Loopctl
) -> None:
    paused = changed(waiting(item("aa11"), paused="error"))
    failed = SETTLED | {"outcome": "error", "error": {"kind": "model", "message": "x"}}
    script = resuming(cwd, AT_WORK[0], paused, failed) | {"runtime/open": opened(cwd)}
    with ScriptedDaemon(socket_path, script) as daemon:
        ran = loopctl("resume", "--session", "s9/meta.json")
    [request] = daemon.asked("runtime/open")
    assert (request["runtimeId"], request["session"]) == ("new", {"kind": "open", "path": f"{cwd}/s9/meta.json"})
    assert "`loopctl resume --session s1` goes on" in ran.err


def test_where_no_session_is_none_is_made(socket_path: str, loopctl: Loopctl) -> None:
    with ScriptedDaemon(socket_path) as daemon:
        ran = loopctl("resume")
    assert ran.code == 4
    assert daemon.asked("runtime/open") == []


def test_a_session_that_closed_as_it_was_reached_is_reached_again(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    tries = iter([RpcError("runtime_not_found", "gone"), {"seq": 0, "state": state(cwd)}])
    with ScriptedDaemon(socket_path, resuming(cwd, *AT_WORK, SETTLED) | {"runtime/attach": lambda *_: next(tries)}):
        assert loopctl("resume").code == 0


# --- after a crash ----------------------------------------------------------------------------------------------------


def test_a_script_is_told_to_take_over_first_what_a_crash_cut_off(
    socket_path: str, cwd: str, loopctl: Loopctl
) -> None:  # S-26
    with ScriptedDaemon(socket_path, resuming(cwd, recoverable=LEFT)) as daemon:
        ran = loopctl("resume")
    assert ran.code == 5
    assert ran.err == (
        "loopctl: a run was cut off by a crash, and 3 messages of it must be taken over first:\n"
        "loopctl: `loopctl recover --session s1`\n"
    )
    assert daemon.asked("session/resume") == daemon.asked("session/recover") == []


@pytest.mark.parametrize(("typed", "code", "asked"), [("y\r", 0, 1), ("n\r", 5, 0)])
def test_a_person_is_asked_whether_to_take_it_over(
    socket_path: str, cwd: str, typed: str, code: int, asked: int
) -> None:  # S-26
    script = resuming(cwd, *AT_WORK, SETTLED, recoverable=LEFT)
    script["session/recover"] = {"runId": "run0", "messages": 3}
    script["session/markRead"] = {"read": True}
    with ScriptedDaemon(socket_path, script) as daemon, at_terminal("resume") as terminal:
        terminal.waits_for("take them over first? [Y/n]")
        if asked:  # it is taken over then
            daemon.answers["runtime/attach"] = {"seq": 0, "state": state(cwd)}
        terminal.type(typed)
        assert terminal.ends() == code
    assert len(daemon.asked("session/recover")) == len(daemon.asked("session/resume")) == asked
    assert len(daemon.asked("runtime/attach")) == 1 + asked  # what it knew of the session is old then
    assert ("and so on" in terminal.shown) is bool(asked)


def test_recover_names_what_goes_on(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    script = resuming(cwd) | {
        "session/state": state(cwd, recoverable=LEFT),
        "session/recover": {"runId": "run0", "messages": 3},
    }
    with ScriptedDaemon(socket_path, script):
        ran = loopctl("recover")
        beside = loopctl("recover", "--session", "s1/meta.json")
    assert ran.out == "3 messages taken over; `loopctl messages` shows them, `loopctl resume` goes on\n"
    assert "`loopctl resume --session s1` goes on" in beside.out


def test_a_crash_in_the_middle_is_told_with_the_way_back(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    def die(peer: Peer) -> None:
        peer.event(AT_WORK[0])
        peer.hang_up()

    with ScriptedDaemon(socket_path, resuming(cwd) | {"session/resume": Then({"runId": "run1"}, die)}):
        ran = loopctl("resume")
    assert ran.code == 69
    assert "`loopctl recover --session s1`" in ran.err
