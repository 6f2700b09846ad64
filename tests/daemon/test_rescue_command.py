"""``loopd rescue`` and ``loopd doctor`` beside a real daemon: what it had to leave unsaved comes back (S-25, D-4)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from daemon_process import PATIENCE, DaemonProcess, open_session, prompt, started

from loop_protocol.client import Client
from loopd.agent.tools.sandbox import Sandbox

SHORT = "[daemon]\ndrain_deadline_s = 2.2\n"


@pytest.fixture
def place() -> Iterator[Path]:
    """Short enough for the path of a socket."""
    with tempfile.TemporaryDirectory(prefix="loopd-") as directory:
        yield Path(directory)


def loopd(place: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(place),
        "XDG_RUNTIME_DIR": str(place / "run"),
        "LOOPD_DATA_DIR": str(place / "data"),
        "LOOPD_SOCKET": str(place / "s"),
        **environ,
    }
    command = [sys.executable, "-m", "loopd", *arguments]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=PATIENCE)


def copies(place: Path) -> list[dict[str, Any]]:
    listed = loopd(place, "rescue", "list", "--json")
    assert (listed.returncode, listed.stderr) == (0, "")
    rows: list[dict[str, Any]] = json.loads(listed.stdout)["copies"]
    return rows


def said(client: Client, path: str) -> list[str]:
    messages = client.call("session/messages", {"path": path}).messages
    return [json.loads(bytes(message))["content"][0]["text"] for message in messages]


def rescued(daemon: DaemonProcess, spoil: Callable[[Path], object]) -> str:
    """A prompt that is saved, then prompts that cannot be, and a TERM; answers the session's path."""
    with daemon.connect() as client:
        opened = open_session(client, daemon)
        assert prompt(client, opened.session_id, "saved", wait=True).saved
        spoil(Path(opened.path).parent)
        for _ in range(20):
            if not prompt(client, opened.session_id, "lost " * 2000, wait=True).saved:
                break
        else:
            raise AssertionError("nothing fails")
        daemon.signal(signal.SIGTERM)
        assert daemon.ended(within=10) == 75
    path: str = opened.path
    return path


def require_back(place: Path, path: str, copy: dict[str, Any]) -> None:
    """It is applied, and a daemon has it all."""
    applied = loopd(place, "rescue", "apply", copy["path"])
    assert (applied.returncode, applied.stderr) == (0, "")
    assert path in applied.stdout
    assert copies(place) == []
    with started(place=place) as daemon, daemon.connect() as client:
        texts = said(client, path)
        assert len(texts) == copy["messages"]
        assert (texts[0], "lost " in texts[-1]) == ("saved", True)
        opened = client.call("runtime/open", {"cwd": daemon.workspace, "session": {"kind": "open", "path": path}})
        assert prompt(client, opened.session_id, "and on", wait=True).saved
    checked = loopd(place, "doctor")
    rest = "0 notes; the sandbox works" if trio.run(Sandbox().tried).works else "1 note"  # which is that it does not
    assert (checked.returncode, checked.stdout.splitlines()[-1]) == (
        0,
        f"1 session, 0 rescue copies: 0 faults, {rest}",
    )


@pytest.mark.parametrize("back", [True, False], ids=["put back", "gone"])
def test_a_session_whose_directory_vanished_is_whole_again(place: Path, back: bool) -> None:  # K-3
    with started(place=place, settings=SHORT) as daemon:
        path = rescued(daemon, lambda directory: directory.rename(place / "away"))
    if back:
        (place / "away").rename(Path(path).parent)
    [copy] = copies(place)
    assert (copy["state"], copy["session"], copy["beyond"]) == ("matches" if back else "gone", path, 2)
    require_back(place, path, copy)


@contextmanager
def mounted(*arguments: str) -> Iterator[None]:
    made = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"mount is refused: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", arguments[-1]], check=True)


def test_a_session_on_a_full_disk_is_whole_again_once_there_is_room(place: Path) -> None:  # K-1
    sessions = place / "data" / "sessions"
    sessions.mkdir(parents=True, mode=0o700)
    with mounted("-t", "tmpfs", "-o", "size=64k,mode=700", "loopd-test", str(sessions)):
        with started(place=place, settings=SHORT) as daemon:
            path = rescued(daemon, lambda _: None)
        [copy] = copies(place)
        assert (copy["state"], copy["beyond"]) == ("matches", 2)
        assert Path(path).stat().st_size > 0
        refused = loopd(place, "rescue", "apply", copy["path"])
        assert (refused.returncode, "ENOSPC" in refused.stderr) == (1, True)
        assert copies(place) == [copy]
        subprocess.run(["mount", "-o", "remount,size=80m", str(sessions)], check=True)
        require_back(place, path, copy)


def test_a_session_on_a_disk_that_became_read_only_is_whole_again(place: Path) -> None:
    sessions = place / "data" / "sessions"
    sessions.mkdir(parents=True, mode=0o700)
    with mounted("--bind", str(sessions), str(sessions)):
        remount = ["mount", "-o", "remount,bind,ro", str(sessions)]
        with started(place=place, settings=SHORT) as daemon:
            path = rescued(daemon, lambda _: subprocess.run(remount, check=True))
        [copy] = copies(place)
        refused = loopd(place, "rescue", "apply", copy["path"])
        assert (refused.returncode, "EROFS" in refused.stderr) == (1, True)
        subprocess.run(["mount", "-o", "remount,bind,rw", str(sessions)], check=True)
        require_back(place, path, copy)


def test_while_a_daemon_has_the_session_open_apply_says_who_and_what_to_do(place: Path) -> None:  # K-5
    with started(place=place, settings=SHORT) as daemon:
        path = rescued(daemon, lambda directory: directory.rename(place / "away"))
    (place / "away").rename(Path(path).parent)
    [copy] = copies(place)
    with started(place=place, settings=SHORT) as daemon, daemon.connect() as client:
        where = {"cwd": daemon.workspace, "session": {"kind": "open", "path": path}}
        opened = client.call("runtime/open", where)
        refused = loopd(place, "rescue", "apply", copy["path"])
        assert (refused.returncode, refused.stdout) == (1, "")
        assert f"is open in process {daemon.popen.pid}: close it there" in refused.stderr
        assert [one["state"] for one in copies(place)] == ["open"]
        checked = loopd(place, "doctor")
        assert checked.returncode == 0
        assert f"note  {path}: is open in process {daemon.popen.pid}\n" in checked.stdout
        assert prompt(client, opened.session_id, "another branch", wait=True).saved
        client.call("runtime/dispose", {"runtimeId": opened.runtime_id})
        refused = loopd(place, "rescue", "apply", copy["path"])
        assert (refused.returncode, "--as-new" in refused.stderr) == (1, True)
        # Beside the daemon, which then lists it like any other.
        applied = loopd(place, "rescue", "apply", "--as-new", copy["path"])
        assert applied.returncode == 0
        listed = [row.path for row in client.call("session/list", {"cwd": daemon.workspace}).sessions]
        assert len(listed) == 2
        [new] = set(listed) - {path}
        assert new in applied.stdout
        assert len(said(client, new)) == copy["messages"]


def test_the_list_for_people_says_what_can_be_done_and_nothing_in_it_acts_on_a_terminal(place: Path) -> None:  # K-45
    strange = place / "ws\x1b[2J"
    strange.mkdir()
    with started(place=place, settings=SHORT) as daemon:
        with daemon.connect() as client:
            opened = client.call("runtime/open", {"cwd": str(strange), "session": {"kind": "new"}})
            Path(opened.path).parent.rename(place / "away")
            prompt(client, opened.session_id, "lost", wait=True)
        daemon.signal(signal.SIGTERM)
        assert daemon.ended(within=10) == 75
    listed = loopd(place, "rescue", "list").stdout
    assert "gone: there is no session any more; `loopd rescue apply` puts all of it back" in listed
    assert listed.endswith("1 rescue copy\n")
    assert ("\x1b" in listed, r"ws\x1b[2J" in listed) == (False, True)


def test_copies_are_found_in_every_place_and_options_stand_on_either_side(place: Path) -> None:
    with started(place=place, settings=SHORT) as daemon:
        rescued(daemon, lambda directory: directory.rename(place / "away"))
    [copy] = copies(place)
    for elsewhere in (place / "run" / "loopd" / "rescue", place / "further"):
        elsewhere.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", copy["path"], str(elsewhere)], check=True)
    assert len(copies(place)) == 2
    further = ["--rescue-dir", str(place / "further")]
    for arguments in ([*further, "rescue", "list", "--json"], ["rescue", "list", "--json", *further]):
        assert len(json.loads(loopd(place, *arguments).stdout)["copies"]) == 3
    data = ["--data-dir", str(place / "data")]
    for arguments in ([*data, "rescue", "list"], ["rescue", "list", *data]):
        assert "2 rescue copies" in loopd(place, *arguments, LOOPD_DATA_DIR="/nonexistent").stdout


def test_doctor_finds_faults_in_sessions_settings_and_the_socket_s_place(place: Path) -> None:  # K-8, D-6
    with started(place=place) as daemon, daemon.connect() as client:
        path = Path(open_session(client, daemon).path)
    (place / "config.toml").write_text("[daemon]\nlog_level = 'loud'\n")
    path.write_bytes(bytes(413))
    open_place = place / "open"
    open_place.mkdir()
    open_place.chmod(0o777)
    arguments = ["doctor", "--config", str(place / "config.toml"), "--socket", str(open_place / "s"), "--json"]
    checked = loopd(place, *arguments)
    assert checked.returncode == 1
    found = json.loads(checked.stdout)
    faults = {one["path"]: one["what"] for one in found["findings"] if one["severity"] == "fault"}
    assert set(faults) == {str(path), str(open_place / "s"), str(place / "config.toml")}
    assert "log_level" in faults[str(place / "config.toml")]
    assert found["summary"] == {
        "sessions": 1,
        "legacy": 0,
        "unsupported": 0,
        "rescueCopies": 0,
        "faults": 3,
        "notes": len(found["findings"]) - 3,
    }
    for one in (path, path.parent):
        alone = loopd(place, "doctor", str(one))
        assert alone.returncode == 1
        assert alone.stdout.startswith(f"fault  {path}: {path} at byte 0: is not JSON")
    assert loopd(place, "doctor", str(place / "nowhere")).returncode == 1


def test_the_daemon_s_start_imports_no_command_and_an_unknown_one_is_refused(place: Path) -> None:
    code = "import sys, loopd.__main__; print(*[name for name in sys.modules if name.startswith('loopd.commands')])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded == "loopd.commands\n"
    refused = loopd(place, "serve")
    assert (refused.returncode, "No such command 'serve'" in refused.stderr) == (2, True)
    assert {"rescue", "doctor"} <= set(loopd(place, "--help").stdout.split())
