"""TERM at a real daemon, whatever it does: it ends in time, tells how by its exit code, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_process import (
    DaemonProcess,
    deaf,
    next_event,
    open_session,
    processes_with,
    prompt,
    started,
)

from loop_protocol.client import Client
from loop_protocol.jsonrpc import request_body
from loopd.storage.files import read_session
from loopd.storage.fs import FileSystem

SHORT = "[daemon]\ndrain_deadline_s = 2.2\n"


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with started(settings=SHORT) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with daemon.connect() as client:
        yield client


def saved_text(path: str) -> str:
    """All that the session's history says, read as a later daemon would."""
    _, history = read_session(FileSystem(), path)
    return "\n".join(history.line(index).decode() for index in range(history.messages))


def test_during_an_answer_it_is_stopped_saved_and_told(daemon: DaemonProcess, client: Client) -> None:  # D-4, S-12
    opened = open_session(client, daemon)
    prompt(client, opened.session_id, "slow")
    next_event(client, "message_update")
    daemon.signal(signal.SIGTERM)
    daemon.told("STATUS=draining")
    assert client.call("server/status").draining  # it still answers meanwhile
    settled = next_event(client, "run_settled")
    assert (settled.outcome, settled.saved) == ("cancelled", True)
    assert next_event(client, "session_closed").reason == "shutdown"
    assert daemon.ended(within=10) == 0
    said = saved_text(opened.path)
    assert "word1" in said  # as much as there was
    assert '"aborted"' in said
    assert not os.path.exists(daemon.socket)
    assert not daemon.rescue.exists()


def test_during_a_tool_with_a_client_that_never_reads_no_process_is_left(  # K-52, K-22, D-8
    daemon: DaemonProcess, client: Client
) -> None:
    mark = f"3{os.getpid()}{time.time_ns() % 10**6}"
    opened = open_session(client, daemon, permission="danger-full-access")
    hello = request_body(1, "initialize", {"versions": [1]})
    asked = [request_body(id, "server/describe", {}) for id in range(2, 42)]
    with deaf(daemon, [hello, request_body(1, "runtime/attach", {"runtimeId": opened.runtime_id}), *asked]):
        prompt(client, opened.session_id, f"shell: (setsid sleep {mark} &); echo ready; exec sleep {mark}")
        next_event(client, "tool_execution_update")
        assert len(processes_with(mark)) >= 1
        daemon.signal(signal.SIGTERM)
        settled = next_event(client, "run_settled")
        assert (settled.outcome, settled.saved) == ("cancelled", True)
        assert daemon.ended(within=10) == 0
    assert processes_with(mark) == []
    assert '"toolResult"' in saved_text(opened.path)


def test_a_second_term_does_not_wait_for_the_answer() -> None:  # D-4
    with started() as daemon, daemon.connect() as client:  # with the usual deadline of 8 s
        opened = open_session(client, daemon)
        prompt(client, opened.session_id, "slow")
        next_event(client, "message_update")
        began = time.monotonic()
        daemon.signal(signal.SIGTERM)
        daemon.told("STATUS=draining")
        daemon.signal(signal.SIGTERM)
        assert daemon.ended(within=10) == 0
        assert time.monotonic() - began < 3
        assert "word1" in saved_text(opened.path)


def test_over_a_save_that_stays_impossible_it_leaves_a_rescue_copy_and_says_75(  # K-3, K-52
    daemon: DaemonProcess, client: Client
) -> None:
    opened = open_session(client, daemon)
    place = Path(opened.path).parent
    place.rename(place.with_suffix(".away"))
    result = prompt(client, opened.session_id, "remember this", wait=True)
    assert (result.outcome, result.saved) == ("success", False)
    daemon.signal(signal.SIGTERM)
    copy = Path(next_event(client, "session_closed").rescue)
    assert copy.parent == daemon.rescue
    assert daemon.ended(within=10) == 75
    assert (copy / "history.jsonl").read_bytes().count(b"remember this") == 2  # the prompt and its echo
    assert str(copy) in daemon.log


def test_where_not_even_a_copy_can_be_written_it_stays_and_says_so_until_it_is_repaired(  # D-4
    daemon: DaemonProcess, client: Client
) -> None:
    opened = open_session(client, daemon)
    place = Path(opened.path).parent
    place.rename(place.with_suffix(".away"))
    prompt(client, opened.session_id, "remember this", wait=True)
    for root in (daemon.rescue, daemon.place / "run" / "loopd" / "rescue"):
        root.parent.mkdir(parents=True, exist_ok=True)
        root.write_text("in the way")
    daemon.signal(signal.SIGTERM)
    assert "still running" in daemon.told("STATUS=still")
    status = client.call("server/status")
    assert (status.draining, [one.session_id for one in status.pending_saves]) == (True, [opened.session_id])
    assert client.call("session/messages", {"sessionId": opened.session_id}).total == 2
    place.with_suffix(".away").rename(place)
    daemon.signal(signal.SIGTERM)
    assert daemon.ended(within=10) == 0
    assert "remember this" in saved_text(opened.path)


def test_a_session_whose_directory_was_removed_is_rescued_whole(daemon: DaemonProcess, client: Client) -> None:  # S-25
    opened = open_session(client, daemon)
    assert prompt(client, opened.session_id, "first", wait=True).saved
    shutil.rmtree(Path(opened.path).parent)
    assert not prompt(client, opened.session_id, "second", wait=True).saved
    daemon.signal(signal.SIGTERM)
    assert daemon.ended(within=10) == 75
    (copy,) = daemon.rescue.iterdir()
    rescued = (copy / "history.jsonl").read_bytes()
    assert (rescued.count(b"first"), rescued.count(b"second")) == (2, 2)


def test_a_daemon_that_was_suspended_in_mid_stream_goes_on(daemon: DaemonProcess, client: Client) -> None:  # K-57
    opened = open_session(client, daemon)
    run_id = prompt(client, opened.session_id, "slow").run_id
    next_event(client, "message_update")
    daemon.signal(signal.SIGSTOP)
    time.sleep(2)  # real time, as the daemon's clocks see it
    daemon.signal(signal.SIGCONT)
    for _ in range(3):
        next_event(client, "message_update")
    assert client.call("session/stop", {"sessionId": opened.session_id, "runId": run_id}).stopped
    assert prompt(client, opened.session_id, "hello", wait=True).outcome == "success"
    timing = client.call("session/state", {"sessionId": opened.session_id}).timings[0]
    assert timing.finished_at - timing.started_at >= 2000  # P-2: wall time


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_other_signals_that_mean_the_end_drain_too(daemon: DaemonProcess, client: Client, number: int) -> None:  # D-4
    opened = open_session(client, daemon)
    daemon.signal(number)
    assert next_event(client, "session_closed").reason == "shutdown"
    assert daemon.ended(within=10) == 0
    assert Path(opened.path).exists()


def test_a_drain_that_exits_ends_the_process(daemon: DaemonProcess, client: Client) -> None:  # D-4
    open_session(client, daemon)
    assert client.call("server/drain", {"exit": True}).exiting
    assert daemon.ended(within=10) == 0
