"""What people stumbled over: each of these once left somebody without an answer."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from loopctl_world import COMMAND, PATIENCE, World, ended
from typing_person import at_terminal


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


def test_a_restart_with_settings_that_are_wrong_leaves_the_daemon_at_work(world: World, tmp_path: Path) -> None:
    world.loopctl("prompt", "one")
    before = world.pid()
    wrong = tmp_path / "config.toml"
    wrong.write_text("[daemon]\nidle_exit = 3\n")
    ran = world.loopctl("daemon", "restart", LOOPD_CONFIG=str(wrong))
    assert ran.returncode == 69
    assert "idle_exit" in ran.stderr
    assert str(wrong) in ran.stderr
    assert world.pid() == before


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


def test_at_a_terminal_an_unsaved_conversation_waits_for_flush(world: World) -> None:  # S-25
    world.loopctl("prompt", "one")
    (place,) = Path(world.root / "s" / "loopd" / "sessions").glob("*/*")
    aside = place.with_name("aside")
    place.rename(aside)
    with at_terminal("prompt", "two", cwd=world.workspace, env=world.environment) as terminal:
        for typed, answered in (("/flush", "put it back, then flush"), ("/quit", "not yet"), ("\x04", "not yet")):
            terminal.waits_for("/flush or /quit> ")
            terminal.type(typed if typed == "\x04" else f"{typed}\n")
            terminal.waits_for(answered)
        aside.rename(place)
        terminal.waits_for("/flush or /quit> ")
        terminal.type("/flush\n")
        terminal.waits_for("saved")
        assert terminal.ends() == 0
    assert "two" in world.loopctl("messages", "--last", "1").stdout


def test_the_session_of_a_directory_changes_and_is_found_again_by_directory_and_id(world: World) -> None:  # S-2, R-1
    world.loopctl("prompt", "one")
    (first,) = Path(world.root / "s" / "loopd" / "sessions").glob("*/*")
    assert world.loopctl("new").returncode == 0
    assert world.loopctl("prompt", "two").stdout == "two\n"
    for name in (str(first), first.name, f"{first}/meta.json"):
        assert "one" in world.loopctl("messages", "--session", name).stdout
    assert world.loopctl("prompt", "three", "--session", first.name).returncode == 0
    assert world.loopctl("runtimes").stdout.count("meta.json") == 2
    assert world.loopctl("dispose").returncode == 0
    assert world.loopctl("dispose", "--session", first.name).returncode == 0
    assert world.loopctl("runtimes").stderr == "loopctl: nothing is open\n"
    assert "three" in world.loopctl("messages", "--session", first.name).stdout
    assert len(world.loopctl("timings", "--session", first.name).stdout.splitlines()) == 3
