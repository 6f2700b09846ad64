"""Whether there is a sandbox is told by the daemon and by ``loopd doctor``, and trying it holds up nobody (A-7)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner
from daemon_process import started
from inprocess import running

from loopd.__main__ import main
from loopd.agent.tools import sandbox
from loopd.agent.tools.sandbox import Sandbox


def place_of_bwrap(place: Path, script: str) -> str:
    place.mkdir()
    (place / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
    (place / "bwrap").chmod(0o755)
    return str(place)


def test_a_daemon_tries_it_after_its_start_and_leaves_no_process() -> None:
    here = trio.run(Sandbox().tried)
    with started() as daemon, daemon.connect() as client:
        until = time.monotonic() + 10
        while (told := client.call("server/status").sandbox) is None:
            assert time.monotonic() < until
        assert told == here
        children = Path(f"/proc/{daemon.popen.pid}/task/{daemon.popen.pid}/children")
        while children.exists() and children.read_text():
            assert time.monotonic() < until


async def test_status_answers_while_it_is_being_tried(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    places = place_of_bwrap(tmp_path / "bin", f'while [ ! -e {gate} ]; do sleep 0.02; done; echo "no" >&2; exit 1')
    trying = Sandbox(places=places)
    async with running(tmp_path) as world:
        world.services.sandbox = trying
        wire = await world.connect()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trying.tried)
            assert (await wire.call("server/status")).get("sandbox") is None
            gate.touch()
        told = (await wire.call("server/status"))["sandbox"]
        assert told["works"] is False
        assert "does not work here: no" in told["reason"]
        await wire.aclose()


@pytest.mark.parametrize("script", [None, "echo 'bwrap: no namespaces' >&2; exit 1", "works"])
def test_doctor_tells_whether_it_works_and_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None
) -> None:
    if script == "works":
        if (reason := trio.run(Sandbox().tried).reason) is not None:
            pytest.skip(reason)
    else:
        places = place_of_bwrap(tmp_path / "bin", script) if script else str(tmp_path)
        monkeypatch.setattr(sandbox, "_systems_own", partial(shutil.which, path=places))
    options = ["--data-dir", str(tmp_path / "data"), "--config", str(tmp_path / "c"), "--socket", str(tmp_path / "s")]
    (tmp_path / "c").touch()
    tmp_path.chmod(0o700)
    told = CliRunner().invoke(main, ["doctor", *options])
    shown = json.loads(CliRunner().invoke(main, ["doctor", *options, "--json"]).stdout)
    assert told.exit_code == 0, told.output
    assert shown["sandbox"]["works"] is (script == "works")
    if script == "works":
        assert "the sandbox works" in told.output
        assert shown["findings"] == []
    else:
        why = "no namespaces" if script else "not installed"
        assert why in told.output
        assert [why in finding["what"] for finding in shown["findings"]] == [True]


def test_doctor_says_once_that_there_is_none(tmp_path: Path) -> None:
    options = ["--data-dir", str(tmp_path / "data"), "--config", str(tmp_path / "c"), "--socket", str(tmp_path / "s")]
    (tmp_path / "c").touch()
    tmp_path.chmod(0o700)
    command = [sys.executable, "-m", "loopd", "doctor", *options]
    told = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert told.stdout.count("bubblewrap is not installed") == 1
    assert told.stderr == ""
