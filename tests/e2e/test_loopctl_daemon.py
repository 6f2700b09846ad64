"""The daemon as ``loopctl`` starts, asks, drains and ends it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from loopctl_world import World, ended


def test_start_status_log_and_stop(world: World) -> None:  # D-7
    assert world.loopctl("status").returncode == 69
    assert world.loopctl("daemon", "start").stdout.startswith("started, pid")
    assert world.loopctl("daemon", "start").stdout.startswith("already running, pid")
    pid = world.pid()
    assert pid is not None
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert os.getsid(pid) == pid
    assert world.log.stat().st_mode & 0o777 == 0o600
    assert "serving on" in world.loopctl("daemon", "log").stdout
    assert world.loopctl("status").stdout.splitlines()[1].split() == ["pid", str(pid)]
    assert world.loopctl("daemon", "stop").stdout == "stopped\n"
    assert world.pid() is None
    assert not Path(world.socket).exists()
    assert world.loopctl("daemon", "stop").returncode == 69


def test_ten_starts_at_once_start_one(world: World) -> None:
    outcomes = [ended(process) for process in [world.start("daemon", "start") for _ in range(10)]]
    assert [code for code, _, _ in outcomes] == [0] * 10
    assert sum(out.startswith("started") for _, out, _ in outcomes) == 1
    assert len({out.split("pid ")[1] for _, out, _ in outcomes}) == 1
    assert world.log.read_text().count("serving on") == 1


def test_a_draining_daemon_refuses_prompts_and_can_take_work_again(world: World) -> None:  # D-4
    world.loopctl("daemon", "start")
    assert world.loopctl("drain").stdout == "quiet\n"
    assert world.loopctl("prompt", "x").returncode == 5
    assert world.loopctl("drain", "--cancel").stdout == "the daemon takes work again\n"
    assert world.loopctl("prompt", "x").stdout == "x\n"


def test_a_socket_left_by_a_killed_daemon_is_taken_over(world: World) -> None:  # K-53
    world.loopctl("daemon", "start")
    world.kill(signal.SIGKILL)
    assert Path(world.socket).exists()
    assert world.loopctl("status").returncode == 69
    assert world.loopctl("models").returncode == 0


def test_a_daemon_that_cannot_start_says_why_and_at_once(world: World) -> None:
    config = world.root / "c" / "loopd" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text("[daemon]\nnonsense = 1\n")
    ran = world.loopctl("prompt", "x")
    assert ran.returncode == 69
    assert "nonsense" in ran.stderr


def test_a_file_in_the_sockets_place_is_left_alone(world: World) -> None:  # K-53
    socket = Path(world.socket)
    socket.parent.mkdir(parents=True)
    socket.write_text("mine")
    ran = world.loopctl("prompt", "x")
    assert ran.returncode == 69
    assert "not a socket" in ran.stderr
    assert socket.read_text() == "mine"


def test_the_socket_of_the_command_line_comes_first(world: World) -> None:
    other = str(world.root / "o" / "s")
    try:
        assert world.loopctl("--socket", other, "prompt", "x").stdout == "x\n"
        assert Path(other).parent.stat().st_mode & 0o777 == 0o700
        assert world.loopctl("status").returncode == 69
        status = json.loads(world.loopctl("--socket", other, "status", "--json").stdout)
        assert status["socket"] == other
    finally:
        assert world.loopctl("--socket", other, "daemon", "stop").returncode == 0
