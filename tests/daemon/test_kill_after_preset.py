"""``kill -9`` in the run that begins with another preset: the preset holds, and the next run tells it (S-19, S-26)."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path
from typing import Any

from daemon_process import PATIENCE, next_event, open_session, prompt, started

from loopd.storage.files import read_session
from loopd.storage.fs import FileSystem


def _stored(path: str) -> Any:
    _, history = read_session(FileSystem(), path)
    return history


def test_a_kill_after_a_change_of_preset_loses_nothing_that_was_told() -> None:
    with tempfile.TemporaryDirectory(prefix="loopd-") as root:
        place = Path(root)
        with started(place=place) as daemon, daemon.connect() as client:
            opened = open_session(client, daemon)
            ids = {"sessionId": opened.session_id}
            prompt(client, opened.session_id, "first", wait=True)
            next_event(client, "run_settled")
            client.call("session/setPermission", {**ids, "permission": "workspace-write"}, timeout=PATIENCE)
            prompt(client, opened.session_id, "slow")
            next_event(client, "message_update")
            daemon.signal(signal.SIGKILL)
            daemon.popen.wait()
        assert "preset: read-only" in _stored(opened.path).sections["permission"]
        with started(place=place) as daemon, daemon.connect() as client:
            session = {"kind": "open", "path": opened.path}
            again = client.call("runtime/open", {"cwd": daemon.workspace, "session": session})
            assert again.state.permission == "workspace-write"
            assert again.state.recoverable is not None
            client.call("session/recover", ids, timeout=PATIENCE)
            assert prompt(client, opened.session_id, "next", wait=True).saved
            history = _stored(opened.path)
            assert "preset: workspace-write" in history.sections["permission"]
            assert (history.messages, sum(b'"instructions"' in line for line in history.lines)) == (5, 2)
