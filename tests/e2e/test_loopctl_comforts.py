"""What people stumbled over: each of these once left somebody without an answer."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from loopctl_world import COMMAND, PATIENCE, World, ended


def test_tool_output_is_shown_as_it_comes(world: World) -> None:
    process = world.start("prompt", "shell: echo first; sleep 30", "--permission", "danger-full-access")
    assert process.stderr is not None
    seen, started = b"", time.monotonic()
    while b"  first" not in seen and time.monotonic() - started < PATIENCE:
        seen += process.stderr.readline()
    assert process.poll() is None, "it is still running"
    assert world.loopctl("stop").returncode == 0
    assert ended(process)[0] == 1


@pytest.mark.parametrize("arguments", [["prompt", "hi"], ["sessions"], ["status", "--json"]])
def test_a_full_disk_on_stdout_is_one_line_and_code_1(world: World, arguments: list[str]) -> None:
    world.loopctl("prompt", "hi")
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [*COMMAND, *arguments],
            cwd=world.workspace,
            env=world.environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
        )
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == "loopctl: cannot write: No space left on device"


def test_the_last_messages(world: World) -> None:
    for text in ("one", "two"):
        world.loopctl("prompt", text)
    shown = world.loopctl("messages", "--last", "2").stdout
    assert "two" in shown
    assert "one" not in shown
    assert world.loopctl("messages", "--last", "9").stdout.count("[") == 4
    assert world.loopctl("messages", "--last", "2", "--limit", "1").returncode == 2


def test_restart_takes_the_environment_of_now_and_a_new_session_says_so(world: World) -> None:
    world.loopctl("prompt", "one")
    before = world.pid()
    again = world.loopctl("daemon", "restart")
    assert again.returncode == 0
    assert world.pid() not in (None, before)
    fresh = world.loopctl("prompt", "two")
    assert "a new session" in fresh.stderr
    assert "--continue" in fresh.stderr
    assert "a new session" not in world.loopctl("prompt", "three").stderr


def test_continue_without_a_session_says_that_it_is_a_new_one(world: World) -> None:  # S-2
    ran = world.loopctl("prompt", "--continue", "one")
    assert ran.returncode == 0
    assert "no session to go on with" in ran.stderr


def test_no_number_is_no_timeout(world: World) -> None:
    assert world.loopctl("prompt", "--timeout", "nan", "x").returncode == 2


def test_a_stop_that_is_refused_leaves_the_daemon_at_work(world: World) -> None:  # D-4, S-25
    world.loopctl("prompt", "one")
    (place,) = Path(world.root / "s" / "loopd" / "sessions").glob("*/*")
    aside = place.with_name("aside")
    place.rename(aside)
    assert world.loopctl("prompt", "two").returncode == 5
    refused = world.loopctl("daemon", "stop")
    assert refused.returncode == 5
    assert "not saved" in refused.stderr
    other = world.loopctl("prompt", "--no-session", "elsewhere")
    assert (other.returncode, other.stdout) == (0, "elsewhere\n")
    aside.rename(place)
    assert world.loopctl("flush").returncode == 0
    assert world.loopctl("prompt", "three").returncode == 0
    assert world.loopctl("daemon", "stop").returncode == 0
