"""``kill -9`` of a real daemon in runs that inputs steer and in runs that were resumed: what is recovered is acceptable
to every provider, goes on where it was, and has nothing twice.

LOOPD_TEST_SEED asks for the moments of a run that failed.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import model_bench as bench
import pytest
import strict_checkers
from daemon_process import PATIENCE, DaemonProcess, started

from loop_protocol.client import Client, LostConnection
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.types import AssistantMessage, TextBlock, UserMessage
from loopd.core.history import History, decode_message
from loopd.storage.files import read_session
from loopd.storage.fs import FileSystem

LIVES = 4
AT_ONCE = 8
FULL = {"permission": "danger-full-access"}
REAL = {kind: bench.catalogue("http://127.0.0.1:1/v1", api=kind).resolve(bench.M) for kind in strict_checkers.CHECKERS}


@dataclass
class Talk:
    """One session as its client knows it. ``said`` is every input that it sent, in the order in which they count."""

    client: Client
    path: str = ""
    id: str = ""
    said: list[str] = field(default_factory=list)

    def open(self, daemon: DaemonProcess) -> Any:
        session = {"kind": "open", "path": self.path} if self.path else {"kind": "new"}
        asked = {"cwd": daemon.workspace, "session": session, "runtimeId": "new"}
        opened = self.client.call("runtime/open", asked | ({} if self.path else FULL))
        self.path, self.id = opened.path, opened.session_id
        self.client.call("runtime/attach", {"runtimeId": opened.runtime_id})
        return opened

    def ask(self, method: str, **params: Any) -> Any:
        return self.client.call(method, {"sessionId": self.id, **params}, timeout=PATIENCE)

    def prompt(self, content: str) -> Any:
        self.said.append(content)
        return self.ask("session/prompt", content=content)

    def steer(self, content: str) -> Any:
        self.said.append(content)
        return self.ask("queue/add", content=content, steer=True)

    def events(self, tag: str) -> Iterator[Any]:
        """Its events of that type, from now on."""
        while (params := self.client.next_event(PATIENCE)) is not None:
            if params.session_id == self.id and params.event.__struct_config__.tag == tag:
                yield params.event

    def stored(self) -> History:
        return read_session(FileSystem(), self.path)[1]  # paired, ordered, whole: or it raises


def inputs_of(history: History) -> list[str]:
    messages = [decode_message(history.line(index)) for index in range(history.messages)]
    users = [message for message in messages if isinstance(message, UserMessage)]
    return [block.text for message in users for block in message.content if isinstance(block, TextBlock)]


def require_acceptable(history: History) -> None:
    """As the next request, it is what each API takes."""
    messages = [decode_message(history.line(index)) for index in range(history.messages)]
    if isinstance(messages[-1], AssistantMessage) and messages[-1].stop_reason not in ("aborted", "error"):
        messages.append(bench.user(len(messages), "go on"))
    for kind, check in strict_checkers.CHECKERS.items():
        check(bench.body(REAL[kind], messages, tools=(bench.BASH,)))


def recovered(talk: Talk, opened: Any) -> int:
    """Takes over what the crash left, which has to come before a resumption; how many messages it was."""
    left = opened.state.recoverable
    if left is None:
        return 0
    with pytest.raises(RpcError) as refused:
        talk.ask("session/resume")
    assert (refused.value.kind, refused.value.data["runId"]) == ("conflict", left.run_id)
    taken = talk.ask("session/recover")
    assert (taken.run_id, taken.messages) == (left.run_id, left.messages)
    require_acceptable(talk.stored())
    return int(taken.messages)


def resumed(talk: Talk) -> bool:
    """Goes on to the end, if there is something to go on with."""
    resumable = talk.stored().resumable
    if resumable is None:
        with pytest.raises(RpcError, match="whole answer"):
            talk.ask("session/resume")
        return False
    run_id = talk.ask("session/resume").run_id
    result = talk.client.call("run/wait", {"runId": run_id}, timeout=PATIENCE)
    assert (result.outcome, result.saved) == ("success", True)
    history = talk.stored()
    assert history.runs[run_id].timing.user_message_index == resumable
    require_acceptable(history)
    return True


def test_a_kill_in_a_steered_run_and_another_when_it_is_resumed() -> None:  # S-26 Q-2 Q-4 P-3 I-8
    with tempfile.TemporaryDirectory(prefix="loopd-") as place:
        with started(place=Path(place)) as daemon, daemon.connect() as client:
            talk = Talk(client)
            talk.open(daemon)
            run_id = talk.prompt("shell: echo up; sleep 0.1").run_id
            item = talk.steer("slow").item_id
            assert item in [event.item_id for event, _ in zip(talk.events("message_start"), range(4), strict=False)]
            next(talk.events("message_update"))
            daemon.signal(signal.SIGKILL)
            daemon.popen.wait()
        with started(place=Path(place)) as daemon, daemon.connect() as client:
            talk.client = client
            opened = talk.open(daemon)
            assert opened.state.recoverable.run_id == run_id
            assert recovered(talk, opened) == 4  # what it was asked, a call, its result, what steered it
            assert opened.state.queue.items == []
            talk.ask("session/resume")
            next(talk.events("message_update"))
            daemon.signal(signal.SIGKILL)
            daemon.popen.wait()
        with started(place=Path(place)) as daemon, daemon.connect() as client:
            talk.client = client
            assert recovered(talk, talk.open(daemon)) == 0  # it had finished nothing
            assert resumed(talk)
            history = talk.stored()
            assert inputs_of(history) == talk.said
            assert [timing.user_message_index for timing in history.timings] == [0, 0]
            assert history.messages == 5


def test_wherever_the_kill_is_nothing_is_doubled_and_what_was_cut_off_goes_on() -> None:  # S-26 Q-4 I-4 I-8
    seed = int(os.environ.get("LOOPD_TEST_SEED", random.randrange(10**6)))
    moments, offered, went_on = random.Random(seed), Counter[int](), 0
    with tempfile.TemporaryDirectory(prefix="loopd-") as place:
        talks: list[Talk] = []
        for life in range(LIVES + 1):
            with started(place=Path(place)) as daemon, daemon.connect() as client:
                for talk in talks:
                    talk.client = client
                    opened = talk.open(daemon)
                    offered[recovered(talk, opened)] += 1
                    went_on += resumed(talk)
                    found = inputs_of(talk.stored())
                    # What steers entered in its order or is gone with the queue; nothing is there twice.
                    assert found == talk.said[: len(found)]
                    for content in talk.said[len(found) :]:
                        assert talk.ask("session/prompt", content=content, wait=True).outcome == "success"
                    assert inputs_of(talk.stored()) == talk.said
                    require_acceptable(talk.stored())
                if life < LIVES:
                    talks = [Talk(client) for _ in range(AT_ONCE)]
                    _work_until_killed(daemon, client, talks, moments.randrange(20, 200))
    print(f"seed {seed}: messages taken over, how often: {dict(offered)}; {went_on} went on")
    assert went_on > 0
    assert sum(offered[number] for number in offered if number > 1) > 0


def _work_until_killed(daemon: DaemonProcess, client: Client, talks: list[Talk], moment: int) -> None:
    """Half of them are steered, half were stopped at once and resumed; the kill comes after so many events."""
    for number, talk in enumerate(talks):
        talk.open(daemon)
        run_id = talk.prompt(f"shell: echo {number}; sleep 0.0{number}").run_id
        if number % 2:
            talk.ask("session/stop", runId=run_id)
            with suppress(RpcError):  # where it had answered already
                talk.ask("session/resume")
        talk.steer("shell: echo steered; sleep 0.02")
        talk.steer("stream 3000")
    with suppress(LostConnection):
        for _ in range(moment):
            if client.next_event(0.5) is None:
                break  # all of them are through
    daemon.signal(signal.SIGKILL)
    daemon.popen.wait()
