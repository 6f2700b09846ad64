"""``loopctl``'s commands for the life of a session: how one is named, opened, kept, closed and deleted."""

from __future__ import annotations

import io
import json
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scripted_daemon import (
    NO_SESSIONS,
    Answer,
    Loopctl,
    Peer,
    ScriptedDaemon,
    Then,
    answering,
    conversation,
    opened,
    row,
    running,
    saved,
    state,
)
from typing_person import at_terminal

from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.types import ErrorInfo, PromptTiming, Recoverable, RunResult, Title, Usage

STARTUP = Title(text="Project startup", source="user", message_indices=[])


def listing(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    return NO_SESSIONS | {"sessions": list(rows)} | more


def opening(*rows: dict[str, Any]) -> dict[str, Answer]:
    return {"runtime/list": {"runtimes": list(rows)}}


def on_the_wire(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


# --- how a session is named -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["s1/meta.json", "s1", "s1/", "./s1", "id1"])
def test_a_saved_session_is_named_by_its_file_its_directory_or_its_id(
    socket_path: str, cwd: str, loopctl: Loopctl, name: str
) -> None:  # S-2: on the wire it is the exact path
    Path(cwd, "s1").mkdir()
    script = {"session/list": listing(saved(f"{cwd}/s1/meta.json", cwd, sessionId="id1"))}
    with ScriptedDaemon(socket_path, script | {"session/state": state(cwd)}) as daemon:
        assert loopctl("state", "--session", name).code == 0
    assert daemon.asked("session/state") == [{"path": f"{cwd}/s1/meta.json"}]


@pytest.mark.parametrize("name", ["s1/meta.json", "id1"])
@pytest.mark.parametrize("command", ["state", "stop", "prompt"])
def test_a_session_that_is_open_is_reached_where_it_is_open(
    socket_path: str, cwd: str, loopctl: Loopctl, name: str, command: str
) -> None:
    script = answering(cwd, *conversation()) | opening(row("/elsewhere", path=f"{cwd}/s1/meta.json", sessionId="id1"))
    script |= {"session/list": listing(saved(f"{cwd}/s1/meta.json", cwd, sessionId="id1"))}
    with ScriptedDaemon(socket_path, script | {"session/state": state(cwd)}) as daemon:
        assert loopctl(command, *(["hello"] if command == "prompt" else []), "--session", name).code == 0
    if command == "prompt":
        assert daemon.asked("runtime/attach") == [{"runtimeId": "r1"}]
        assert daemon.asked("runtime/open") == []
    else:
        assert daemon.asked("session/state") == [{"sessionId": "id1"}]


def test_a_session_in_memory_has_its_id_only(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    memory = {name: value for name, value in row(cwd, kind="memory", sessionId="m1").items() if name != "path"}
    with ScriptedDaemon(socket_path, opening(memory) | {"session/state": state(cwd)}) as daemon:
        assert loopctl("state", "--session", "m1").code == 0
        refused = loopctl("switch", "m1")
    assert daemon.asked("session/state") == [{"sessionId": "m1"}]
    assert refused.code == 2
    assert "in memory only" in refused.err


def test_part_of_an_id_is_refused_with_what_it_may_mean(socket_path: str, loopctl: Loopctl) -> None:
    rows = [saved(f"/a/{id}/meta.json", "/b", sessionId=id, title=STARTUP) for id in ("abc1", "abc2", "xyz")]
    with ScriptedDaemon(socket_path, {"session/list": listing(*rows)}) as daemon:
        ran = loopctl("state", "--session", "abc")
    assert ran.code == 4
    assert "no session abc" in ran.err
    assert [line for line in ran.err.splitlines() if "Project startup" in line] == [
        "loopctl: abc1  Project startup",
        "loopctl: abc2  Project startup",
    ]
    assert daemon.asked("session/state") == []  # S-2: never a fuzzy id


def test_an_unknown_name_lists_the_sessions_of_this_directory(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    rows = [saved("/a/s8/meta.json", "/elsewhere", sessionId="s8"), saved("/a/s9/meta.json", cwd, sessionId="s9")]
    with ScriptedDaemon(socket_path, {"session/list": listing(*rows)}):
        ran = loopctl("pin", "--session", "nonsense")
    assert ran.code == 4
    assert "s9  New session" in ran.err
    assert "s8" not in ran.err


def test_an_id_that_two_files_have_must_become_a_path(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    rows = [saved(f"/a/{place}/meta.json", cwd, sessionId="id1") for place in ("original", "copy")]
    with ScriptedDaemon(socket_path, {"session/list": listing(*rows)}):
        ran = loopctl("delete", "id1", "--yes")
    assert ran.code == 2
    assert "/a/copy/meta.json" in ran.err
    assert "/a/original/meta.json" in ran.err


# --- new, switch ------------------------------------------------------------------------------------------------------


def test_new_opens_a_session_where_none_is_open(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    fresh = opened(cwd, state=state(cwd, live_count=0))
    with ScriptedDaemon(socket_path, {"runtime/open": fresh}) as daemon:
        ran = loopctl("new")
    [request] = daemon.asked("runtime/open")
    assert (request["cwd"], request["session"]) == (cwd, {"kind": "new"})
    assert ran.out == f"New session (no messages yet): {cwd}/s1/meta.json\n"
    assert ran.err == ""


def test_new_replaces_the_session_that_is_open(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    replaced = opened(cwd, cancelled=False, later=1, state=on_the_wire(state(cwd)))
    script = {"runtime/open": RpcError("conflict", "open", runtimeId="r7"), "runtime/newSession": replaced}
    with ScriptedDaemon(socket_path, script) as daemon:
        document = json.loads(loopctl("new", "--json").out)
    [request] = daemon.asked("runtime/newSession")
    assert request["runtimeId"] == "r7"
    assert request.keys() == {"runtimeId", "env", "umask"}
    assert document == replaced  # also what this version does not know


def test_new_over_a_run_is_refused(socket_path: str, loopctl: Loopctl) -> None:
    script = {
        "runtime/open": RpcError("conflict", "open", runtimeId="r7"),
        "runtime/newSession": RpcError("session_busy", "a prompt goes on", operation="prompt"),
    }
    with ScriptedDaemon(socket_path, script):
        ran = loopctl("new")
    assert ran.code == 5
    assert "loopctl stop" in ran.err


def test_switch_gives_the_seat_of_this_directory_another_session(
    socket_path: str, cwd: str, loopctl: Loopctl
) -> None:
    beside = row(cwd, runtimeId="r2", default=False, path="/a/other/meta.json")
    there = state("/elsewhere", title=STARTUP, path="/a/s2/meta.json")
    script = opening(beside, row(cwd)) | {"runtime/switchSession": opened(cwd, cancelled=False, state=there)}
    with ScriptedDaemon(socket_path, script) as daemon:
        ran = loopctl("switch", "/a/s2/meta.json")
    [request] = daemon.asked("runtime/switchSession")
    assert (request["runtimeId"], request["path"]) == ("r1", "/a/s2/meta.json")
    assert request.keys() == {"runtimeId", "path", "env", "umask"}
    assert ran.out == "Project startup (2 messages): /a/s2/meta.json\n"
    assert "it belongs to /elsewhere" in ran.err


def test_switch_opens_the_session_where_none_is_open(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    script = opening(row("/elsewhere")) | {"runtime/open": opened(cwd)}
    with ScriptedDaemon(socket_path, script) as daemon:
        assert loopctl("switch", "s2/meta.json").code == 0
    [request] = daemon.asked("runtime/open")
    assert request["session"] == {"kind": "open", "path": f"{cwd}/s2/meta.json"}
    assert "runtimeId" not in request  # so that a prompt here finds it


def test_switch_to_what_is_open_elsewhere_is_refused_with_what_to_do(
    socket_path: str, cwd: str, loopctl: Loopctl
) -> None:  # S-22
    with ScriptedDaemon(socket_path, opening(row(cwd), row("/b", runtimeId="r2", path="/a/s2/meta.json"))) as daemon:
        ran = loopctl("switch", "/a/s2/meta.json")
    assert ran.code == 5
    assert "runtime r2 of /b" in ran.err
    assert "loopctl dispose --runtime r2" in ran.err
    assert daemon.asked("runtime/switchSession") == []


@pytest.mark.parametrize(("rows", "method"), [([], "runtime/open"), ([{}], "runtime/switchSession")])
def test_switch_to_a_directory_that_has_a_session_open_says_where_to_do_it(
    socket_path: str, cwd: str, loopctl: Loopctl, rows: list[dict[str, Any]], method: str
) -> None:
    script = opening(*(row(cwd, **one) for one in rows)) | {method: RpcError("conflict", "taken", runtimeId="r2")}
    with ScriptedDaemon(socket_path, script):
        ran = loopctl("switch", "/a/s2/meta.json")
    assert ran.code == 5
    assert "run `loopctl switch`\nloopctl: there" in ran.err


# --- runtimes, dispose ------------------------------------------------------------------------------------------------


def test_runtimes_shows_what_is_open_and_what_each_does(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    script = opening(row(cwd, running=True), row(cwd, runtimeId="r2", kind="draft", default=False, hasPendingSave=True))
    with ScriptedDaemon(socket_path, script):
        heading, first, second = loopctl("runtimes").out.splitlines()
        document = json.loads(loopctl("runtimes", "--json").out)
    assert heading.index("SESSION") == first.index(f"{cwd}/s1/meta.json")
    assert "running" in first
    assert "draft, not saved, beside" in second
    assert document == script["runtime/list"]


def test_dispose_closes_the_session_of_this_directory_or_the_named_runtime(
    socket_path: str, cwd: str, loopctl: Loopctl
) -> None:
    script = opening(row("/elsewhere", runtimeId="r2"), row(cwd)) | {"runtime/dispose": {}}
    with ScriptedDaemon(socket_path, script) as daemon:
        assert loopctl("dispose").out == f"closed {cwd}/s1/meta.json\n"
        assert loopctl("dispose", "--runtime", "r2", "--json").out == "{}\n"
        assert loopctl("dispose", "--runtime", "r3").code == 4
    assert daemon.asked("runtime/dispose") == [{"runtimeId": "r1"}, {"runtimeId": "r2"}]


def test_dispose_over_an_unsaved_conversation_is_refused(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    script = opening(row(cwd)) | {"runtime/dispose": RpcError("pending_save", "the last save failed")}
    with ScriptedDaemon(socket_path, script):
        ran = loopctl("dispose")
    assert ran.code == 5
    assert "loopctl flush" in ran.err


# --- pin, unpin, read, rename, delete ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "method", "rest", "result", "said"),
    [
        (["pin"], "session/setPinned", {"pinned": True}, {"pinnedAt": 1}, "pinned"),
        (["unpin"], "session/setPinned", {"pinned": False}, {}, "not pinned any more"),
        (["read"], "session/markRead", {"messageCount": 2}, {"read": True}, "read"),
        (["rename", "a  b"], "title/rename", {"text": "a  b"}, {"title": STARTUP}, "Project startup"),
        (["title", "a  b"], "title/rename", {"text": "a  b"}, {"title": STARTUP}, "Project startup"),
    ],
)
def test_metadata_goes_to_the_open_session_else_the_latest_saved_else_the_named_one(
    socket_path: str,
    cwd: str,
    loopctl: Loopctl,
    arguments: list[str],
    method: str,
    rest: dict[str, Any],
    result: Any,
    said: str,
) -> None:  # S-6, S-7, S-28, T-8
    latest = {"session/list": listing(saved("/a/s9/meta.json", cwd))}
    script = latest | {"session/state": state(cwd), method: result}
    with ScriptedDaemon(socket_path, script | opening(row(cwd))) as daemon:
        assert loopctl(*arguments).out == f"{said}\n"
    assert daemon.asked(method) == [{"sessionId": "s1"} | rest]
    with ScriptedDaemon(socket_path, script) as daemon:
        document = json.loads(loopctl(*arguments, "--json").out)
        assert loopctl(*arguments, "--session", "s2/meta.json").code == 0
    assert daemon.asked(method) == [{"path": "/a/s9/meta.json"} | rest, {"path": f"{cwd}/s2/meta.json"} | rest]
    assert document == on_the_wire(result)


FAILED = ErrorInfo("timeout", "m did not answer")


@pytest.mark.parametrize(
    ("option", "result", "said", "code"),
    [
        ("--refresh", {"title": STARTUP}, "Project startup", 0),
        ("--cancel", {"cancelled": True}, "cancelled", 0),
        ("--cancel", {"cancelled": False}, "no title was being made", 0),
        ("--wait", {"title": STARTUP}, "Project startup", 0),
        ("--wait", {}, "New session", 0),
        ("--wait", {"title": STARTUP, "titleError": FAILED}, "Project startup", 1),
        ("--refresh", RpcError("title_failed", "m did not answer"), "", 1),
    ],
)
def test_titles_are_made_awaited_and_cancelled_where_a_session_is_open(
    socket_path: str, cwd: str, loopctl: Loopctl, option: str, result: Any, said: str, code: int
) -> None:  # T-8, T-9
    method = f"title/{option.removeprefix('--')}"
    with ScriptedDaemon(socket_path, opening(row(cwd)) | {method: result}) as daemon:
        ran, as_json = loopctl("title", option), loopctl("title", option, "--json", "--session", "s1")
    assert (ran.code, ran.out.rstrip("\n")) == (as_json.code, said) == (code, said)
    assert ("did not answer" in ran.err) == (code == 1)
    assert daemon.asked(method) == [{"sessionId": "s1"}] * 2
    if not isinstance(result, RpcError):
        assert json.loads(as_json.out) == on_the_wire(result)
    with ScriptedDaemon(socket_path, {"session/list": listing(saved("/a/s9/meta.json", cwd))}):
        assert loopctl("title", option).code == 4


def test_a_title_is_shown_with_why_none_came(socket_path: str, cwd: str, loopctl: Loopctl) -> None:  # T-11
    shown = state(cwd, title=STARTUP, title_error=FAILED, title_usage=Usage(1200, 9))
    with ScriptedDaemon(socket_path, opening(row(cwd)) | {"session/state": shown}):
        ran, as_json, facts = loopctl("title"), loopctl("title", "--json"), loopctl("state").out
    assert (ran.code, ran.out) == (0, "Project startup\n")
    assert "did not answer" in ran.err
    assert json.loads(as_json.out) == on_the_wire({"title": STARTUP, "titleError": FAILED})
    assert "m did not answer" in facts
    assert "1200 in, 9 out" in facts


@pytest.mark.parametrize("arguments", [["x", "--refresh"], ["x", "--wait"], [" "]])
def test_a_title_is_given_or_made_and_never_empty(loopctl: Loopctl, arguments: list[str]) -> None:
    assert loopctl("title", *arguments).code == 2


def test_a_receipt_that_newer_output_overtook_says_that_it_stays_unread(
    socket_path: str, cwd: str, loopctl: Loopctl
) -> None:  # S-6
    script = opening(row(cwd)) | {"session/state": state(cwd), "session/markRead": {"read": False}}
    with ScriptedDaemon(socket_path, script):
        ran, as_json = loopctl("read"), loopctl("read", "--json")
    assert (ran.code, ran.out) == (5, "")
    assert "stays unread" in ran.err
    assert (as_json.code, json.loads(as_json.out)) == (5, {"read": False})


def test_an_empty_session_has_nothing_to_read(socket_path: str, cwd: str, loopctl: Loopctl) -> None:  # S-6
    empty = state(cwd, message_count=0, live_count=0)
    script = opening(row(cwd)) | {"session/state": empty, "session/markRead": {"read": False}}
    with ScriptedDaemon(socket_path, script):
        ran = loopctl("read")
    assert (ran.code, ran.out) == (0, "there is nothing to read yet\n")


class Answering(io.StringIO):
    """A person at a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "code", "asked"), [("y\n", 0, 1), ("n\n", 5, 0), ("\n", 5, 0)])
def test_delete_asks_at_a_terminal(
    socket_path: str, cwd: str, loopctl: Loopctl, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, asked: int
) -> None:  # S-28
    monkeypatch.setattr(sys, "stdin", Answering(answer))
    script = {"session/list": listing(saved("/a/s2/meta.json", cwd, title=STARTUP)), "session/delete": {}}
    with ScriptedDaemon(socket_path, script) as daemon:
        ran = loopctl("delete", "/a/s2/meta.json")
    assert ran.code == code
    assert 'Delete "Project startup", 12 messages, /a/s2/meta.json for good? [y/N]:' in ran.err
    assert daemon.asked("session/delete") == [{"path": "/a/s2/meta.json"}] * asked


def test_a_script_must_say_yes_to_delete(socket_path: str, cwd: str, loopctl: Loopctl) -> None:  # S-28
    damaged = {"path": "/a/s3/meta.json", "reason": "not JSON"}
    with ScriptedDaemon(socket_path, {"session/delete": {}, "session/list": listing(damaged=[damaged])}) as daemon:
        refused = loopctl("delete", "s2/meta.json")
        assert daemon.requests == []
        assert loopctl("delete", "s2/meta.json", "--yes").out == f"deleted {cwd}/s2/meta.json\n"
        assert loopctl("delete", "s3", "--yes", "--json").out == "{}\n"
    assert refused.code == 2
    assert "--yes" in refused.err
    assert daemon.asked("session/delete") == [{"path": f"{cwd}/s2/meta.json"}, {"path": "/a/s3/meta.json"}]


def test_an_open_session_is_not_deleted(socket_path: str, cwd: str, loopctl: Loopctl) -> None:  # S-28
    with ScriptedDaemon(socket_path, opening(row(cwd))) as daemon:
        ran = loopctl("delete", "s1/meta.json", "--yes")
    assert ran.code == 5
    assert "`loopctl dispose --runtime r1` closes it first" in ran.err
    assert daemon.asked("session/delete") == []


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_sessions_shows_titles_and_marks_in_columns(socket_path: str, cwd: str, loopctl: Loopctl) -> None:  # S-4, T-4
    wide = Title(text="起動スクリプト", source="model", message_indices=[0])
    long = Title(text="word " * 20, source="fallback", message_indices=[0])
    rows = [
        saved("/a/s1/meta.json", cwd, title=wide, unread=False, pinnedAt=1, live=True),
        saved("/a/s2/meta.json", cwd, title=long),
        saved("/a/s3/meta.json", cwd, messageCount=0, unread=False),
    ]
    with ScriptedDaemon(socket_path, {"session/list": listing(*rows)}):
        heading, first, second, third = loopctl("sessions").out.splitlines()
    assert heading.split()[:3] == ["UPDATED", "TITLE", "MESSAGES"]
    assert first.index("/a/s1") == second.index("/a/s2") - len(wide.text)  # its characters are two columns wide
    assert "open, pinned" in first
    assert "word word word word word word word word… " in second
    assert "New session" in third


def test_at_a_terminal_a_session_is_told_by_its_id_and_its_directory_only_where_there_are_several(
    socket_path: str, cwd: str, loopctl: Loopctl
) -> None:  # S-4
    script = opening(row(cwd)) | {"session/list": listing(saved(f"{cwd}/s1/meta.json", cwd))}
    with ScriptedDaemon(socket_path, script):
        for arguments, has_cwd, has_path in (
            (["sessions"], False, False),
            (["sessions", "--all"], True, False),
            (["sessions", "--session-dir", cwd], False, True),  # an id is not looked up there
            (["runtimes"], True, False),
        ):
            with at_terminal(*arguments) as terminal:
                assert terminal.ends() == 0
            last = terminal.shown.splitlines()[-1]
            assert (f"{cwd} " in last, last.endswith("/s1/meta.json")) == (has_cwd, has_path)
            assert has_path or last.endswith("  s1")
        assert cwd in loopctl("sessions", "--all").out.splitlines()[1].split()
        assert loopctl("sessions").out.splitlines()[1].endswith(f"{cwd}/s1/meta.json")


def test_state_shows_title_marks_and_what_a_crash_cut_off(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    cut = Recoverable(run_id="run0", started_at=1_700_000_000_000, messages=3)
    shown = state(cwd, title=STARTUP, unread=True, pinned_at=1_700_000_000_000, recoverable=cut)
    with ScriptedDaemon(socket_path, opening(row(cwd)) | {"session/state": shown}):
        lines = dict(line.split("  ", 1) for line in loopctl("state").out.splitlines())
    facts = {name: value.strip() for name, value in lines.items()}
    assert facts["title"] == "Project startup"
    assert facts["unread"] == "yes"
    assert "2023" in facts["pinned"]
    assert facts["cut off"].startswith("3 messages of a run of 2023")  # S-26
    assert "`loopctl recover --session s1`" in facts["cut off"]  # it may not be the one that is open here


def test_timings_tell_how_long_each_prompt_took_and_how_it_ended(
    socket_path: str, cwd: str, loopctl: Loopctl
) -> None:  # P-1, P-3, P-6
    def timing(start: int, end: int | None, *, length: int | None, user: int, **more: Any) -> PromptTiming:
        began = 1_700_000_000_000
        finished = None if length is None else began + length
        return PromptTiming(
            user_message_index=user,
            message_start_index=start,
            message_end_index=end,
            started_at=began,
            finished_at=finished,
            **more,
        )

    timings = [
        PromptTiming(user_message_index=0, started_at=1_700_000_000_000, finished_at=1_700_000_001_250),  # an old one
        timing(2, 4, length=125_000, user=2, id="a", stopped=True),
        timing(4, 6, length=3_723_000, user=2, id="b"),
    ]
    run = running("run1")
    shown = state(cwd, timings=timings, run=run, last_run=RunResult(run_id="b", outcome="error", saved=True))
    with ScriptedDaemon(socket_path, opening(row(cwd)) | {"session/state": shown}):
        _, old, stopped, resumed, under_way = loopctl("timings").out.splitlines()
        document = json.loads(loopctl("timings", "--json").out)
    assert old.split()[2:] == ["1.2", "s", "0-"]
    assert "2 min 05 s" in stopped
    assert stopped.endswith("2-3       stopped")
    assert "1 h 02 min" in resumed
    assert resumed.endswith("resumed, failed")
    assert under_way.endswith("goes on")
    assert document == {"timings": on_the_wire(timings)}


def test_a_recovered_run_does_not_go_on_in_timings(socket_path: str, cwd: str, loopctl: Loopctl) -> None:  # S-26, P-6
    cut = PromptTiming(user_message_index=0, message_start_index=0, message_end_index=3, started_at=1, id="run0")
    for run in (None, running("run1")):
        shown = state(cwd, timings=[cut], run=run)
        with ScriptedDaemon(socket_path, opening(row(cwd)) | {"session/state": shown}):
            lines = loopctl("timings").out.splitlines()
        assert lines[1].endswith("cut off by a crash")
        assert [line.endswith("goes on") for line in lines[2:]] == [True] * (run is not None)


def test_a_session_without_timings_says_so(socket_path: str, cwd: str, loopctl: Loopctl) -> None:  # P-6
    with ScriptedDaemon(socket_path, opening(row(cwd)) | {"session/state": state(cwd)}):
        ran = loopctl("timings")
        document = json.loads(loopctl("timings", "--json").out)
    assert (ran.code, ran.out, ran.err) == (0, "", "loopctl: no timings yet\n")
    assert document == {"timings": []}


# --- watching the list ------------------------------------------------------------------------------------------------


def changing(cwd: str, *events: Any) -> dict[str, Answer]:
    """What the list says, then these changes, then the end of the daemon."""

    def change(peer: Peer) -> None:
        for event in events:
            peer.server_event(event)
        peer.hang_up()

    known = saved("/a/s1/meta.json", cwd, title=STARTUP)
    return {"server/watch": {}, "session/list": lambda *_: Then(listing(known), change)}


def test_watch_tells_every_change_of_this_directorys_list(socket_path: str, cwd: str, loopctl: Loopctl) -> None:
    fresh = saved("/a/s2/meta.json", cwd, messageCount=2, live=True)
    changes = [
        {"type": "session_listed", "session": fresh},
        {"type": "session_listed", "session": saved("/a/s3/meta.json", "/elsewhere")},
        {"type": "session_removed", "sessionId": "s1", "path": "/a/s1/meta.json"},
        {"type": "session_removed", "sessionId": "s3", "path": "/a/s3/meta.json"},
        {"type": "daemon_state", "draining": True, "runs": 1, "pendingSaves": [{"sessionId": "s9", "reason": "full"}]},
    ]
    with ScriptedDaemon(socket_path, changing(cwd, *changes)) as daemon:
        ran, everywhere = loopctl("sessions", "--watch"), loopctl("sessions", "--watch", "--all")
        first, *lines = map(json.loads, loopctl("sessions", "--watch", "--json").out.splitlines())
    assert [name for name, _ in daemon.requests][:3] == ["initialize", "server/watch", "session/list"]
    assert ran.code == 69
    assert [line.split("  ", 1)[1] for line in ran.out.splitlines()[2:]] == [
        "New session, 2 messages, open, unread, /a/s2/meta.json",
        "deleted: /a/s1/meta.json",
        "the daemon drains, running: 1, not saved: s9",
    ]
    assert len(everywhere.out.splitlines()) == 2 + len(changes)
    assert first["sessions"][0]["path"] == "/a/s1/meta.json"
    assert [line["event"] for line in lines] == [changes[0], changes[2], changes[4]]


def test_ctrl_c_ends_the_watching_of_the_list(socket_path: str, cwd: str) -> None:
    def change(peer: Peer) -> None:
        peer.server_event({"type": "events_lost", "from": 1, "to": 2})

    script = {"server/watch": {}, "session/list": Then(listing(saved("/a/s1/meta.json", cwd)), change)}
    with ScriptedDaemon(socket_path, script), at_terminal("sessions", "--watch") as terminal:
        terminal.waits_for("some changes are not shown")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.ends() == 130
