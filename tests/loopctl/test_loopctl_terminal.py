"""What a terminal is shown, what a pipe gets, and how fast and how quietly the program comes and goes."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
import tty
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_daemon import Loopctl, ScriptedDaemon, answering, assistant, conversation, row, says, state
from typing_person import at_terminal

from loop_protocol.v1.types import Recoverable, Title
from loopctl.__main__ import COMMANDS
from loopctl.terminal import clock, one_line, visible, wrapped

LOOPCTL = [sys.executable, "-m", "loopctl"]
NASTY = "curl e|sh\r\x1b[2K ls \u202e\u200b\x9b1m"


@given(st.text())
def test_what_is_shown_has_nothing_that_acts_or_hides(text: str) -> None:  # K-45
    shown = visible(text)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]", shown)
    assert len(shown) >= len(text)


def test_every_character_that_acts_or_has_no_shape_is_an_escape() -> None:  # K-45
    """By Unicode's own words, but for tab and newline, spaces, and what is told apart by its neighbours."""
    every = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code <= 0xDFFF]
    formats = {one for one in every if unicodedata.category(one) in ("Cc", "Cf", "Zl", "Zp")} - {"\t", "\n"}
    # Signs that stand before numbers and words: they have a shape, though Unicode has them among the formats.
    shaped = set("\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd")
    shaped |= {chr(code) for code in range(0x13430, 0x13440)}
    named = {*"\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0\u180b\u180f", *map(chr, range(0xFE00, 0xFE10))}
    tags = {chr(code) for code in range(0xE0000, 0xE1000)}
    missed = [f"{ord(one):04x}" for one in sorted((formats - shaped) | named | tags) if visible(one) == one]
    assert missed == []
    ordinary = "Zoë – «naïve» 漢字 ｶﾞ हिन्दी עברית ไทย \u00a0 e\u0301 👍🏽 ⚠\ufe0f ✔\ufe0e\t\n"
    assert visible(ordinary) == ordinary
    assert visible("a\ufe0f") == r"a\ufe0f"
    assert visible("⚠\ufe0f\ufe0f") == "⚠\ufe0f" + r"\ufe0f"


@given(st.integers())
def test_any_number_of_milliseconds_can_be_shown(time: int) -> None:
    """Files of an earlier version may say any."""
    assert clock(time)
    assert re.fullmatch("2026-0[1-3]-[0-9]{2} [0-9]{2}:[0-9]{2}", clock(1_770_000_000_000))


@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_shown_json_is_still_the_same_json(text: str) -> None:
    assert json.loads(visible(json.dumps({"a": text}, ensure_ascii=False))) == {"a": text}


def test_a_cut_line_says_how_much_is_missing() -> None:
    assert one_line("a\n b", 10) == "a b"
    assert one_line("0123456789", 4) == "012… (6 more characters) …9"


def test_a_terminal_sees_escapes_and_a_pipe_gets_every_byte(socket_path: str, cwd: str) -> None:  # K-45
    with ScriptedDaemon(socket_path, answering(cwd, *conversation(*says(NASTY)))):
        piped = subprocess.run([*LOOPCTL, "prompt", "x"], capture_output=True, check=True, timeout=20)
        master, slave = pty.openpty()
        tty.setraw(slave)  # else the terminal itself turns \n into \r\n
        subprocess.run([*LOOPCTL, "prompt", "x"], stdout=slave, stderr=slave, stdin=slave, check=True, timeout=20)
        os.close(slave)
        shown = os.read(master, 65536).decode()
        os.close(master)
    assert piped.stdout.decode() == NASTY + "\n"
    assert shown == r"curl e|sh\u000d\u001b[2K ls \u202e\u200b\u009b1m" + "\n"


def test_only_newlines_end_a_line_of_what_a_tool_or_a_person_says(socket_path: str, cwd: str) -> None:  # K-45
    """Progress bars go back to the beginning of their line; what was there first must not be gone."""
    said = "rm -rf ~\rls\x85\u2028\x0cdone"
    events = [
        {"type": "tool_execution_start", "toolCallId": "c", "toolName": "bash", "arguments": {"command": said}},
        {"type": "tool_execution_update", "toolCallId": "c", "outputDelta": said * 2},
        {"type": "tool_execution_end", "toolCallId": "c", "isError": True},
    ]
    failed = {"kind": "model", "message": said}
    script = answering(cwd, *conversation(*events, outcome="error", error=failed))
    with ScriptedDaemon(socket_path, script), at_terminal("prompt", "x") as terminal:
        assert terminal.ends() == 1
    shown = visible(said)
    assert r'{"command":"rm -rf ~\rls' in terminal.shown
    assert f"  {shown}{shown}\r\n" in terminal.shown
    assert f"loopctl: the run failed: {shown}\r\n" in terminal.shown


@pytest.mark.parametrize("command", [["messages"], ["rpc", "session/messages"], ["messages", "--json"]])
def test_raw_gives_a_terminal_the_bytes(socket_path: str, cwd: str, command: list[str]) -> None:
    page = {"start": 0, "total": 1, "committed": 1, "messages": [assistant("\u202eolleh") | {"index": 0}]}
    script = {"runtime/list": {"runtimes": [row(cwd)]}, "session/state": state(cwd), "session/messages": page}
    with ScriptedDaemon(socket_path, script):
        for option, expected in ([], r"\u202eolleh"), (["--raw"], "\u202eolleh"):
            with at_terminal(*command, *option) as terminal:
                terminal.waits_for(expected)
                assert terminal.ends() == 0


RAW = ["prompt", "resume", "attach", "state", "messages", "sessions", "title", "runtimes", "queue", "approvals", "rpc"]


@pytest.mark.parametrize("name", [*RAW, "daemon log"])
def test_whatever_prints_what_others_said_has_raw(loopctl: Loopctl, name: str) -> None:
    assert "--raw " in loopctl(*name.split(), "--help").out


def test_a_reader_that_goes_away_ends_it_quietly(socket_path: str, cwd: str) -> None:
    with ScriptedDaemon(socket_path, answering(cwd, *conversation(*says("x" * 2000)))) as daemon:
        read, write = os.pipe()
        os.close(read)
        ran = subprocess.run([*LOOPCTL, "prompt", "x"], stdout=write, stderr=subprocess.PIPE, timeout=20)
        os.close(write)
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert daemon.asked("session/stop") == []  # the run goes on


def test_a_second_ctrl_c_ends_at_once_and_names_the_run_that_goes_on(socket_path: str, cwd: str) -> None:
    asked = threading.Event()

    def never(*_: object) -> None:
        asked.set()

    script = answering(cwd, *conversation(*says("half"))[:-1]) | {"session/stop": never}
    with ScriptedDaemon(socket_path, script):
        process = subprocess.Popen([*LOOPCTL, "prompt", "x"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 100)
        process.send_signal(signal.SIGINT)
        assert asked.wait(20)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert b"run run1 may go on" in err


def test_an_encoding_without_the_character_shows_which_it_is(socket_path: str, cwd: str) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    with ScriptedDaemon(socket_path, answering(cwd, *conversation(*says("né")))):
        ran = subprocess.run([*LOOPCTL, "prompt", "x"], capture_output=True, env=environment, timeout=20)
    assert (ran.returncode, ran.stdout) == (0, b"n\\xe9\n")


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], ["msgspec", "trio", "loopd", "socket", "loop_protocol"]),
        (["prompt", "--help"], ["trio", "loopd", "asyncio", "rich", "subprocess", "loopctl.commands.attach"]),
        (["messages", "--help"], ["trio", "loopd", "asyncio", "loopctl.commands.prompt"]),
    ],
)
def test_a_command_imports_only_what_it_needs(arguments: list[str], absent: list[str]) -> None:
    code = "import sys; from loopctl.__main__ import run; run(sys.argv[1:]); print('MODULES', *sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, timeout=20
    )
    modules = ran.stdout.split("MODULES")[1].split()
    assert [name for name in absent if name in modules] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_does(loopctl: Loopctl, name: str) -> None:
    ran = loopctl(name, "--help")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(f"Usage: loopctl {name} ")


@pytest.mark.parametrize(("words", "offered"), [("loopctl sw", "switch"), ("loopctl delete --y", "--yes")])
def test_the_shell_completes_commands_and_options(words: str, offered: str) -> None:
    wanted = {"_LOOPCTL_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    ran = subprocess.run(LOOPCTL, capture_output=True, text=True, check=True, env=os.environ | wanted, timeout=20)
    assert ran.stdout == f"plain,{offered}\n"


def test_a_conversation_at_a_terminal_begins_with_its_title_and_marks(socket_path: str, cwd: str) -> None:
    shown = state(
        cwd,
        title=Title(text="Project startup", source="user", message_indices=[]),
        unread=True,
        pinned_at=1,
        recoverable=Recoverable(run_id="run0", started_at=1, messages=3),
    )
    page = {"start": 0, "total": 1, "committed": 1, "messages": [assistant("hello") | {"index": 0}]}
    script = {"runtime/list": {"runtimes": [row(cwd)]}, "session/state": shown, "session/messages": page}
    with ScriptedDaemon(socket_path, script), at_terminal("messages") as terminal:
        terminal.waits_for("Project startup · unread · pinned")
        terminal.waits_for("3 messages of a run of ")  # S-26
        terminal.waits_for("hello")
        assert terminal.ends() == 0


def test_what_needs_no_wrapping_takes_no_time() -> None:
    """`loopctl approvals show` of 20 MB of arguments into a pipe took 13 s."""
    started = time.process_time()
    assert wrapped("ü" * 5_000_000, None) == ["ü" * 5_000_000]
    assert time.process_time() - started < 0.5
    assert wrapped("", 10) == [""]
    assert wrapped("日本", 16) == ["日本"]
    assert wrapped("日本", 3) == ["日", "本"]
