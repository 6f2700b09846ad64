"""``loopctl queue``, and what other commands say of inputs that wait, against a scripted daemon."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from typing import Any

import pytest
from approving import request
from queueing import added, changed, item, on_the_wire, waiting
from scripted_daemon import Loopctl, Peer, ScriptedDaemon, Then, conversation, row, running, says, state
from typing_person import at_terminal

from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.types import ErrorInfo, ImageBlock, QueueState

PICTURES = [ImageBlock(mime_type="image/png", bytes=12_300), ImageBlock(mime_type="image/gif", bytes=3 << 20)]
FIRST, SECOND = item("aa11", "do this"), item("ab22", "and that\nin two lines", steer=True, images=PICTURES)
STATUS = {
    "version": "0.1.0",
    "pid": 1 << 22,  # no process has it
    "uptimeMs": 1,
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


def here(cwd: str, queue: QueueState, **more: Any) -> dict[str, Any]:
    """A session of this directory with that queue."""
    return {"runtime/list": {"runtimes": [row(cwd, queued=len(queue.items))]}} | {
        "session/state": state(cwd, queue=queue),
        **more,
    }


# --- the list ---------------------------------------------------------------------------------------------------------


def test_the_list_says_that_the_run_waits_for_a_person(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    asks = state(cwd, queue=waiting(FIRST), approvals=[request()], run=running("run1"))
    with ScriptedDaemon(socket_path, here(cwd, waiting(FIRST), **{"session/state": asks})):
        ran = loopctl("queue")
    assert (ran.code, ran.err) == (0, "loopctl: the run waits for an approval; `loopctl approvals` shows it\n")


@pytest.mark.parametrize("arguments", [["queue"], ["queue", "list"]])
def test_what_waits_is_listed_with_position_id_mark_text_and_images(
    socket_path: str, cwd: str, loopctl: Loopctl, arguments: list[str]
) -> None:
    queue = waiting(FIRST, SECOND)
    with ScriptedDaemon(socket_path, here(cwd, queue)):
        ran, document = loopctl(*arguments), json.loads(loopctl(*arguments, "--json").out)
    assert (ran.code, ran.err) == (0, "")
    heading, *lines = ran.out.splitlines()
    assert [re.split(" {2,}", line) for line in lines] == [
        ["0", "aa11", "do this"],
        ["1", "ab22", "steer", "and that … (image/png, 12 KiB) (image/gif, 3 MiB)"],
    ]
    assert {heading.index("INPUT")} == {lines[0].index("do this"), lines[1].index("and that")}
    assert document == on_the_wire(queue)


def test_options_may_stand_before_the_subcommand(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    with ScriptedDaemon(socket_path, here(cwd, waiting(FIRST)) | {"queue/remove": added(FIRST)}):
        assert json.loads(loopctl("queue", "--json", "remove", "aa").out) == added(FIRST)
        assert loopctl("queue", "--session", "s9/meta.json", "remove", "aa").code == 4


@pytest.mark.parametrize(
    ("queue", "said"),
    [
        (waiting(), "nothing waits"),
        (waiting(FIRST, paused="stopped"), "1 queued input, paused: the run was stopped; `loopctl resume` goes on"),
        (waiting(FIRST, SECOND, paused="error"), "2 queued inputs, paused: a run failed; `loopctl resume`"),
        (waiting(FIRST, paused="save_failed"), "the conversation is not saved; `loopctl flush` saves it and goes on"),
        (waiting(FIRST, paused="draining"), "the daemon takes no new work; `loopctl drain --cancel` lets it go on"),
        (
            waiting(FIRST, paused="error", error=ErrorInfo("model_unavailable", "set X_KEY")),
            "the next one was not accepted (set X_KEY); `loopctl queue remove` takes it out, `loopctl resume`",
        ),
    ],
)
def test_why_it_does_not_go_on_stands_on_top_with_what_to_do(
    socket_path: str, cwd: str, loopctl: Loopctl, queue: QueueState, said: str
) -> None:
    with ScriptedDaemon(socket_path, here(cwd, queue)):
        ran = loopctl("queue")
    assert ran.code == 0
    assert said in ran.err


def test_at_a_terminal_a_line_is_as_wide_as_it(socket_path: str, cwd: str) -> None:
    wide = item("aa11", "wide 漢字 " * 40, images=PICTURES[:1])
    narrow = {**os.environ, "COLUMNS": "60"}
    with ScriptedDaemon(socket_path, here(cwd, waiting(wide))), at_terminal("queue", env=narrow) as terminal:
        assert terminal.ends() == 0
    [line] = [line for line in terminal.shown.splitlines() if "aa11" in line]
    assert line.endswith("… (image/png, 12 KiB)")
    assert 56 <= len(line) + len(re.findall("[漢字]", line)) <= 60


@pytest.mark.parametrize("arguments", [["queue"], ["queue", "remove", "aa11"]])
def test_what_a_terminal_shows_as_escapes_is_cut_by_their_width(
    socket_path: str, cwd: str, arguments: list[str]
) -> None:  # K-45
    hidden = item("aa11", "red \x1b[31m\u202e " * 20)
    narrow = {**os.environ, "COLUMNS": "60"}
    script = here(cwd, waiting(hidden)) | {"queue/remove": added(hidden)}
    with ScriptedDaemon(socket_path, script), at_terminal(*arguments, env=narrow) as terminal:
        assert terminal.ends() == 0
    [line] = [line for line in terminal.shown.splitlines() if "aa11" in line]
    assert "\\u001b[31m\\u202e" in line
    assert line.endswith("…")
    assert 50 <= len(line) <= 60


def test_a_session_beside_that_of_this_directory_is_named_in_the_remedy(
    socket_path: str, cwd: str, loopctl: Loopctl
) -> None:
    script = here(cwd, waiting(FIRST, paused="stopped"))
    script["runtime/list"] = {"runtimes": [row(cwd, sessionId="s0", path="/s0"), row(cwd, default=False)]}
    with ScriptedDaemon(socket_path, script) as daemon:
        ran = loopctl("queue", "--session", "s1/meta.json")
        loopctl("queue", "--session", "s1/meta.json", "list")
    assert "`loopctl resume --session s1` goes on" in ran.err
    assert daemon.asked("session/state") == [{"sessionId": "s1"}] * 2


@pytest.mark.parametrize("arguments", [[], ["add", "x"], ["edit", "a", "x"], ["move", "a", "0"], ["remove", "a"]])
def test_without_an_open_session_there_is_no_queue(socket_path: str, loopctl: Loopctl, arguments: list[str]) -> None:
    assert loopctl("queue", *arguments).code == 69
    with ScriptedDaemon(socket_path) as daemon:
        assert loopctl("queue", *arguments).code == 4
    assert daemon.asked("runtime/open") == []


# --- changes ----------------------------------------------------------------------------------------------------------


def test_add_prints_the_id_or_that_of_the_run_that_began(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    with ScriptedDaemon(socket_path, here(cwd, waiting()) | {"queue/add": added(FIRST)}) as daemon:
        assert loopctl("queue", "add", "do this").out == "itemId aa11\n"
        assert json.loads(loopctl("queue", "add", "--steer", "do this", "--json").out) == added(FIRST)
        daemon.answers["queue/add"] = added(FIRST, "run1")
        assert loopctl("queue", "add", "do this").out == "runId run1\n"
    plain, steering = daemon.asked("queue/add")[:2]
    assert plain == {"sessionId": "s1", "content": "do this", "steer": False, "approvals": "reject"}
    assert steering["steer"] is True


def test_add_to_a_paused_queue_says_that_it_does_not_go_on(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    with ScriptedDaemon(socket_path, here(cwd, waiting(FIRST, paused="stopped")) | {"queue/add": added(FIRST)}):
        ran = loopctl("queue", "add", "do this")
    assert (ran.code, ran.out) == (0, "itemId aa11\n")
    assert "1 queued input, paused: the run was stopped; `loopctl resume` goes on" in ran.err


def test_a_session_that_is_gone_after_the_input_was_queued_changes_nothing(
    socket_path: str, cwd: str, loopctl: Loopctl
) -> None:
    script = here(cwd, waiting(FIRST)) | {
        "queue/add": added(FIRST),
        "session/state": RpcError("session_closed", "gone"),
    }
    with ScriptedDaemon(socket_path, script):
        ran = loopctl("queue", "add", "do this")
    assert (ran.code, ran.out, ran.err) == (0, "itemId aa11\n", "")


def test_add_and_edit_read_stdin_for_a_dash(
    socket_path: str, cwd: str, loopctl: Loopctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = here(cwd, waiting(FIRST)) | {"queue/add": added(FIRST), "queue/edit": added(FIRST)}
    with ScriptedDaemon(socket_path, script) as daemon:
        for arguments in (["add", "-"], ["edit", "aa11", "-"]):
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe\n")))
            assert loopctl("queue", *arguments).code == 0
    assert [daemon.asked(f"queue/{method}")[0]["content"] for method in ("add", "edit")] == ["from a pipe\n"] * 2


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        (["other"], {"content": "other"}),
        (["--steer"], {"steer": True}),
        (["--no-steer"], {"steer": False}),
        (["other", "--steer"], {"content": "other", "steer": True}),
    ],
)
def test_edit_needs_no_revision_and_changes_only_what_is_said(
    socket_path: str, cwd: str, loopctl: Loopctl, arguments: list[str], changes: dict[str, Any]
) -> None:
    now = item("aa11", revision=4)
    script = here(cwd, waiting(SECOND, now)) | {"queue/edit": added(item("aa11", "other", revision=5))}
    with ScriptedDaemon(socket_path, script) as daemon:
        ran = loopctl("queue", "edit", "aa", *arguments)
        daemon.answers["queue/edit"] = added(item("aa11", "other", revision=6, steer=True))
        steering = loopctl("queue", "edit", "aa", "--steer")
    assert ran.out == "edited aa11: other\n"
    assert steering.out == "edited aa11 (steers): other\n"
    assert daemon.asked("queue/edit")[:1] == [{"sessionId": "s1", "itemId": "aa11", "revision": 4} | changes]


def test_move_and_remove_take_the_beginning_of_an_id(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    script = here(cwd, waiting(FIRST, SECOND)) | {"queue/move": added(FIRST), "queue/remove": added(SECOND)}
    with ScriptedDaemon(socket_path, script) as daemon:
        assert loopctl("queue", "move", "aa", "1").out == "moved aa11: do this\n"
        assert loopctl("queue", "remove", "ab2").out.startswith("removed ab22 (steers): and that …")
        ambiguous = loopctl("queue", "remove", "a")
    assert daemon.asked("queue/move") == [{"sessionId": "s1", "itemId": "aa11", "to": 1}]
    assert daemon.asked("queue/remove") == [{"sessionId": "s1", "itemId": "ab22"}]
    assert ambiguous.code == 2
    assert "several begin with a: aa11, ab22" in ambiguous.err


def test_an_edit_on_what_somebody_else_has_edited_is_told(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    conflict = RpcError("conflict", "it has revision 9", revision=9)
    with ScriptedDaemon(socket_path, here(cwd, waiting(FIRST)) | {"queue/edit": conflict}):
        ran = loopctl("queue", "edit", "aa", "other")
    assert ran.code == 5
    assert "somebody else has edited aa11 just now: `loopctl queue` shows" in ran.err


@pytest.mark.parametrize("arguments", [["edit", "zz99", "x"], ["move", "zz99", "0"], ["remove", "zz99"]])
@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [("queue_item_started", 5, "`loopctl attach`"), ("queue_item_not_found", 4, "`loopctl queue` lists")],
)
def test_an_input_that_does_not_wait_any_more_is_told_by_the_daemon(
    socket_path: str, cwd: str, loopctl: Loopctl, arguments: list[str], kind: str, code: int, said: str
) -> None:
    error = RpcError(kind, "not here", runId="run1")
    script = here(cwd, waiting(FIRST)) | {f"queue/{method}": error for method in ("edit", "move", "remove")}
    with ScriptedDaemon(socket_path, script) as daemon:
        ran = loopctl("queue", *arguments)
    assert ran.code == code
    assert said in ran.err
    assert daemon.asked(f"queue/{arguments[0]}")[0]["itemId"] == "zz99"


@pytest.mark.parametrize(
    "arguments",
    [["edit", "aa"], ["edit", "aa", " "], ["move", "aa", "x"], ["add", " "], ["nonsense"], ["add", "a", "b"]]
    + [[command, "", *more] for command, *more in (["edit", "x"], ["move", "0"], ["remove"])],
)
def test_a_usage_error_asks_nobody(socket_path: str, loopctl: Loopctl, arguments: list[str]) -> None:
    with ScriptedDaemon(socket_path) as daemon:
        assert loopctl("queue", *arguments).code == 2
    assert daemon.requests == []


# --- what other commands say ------------------------------------------------------------------------------------------


def test_stop_and_abort_say_what_waits_behind(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    script = here(cwd, waiting(FIRST, SECOND, paused="stopped"))
    said = (
        "loopctl: 2 queued inputs, paused: the run was stopped; `loopctl resume` goes on; "
        "`loopctl queue` shows what waits\n"
    )
    with ScriptedDaemon(socket_path, script | {"session/abort": {"stopped": True}}) as daemon:
        assert (loopctl("stop").err, loopctl("abort").err) == (said, said)  # nothing ran
        busy, after = state(cwd, run=running("run1")), script["session/state"]
        states = iter([busy, after])
        daemon.answers |= {"session/state": lambda *_: next(states), "session/stop": {"stopped": True}}
        ran = loopctl("stop")
    assert (ran.code, ran.out, ran.err) == (0, "stopped\n", said)


def test_a_session_that_is_gone_after_the_stop_was_stopped(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    script = here(cwd, waiting()) | {
        "session/abort": {"stopped": True},
        "session/state": RpcError("session_closed", "closed"),
    }
    with ScriptedDaemon(socket_path, script):
        ran = loopctl("abort")
    assert (ran.code, ran.out, ran.err) == (0, "aborted\n", "")


def test_state_and_runtimes_show_the_queue(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    with ScriptedDaemon(socket_path, here(cwd, waiting(FIRST, SECOND, paused="stopped"))):
        assert re.search(r"queue +2 queued inputs, paused: the run was stopped; `loopctl resume`", loopctl("state").out)
        assert "`loopctl resume --session s1`" in loopctl("state", "--session", "s1/meta.json").out
        assert "2 queued" in loopctl("runtimes").out
    with ScriptedDaemon(socket_path, here(cwd, waiting())):
        assert "queue" not in loopctl("state").out + loopctl("runtimes").out


@pytest.mark.parametrize(
    ("arguments", "method"),
    [
        (["new"], "runtime/newSession"),
        (["prompt", "--new", "x"], "runtime/newSession"),
        (["switch", "/a/s2/meta.json"], "runtime/switchSession"),
        (["dispose"], "runtime/dispose"),
    ],
)
def test_what_would_drop_the_queue_says_so_and_drops_it_when_told(
    socket_path: str, cwd: str, loopctl: Loopctl, arguments: list[str], method: str
) -> None:
    script = here(cwd, waiting(FIRST, SECOND)) | {
        "runtime/open": RpcError("conflict", "open", runtimeId="r1"),
        method: RpcError("conflict", "2 queued inputs would be lost; pass discardQueue: true", queued=2),
    }
    with ScriptedDaemon(socket_path, script) as daemon:
        ran = loopctl(*arguments)
        assert ran.code == 5
        assert "loopctl: 2 queued inputs would be lost\n" in ran.err
        assert "--discard-queue" in ran.err
        assert "discardQueue" not in ran.err
        if arguments[0] != "prompt":
            done = {"runtimeId": "r1", "sessionId": "s2", "created": True, "cancelled": False, "state": state(cwd)}
            daemon.answers[method] = {} if method == "runtime/dispose" else done
            assert loopctl(*arguments, "--discard-queue").code == 0
            assert daemon.asked(method)[-1]["discardQueue"] is True
    assert "discardQueue" not in daemon.asked(method)[0]


@pytest.mark.parametrize("arguments", [["drain"], ["drain", "--exit"], ["daemon", "stop"]])
def test_who_lets_runs_finish_hears_what_they_wait_for(
    socket_path: str, cwd: str, loopctl: Loopctl, arguments: list[str]
) -> None:  # D-4
    rows = {"runtimes": [row(cwd, pendingApprovals=2)]}
    with ScriptedDaemon(
        socket_path, {"runtime/list": rows, "server/status": STATUS | {"runs": 1}, "server/drain": DRAINED}
    ):
        ran = loopctl(*arguments)
    assert "loopctl: 2 requests wait for approval; `loopctl approvals` shows and answers them\n" in ran.err


@pytest.mark.parametrize("arguments", [["drain", "--exit"], ["daemon", "stop"]])
def test_what_goes_with_the_daemon_is_said_before(
    socket_path: str, cwd: str, loopctl: Loopctl, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    said: list[str] = []

    def drain(_: Any, __: Peer) -> Any:
        said.append(capsys.readouterr().err)
        return DRAINED | {"queued": 3}

    script = here(cwd, waiting(FIRST, SECOND)) | {"server/status": STATUS, "server/drain": drain}
    with ScriptedDaemon(socket_path, script):
        ran = loopctl(*arguments)
    assert ran.code == 0
    assert said == [
        "loopctl: 2 queued inputs, in the daemon's memory only: what has not started when it ends is lost\n"
    ]
    assert "loopctl: 3 queued inputs went with the daemon\n" in ran.err  # one came meanwhile
    with ScriptedDaemon(socket_path, script | {"server/drain": DRAINED | {"queued": 2}}):
        assert "went with the daemon" not in loopctl(*arguments).err


def test_a_drain_that_stays_keeps_the_queue(socket_path: str, cwd: str, loopctl: Loopctl) -> None:  # D-4
    drained = DRAINED | {"exiting": False, "queued": 1}
    with ScriptedDaemon(socket_path, here(cwd, waiting(FIRST)) | {"server/drain": drained}):
        ran = loopctl("drain")
    assert ran.err == (
        "loopctl: no new work is taken until `loopctl drain --cancel`; 1 queued input waits, "
        "`loopctl queue` says for what\n"
    )


# --- attach -----------------------------------------------------------------------------------------------------------


def watching(cwd: str, before: QueueState | None, *events: Any) -> dict[str, Any]:
    def play(peer: Peer) -> None:
        for event in [*events, {"type": "session_closed", "reason": "disposed"}]:
            peer.event(event)

    attached = {"seq": 0, "replayed": True} if before is None else {"seq": 0, "state": state(cwd, queue=before)}
    return {"runtime/list": {"runtimes": [row(cwd)]}, "runtime/attach": lambda *_: Then(attached, play)}


ONE, TWO = item("aa11", "one"), item("bb22", "two")
ENTERS = {"type": "message_start", "messageId": "u", "message": {"role": "user"}, "itemId": "aa11"}


@pytest.mark.parametrize(
    ("before", "events", "lines"),
    [
        (waiting(ONE), [changed(waiting(ONE, TWO))], ["bb22 waits: two"]),
        (waiting(), [changed(waiting(item("aa11", "one", steer=True)))], ["aa11 (steers) waits: one"]),
        (waiting(ONE, TWO), [changed(waiting(ONE))], ["bb22 was removed: two"]),
        (waiting(ONE, TWO), [conversation()[0] | {"itemId": "aa11"}, changed(waiting(TWO))], ["aa11 starts"]),
        (waiting(ONE), [ENTERS, changed(waiting())], ["aa11 starts"]),
        (waiting(ONE), [changed(waiting(item("aa11", "else", revision=2)))], ["aa11 is now: else"]),
        (waiting(ONE), [changed(waiting(item("aa11", "one", revision=2, steer=True)))], ["aa11 steers now"]),
        (
            waiting(TWO, item("aa11", "one", steer=True)),
            [changed(waiting(ONE, TWO))],
            ["aa11 did not enter the run, and waits for its turn"],
        ),
        (waiting(ONE, TWO, item("cc33")), [changed(waiting(item("cc33"), ONE, TWO))], ["cc33 was moved to 0"]),
        (
            waiting(ONE),
            [changed(waiting(ONE, paused="stopped")), changed(waiting(ONE))],
            ["paused: the run was stopped; `loopctl resume` goes on", "goes on"],
        ),
        (waiting(ONE, paused="stopped"), [changed(waiting())], ["aa11 was removed: one"]),
        (None, [changed(waiting(ONE, TWO)), changed(waiting(TWO))], ["2 queued inputs", "aa11 was removed: one"]),
        (waiting(ONE), [{"type": "events_lost", "from": 1, "to": 2}, changed(waiting())], ["nothing waits"]),
    ],
)
def test_attach_shows_each_change_of_the_queue_in_a_line(
    socket_path: str, cwd: str, loopctl: Loopctl, before: QueueState | None, events: list[Any], lines: list[str]
) -> None:
    arguments = ["--since", "0"] if before is None else []
    with ScriptedDaemon(socket_path, watching(cwd, before, *events)):
        ran = loopctl("attach", *arguments)
    assert re.findall("^loopctl: queue: (.*)$", ran.err, re.MULTILINE) == lines


def test_attach_begins_with_what_waits_and_leaves_answers_whole(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    started, *deltas, end = says("an answer")
    events = [started, *deltas[:2], changed(waiting(ONE, TWO)), *deltas[2:], end]
    with ScriptedDaemon(socket_path, watching(cwd, waiting(ONE, paused="stopped"), *events)):
        ran = loopctl("attach")
    assert ran.out == "an answer\n"
    assert "1 queued input, paused: the run was stopped; `loopctl resume` goes on; `loopctl queue` shows" in ran.err
    assert "loopctl: queue: bb22 waits: two\nloopctl: queue: goes on\n" in ran.err


def test_attach_beside_the_session_of_this_directory_names_it(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    script = watching(cwd, waiting(ONE), changed(waiting(ONE, paused="stopped")))
    script["runtime/list"] = {"runtimes": [row("/elsewhere")]}
    with ScriptedDaemon(socket_path, script):
        ran = loopctl("attach", "--runtime", "r1")
    assert "`loopctl resume --session s1` goes on" in ran.err
