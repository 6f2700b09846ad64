"""A daemon is killed in mid-run; the person finds out what is left of it, and takes it back."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from loopctl_world import World


def test_after_a_kill_the_run_is_offered_and_taken_over(world: World) -> None:  # S-26, K-20
    assert world.loopctl("prompt", "hello").returncode == 0
    assert world.loopctl("recover").returncode == 1  # nothing was cut off
    run = world.start("prompt", "--permission", "danger-full-access", "shell: echo at work; exec sleep 60")
    assert run.stderr is not None
    while b"at work" not in (line := run.stderr.readline()):
        assert line
    world.kill(signal.SIGKILL)
    run.communicate()
    told = world.loopctl("state")
    assert "2 messages of a run of " in told.stdout
    taken = world.loopctl("recover")
    said = "2 messages taken over; `loopctl messages` shows them, `loopctl resume` goes on\n"
    assert (taken.returncode, taken.stdout) == (0, said)
    shown = world.loopctl("messages").stdout
    assert "shell: echo at work" in shown
    assert "the daemon ended in the middle of the run" in shown
    assert "cut off" not in world.loopctl("state").stdout
    again = world.loopctl("prompt", "and now")  # in the same session, which recovering opened
    assert (again.returncode, again.stdout) == (0, "and now\n")
    assert [one["role"] for one in json.loads(world.loopctl("messages", "--json").stdout)["messages"]] == [
        "user",
        "assistant",
        "user",
        "assistant",
        "toolResult",
        "user",
        "assistant",
    ]


def test_a_new_session_after_a_kill_says_how_to_recover_the_one_before(world: World) -> None:  # S-26
    run = world.start("prompt", "slow")
    assert run.stdout is not None
    assert run.stdout.read(4) == b"word"
    world.kill(signal.SIGKILL)
    _, lost = run.communicate()
    new = world.loopctl("prompt", "something else")
    (command,) = [line for line in new.stderr.splitlines() if "recover" in line]
    assert command in lost.decode().splitlines()
    taken = world.loopctl(*command.split("`")[1].split()[1:])
    assert taken.returncode == 0
    assert taken.stdout.startswith("1 message taken over; `loopctl messages --session ")
    assert "a crash" not in world.loopctl("prompt", "--new", "and more").stderr


def test_a_prompt_that_leaves_it_behind_says_so(world: World) -> None:  # S-26
    run = world.start("prompt", "slow")
    assert run.stdout is not None
    assert run.stdout.read(4) == b"word"
    world.kill(signal.SIGKILL)
    run.communicate()
    path = json.loads(world.loopctl("sessions", "--json").stdout)["sessions"][0]["path"]
    left = Path(path).with_name("run.journal").read_bytes()
    new = world.loopctl("prompt", "--session", path, "other")
    assert new.returncode == 0
    assert "this prompt leaves 1 message of it behind, in run.journal.old" in new.stderr
    assert Path(path).with_name("run.journal.old").read_bytes() == left
    told = world.loopctl("recover", "--session", path)
    assert told.returncode == 1
    assert f"no crash cut off a run of {path}" in told.stderr
