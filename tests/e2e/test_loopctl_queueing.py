"""Typing ahead, changing one's mind, stopping and going on: ``loopctl`` with the real daemon."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import Any

from loopctl_world import World, ended, first_output
from typing_person import at_terminal

FULL = ("--permission", "danger-full-access")
# It ends by itself too: a killed daemon does not end it.
GATE = "shell: echo at work; for _ in {1..600}; do [ -e open ] && break; sleep 0.05; done; echo gone on"


def at_the_gate(world: World) -> subprocess.Popen[bytes]:
    """A run that goes on until ``open`` is called."""
    run = world.start("prompt", GATE, *FULL)
    assert run.stderr is not None
    while b"at work" not in (line := run.stderr.readline()):
        assert line
    return run


def open_gate(world: World) -> None:
    (world.workspace / "open").touch()


def waits(process: subprocess.Popen[bytes]) -> None:
    """Until it says so."""
    assert process.stderr is not None
    while b"waits for its turn" not in (line := process.stderr.readline()):
        assert line


def queue(world: World) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(world.loopctl("queue", "--json").stdout)
    return document


def ids(world: World) -> list[str]:
    return [item["itemId"] for item in queue(world)["items"]]


def said(world: World) -> list[str]:
    """What was sent and answered, tools left out."""
    found = json.loads(world.loopctl("messages", "--json").stdout)["messages"]
    return [
        "".join(block.get("text", "") for block in message["content"]).strip()
        for message in found
        if message["role"] != "toolResult" and message["content"] and message["content"][0]["type"] == "text"
    ]


def test_two_shells_type_ahead_of_a_slow_prompt_and_each_gets_its_own_answer(world: World) -> None:
    slow = world.start("prompt", "slow")
    first_output(slow)
    assert world.loopctl("prompt", "plain").returncode == 5
    shells = []
    for text in ("one", "two"):
        shells.append(world.start("prompt", "--queue", text))
        waits(shells[-1])
    assert ended(slow)[0] == 0
    outcomes = [ended(shell) for shell in shells]
    assert [(code, out) for code, out, _ in outcomes] == [(0, "one\n"), (0, "two\n")]
    assert said(world)[2:] == ["one", "one", "two", "two"]
    assert world.loopctl("queue").stderr == "loopctl: nothing waits\n"


def test_an_order_is_changed_before_its_turn(world: World) -> None:
    run = at_the_gate(world)
    for text in ("one", "two", "three"):
        assert world.loopctl("queue", "add", text).stdout.startswith("itemId ")
    one, two, three = ids(world)
    assert world.loopctl("queue", "move", three, "0").returncode == 0
    assert world.loopctl("queue", "edit", one, "changed").stdout == f"edited {one}: changed\n"
    assert world.loopctl("queue", "remove", two).stdout == f"removed {two}: two\n"
    lines = world.loopctl("queue").stdout.splitlines()[1:]
    assert [line.split() for line in lines] == [["0", three, "three"], ["1", one, "changed"]]
    watching = world.start("attach")
    assert watching.stderr is not None
    title, session, queue = (watching.stderr.readline() for _ in range(3))
    assert b"echo at work" in title
    assert b"2 messages" in session
    assert b"2 queued inputs" in queue
    last = world.start("prompt", "--queue", "last")
    waits(last)
    open_gate(world)
    assert ended(run)[0] == 0
    assert ended(last)[:2] == (0, "last\n")
    watching.send_signal(signal.SIGINT)
    _, _, shown = ended(watching)
    assert f"loopctl: queue: {three} starts\n" in shown
    assert shown.index("> three") < shown.index("> changed") < shown.index("> last")
    assert said(world)[-6:] == ["three"] * 2 + ["changed"] * 2 + ["last"] * 2
    started = world.loopctl("queue", "remove", three)
    assert started.returncode == 5
    assert "has started" in started.stderr


def test_an_input_that_steers_enters_the_run_that_goes_on(world: World) -> None:
    run = at_the_gate(world)
    follower = world.start("prompt", "--queue", "turn left")
    waits(follower)
    [item] = ids(world)
    assert world.loopctl("queue", "edit", item, "--steer").returncode == 0
    assert world.loopctl("queue").stdout.splitlines()[1].split() == ["0", item, "steer", "turn", "left"]
    open_gate(world)
    (code, out, _), (steered, followed, _) = ended(run), ended(follower)
    assert (code, steered) == (0, 0)
    assert out.endswith("turn left\n")
    assert followed == "turn left\n"
    state = json.loads(world.loopctl("state", "--json").stdout)
    assert len(state["timings"]) == 1


def test_a_stop_pauses_and_resume_goes_on_until_the_queue_is_empty(world: World) -> None:
    run = at_the_gate(world)
    shells = []
    for text in ("one", "two"):
        shells.append(world.start("prompt", "--queue", text))
        waits(shells[-1])
    stop = world.loopctl("stop")
    assert stop.stdout == "stopped\n"
    assert "2 queued inputs, paused: the run was stopped; `loopctl resume` goes on" in stop.stderr
    code, _, err = ended(run)
    assert code == 1
    assert "2 queued inputs, paused" in err
    assert queue(world)["paused"] == "stopped"
    assert world.loopctl("new").returncode == 5
    resumed = world.loopctl("resume")
    assert resumed.returncode == 0
    for shell, text in zip(shells, ("one", "two"), strict=True):
        code, out, err = ended(shell)
        assert (code, out) == (0, f"{text}\n")
        assert err.count("the queue is paused: the run was stopped; `loopctl resume` goes on") == 1
    assert said(world)[-4:] == ["one", "one", "two", "two"]
    assert queue(world) == {"items": []}
    again = world.loopctl("resume")
    assert again.returncode == 5
    assert "whole answer" in again.stderr


def test_ctrl_c_and_the_time_given_take_a_waiting_prompt_back(world: World) -> None:
    run = at_the_gate(world)
    with at_terminal("prompt", "--queue", "never", cwd=world.workspace, env=world.environment) as terminal:
        terminal.waits_for("queued behind 1; waits for its turn")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.ends() == 130
    assert "taken out of the queue again" in terminal.shown
    late = world.loopctl("prompt", "--queue", "--timeout", "0.3", "nor this")
    assert late.returncode == 3
    assert "taken out of the queue again" in late.stderr
    removed = world.start("prompt", "--queue", "removed")
    waits(removed)
    assert world.loopctl("queue", "remove", ids(world)[0]).returncode == 0
    assert ended(removed)[0] == 5
    open_gate(world)
    assert ended(run)[0] == 0
    assert said(world) == [GATE, "at work\ngone on"]


def test_after_a_kill_recover_and_resume_go_on_with_the_work(world: World) -> None:  # S-26, Q-4
    run = at_the_gate(world)
    world.kill(signal.SIGKILL)
    open_gate(world)  # the command is nobody's now, and would stay
    run.communicate()
    refused = world.loopctl("resume")
    assert refused.returncode == 5
    command = refused.stderr.split("`")[1].split()[1:]
    taken = world.loopctl(*command)
    assert taken.returncode == 0
    resume = taken.stdout.split("`")[3].split()[1:]
    assert resume[0] == "resume"
    ran = world.loopctl(*resume)
    assert ran.returncode == 0
    assert "the daemon ended in the middle of the run" in ran.stdout
    assert said(world)[0] == GATE


def test_a_person_takes_over_what_a_kill_left_and_goes_on_in_one_step(world: World) -> None:  # S-26, Q-4
    run = at_the_gate(world)
    world.kill(signal.SIGKILL)
    open_gate(world)  # the command is nobody's now, and would stay
    run.communicate()
    with at_terminal("resume", cwd=world.workspace, env=world.environment) as terminal:
        terminal.waits_for("take them over first? [Y/n]")
        terminal.type("\r")
        terminal.waits_for("the daemon ended in the middle of the run")
        assert terminal.ends() == 0
    assert "cut off" not in world.loopctl("state").stdout


def test_stopped_work_goes_on_after_a_restart_here_and_by_name(world: World) -> None:
    for number, arguments in enumerate(([], ["--session"])):
        run = at_the_gate(world)
        assert world.loopctl("stop").returncode == 0
        ended(run)
        state = json.loads(world.loopctl("state", "--json").stdout)
        assert world.loopctl("daemon", "restart").returncode == 0
        ran = world.loopctl("resume", *arguments, *([state["sessionId"]] if arguments else []))
        assert ran.returncode == 0, number
        named = ["--session", state["path"]]
        timings = json.loads(world.loopctl("state", "--json", *named).stdout)["timings"]
        assert [timing["userMessageIndex"] for timing in timings[-2:]] == [timings[-1]["userMessageIndex"]] * 2
        world.loopctl("new")


def test_a_failed_run_is_resumed(world: World) -> None:
    assert world.loopctl("prompt", "fail").returncode == 1
    ran = world.loopctl("resume")
    assert ran.returncode == 1
    assert "the run failed" in ran.stderr


def test_inputs_that_go_with_the_daemon_are_named_before(world: World) -> None:
    run = at_the_gate(world)
    waiting = world.start("prompt", "--queue", "lost")
    waits(waiting)
    assert "1 queued" in world.loopctl("runtimes").stdout
    assert world.loopctl("stop").returncode == 0
    stop = world.loopctl("daemon", "stop")
    assert stop.returncode == 0
    assert "1 queued input, in the daemon's memory only" in stop.stderr
    ended(run)
    code, _, err = ended(waiting)
    assert code == 5
    assert "the session was closed, and the queued input is gone: shutdown" in err
