"""A person is asked in place, or answers from another terminal; and nothing that is shown acts or hides."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import termios
import tty
import unicodedata
from typing import Any

import pytest
from approving import NASTY, SEEN, Asked, eventually, request, requested, resolved
from hypothesis import given
from hypothesis import strategies as st
from queueing import on_the_wire
from scripted_daemon import Loopctl, Peer, ScriptedDaemon, Then, answering, conversation, opened, row, state
from typing_person import Terminal, at_terminal

from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.types import ApprovalRequest
from loopctl.approvals import described, summary
from loopctl.terminal import clock, folded, visible

ONCE = "y once, n no> "
ONE = request()
RULED = request(rules=["bash: make test"])
CHANGE = request(
    "ee55ff66-0000",
    tool_name="edit",
    arguments={"path": "a.py", "oldText": "1\n", "newText": "2\n", "all": True},
    operation="edit",
    reason="changing files takes a person",
    path="/src/a.py",
    diff="-1\n+2\n",
    sha256_before="ab" * 32,
    rules=["edit: /src/a.py"],
    justification="the test wants 2",
    expires_at=1_770_000_000_000,
)


def quiet(terminal: Terminal) -> bool:
    """Nothing that was shown acts or hides, but for what loopctl itself dims."""
    shown = terminal.shown.replace("\r\n", "\n").replace("\x1b[2m", "").replace("\x1b[22m", "")
    return shown == visible(shown)


# --- what is shown of one ---------------------------------------------------------------------------------------------


def test_a_request_is_shown_with_all_that_is_needed_to_decide_it() -> None:
    shown, cut = described(CHANGE, whole=False)
    assert not cut
    assert shown.startswith("edit asks: changing files takes a person\n  path\n  │ a.py\n  oldText\n  │ 1\n")
    for line in (
        "  all\n  │ true\n",
        "  the change\n  │ -1\n  │ +2\n",
        "  the model says\n  │ the test wants 2\n",
        "  in: /src\n",
        "  file: /src/a.py\n",
        f"  before: SHA-256 {'ab' * 32}\n",
        "  without approval it may do: reading only, no network\n",
        "  for the session would allow: edit: /src/a.py\n",
        f"  until: {clock(CHANGE.expires_at or 0, seconds=True)}\n",
    ):
        assert line in shown
    once, _ = described(
        request(arguments={"command": "ls", "justification": "to see"}, justification="to see"), whole=True
    )
    assert once.count("to see") == 1  # it is one of the arguments already
    assert "  before: no such file\n" in described(request(operation="write", path="/src/b"), whole=False)[0]
    assert "not for the session: a pipe\n" in described(request(rules_refused="a pipe"), whole=False)[0]


def test_a_long_text_shows_its_end_and_how_much_is_left_out() -> None:  # K-45
    shown, cut = described(request(command=NASTY), whole=False)
    assert cut
    assert SEEN in shown
    assert "more characters) …" in shown
    assert "; rm -rf ~\n" in shown
    assert len(shown) < 2000
    lines = "\n".join(map(str, range(1000)))
    shown, cut = described(request(command=lines), whole=False)
    assert cut
    assert "  │ 15\n  │ … (976 more lines) …\n  │ 992\n" in shown
    assert "  │ 999\n" in shown
    whole, cut = described(request(command=NASTY), whole=True)
    assert not cut
    assert visible(NASTY) in whole


def test_a_narrow_terminal_breaks_no_words_of_ours_and_nothing_silently() -> None:
    shown, _ = described(request(command="x" * 40, reason="a command takes a person"), whole=False, width=40)
    assert shown.startswith(f"bash asks: a command \n      takes a person\n  command\n  │ {'x' * 36}\n  ┊ xxxx\n")


@given(st.text(), st.integers(3, 40), st.integers(3, 40))
def test_what_is_folded_keeps_both_ends(text: str, lines: int, length: int) -> None:  # K-45
    shown, cut = folded(text, lines=lines, length=length)
    assert cut or "\n".join(shown) == text
    assert len(shown) <= lines + 1
    assert shown[0][0:1] == text[0:1].strip("\n")
    assert shown[-1][-1:] == text[-1:].strip("\n")


@given(st.text(), st.integers(40, 100) | st.none(), st.booleans())
def test_no_text_of_a_request_acts_or_passes_for_a_line_of_ours(text: str, width: int | None, whole: bool) -> None:
    """A-8, K-45: also not where a terminal begins a new line by itself."""
    text *= 7
    one = request(command=text, reason=text, cwd=text, sandbox=text, rules=[text], justification=text, diff=text)
    shown, _ = described(one, whole=whole, width=width)
    assert shown == visible(shown)
    assert "\n" not in summary(one)
    first, *lines = shown.removesuffix("\n").split("\n")
    assert first.startswith("bash asks: ")
    ours = ("  command", "  the change", "  the model says", "  in: ", "  without approval ", "  for the session ")
    assert [line for line in lines if not line.startswith(("  │ ", "  ┊ ", "      "))] == [
        line for line in lines if line.startswith(ours)
    ]
    assert sum(line.startswith(ours) for line in lines) == 6
    wide = [line for line in lines if width is not None and sum(_columns(one) for one in line) > width]
    assert wide == []


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


# --- asked in place ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "typed", "answer"),
    [
        (ONE, "y\n", {"decision": "allowed-once"}),
        (RULED, "s\n", {"decision": "allowed-session"}),
        (ONE, "n\nnot today\n", {"decision": "rejected", "feedback": "not today"}),
        (ONE, "n\n\n", {"decision": "rejected"}),
    ],
)
def test_a_terminal_asks_in_place(
    socket_path: str, cwd: str, one: ApprovalRequest, typed: str, answer: dict[str, Any]
) -> None:
    asked = Asked(cwd, one)
    with ScriptedDaemon(socket_path, asked.script) as daemon, at_terminal("prompt", "x") as terminal:
        terminal.waits_for("bash asks: each command takes a person\r\n  command\r\n  │ make test\r\n")
        terminal.waits_for("s for the session, n no> " if one.rules else ONCE)
        terminal.type(typed)
        assert terminal.ends() == 0
    assert daemon.asked("approval/resolve") == [{"approvalId": one.approval_id} | answer]
    assert daemon.asked("initialize")[0]["capabilities"] == {"approvals": True}
    assert "approvals" not in daemon.asked("session/prompt")[0]


def test_what_is_no_answer_is_explained_and_asked_again(socket_path: str, cwd: str) -> None:
    asked = Asked(cwd, request(command=NASTY, rules_refused="it has a pipe"))
    with ScriptedDaemon(socket_path, asked.script) as daemon, at_terminal("prompt", "x") as terminal:
        keys = "y once, n no, v shows all> "
        terminal.waits_for(keys)
        terminal.type("\n")
        terminal.waits_for(keys)
        terminal.type("maybe\n")
        terminal.waits_for("loopctl: y allows it this time, n rejects it\r\n")
        terminal.waits_for("loopctl: v shows all of it; Ctrl-D asks no more here, and the request waits on\r\n" + keys)
        terminal.type("s\n")
        terminal.waits_for("loopctl: it cannot be allowed for the session: it has a pipe\r\n" + keys)
        terminal.type("v\n")
        wide = len(visible(NASTY)) // 76
        terminal.waits_for("\r\n  ┊ " + visible(NASTY)[wide * 76 :] + "\r\n")  # K-45
        terminal.waits_for(keys)
        assert daemon.asked("approval/resolve") == []
        terminal.type("y\n")
        assert terminal.ends() == 0
    assert quiet(terminal)


def test_what_was_typed_before_the_question_is_no_answer_to_it(socket_path: str, cwd: str) -> None:
    asked = Asked(cwd, ONE, request("cc33dd44-0000", "make install"))
    with ScriptedDaemon(socket_path, asked.script) as daemon, at_terminal("prompt", "x") as terminal:
        terminal.waits_for(ONCE)
        terminal.type("y\ny\n")
        terminal.waits_for("make install")
        terminal.waits_for(ONCE)
        assert len(daemon.asked("approval/resolve")) == 1
        terminal.type("n\n\n")
        assert terminal.ends() == 0
    assert [one["decision"] for one in daemon.asked("approval/resolve")] == ["allowed-once", "rejected"]


@pytest.mark.parametrize(
    ("outcome", "more", "said"),
    [
        ("allowed-once", {"by": "vim (pid 7)"}, "allowed once by vim (pid 7)"),
        ("rejected", {"by": "vim (pid 7)", "feedback": "no\x1b[2K"}, "rejected by vim (pid 7)"),
        ("timed-out", {}, "not allowed: nobody answered in time"),
        ("cancelled", {}, "cancelled, since its run ends"),
    ],
)
def test_what_is_settled_elsewhere_takes_the_question_back(
    socket_path: str, cwd: str, outcome: str, more: dict[str, Any], said: str
) -> None:  # K-43, A-2
    asked = Asked(cwd, ONE, request("cc33dd44-0000", "make install"))
    with ScriptedDaemon(socket_path, asked.script) as daemon, at_terminal("prompt", "x") as terminal:
        terminal.waits_for(ONCE)
        terminal.type("n\n")
        terminal.waits_for("no reason)> ")
        asked.resolve(outcome, **more)
        why = "loopctl: told the model: no\\u001b[2K\r\n" if "feedback" in more else ""
        terminal.waits_for(f"loopctl: {said}: bash: make test\r\n{why}loopctl: bash asks: ")
        terminal.waits_for("make install")
        terminal.waits_for(ONCE)  # and no reason is asked for any more
        terminal.type("y\n")
        assert terminal.ends() == 0
    assert daemon.asked("approval/resolve") == [{"approvalId": "cc33dd44-0000", "decision": "allowed-once"}]


def test_what_was_half_typed_is_not_left_for_the_shell(socket_path: str, cwd: str) -> None:
    asked = Asked(cwd, ONE)
    with ScriptedDaemon(socket_path, asked.script), at_terminal("prompt", "x") as terminal:
        terminal.waits_for(ONCE)
        device = os.readlink(f"/proc/{terminal.process.pid}/fd/2")
        shell = os.open(device, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
        terminal.type("n\nrm -rf would be")
        terminal.waits_for("no reason)> ")
        asked.resolve("allowed-once", by="vim (pid 7)")
        asked.settle()
        terminal.waits_for("allowed once by vim")
        assert terminal.process.wait(20) == 0
        tty.setraw(shell, termios.TCSANOW)  # from here on it gives what is no whole line yet
        with pytest.raises(BlockingIOError):
            os.read(shell, 100)
        os.close(shell)


def test_a_late_answer_is_told_who_answered(socket_path: str, cwd: str) -> None:  # K-43
    late = RpcError("approval_not_pending", "this approval is settled: rejected, by vim (pid 7)", by="vim (pid 7)")
    asked = Asked(cwd, ONE)

    def answered(_params: Any, peer: Peer) -> RpcError:
        peer.event(resolved(ONE, "rejected", by="vim (pid 7)"))
        asked.settle()
        return late

    with (
        ScriptedDaemon(socket_path, asked.script | {"approval/resolve": answered}),
        at_terminal("prompt", "x") as terminal,
    ):
        terminal.waits_for(ONCE)
        terminal.type("y\n")
        terminal.waits_for("loopctl: this approval is settled: rejected, by vim (pid 7)\r\n")
        assert terminal.ends() == 0
    assert terminal.shown.count("vim") == 1


def test_ctrl_c_stops_the_run_that_asks(socket_path: str, cwd: str) -> None:
    with ScriptedDaemon(socket_path, Asked(cwd, ONE).script) as daemon, at_terminal("prompt", "x") as terminal:
        terminal.waits_for(ONCE)
        terminal.process.send_signal(signal.SIGINT)
        terminal.waits_for("\r\nloopctl: cancelled, since its run ends: bash: make test\r\nloopctl: stopped\r\n")
        assert terminal.ends() == 130
    assert len(daemon.asked("session/stop")) == 1


def test_who_leaves_the_question_is_told_how_to_answer_elsewhere(socket_path: str, cwd: str) -> None:
    asked = Asked(cwd, ONE, request("cc33dd44-0000", "make install"))
    with ScriptedDaemon(socket_path, asked.script) as daemon, at_terminal("prompt", "x") as terminal:
        terminal.waits_for(ONCE)
        terminal.type("\x04")
        terminal.waits_for("loopctl: still waits for an approval: bash: make test\r\n")
        terminal.waits_for("`loopctl approvals show aa11bb22` shows all of it")
        asked.resolve("allowed-once", by="vim (pid 7)")
        terminal.waits_for("loopctl: allowed once by vim (pid 7): bash: make test\r\n")
        terminal.waits_for("loopctl: waits for an approval: bash: make install\r\n")
        asked.settle()
        assert terminal.ends() == 0
    assert daemon.asked("approval/resolve") == []


def test_events_that_were_lost_may_have_been_its_answer(socket_path: str, cwd: str) -> None:
    asked = Asked(cwd, ONE)
    now = state(cwd, approvals=[request("cc33dd44-0000", "make install")], run=None)
    script = asked.script | {"session/state": now, "run/wait": None}
    with ScriptedDaemon(socket_path, script), at_terminal("prompt", "x") as terminal:
        terminal.waits_for(ONCE)
        asked.peer.event({"type": "events_lost", "from": 1, "to": 2})
        terminal.waits_for("loopctl: settled meanwhile: bash: make test\r\n")
        terminal.waits_for("make install")
        terminal.waits_for(ONCE)


# --- where nobody is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "params"),
    [
        ([], {"approvals": "reject"}),
        (["--approvals", "reject"], {"approvals": "reject"}),
        (["--approvals", "wait"], {}),
        (["--approvals", "wait", "--approval-timeout", "1.5"], {"approvalTimeoutMs": 1500}),
        (["--no-wait"], {"approvals": "reject"}),
        (["--json"], {"approvals": "reject"}),
    ],
)
@pytest.mark.parametrize("command", [["prompt", "x"], ["prompt", "--queue", "x"], ["resume"]])
def test_a_script_rejects_unless_it_says_that_it_waits(
    socket_path: str, cwd: str, loopctl: Loopctl, command: list[str], options: list[str], params: dict[str, Any]
) -> None:
    done = Then({"runId": "run1"}, lambda peer: [peer.event(event) for event in conversation()] and None)
    added = Then(
        {"itemId": "i1", "revision": 1, "content": [], "steer": False, "createdAt": 1, "runId": "run1"}, done.after
    )
    script = answering(cwd) | {
        "session/prompt": done,
        "session/resume": done,
        "queue/add": added,
        "runtime/list": {"runtimes": [row(cwd)]},
        "runtime/open": opened(cwd),
    }
    with ScriptedDaemon(socket_path, script) as daemon:
        assert loopctl(*command, *options).code == 0
    assert "capabilities" not in daemon.asked("initialize")[0]
    method = "session/resume" if command == ["resume"] else "queue/add" if "--queue" in command else "session/prompt"
    [sent] = daemon.asked(method)
    assert {name: value for name, value in sent.items() if name.startswith("approval")} == params


def test_a_script_that_waits_says_for_what_and_how_to_answer(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    events = conversation(requested(request(command=NASTY)), resolved(ONE, "allowed-once", by="vim (pid 7)"))
    for json_too in ([], ["--json"]):
        with ScriptedDaemon(socket_path, answering(cwd, *events)):
            ran = loopctl("prompt", "x", "--approvals", "wait", *json_too)
        assert ran.code == 0
        assert f"loopctl: waits for an approval: bash: {SEEN[:60]}" in ran.err  # escapes in a pipe too
        assert "`loopctl approvals allow aa11bb22` or `reject aa11bb22` answers" in ran.err
        assert "loopctl: allowed once by vim (pid 7): bash: " in ran.err


def test_a_script_that_rejects_says_what_was_not_allowed(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    events = conversation(requested(ONE), resolved(ONE, "unavailable"))
    with ScriptedDaemon(socket_path, answering(cwd, *events)):
        ran = loopctl("prompt", "x")
    assert ran.code == 0
    assert ran.err.endswith(
        "loopctl: not allowed: nobody is there who could be asked: bash: make test\n"
        "loopctl: `--approvals wait` lets it wait for an answer, from any terminal\n"
    )


@pytest.mark.parametrize("option", [["--json"], ["--no-wait"], ["--approvals", "reject"]])
def test_a_terminal_is_not_asked_where_its_command_does_not_ask(socket_path: str, cwd: str, option: list[str]) -> None:
    with (
        ScriptedDaemon(socket_path, answering(cwd, *conversation())) as daemon,
        at_terminal("prompt", "x", *option) as terminal,
    ):
        assert terminal.ends() == 0
    assert "capabilities" not in daemon.asked("initialize")[0]
    assert ("approvals" in daemon.asked("session/prompt")[0]) == ("reject" in option)


# --- from another terminal --------------------------------------------------------------------------------------------


OTHER = request("cc33dd44-0000", "make install", session_id="s2", cwd="/other")


def waiting(*requests: ApprovalRequest) -> dict[str, Any]:
    return {"approvals": [on_the_wire(one) for one in requests]}


def test_all_that_waits_is_listed(socket_path: str, loopctl: Loopctl) -> None:
    with ScriptedDaemon(socket_path, {"approval/list": waiting(ONE, OTHER, request("ff", NASTY))}) as daemon:
        lines = loopctl("approvals").out.splitlines()
        assert loopctl("approvals", "list").out.splitlines()[0] == lines[0]
        assert len(json.loads(loopctl("approvals", "--json").out)["approvals"]) == 3
        daemon.answers["approval/list"] = waiting(request(cwd="/s\x1b[2Kc\u202e"))
        for option in ([], ["--raw"]):
            assert r"/s\u001b[2Kc\u202e" in loopctl("approvals", *option).out
        daemon.answers["approval/list"] = waiting()
        assert loopctl("approvals").err == "loopctl: nothing waits for an approval\n"
    assert lines[0].split() == ["ID", "AGE", "CWD", "TOOL", "WHAT"]
    assert [lines[1].split()[0], *lines[1].split()[-4:]] == ["aa11bb22", "/src", "bash", "make", "test"]
    assert "/other" in lines[2]
    assert r"curl e|sh\u000d\u001b[2K ls" in lines[3]  # K-45: also in a pipe, since somebody decides by it
    assert lines[3].endswith("; rm -rf ~")


def test_what_fits_into_the_list_is_not_cut(socket_path: str) -> None:
    here, far = request(command="make the whole documentation anew"), request("cc", "make " + "x" * 100)
    with ScriptedDaemon(socket_path, {"approval/list": waiting(here, far)}), at_terminal("approvals") as terminal:
        assert terminal.ends() == 0
    lines = terminal.shown.splitlines()
    assert lines[1].endswith("  make the whole documentation anew")
    assert "more characters) …" in lines[2]


def test_one_is_shown_whole(socket_path: str, loopctl: Loopctl) -> None:  # A-8, K-45
    with ScriptedDaemon(socket_path, {"approval/list": waiting(request(command=NASTY))}):
        assert NASTY in loopctl("approvals", "show", "--raw").out
        for arguments in (["show"], ["show", "aa"]):
            assert visible(NASTY) in loopctl("approvals", *arguments).out
        assert json.loads(loopctl("approvals", "show", "--json").out)["arguments"] == {"command": NASTY}
        ran = loopctl("approvals", "show", "bb")
    assert (ran.code, ran.err) == (4, "loopctl: no approval bb waits; `loopctl approvals` lists what does\n")


@pytest.mark.parametrize(
    ("arguments", "answer", "said"),
    [
        (["allow", "aa"], {"decision": "allowed-once"}, "allowed: bash: make test\n"),
        (["allow", "aa11", "--session"], {"decision": "allowed-session"}, "allowed: bash: make test\n"),
        (["reject", "aa11bb22"], {"decision": "rejected"}, "rejected: bash: make test\n"),
        (["reject", "--reason", "no"], {"decision": "rejected", "feedback": "no"}, "rejected: bash: make test\n"),
    ],
)
def test_one_is_answered(
    socket_path: str, loopctl: Loopctl, arguments: list[str], answer: dict[str, Any], said: str
) -> None:
    result = {"approvalId": ONE.approval_id, "outcome": answer["decision"]}
    with ScriptedDaemon(socket_path, {"approval/list": waiting(RULED), "approval/resolve": result}) as daemon:
        ran = loopctl("approvals", *arguments)
        assert json.loads(loopctl("approvals", *arguments, "--json").out) == result
    assert (ran.code, ran.out) == (0, said)
    assert daemon.asked("approval/resolve")[0] == {"approvalId": ONE.approval_id} | answer


def test_what_no_rule_covers_is_not_allowed_for_the_session(socket_path: str, loopctl: Loopctl) -> None:
    one = request(rules_refused="it redirects to a file")
    with ScriptedDaemon(socket_path, {"approval/list": waiting(one)}) as daemon:
        ran = loopctl("approvals", "allow", "aa", "--session")
    assert (ran.code, ran.err) == (
        2,
        "loopctl: this cannot be allowed for the session: it redirects to a file\n"
        "loopctl: Without --session it is allowed once.\n",
    )
    assert daemon.asked("approval/resolve") == []


def test_which_one_must_be_clear(socket_path: str, loopctl: Loopctl) -> None:
    with ScriptedDaemon(socket_path, {"approval/list": waiting(ONE, OTHER)}) as daemon:
        assert loopctl("approvals", "allow").code == 2  # what waits may be another than was shown
        ran = loopctl("approvals", "reject")
        assert (ran.code, ran.err.splitlines()) == (
            2,
            ["loopctl: which one?", "loopctl: aa11bb22  bash: make test", "loopctl: cc33dd44  bash: make install"],
        )
        daemon.answers["approval/list"] = waiting()
        assert loopctl("approvals", "reject").code == 4
        daemon.answers["approval/list"] = waiting(ONE)
        for command in ("allow", "reject", "show"):  # a script's variable that is not set
            ran = loopctl("approvals", command, "")
            assert (ran.code, "the ID is empty" in ran.err) == (2, True)
    assert daemon.asked("approval/resolve") == []


@pytest.mark.parametrize(
    ("data", "code", "said"),
    [
        ({"outcome": "rejected", "by": "vim (pid 7)"}, 5, "this approval is settled: rejected, by vim (pid 7)"),
        ({}, 4, "no approval aa11 waits, and it may have been answered"),
    ],
)
def test_an_answer_that_comes_too_late_is_told_so(
    socket_path: str, loopctl: Loopctl, data: dict[str, Any], code: int, said: str
) -> None:  # K-43
    late = RpcError("approval_not_pending", "this approval is settled: rejected, by vim (pid 7)", **data)
    with ScriptedDaemon(socket_path, {"approval/list": waiting(), "approval/resolve": late}):
        ran = loopctl("approvals", "allow", "aa11")
    assert ran.code == code
    assert ran.err.startswith(f"loopctl: {said}")


def changing(*events: Any) -> Then:
    def tell(peer: Peer) -> None:
        for event in events:
            peer.server_event(event)

    return Then(waiting(ONE), tell)


def watched(terminal: Terminal) -> None:
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.ends() == 130


def test_a_watch_asks_in_place_at_a_terminal(socket_path: str) -> None:
    done = {"approvalId": OTHER.approval_id, "outcome": "allowed-once"}
    events = [requested(ONE), resolved(ONE, "rejected", by="vim (pid 7)"), requested(OTHER)]
    script = {"server/watch": {}, "approval/list": changing(*events), "approval/resolve": done}
    with ScriptedDaemon(socket_path, script) as daemon, at_terminal("approvals", "--watch") as terminal:
        terminal.waits_for("make test")
        terminal.waits_for("loopctl: rejected by vim (pid 7): bash: make test")
        terminal.waits_for("make install")
        terminal.waits_for(ONCE)
        terminal.type("y\n")
        eventually(lambda: bool(daemon.asked("approval/resolve")))
        watched(terminal)
    assert daemon.asked("approval/resolve") == [{"approvalId": OTHER.approval_id, "decision": "allowed-once"}]
    assert terminal.shown.count("make test") == 2  # told in the list and as news, asked once


def test_a_watch_in_a_pipe_tells_each_change_once(socket_path: str) -> None:
    events = [requested(ONE), resolved(ONE, "timed-out"), requested(OTHER), {"type": "session_removed", "path": "x"}]
    with ScriptedDaemon(socket_path, {"server/watch": {}, "approval/list": changing(*events)}):
        for option, lines in ([], 5), (["--json"], 4):
            command = [sys.executable, "-m", "loopctl", "approvals", "--watch", *option]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
                assert process.stdout is not None
                shown = [process.stdout.readline() for _ in range(lines)]
                process.send_signal(signal.SIGINT)
                rest = process.stdout.read()
            assert process.returncode == 130
            assert rest == ""
            if option:
                types = [json.loads(line).get("event", {}).get("type") for line in shown]
                assert types == [None, "approval_requested", "approval_resolved", "approval_requested"]
            else:
                assert [line.split(":")[1].strip() for line in shown[::2]] == [
                    "waits for an approval",
                    "not allowed",
                    "`loopctl approvals show cc33dd44` shows all of it, `loopctl approvals allow cc33dd44` or `reject "
                    "cc33dd44` answers",
                ]


# --- presets, and what else tells of approvals ------------------------------------------------------------------------


def test_a_preset_is_shown_and_set(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    script = {
        "runtime/list": {"runtimes": [row(cwd)]},
        "session/state": state(cwd, permission="workspace-write"),
        "session/setPermission": lambda params, _: {"permission": params["permission"]},
    }
    with ScriptedDaemon(socket_path, script) as daemon:
        assert loopctl("permission").out.startswith("workspace-write: ")
        assert json.loads(loopctl("permission", "--json").out) == {"permission": "workspace-write"}
        assert loopctl("permission", "danger-full-access").out.startswith("danger-full-access: nothing asks")
        assert loopctl("permission", "all").code == 2
        busy = RpcError("approvals_pending", "setPermission: an approval must be answered first")
        daemon.answers["session/setPermission"] = busy
        ran = loopctl("permission", "read-only", "--session", "s1")
        daemon.answers["runtime/list"] = {"runtimes": []}
        assert loopctl("permission").code == 4
    assert daemon.asked("session/setPermission")[0] == {"sessionId": "s1", "permission": "danger-full-access"}
    assert ran.code == 5
    assert "`loopctl approvals` shows what waits for an answer" in ran.err


def test_status_state_and_runtimes_say_what_waits(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    status = {
        **{"version": "1", "pid": 1, "uptimeMs": 1, "draining": False, "runtimes": 1, "sessions": 1, "runs": 1},
        **{"pendingApprovals": 2, "pendingSaves": [], "connections": 1, "socket": "/s", "dataDir": "/d"},
        **{"counters": {}, "sandbox": {"works": False, "reason": "no bwrap"}},
    }
    script = {
        "server/status": status,
        "runtime/list": {"runtimes": [row(cwd, pendingApprovals=2)]},
        "session/state": state(cwd, approvals=[ONE]),
    }
    with ScriptedDaemon(socket_path, script) as daemon:
        shown = loopctl("status").out
        assert "2 to approve" in loopctl("runtimes").out
        assert "an approval: bash: make test" in loopctl("state").out
        daemon.answers["server/status"] = status | {"sandbox": {"works": True}, "pendingApprovals": 0}
        quiet = loopctl("status").out
    assert "approvals    2; `loopctl approvals` shows them\n" in shown
    assert "sandbox      does not work, so each command asks: no bwrap\n" in shown
    assert "approvals" not in quiet
    assert "sandbox      works\n" in quiet


def test_attach_tells_what_waits_already(socket_path: str, cwd: str) -> None:  # K-42
    attached = Then(
        {"seq": 0, "state": state(cwd, approvals=[ONE])},
        lambda peer: [peer.event(e) for e in (resolved(ONE, "timed-out"), requested(OTHER))] and None,
    )
    script = {"runtime/list": {"runtimes": [row(cwd)]}, "runtime/attach": attached}
    with ScriptedDaemon(socket_path, script) as daemon, at_terminal("attach") as terminal:
        terminal.waits_for("loopctl: waits for an approval: bash: make test")
        terminal.waits_for("loopctl: not allowed: nobody answered in time: bash: make test")
        terminal.waits_for("loopctl: waits for an approval: bash: make install")
        watched(terminal)
    assert "capabilities" not in daemon.asked("initialize")[0]
