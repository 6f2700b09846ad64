"""``kill -9`` of a real daemon at random moments of prompts with tools: all reopens, and nothing that was told is gone.

A moment is one session's: each daemon dies once, over several sessions that work at the same time. LOOPD_TEST_KILLS
asks for another number of moments, LOOPD_TEST_SEED for the delays of a run that failed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from daemon_process import PATIENCE, DaemonProcess, started

from loop_protocol.client import Client, LostConnection
from loop_protocol.v1.events import EventParams, MessageEnd, RunSettled, SessionSaved
from loopd.storage.files import read_session
from loopd.storage.fs import FileSystem

KILLS = int(os.environ.get("LOOPD_TEST_KILLS", "100"))
AT_ONCE = 10
LONGEST_S = 0.4


@dataclass
class Told:
    """What a client was told of one session in one daemon's life. ``kept`` is what all lives before left in it."""

    path: str
    session_id: str
    kept: list[Any] = field(default_factory=list)
    seen: dict[int, Any] = field(default_factory=dict)
    saved: int = 0
    accepted: set[str] = field(default_factory=set)
    settled: set[str] = field(default_factory=set)

    def take(self, params: EventParams) -> bool:
        """Whether a run is over."""
        match params.event:
            case MessageEnd(index=int(index), message=message):
                self.seen[index] = json.loads(bytes(message))  # type: ignore[arg-type]
            case SessionSaved(message_count=count):
                self.saved = count
            case RunSettled(run_id=run_id, saved=saved):
                assert saved
                self.settled.add(run_id)
                return True
        return False


def _open(client: Client, daemon: DaemonProcess, path: str | None) -> Any:
    session = {"kind": "open", "path": path} if path else {"kind": "new"}
    request = {"cwd": daemon.workspace, "session": session, "runtimeId": "new"}
    opened = client.call("runtime/open", request | ({} if path else {"permission": "danger-full-access"}))
    client.call("runtime/attach", {"runtimeId": opened.runtime_id})
    return opened


def _messages(client: Client, session_id: str) -> list[Any]:
    raw = client.call_raw("session/messages", {"sessionId": session_id}, timeout=PATIENCE)
    found: list[Any] = json.loads(raw)["messages"]
    return found


def _until_killed(client: Client, daemon: DaemonProcess, sessions: list[Told], delay: float) -> None:
    """All of them work at the same time, prompt after prompt, until the daemon is gone. What it said last counts."""
    by_id = {told.session_id: told for told in sessions}

    def prompt(told: Told) -> None:
        number = len(told.accepted)
        content = f"shell: echo {number}; sleep 0.005" if number % 3 else f"stream {20 + number}"
        ask = {"sessionId": told.session_id, "content": content}
        told.accepted.add(client.call("session/prompt", ask, timeout=PATIENCE).run_id)

    killing = threading.Timer(delay, daemon.signal, [signal.SIGKILL])
    killing.start()
    try:
        with suppress(LostConnection):
            for told in sessions:
                prompt(told)
            while (params := client.next_event(PATIENCE)) is not None:
                if by_id[params.session_id].take(params):
                    prompt(by_id[params.session_id])
        with suppress(LostConnection):
            while (params := client.next_event(PATIENCE)) is not None:
                by_id[params.session_id].take(params)
    finally:
        killing.join()
        daemon.popen.wait()


def _check(client: Client, daemon: DaemonProcess, told: Told) -> tuple[Told, bool, int]:
    """For its next life; whether the kill hit a run of it, and how many messages of that were recoverable."""
    opened = _open(client, daemon, told.path)
    left = opened.state.recoverable
    found = _messages(client, opened.session_id)
    # Nothing acknowledged is missing, of this life or of any before.
    assert found[: len(told.kept)] == told.kept
    assert len(found) >= told.saved
    count = left.messages if left else 0
    assert all(index < len(found) + count for index in told.seen), (told, len(found), count)
    if left:
        recovered = client.call("session/recover", {"sessionId": opened.session_id}, timeout=PATIENCE)
        assert (recovered.run_id, recovered.messages) == (left.run_id, count)
        assert left.run_id in told.accepted
        found = _messages(client, opened.session_id)
    for index, message in told.seen.items():
        assert found[index] == message
    ask = {"sessionId": opened.session_id, "content": "shell: echo next", "wait": True}
    again = client.call("session/prompt", ask, timeout=PATIENCE)
    assert (again.outcome, again.saved) == ("success", True)
    kept = _messages(client, opened.session_id)
    assert kept[: len(found)] == found
    assert len(kept) == len(found) + 4
    _, history = read_session(FileSystem(), told.path)  # pairing, checksum, order: as any later daemon reads it
    assert history.messages == len(kept)
    return Told(told.path, opened.session_id, kept), told.accepted != told.settled, count


def test_a_daemon_killed_at_any_moment_loses_nothing_that_it_told(  # S-26, S-14, I-4, I-8, K-9, K-20, K-53
) -> None:
    seed = int(os.environ.get("LOOPD_TEST_SEED", random.randrange(10**6)))
    delays = random.Random(seed)
    lives = max(1, KILLS // AT_ONCE)
    hits, offered = 0, dict.fromkeys(range(6), 0)
    with tempfile.TemporaryDirectory(prefix="loopd-") as place:
        sessions: list[Told] = []
        for life in range(lives + 1):
            with started(place=Path(place)) as daemon, daemon.connect() as client:
                for number, told in enumerate(sessions):
                    sessions[number], hit, count = _check(client, daemon, told)
                    hits += hit
                    offered[count] += 1
                while len(sessions) < AT_ONCE:
                    opened = _open(client, daemon, None)
                    sessions.append(Told(opened.path, opened.session_id))
                if life < lives:
                    while client.next_event(0) is not None:
                        pass
                    _until_killed(client, daemon, sessions, delays.uniform(0.01, LONGEST_S))
    print(f"seed {seed}: {hits} of {lives * AT_ONCE} kills hit a run; recoverable messages, how often: {offered}")
    assert hits > 0
    assert sum(offered[count] for count in range(1, 6)) > 0
