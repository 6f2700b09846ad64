"""What a real daemon keeps from its tools: its environment, and all of its own files (K-31, A-7)."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from daemon_process import open_session, prompt, started

KEY = "sk-of-the-daemon-itself-55555"
PROVIDER = """\
[providers.mine]
api = "openai-chat"
base_url = "http://127.0.0.1:9/v1"
models = [{{ id = "m" }}]
api_key_file = "{}"
"""
# From a process of its own, as it cannot be undone: what `environ` shows, and 0 where no other process may look.
CONCEALED = """\
import ctypes, os
from loopd.concealment import conceal_environment
conceal_environment()
try:
    shown = open("/proc/self/environ").read()
except PermissionError:  # not even the process itself, unless it is root
    shown = ""
print(shown.strip("\\0"), os.environ["MINE_API_KEY"], ctypes.CDLL(None).prctl(3))
"""


def test_nothing_of_its_own_is_read_written_or_asked_for() -> None:
    with tempfile.TemporaryDirectory(prefix="loopd-") as root:
        place = Path(root)
        own = {
            "socket": place / "s",
            "its lock": place / "s.lock",
            "settings": place / "config.toml",
            "data": place / "data/new",
            "rescued": place / "rescues/new",
            "log": place / "log-file",
            "log of one that loopctl starts": place / "state/loopd/loopd.log",
            "key": place / "keys/mine",
            "credentials": place / "creds/key",
            "usual socket": place / "run/loopd/loopd.sock",
            "usual settings": place / ".config/loopd/config.toml",
        }
        for name in ("key", "credentials", "usual settings"):
            own[name].parent.mkdir(parents=True)
            own[name].write_text(KEY)
        options = ["--log-file", str(own["log"]), "--rescue-dir", str(place / "rescues")]
        environ = {"CREDENTIALS_DIRECTORY": str(place / "creds"), "XDG_STATE_HOME": str(place / "state")}
        settings = PROVIDER.format(own["key"])
        with (
            started(*options, place=place, settings=settings, environ=environ) as daemon,
            daemon.connect() as client,
        ):
            model = {"provider": "practice", "id": "echo"}
            session = open_session(client, daemon, model=model, permission="workspace-write")

            def answer(what: str) -> str:
                told = prompt(client, session.session_id, what, wait=True, approvals="reject")
                assert told.outcome == "success"
                found = client.call("session/messages", {"sessionId": session.session_id, "limit": 500}).messages
                return bytes(found[-2]).decode()

            for name, path in own.items():
                assert "denied: the daemon's own" in answer(f"write {path}: x"), name
            for name in ("settings", "log", "key", "credentials"):
                assert "denied: the daemon's own" in answer(f"read {own[name]}"), name
            beside = place / "keys/beside"
            assert "nobody is there" in answer(f"write {beside}: x")  # it is no directory of the daemon's


def test_its_environment_is_shown_to_nobody() -> None:  # K-31
    with started(environ={"MINE_API_KEY": KEY}) as daemon:
        try:
            shown = Path(f"/proc/{daemon.popen.pid}/environ").read_bytes()
        except PermissionError:  # only root may look, and sees nothing
            shown = b""
    assert shown.strip(b"\0") == b""
    ran = subprocess.run(
        [sys.executable, "-c", CONCEALED], env={"MINE_API_KEY": KEY}, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == [KEY, "0"]
