"""``loopctl prompt`` against a scripted daemon: where it goes, what it shows, and the exit code of every end."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from scripted_daemon import (
    Loopctl,
    Peer,
    ScriptedDaemon,
    Then,
    answering,
    assistant,
    conversation,
    opened,
    running,
    says,
    state,
)

from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.types import ModelRef

SETTLED = {"runId": "run1", "outcome": "cancelled", "saved": True}


def failed(message: str, *, kind: str = "model", **rest: Any) -> dict[str, Any]:
    return {"kind": kind, "message": message} | rest


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_the_answer_goes_to_stdout_and_tools_to_stderr(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    tool = [
        {"type": "tool_execution_start", "toolCallId": "c", "toolName": "bash", "arguments": {"command": "echo hi"}},
        {"type": "tool_execution_update", "toolCallId": "c", "outputDelta": "hi\n"},
        {"type": "tool_execution_end", "toolCallId": "c", "isError": False},
    ]
    thought = {"type": "message_update", "messageId": "m2", "thinkingDelta": "secret thought"}
    events = conversation(*says("let me see"), *tool, thought, *says("done\n", message="m2"))
    with ScriptedDaemon(socket_path, answering(cwd, *events)) as daemon:
        ran = loopctl("prompt", "hello")
    assert (ran.code, ran.out) == (0, "let me see\ndone\n")
    assert ran.err == '→ bash {"command":"echo hi"}\n  hi\n'
    [request] = daemon.asked("session/prompt")
    assert (request["sessionId"], request["content"]) == ("s1", "hello")
    assert request["requestId"]


def test_events_of_other_runs_and_sessions_are_not_shown(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    def play(peer: Peer) -> None:
        for event in [*conversation(*says("theirs"), run_id="run0"), *conversation(*says("ours"))]:
            peer.event(event)

    def elsewhere(_: Any, peer: Peer) -> Any:
        peer.event(conversation(run_id="run1")[-1], session="s0")
        return Then({"runId": "run1"}, play)

    with ScriptedDaemon(socket_path, answering(cwd) | {"session/prompt": elsewhere}):
        assert loopctl("prompt", "hello").out == "ours\n"


def test_a_failed_tool_without_output_says_why(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    refused = {
        "role": "toolResult",
        "index": 2,
        "content": [{"type": "text", "text": "read-only forbids commands"}],
        "timestamp": 1,
        "toolCallId": "c",
        "toolName": "bash",
        "isError": True,
    }
    events = conversation(
        {"type": "tool_execution_start", "toolCallId": "c", "toolName": "bash", "arguments": {}},
        {"type": "tool_execution_end", "toolCallId": "c", "isError": True},
        {"type": "message_end", "messageId": "t", "index": 2, "message": refused},
    )
    with ScriptedDaemon(socket_path, answering(cwd, *events)):
        assert loopctl("prompt", "hello").err == "→ bash {}\n  (failed)\n  read-only forbids commands\n"


def test_json_prints_the_events_of_the_run_as_they_came(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    before = {"type": "save_failed", "reason": "of another run"}
    events = [before, *conversation({"type": "weather", "sun": True}, *says("ok"))]
    with ScriptedDaemon(socket_path, answering(cwd, *events)):
        lines = [json.loads(line) for line in loopctl("prompt", "hello", "--json").out.splitlines()]
    assert [line["event"] for line in lines] == events[1:]
    assert [line["seq"] for line in lines] == list(range(2, len(events) + 1))


def test_lost_events_are_told_and_the_answer_comes_whole(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    started, *middle, settled = conversation(*says("0123456789"))
    events = [started, middle[1], {"type": "events_lost", "from": 3, "to": 4}, middle[4], middle[-1], settled]
    script = answering(cwd, *events) | {"session/state": state(cwd, run=running("run1"))}
    with ScriptedDaemon(socket_path, script):
        ran = loopctl("prompt", "hello")
    assert (ran.code, ran.out) == (0, "0167\n0123456789\n")
    assert "events were lost" in ran.err


def test_a_run_that_settled_among_lost_events_still_ends(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    events = [conversation()[0], {"type": "events_lost", "from": 3, "to": 4}]
    script = answering(cwd, *events) | {
        "session/state": state(cwd),
        "run/wait": {"runId": "run1", "outcome": "error", "saved": True, "error": failed("gone wrong")},
    }
    with ScriptedDaemon(socket_path, script):
        ran = loopctl("prompt", "hello")
    assert ran.code == 1
    assert "gone wrong" in ran.err


def test_a_wait_before_the_next_try_is_told_with_its_reason(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    wait = {"type": "retry_wait", "untilAt": 3001, "reason": "p answered with status 429: slow down"}  # events are at 1
    with ScriptedDaemon(socket_path, answering(cwd, *conversation(wait, *says("done")))):
        ran = loopctl("prompt", "hello")
    assert (ran.code, ran.out) == (0, "done\n")
    assert ran.err == "loopctl: retrying in 3 s: p answered with status 429: slow down\n"


def test_the_practice_model_is_named_with_the_way_to_a_real_one(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    script = answering(cwd, *conversation(), model=ModelRef("practice", "echo"), live_count=0)
    with ScriptedDaemon(socket_path, script):
        ran = loopctl("prompt", "hello")
    assert "practice/echo" in ran.err
    assert "OPENAI_API_KEY or ANTHROPIC_API_KEY" in ran.err
    assert "config.toml" in ran.err


def test_in_the_middle_of_a_conversation_the_practice_model_is_not_told_again(
    socket_path: str, cwd: str, loopctl: Loopctl
) -> None:  # D-7
    with ScriptedDaemon(socket_path, answering(cwd, *conversation(), model=ModelRef("practice", "echo"))):
        assert loopctl("prompt", "hello").err == ""


LACKING = {
    "models": [
        {"provider": name, "id": "*", "usable": False, "input": ["text"], "default": False, "reason": f"set {variable}"}
        | {"keyEnv": variable}
        for name, variable in (("anthropic", "ANTHROPIC_API_KEY"), ("mine", "MINE_KEY"))
    ]
}


@pytest.mark.parametrize(("variable", "name"), [("ANTHROPIC_API_KEY", "anthropic"), ("MINE_KEY", "mine")])
def test_a_key_that_is_here_but_not_in_the_daemon_is_told_with_the_remedy(
    socket_path: str, cwd: str, loopctl: Loopctl, variable: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "sk-secret")
    practising = answering(cwd, *conversation(), model=ModelRef("practice", "echo")) | {"model/list": LACKING}
    refusing = answering(cwd) | {
        "session/prompt": RpcError("model_unavailable", f"set {variable}"),
        "model/list": LACKING,
    }
    for script, arguments in ((practising, ()), (practising, ("--model", "practice/echo")), (refusing, ())):
        with ScriptedDaemon(socket_path, script):
            ran = loopctl("prompt", "hello", *arguments)
        assert f"{variable} is set here, but not in the running daemon, which cannot use {name}" in ran.err
        assert "loopctl daemon restart" in ran.err
        assert "practice model" not in ran.err
        assert "sk-secret" not in ran.out + ran.err


def test_a_key_that_no_model_waits_for_is_nobodys_business(
    socket_path: str, cwd: str, loopctl: Loopctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-secret")
    with ScriptedDaemon(socket_path, answering(cwd, *conversation()) | {"model/list": LACKING}) as daemon:
        ran = loopctl("prompt", "hello")
    assert ran.err == ""
    assert daemon.asked("model/list") == []  # it would be one more answer to wait for


# --- how it ends ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settled", "code", "said"),
    [
        ({"outcome": "success"}, 0, ""),
        ({"outcome": "error", "error": failed("no such model")}, 1, "the run failed: no such model"),
        ({"outcome": "cancelled"}, 1, "stopped"),
        ({"outcome": "success", "saved": False, "error": failed("disk full", kind="save_failed")}, 5, "loopctl flush"),
        ({"outcome": "error", "saved": False, "error": failed("both")}, 5, "loopctl flush"),  # S-25
    ],
)
def test_the_exit_code_tells_the_outcome(
    socket_path: str, cwd: str, loopctl: Loopctl, settled: dict[str, Any], code: int, said: str
) -> None:
    with ScriptedDaemon(socket_path, answering(cwd, *conversation(**settled))):
        ran = loopctl("prompt", "hello")
    assert ran.code == code
    assert said in ran.err


def test_a_run_and_a_save_that_both_failed_are_both_named(socket_path: str, cwd: str, loopctl: Loopctl) -> None:  # S-17
    parts = [failed("model gone", kind="model_unavailable"), failed("disk full", kind="save_failed")]
    events = conversation(outcome="error", saved=False, error=failed("two failures", errors=parts))
    with ScriptedDaemon(socket_path, answering(cwd, *events)):
        ran = loopctl("prompt", "hello")
    assert ran.code == 5
    assert "model_unavailable: model gone" in ran.err
    assert "save_failed: disk full" in ran.err


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("session_busy", 5),
        ("pending_save", 5),
        ("approvals_pending", 5),
        ("draining", 5),
        ("session_not_found", 4),
        ("invalid_params", 2),
        ("internal", 1),
        ("a_kind_from_the_future", 1),
    ],
)
def test_a_refused_prompt_exits_by_its_kind(socket_path: str, cwd: str, loopctl: Loopctl, kind: str, code: int) -> None:
    with ScriptedDaemon(socket_path, answering(cwd) | {"session/prompt": RpcError(kind, "not now")}):
        ran = loopctl("prompt", "hello")
    assert ran.code == code
    assert ran.err.startswith("loopctl: not now\n")


def test_a_daemon_lost_in_mid_run_is_69_and_says_what_is_kept(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    def die(peer: Peer) -> None:
        for event in conversation(*says("half an answer"))[:4]:
            peer.event(event)
        peer.hang_up()

    with ScriptedDaemon(socket_path, answering(cwd) | {"session/prompt": Then({"runId": "run1"}, die)}):
        ran = loopctl("prompt", "hello")
    assert ran.code == 69
    assert "is kept" in ran.err
    assert "`loopctl recover --session s1`" in ran.err  # S-26


def test_a_save_that_fails_is_told_once(socket_path: str, cwd: str, loopctl: Loopctl) -> None:  # S-14
    told = {"type": "save_failed", "reason": "the disk is full"}
    events = conversation(told, saved=False, error=failed("the disk is full", kind="save_failed"))
    with ScriptedDaemon(socket_path, answering(cwd, *events)):
        ran, machine = loopctl("prompt", "hello"), loopctl("prompt", "--json", "hello")
    assert (ran.code, ran.err.count("the disk is full")) == (5, 1)
    assert machine.err.count("the disk is full") == 1  # for the person: stdout is for a program


def test_words_without_quotes_are_refused_with_the_remedy(socket_path: str, loopctl: Loopctl) -> None:
    ran = loopctl("prompt", "what", "is", "this?")
    assert ran.code == 2
    assert "put it in quotes" in ran.err
    assert not Path(socket_path).exists()


def test_the_time_given_stops_the_run(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    def stop(_: Any, peer: Peer) -> Any:
        for event in [*says("half"), conversation(outcome="cancelled")[-1]]:
            peer.event(event)
        return {"stopped": True}

    script = answering(cwd, conversation()[0]) | {"session/stop": stop, "run/wait": SETTLED}
    with ScriptedDaemon(socket_path, script) as daemon:
        ran = loopctl("prompt", "hello", "--timeout", "0.05")
    assert (ran.code, ran.out) == (3, "half\n")
    assert "--timeout" in ran.err
    assert daemon.asked("session/stop") == [{"sessionId": "s1", "runId": "run1"}]


def test_a_run_that_ended_as_it_was_stopped_keeps_its_own_outcome(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    def too_late(_: Any, peer: Peer) -> Any:
        peer.event(conversation()[-1])
        return {"stopped": False}

    script = answering(cwd, conversation()[0]) | {"session/stop": too_late, "run/wait": SETTLED}
    with ScriptedDaemon(socket_path, script):
        assert loopctl("prompt", "hello", "--timeout", "0.05").code == 0


def test_ctrl_c_stops_the_run_and_says_so(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    def interrupt(peer: Peer) -> None:
        peer.event(conversation()[0])
        os.kill(os.getpid(), signal.SIGINT)

    def stop(_: Any, peer: Peer) -> Any:
        peer.event(conversation(outcome="cancelled")[-1])
        return {"stopped": True}

    script = answering(cwd) | {
        "session/prompt": Then({"runId": "run1"}, interrupt),
        "session/stop": stop,
        "run/wait": SETTLED,
    }
    with ScriptedDaemon(socket_path, script):
        ran = loopctl("prompt", "hello")
    assert (ran.code, ran.err) == (130, "loopctl: stopped\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_no_wait_prints_the_ids_and_leaves_the_run(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    with ScriptedDaemon(socket_path, answering(cwd)):
        assert loopctl("prompt", "hello", "--no-wait").out == "runId run1\nsessionId s1\n"
        ids = json.loads(loopctl("prompt", "hello", "--no-wait", "--json").out)
    assert ids == {"runId": "run1", "sessionId": "s1"}


# --- where it goes ----------------------------------------------------------------------------------------------------


def test_the_current_session_is_opened_new_with_the_callers_environment(
    socket_path: str, cwd: str, loopctl: Loopctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    with ScriptedDaemon(socket_path, answering(cwd, *conversation())) as daemon:
        loopctl("prompt", "hello", "--model", "a/b/c", "--permission", "read-only")
    [request] = daemon.asked("runtime/open")
    assert (request["cwd"], request["session"], request["model"]) == (
        cwd,
        {"kind": "new"},
        {"provider": "a", "id": "b/c"},
    )
    assert request["env"]["LC_ALL"] == "C.UTF-8"
    assert "SOME_API_KEY" not in request["env"]
    umask = os.umask(0)
    os.umask(umask)
    assert request["umask"] == umask
    assert "runtimeId" not in request


def test_an_open_session_is_joined_and_set_to_what_was_asked(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    script = answering(cwd, *conversation()) | {
        "runtime/open": RpcError("conflict", "open", runtimeId="r7", sessionId="s1"),
        "session/setModel": {"model": {"provider": "a", "id": "b"}},
        "session/setPermission": {"permission": "workspace-write"},
    }
    with ScriptedDaemon(socket_path, script) as daemon:
        ran = loopctl("prompt", "hello", "--model", "a/b", "--permission", "workspace-write")
    assert daemon.asked("runtime/attach") == [{"runtimeId": "r7"}]
    assert daemon.asked("session/setModel") == [{"sessionId": "s1", "model": {"provider": "a", "id": "b"}}]
    assert "model is now a/b (it was ollama/qwen)" in ran.err
    assert "permission is now workspace-write (it was read-only)" in ran.err
    assert [name for name, _ in daemon.requests][-1] == "session/prompt"


@pytest.mark.parametrize(
    ("had", "arguments", "wanted"),
    [
        (None, ["--effort", "high"], {"provider": "ollama", "id": "qwen", "effort": "high"}),
        ("low", ["--effort", "high"], {"provider": "ollama", "id": "qwen", "effort": "high"}),
        ("low", ["--model", "a/b", "--effort", "high"], {"provider": "a", "id": "b", "effort": "high"}),
        ("low", ["--model", "a/b"], {"provider": "a", "id": "b"}),
        ("low", ["--model", "ollama/qwen"], None),
        ("high", ["--effort", "high"], None),
    ],
)
def test_an_effort_is_set_where_it_differs_and_stays_with_its_model(
    socket_path: str, cwd: str, loopctl: Loopctl, had: str | None, arguments: list[str], wanted: Any
) -> None:
    script = answering(cwd, *conversation(), model=ModelRef("ollama", "qwen", had)) | {
        "session/setModel": {"model": wanted or {}}
    }
    with ScriptedDaemon(socket_path, script) as daemon:
        ran = loopctl("prompt", "hello", *arguments)
    assert ran.code == 0
    assert daemon.asked("session/setModel") == ([{"sessionId": "s1", "model": wanted}] if wanted else [])
    if wanted and "effort" in wanted:
        assert f"is now {wanted['provider']}/{wanted['id']} with high effort (it was ollama/qwen" in ran.err


def test_a_new_session_starts_with_the_effort(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    with ScriptedDaemon(socket_path, answering(cwd, *conversation(), model=ModelRef("a", "b", "low"))) as daemon:
        ran = loopctl("prompt", "hello", "--new", "--model", "a/b", "--effort", "low")
    [request] = daemon.asked("runtime/open")
    assert request["model"] == {"provider": "a", "id": "b", "effort": "low"}
    assert (ran.code, ran.err) == (0, "")


def test_new_replaces_the_session_of_the_open_runtime(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    script = answering(cwd, *conversation()) | {
        "runtime/open": RpcError("conflict", "open", runtimeId="r7", sessionId="s0"),
        "runtime/newSession": opened(cwd, cancelled=False, runtimeId="r7"),
    }
    with ScriptedDaemon(socket_path, script) as daemon:
        assert loopctl("prompt", "hello", "--new").code == 0
    [renewal] = daemon.asked("runtime/newSession")
    assert {renewal["runtimeId"]: renewal["env"]["PATH"]} == {"r7": os.environ["PATH"]}
    assert daemon.asked("runtime/attach") == [{"runtimeId": "r7"}]


def test_a_session_by_path_joins_the_runtime_that_has_it(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    script = answering(cwd, *conversation()) | {"runtime/open": RpcError("session_locked", "open", runtimeId="r7")}
    with ScriptedDaemon(socket_path, script) as daemon:
        assert loopctl("prompt", "hello", "--session", "x/meta.json").code == 0
    [request] = daemon.asked("runtime/open")
    assert (request["runtimeId"], request["session"]) == ("new", {"kind": "open", "path": f"{cwd}/x/meta.json"})
    assert daemon.asked("runtime/attach") == [{"runtimeId": "r7"}]


def test_a_session_that_another_process_holds_is_refused(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    script = answering(cwd) | {"runtime/open": RpcError("session_locked", "held by process 7", holder=7)}
    with ScriptedDaemon(socket_path, script):
        assert loopctl("prompt", "hello", "--session", "x/meta.json").code == 5


def test_no_session_has_a_runtime_of_its_own_that_goes_at_the_end(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    script = answering(cwd, *conversation(outcome="error", error=failed("x"))) | {"runtime/dispose": {}}
    with ScriptedDaemon(socket_path, script) as daemon:
        assert loopctl("prompt", "hello", "--no-session").code == 1
    [request] = daemon.asked("runtime/open")
    assert (request["runtimeId"], request["session"]) == ("new", {"kind": "memory"})
    assert daemon.requests[-1] == ("runtime/dispose", {"runtimeId": "r1"})


def test_a_runtime_that_vanished_before_we_joined_is_opened_again(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    tries = iter([RpcError("conflict", "open", runtimeId="gone"), opened(cwd)])

    def attach(params: Any, _: Peer) -> Any:
        return (
            RpcError("runtime_not_found", "gone") if params["runtimeId"] == "gone" else {"seq": 0, "state": state(cwd)}
        )

    script = answering(cwd, *conversation()) | {"runtime/open": lambda *_: next(tries), "runtime/attach": attach}
    with ScriptedDaemon(socket_path, script):
        assert loopctl("prompt", "hello").code == 0


# --- what is sent -----------------------------------------------------------------------------------------------------


class Stdin(io.TextIOWrapper):
    def __init__(self, raw: bytes, *, terminal: bool = False) -> None:
        super().__init__(io.BytesIO(raw))
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize("arguments", [["prompt"], ["prompt", "-"]])
def test_stdin_is_read_for_a_dash_or_without_a_text(
    socket_path: str, cwd: str, loopctl: Loopctl, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(b"from a pipe\xff\n"))
    with ScriptedDaemon(socket_path, answering(cwd, *conversation())) as daemon:
        ran = loopctl(*arguments)
    assert daemon.asked("session/prompt")[0]["content"] == "from a pipe\ufffd\n"
    assert "not UTF-8" in ran.err


def test_stdin_is_left_alone_when_a_text_is_given(
    socket_path: str, cwd: str, loopctl: Loopctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = Stdin(b"for somebody else")
    monkeypatch.setattr(sys, "stdin", stdin)
    with ScriptedDaemon(socket_path, answering(cwd, *conversation())):
        loopctl("prompt", "hello")
    assert stdin.buffer.read() == b"for somebody else"


def test_an_argument_that_is_not_utf_8_is_sent_with_replacements(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    with ScriptedDaemon(socket_path, answering(cwd, *conversation())) as daemon:
        loopctl("prompt", os.fsdecode(b"caf\xe9"))
    assert daemon.asked("session/prompt")[0]["content"] == "caf\ufffd"


@pytest.mark.parametrize(
    "arguments",
    [
        ["prompt"],
        ["prompt", "  "],
        ["prompt", "x", "--new", "--continue"],
        ["prompt", "x", "--session", "p", "--no-session"],
        ["prompt", "x", "--model", "nonsense"],
        ["prompt", "x", "--permission", "all"],
        ["prompt", "x", "--timeout", "0"],
        ["prompt", "x", "--no-wait", "--no-session"],
        ["prompt", "x", "y"],
        ["nonsense"],
    ],
)
def test_a_usage_error_is_2_before_anything_is_started(
    socket_path: str, loopctl: Loopctl, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(b"", terminal=True))
    assert loopctl(*arguments).code == 2
    assert not Path(socket_path).exists()


def test_an_assistant_message_is_shown_even_if_no_delta_was(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    whole = {"type": "message_end", "messageId": "m", "index": 1, "message": assistant("at once")}
    with ScriptedDaemon(socket_path, answering(cwd, *conversation(whole))):
        assert loopctl("prompt", "hello").out == "at once\n"
