"""The other commands against a scripted daemon: what they ask, what they print, and their exit codes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scripted_daemon import (
    Loopctl,
    Peer,
    Ran,
    ScriptedDaemon,
    Then,
    assistant,
    conversation,
    row,
    running,
    saved,
    says,
    state,
)

from loop_protocol import client as client_module
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.types import ErrorInfo, Title

EMPTY = {"sessions": [], "damaged": [], "legacy": [], "unsupported": 0}
STATUS = {
    "version": "0.1.0",
    "pid": 1,
    "uptimeMs": 61_000,
    "draining": False,
    "runtimes": 1,
    "sessions": 1,
    "runs": 0,
    "pendingApprovals": 0,
    "pendingSaves": [],
    "connections": 1,
    "socket": "/s",
    "dataDir": "/d",
    "counters": {},
}
DRAINED = {"draining": True, "quiet": True, "exiting": True, "runs": 0, "pendingSaves": [], "rescued": []}


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["drain"],
        ["stop"],
        ["abort"],
        ["flush"],
        ["attach"],
        ["dispose"],
        ["runtimes"],
        ["daemon", "stop"],
        ["daemon", "log"],
    ],
)
def test_commands_that_need_a_running_daemon_start_none(
    socket_path: str, loopctl: Loopctl, arguments: list[str]
) -> None:
    ran = loopctl(*arguments)
    assert ran.code == 69
    assert "loopctl daemon start" in ran.err
    assert not Path(socket_path).exists()


def test_a_socket_path_that_is_too_long_names_length_and_limit(loopctl: Loopctl) -> None:  # K-54
    ran = loopctl("--socket", "/" + "x" * 119, "sessions")
    assert ran.code == 69
    assert "120 bytes" in ran.err
    assert "107" in ran.err


def test_beside_a_daemon_that_hangs_no_second_one_is_started(
    socket_path: str, tmp_path: Path, loopctl: Loopctl, monkeypatch: pytest.MonkeyPatch
) -> None:  # K-53
    monkeypatch.setattr(client_module, "CONNECT_TIMEOUT", 0.05)
    with ScriptedDaemon(socket_path, {"initialize": None}):
        ran = loopctl("sessions")
    assert ran.code == 69
    assert "does not answer" in ran.err
    assert not (tmp_path / "state").exists()


# --- reading ----------------------------------------------------------------------------------------------------------


def messages_of(count: int, page: int) -> Any:
    texts = [assistant(f"text {index}") | {"index": index} for index in range(count)]

    def answer(params: Any, _: Peer) -> Any:
        end = min(params["start"] + min(page, params.get("limit", page)), count)
        return {
            "start": params["start"],
            "total": count,
            "committed": count - 1,
            "messages": texts[params["start"] : end],
        }

    return answer


def test_messages_joins_the_pages_of_the_open_session(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    script = {"runtime/list": {"runtimes": [row(cwd)]}, "session/messages": messages_of(7, 3)}
    with ScriptedDaemon(socket_path, script) as daemon:
        document = json.loads(loopctl("messages", "--json").out)
        human = loopctl("messages")
        part = json.loads(loopctl("messages", "--json", "--start", "1", "--limit", "4").out)
    assert [message["index"] for message in document["messages"]] == list(range(7))
    assert (document["start"], document["total"], document["committed"]) == (0, 7, 6)
    assert daemon.asked("session/messages")[0] == {"sessionId": "s1", "start": 0}
    assert "text 6" in human.out
    assert human.out.count("not saved yet") == 1
    assert [message["index"] for message in part["messages"]] == [1, 2, 3, 4]


def test_without_an_open_session_the_latest_saved_one_is_read_by_path(
    socket_path: str, cwd: str, loopctl: Loopctl
) -> None:
    script = {
        "runtime/list": {"runtimes": [row("/elsewhere"), row(cwd, kind="memory", default=False)]},
        "session/list": EMPTY | {"sessions": [saved("/a/s9/meta.json", cwd)]},
        "session/messages": messages_of(1, 9),
    }
    with ScriptedDaemon(socket_path, script) as daemon:
        assert loopctl("messages").code == 0
    assert daemon.asked("session/list") == [{"cwd": cwd, "limit": 1}]
    assert daemon.asked("session/messages") == [{"path": "/a/s9/meta.json", "start": 0}]


@pytest.mark.parametrize("command", ["messages", "state"])
def test_no_session_at_all_is_4_and_names_damaged_ones(socket_path: str, loopctl: Loopctl, command: str) -> None:
    damaged = EMPTY | {"damaged": [{"path": "/a/meta.json", "reason": "NUL bytes"}]}
    with ScriptedDaemon(socket_path, {"runtime/list": {"runtimes": []}, "session/list": damaged}):
        ran = loopctl(command)
    assert ran.code == 4
    assert "/a/meta.json: NUL bytes" in ran.err


def test_a_named_session_is_read_by_id_where_it_is_open_and_by_path_where_not(
    socket_path: str, cwd: str, loopctl: Loopctl
) -> None:
    script = {"runtime/list": {"runtimes": [row(cwd)]}, "session/state": state(cwd)}
    with ScriptedDaemon(socket_path, script) as daemon:
        shown = loopctl("state", "--session", "s1/meta.json")
        loopctl("state", "--session", "s2/meta.json")
    assert daemon.asked("session/state") == [{"sessionId": "s1"}, {"path": f"{cwd}/s2/meta.json"}]
    assert "ollama/qwen" in shown.out


def test_state_names_a_pending_save_and_what_to_do(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    unsaved = state(cwd, has_pending_save=True, save_error="disk full", run=running("run1"), operation="prompt")
    with ScriptedDaemon(socket_path, {"runtime/list": {"runtimes": [row(cwd)]}, "session/state": unsaved}):
        ran = loopctl("state")
        document = json.loads(loopctl("state", "--json").out)
    assert "disk full; repair the cause, then `loopctl flush`" in ran.out
    assert "run1" in ran.out
    assert document["hasPendingSave"] is True


def test_sessions_is_a_table_and_names_what_cannot_be_listed(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    listing = {
        "sessions": [saved("/a/s1/meta.json", cwd)],
        "damaged": [{"path": "/a/s2/meta.json", "reason": "not JSON"}],
        "legacy": ["/a/old.jsonl"],
        "unsupported": 2,
    }
    with ScriptedDaemon(socket_path, {"session/list": listing}) as daemon:
        ran = loopctl("sessions")
        document = json.loads(loopctl("sessions", "--all", "--limit", "3", "--session-dir", "d", "--json").out)
    assert daemon.asked("session/list") == [{"cwd": cwd}, {"sessionDir": f"{cwd}/d", "limit": 3}]
    heading, line = ran.out.splitlines()
    assert heading.index("PATH") == line.index("/a/s1/meta.json")
    assert "unread" in line
    assert "damaged: /a/s2/meta.json: not JSON" in ran.err
    assert "/a/old.jsonl" in ran.err
    assert "2 of a newer format" in ran.err
    assert document == listing


def test_models_marks_the_default_and_says_why_one_is_not_usable(socket_path: str, loopctl: Loopctl) -> None:
    rows = [
        {"provider": "ollama", "id": "q", "usable": True, "input": ["text"], "default": True, "contextWindow": 8192},
        {"provider": "x", "id": "y", "usable": False, "input": ["text"], "default": False, "reason": "no key"},
    ]
    with ScriptedDaemon(socket_path, {"model/list": {"models": rows}}):
        ran = loopctl("models")
    assert "*  ollama/q  8192" in ran.out
    assert "not usable: no key" in ran.out
    assert ran.err == ""


def test_models_says_which_key_is_here_that_the_daemon_lacks(
    socket_path: str, loopctl: Loopctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"provider": "x", "id": "y", "usable": False, "input": ["text"], "default": False, "reason": "set X_KEY"}
    monkeypatch.setenv("X_KEY", "sk-secret")
    with ScriptedDaemon(socket_path, {"model/list": {"models": [row | {"keyEnv": "X_KEY"}, row]}}):
        shown = [loopctl("models"), loopctl("models", "--json")]
    for ran in shown:
        assert ran.err.count("X_KEY is set here, but not in the running daemon, which cannot use x without it") == 1
        assert "loopctl daemon restart" in ran.err
        assert "sk-secret" not in ran.out + ran.err


# --- acting -----------------------------------------------------------------------------------------------------------


def test_stop_ends_the_running_run(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    idle, busy = row(cwd, sessionId="s0"), row(cwd, default=False, running=True)
    script = {
        "runtime/list": {"runtimes": [idle, busy]},
        "session/state": state(cwd, run=running("run1")),
        "session/stop": {"stopped": True},
    }
    with ScriptedDaemon(socket_path, script) as daemon:
        assert loopctl("stop").out == "stopped\n"
    assert daemon.asked("session/stop") == [{"sessionId": "s1", "runId": "run1"}]


def test_stop_of_an_idle_session_says_so(socket_path: str, cwd: str, loopctl: Loopctl) -> None:  # K-29
    script = {"runtime/list": {"runtimes": [row(cwd)]}, "session/state": state(cwd)}
    with ScriptedDaemon(socket_path, script):
        ran = loopctl("stop")
        assert (ran.code, ran.out) == (0, "nothing is running\n")
        assert json.loads(loopctl("stop", "--json").out) == {"stopped": False}


@pytest.mark.parametrize("command", ["stop", "abort", "flush", "attach", "dispose"])
def test_where_no_session_is_open_the_code_is_4(socket_path: str, loopctl: Loopctl, command: str) -> None:
    with ScriptedDaemon(socket_path, {"runtime/list": {"runtimes": [row("/elsewhere")]}}):
        assert loopctl(command).code == 4


def test_abort_and_flush_name_the_session_and_tell_the_result(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    script = {
        "runtime/list": {"runtimes": [row(cwd)]},
        "session/abort": {"stopped": True},
        "session/flush": {"flushed": True},
    }
    with ScriptedDaemon(socket_path, script):
        assert loopctl("abort").out == "aborted\n"
        assert loopctl("flush", "--runtime", "r1").out == "saved\n"


def test_a_flush_that_fails_is_5(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    script = {"runtime/list": {"runtimes": [row(cwd)]}, "session/flush": RpcError("save_failed", "disk full")}
    with ScriptedDaemon(socket_path, script):
        ran = loopctl("flush")
    assert ran.code == 5
    assert "disk full" in ran.err


def test_a_session_that_cannot_be_made_is_not_said_to_be_kept(socket_path: str, loopctl: Loopctl) -> None:
    """S-25: nothing is in the daemon's memory then."""
    with ScriptedDaemon(socket_path, {"runtime/open": RpcError("save_failed", "could not create it")}):
        ran = loopctl("new")
    assert ran.code == 5
    assert "could not create it" in ran.err
    assert "if anything" in ran.err


def test_status_and_drain_show_what_is_unsaved(socket_path: str, loopctl: Loopctl) -> None:
    unsaved = [{"sessionId": "s1", "reason": "disk full", "path": "/a/meta.json"}]
    script = {
        "server/status": STATUS | {"pendingSaves": unsaved},
        "server/drain": DRAINED | {"exiting": False, "pendingSaves": unsaved},
    }
    with ScriptedDaemon(socket_path, script) as daemon:
        status, drain = loopctl("status"), loopctl("drain", "--exit", "--deadline", "1.5")
    assert status.code == 0
    assert "1 min" in status.out
    assert "/a/meta.json: disk full" in status.err
    assert drain.code == 5
    assert daemon.asked("server/drain") == [{"exit": True, "rescue": False, "cancel": False, "deadlineMs": 1500}]


def test_daemon_stop_over_a_pending_save_is_refused(socket_path: str, loopctl: Loopctl) -> None:  # S-25
    unsaved = [{"sessionId": "s1", "reason": "disk full"}]
    script = {"server/status": STATUS, "server/drain": DRAINED | {"exiting": False, "pendingSaves": unsaved}}
    with ScriptedDaemon(socket_path, script):
        ran = loopctl("daemon", "stop")
    assert ran.code == 5
    assert "--rescue" in ran.err


def test_rpc_prints_the_result_and_an_error_as_json(socket_path: str, loopctl: Loopctl) -> None:
    script = {"server/status": STATUS, "session/flush": RpcError("session_not_found", "no such session")}
    with ScriptedDaemon(socket_path, script) as daemon:
        assert json.loads(loopctl("rpc", "server/status", "--json").out) == STATUS
        missing = loopctl("rpc", "session/flush", '{"sessionId": "x"}')
        assert loopctl("rpc", "session/flush", "{nonsense").code == 2
        assert loopctl("rpc", "no/method").code == 2
    assert missing.code == 4
    assert json.loads(missing.err)["data"] == {"kind": "session_not_found", "retryable": False}
    assert daemon.asked("session/flush") == [{"sessionId": "x"}]


# --- watching ---------------------------------------------------------------------------------------------------------


def test_attach_shows_what_others_do_until_the_session_closes(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    user = {"role": "user", "index": 0, "content": [{"type": "text", "text": "hi"}], "timestamp": 1}
    asked = {"type": "message_end", "messageId": "u", "index": 0, "message": user}

    def play(peer: Peer) -> None:
        for event in [*conversation(asked, *says("hello")), {"type": "session_closed", "reason": "disposed"}]:
            peer.event(event)

    script = {
        "runtime/list": {"runtimes": [row(cwd)]},
        "runtime/attach": lambda *_: Then({"seq": 0, "state": state(cwd)}, play),
    }
    with ScriptedDaemon(socket_path, script):
        human, lines = loopctl("attach"), loopctl("attach", "--json", "--since", "0").out.splitlines()
    assert (human.code, human.out) == (0, "hello\n")
    assert "> hi\n" in human.err
    assert "closed: disposed" in human.err
    assert [json.loads(line)["event"]["type"] for line in lines][-1] == "session_closed"


def test_attach_tells_the_title_what_becomes_of_it_and_why_none_came(
    socket_path: str, cwd: str, loopctl: Loopctl
) -> None:  # T-11, T-12
    made = {"text": "Project startup", "source": "model", "messageIndices": [0]}
    failed = {"kind": "timeout", "message": "ollama/qwen did not answer"}
    spent = {"inputTokens": 3, "outputTokens": 1}

    def play(peer: Peer) -> None:
        for event in ({"title": made, "usage": spent}, {"error": failed}, {"usage": spent}):
            peer.event({"type": "session_title", **event})
        peer.event({"type": "session_closed", "reason": "disposed"})

    before = state(cwd, title=Title(text="Explain it", source="fallback", message_indices=[0]))
    before = msgspec.structs.replace(before, title_error=ErrorInfo("auth", "no key"))
    script = {
        "runtime/list": {"runtimes": [row(cwd)]},
        "runtime/attach": lambda *_: Then({"seq": 0, "state": before}, play),
    }
    with ScriptedDaemon(socket_path, script):
        told = loopctl("attach").err.splitlines()
    assert told[0] == "loopctl: Explain it"
    assert [line for line in told[1:] if " title " in line] == [
        "loopctl: no title came by itself: no key",
        "loopctl: the title is now: Project startup",
        "loopctl: no title came by itself: ollama/qwen did not answer",
    ]


def test_ctrl_c_ends_the_watching_only(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    def interrupt(_: Peer) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    script = {
        "runtime/list": {"runtimes": [row(cwd)]},
        "runtime/attach": Then({"seq": 0, "state": state(cwd)}, interrupt),
    }
    with ScriptedDaemon(socket_path, script) as daemon:
        assert loopctl("attach").code == 130
    assert [name for name, _ in daemon.requests] == ["initialize", "runtime/list", "runtime/attach"]


def test_a_daemon_lost_while_watching_is_told_in_a_line_of_its_own(
    socket_path: str, cwd: str, loopctl: Loopctl
) -> None:
    def die(peer: Peer) -> None:
        for event in conversation(*says("half an answer"))[:4]:
            peer.event(event)
        peer.hang_up()

    script = {
        "runtime/list": {"runtimes": [row(cwd)]},
        "runtime/attach": Then({"seq": 0, "state": state(cwd)}, die),
    }
    with ScriptedDaemon(socket_path, script):
        ran = loopctl("attach")
    assert ran.code == 69
    assert ran.out.endswith("half\n")


def test_a_save_that_fails_is_told_once_to_who_watches(socket_path: str, cwd: str, loopctl: Loopctl) -> None:  # S-14
    failed = {"type": "save_failed", "reason": "disk full"}
    settled = {"outcome": "success", "saved": False, "error": {"kind": "save_failed", "message": "disk full"}}
    events = [failed, {"type": "run_settled", "runId": "run1", **settled}]

    def play(peer: Peer) -> None:
        for event in [*events, {"type": "session_closed", "reason": "disposed"}]:
            peer.event(event)

    script = {
        "runtime/list": {"runtimes": [row(cwd)]},
        "runtime/attach": Then({"seq": 0, "state": state(cwd)}, play),
    }
    with ScriptedDaemon(socket_path, script):
        ran = loopctl("attach")
    assert ran.err.count("disk full") == 1


# --- the log ----------------------------------------------------------------------------------------------------------


def test_the_log_shows_its_last_lines_however_long_it_is(tmp_path: Path, loopctl: Loopctl) -> None:
    log = tmp_path / "state" / "loopd" / "loopd.log"
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"line {number}\n" for number in range(30_000)))
    assert loopctl("daemon", "log", "-n", "2").out == "line 29998\nline 29999\n"
    assert loopctl("daemon", "log", "-n", "0").out == ""
    assert loopctl("daemon", "log", "-n", "20000").out.splitlines()[0] == "line 10000"


def test_options_of_drain_that_would_do_nothing_are_refused(socket_path: str, loopctl: Loopctl) -> None:  # D-4
    with ScriptedDaemon(socket_path, {"server/drain": DRAINED}) as daemon:
        for options in (["--rescue"], ["--cancel", "--exit"], ["--cancel", "--deadline", "1"]):
            assert loopctl("drain", *options).code == 2
    assert daemon.asked("server/drain") == []


def test_a_drain_that_stays_says_how_to_take_it_back(socket_path: str, loopctl: Loopctl) -> None:  # D-4
    with ScriptedDaemon(socket_path, {"server/drain": DRAINED | {"exiting": False}}):
        ran = loopctl("drain")
    assert (ran.code, ran.out) == (0, "quiet\n")
    assert "`loopctl drain --cancel`" in ran.err


def test_a_rescue_copy_comes_with_the_way_back_and_how_long_it_lasts(
    socket_path: str, tmp_path: Path, loopctl: Loopctl, monkeypatch: pytest.MonkeyPatch
) -> None:  # S-25
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    lasting, passing = "/data/rescue/s1-2", str(tmp_path / "run" / "loopd" / "rescue" / "s1-2")
    for copy in (lasting, passing):
        with ScriptedDaemon(socket_path, {"server/drain": DRAINED | {"rescued": [copy]}}):
            ran = loopctl("drain", "--exit", "--rescue")
        assert ran.out == f"quiet, the daemon exits\nrescue copy: {copy}\n"
        assert f"`loopd rescue apply {copy}`" in ran.err
        assert ("gone after a logout" in ran.err) is (copy == passing)


def test_no_messages_are_said_to_be_none(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    script = {"runtime/list": {"runtimes": [row(cwd)]}, "session/messages": messages_of(0, 3)}
    with ScriptedDaemon(socket_path, script):
        assert loopctl("messages") == Ran(0, "", "loopctl: no messages yet\n")
    with ScriptedDaemon(socket_path, script | {"session/messages": messages_of(2, 3)}):
        assert loopctl("messages", "--start", "2").err == "loopctl: there are 2 messages, from 0 on\n"


def test_an_empty_title_is_a_usage_error(loopctl: Loopctl) -> None:  # T-5
    ran = loopctl("rename", " ")
    assert ran.code == 2
    assert "the title is empty" in ran.err


def test_the_list_of_daemon_commands_has_whole_sentences(loopctl: Loopctl) -> None:
    ran = loopctl("daemon", "--help")
    assert ran.code == 0
    assert "..." not in ran.out.split("Commands:")[1]
