"""The blocking client against a scripted daemon: order, ends, and what a daemon of another version may say."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import Any

import msgspec
import pytest
from scripted_daemon import HELLO, Peer, ScriptedDaemon, Then

from loop_protocol import client as client_module
from loop_protocol.client import Client, LostConnection, Unreachable
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.events import EventsLost, MessageUpdate, SaveFailed
from loop_protocol.v1.methods import FlushResult, SessionParams


def update(text: str) -> dict[str, Any]:
    return {"type": "message_update", "messageId": "m", "textDelta": text}


def test_a_call_answers_with_the_record_of_the_method_table(socket_path: str) -> None:
    with ScriptedDaemon(socket_path, {"session/flush": {"flushed": True, "later": 1}}) as daemon:
        with Client.connect() as client:
            assert client.hello is not None
            assert client.hello.version == 1
            assert client.call("session/flush", SessionParams("s1")) == FlushResult(True)
            assert client.call_raw("session/flush", {"sessionId": "s1"}) == b'{"flushed":true,"later":1}'
        assert daemon.asked("session/flush") == [{"sessionId": "s1"}] * 2


def test_an_error_answer_keeps_kind_code_and_data(socket_path: str) -> None:
    busy = RpcError("session_busy", "a run goes on", operation="prompt")
    with ScriptedDaemon(socket_path, {"session/flush": busy}), Client.connect() as client:
        with pytest.raises(RpcError) as caught:
            client.call("session/flush", {"sessionId": "s1"})
        assert (caught.value.kind, caught.value.code) == ("session_busy", -32000)
        assert caught.value.data == {"kind": "session_busy", "retryable": True, "operation": "prompt"}


def test_a_result_of_another_shape_is_an_error_and_not_a_wrong_record(socket_path: str) -> None:
    with (
        ScriptedDaemon(socket_path, {"session/flush": {"flushed": "yes"}}),
        Client.connect() as client,
        pytest.raises(RpcError, match="does not fit"),
    ):
        client.call("session/flush", {"sessionId": "s1"})


def test_events_that_come_before_a_reply_are_kept_in_their_order(socket_path: str) -> None:
    def chatty(_: Any, peer: Peer) -> Any:
        peer.event(update("a"))
        peer.event(update("b"))
        return Then({"flushed": False}, lambda peer: peer.event(update("c")))

    with ScriptedDaemon(socket_path, {"session/flush": chatty}), Client.connect() as client:
        client.call("session/flush", {"sessionId": "s1"})
        events = client.events()
        seen = [next(events) for _ in range(3)]
        assert [params.event.text_delta for params in seen if isinstance(params.event, MessageUpdate)] == [
            "a",
            "b",
            "c",
        ]
        assert client.next_event(timeout=0) is None


def test_an_event_type_from_the_future_comes_raw_and_is_skipped_typed(socket_path: str) -> None:
    def chatty(_: Any, peer: Peer) -> Any:
        peer.event({"type": "weather", "sun": True})
        peer.event({"type": "save_failed", "reason": "full", "later": 1})
        peer.event({"type": "weather", "sun": False})
        peer.event({"type": "save_failed", "reason": "full"})
        return {"flushed": False}

    with ScriptedDaemon(socket_path, {"session/flush": chatty}), Client.connect() as client:
        client.call("session/flush", {"sessionId": "s1"})
        first = client.next_notification()
        assert first is not None
        assert first.params is None
        assert msgspec.json.decode(first.raw)["event"] == {"type": "weather", "sun": True}
        assert [client.next_event(1).event, client.next_event(1).event] == [SaveFailed("full")] * 2  # type: ignore[union-attr]


def test_a_wait_that_takes_too_long_is_cancelled_and_its_late_answer_reaches_nobody(socket_path: str) -> None:
    ids: list[bytes] = []

    def late(_: Any, peer: Peer) -> Any:
        if not ids:
            ids.append(b"2")
            return None
        peer.send(b'{"jsonrpc":"2.0","id":2,"result":{"flushed":true}}\n')
        return {"flushed": False}

    with ScriptedDaemon(socket_path, {"session/flush": late}) as daemon, Client.connect() as client:
        with pytest.raises(TimeoutError, match="session/flush"):
            client.call("session/flush", {"sessionId": "s1"}, timeout=0.02)
        assert client.call("session/flush", {"sessionId": "s1"}) == FlushResult(False)
        assert daemon.asked("$/cancelRequest") == [{"id": 2}]


def test_a_daemon_that_ends_gives_what_it_said_and_then_says_lost(socket_path: str) -> None:
    def last_words(_: Any, peer: Peer) -> Any:
        peer.event(update("a"))
        peer.hang_up()

    with ScriptedDaemon(socket_path, {"session/flush": last_words}), Client.connect() as client:
        with pytest.raises(LostConnection, match="closed"):
            client.call("session/flush", {"sessionId": "s1"})
        assert client.next_event(timeout=0) is not None
        with pytest.raises(LostConnection):
            client.next_event(timeout=1)


def test_bytes_that_are_no_protocol_end_the_connection(socket_path: str) -> None:
    def garbage(_: Any, peer: Peer) -> Any:
        peer.send(b'{"jsonrpc": nonsense\n')

    with (
        ScriptedDaemon(socket_path, {"session/flush": garbage}),
        Client.connect() as client,
        pytest.raises(LostConnection, match="not the protocol"),
    ):
        client.call("session/flush", {"sessionId": "s1"})


def test_too_many_events_while_a_reply_is_awaited_are_told_as_a_range(socket_path: str) -> None:
    def flood(_: Any, peer: Peer) -> Any:
        for _ in range(100):
            peer.event(update("x" * 200_000))
        return {"flushed": False}

    with ScriptedDaemon(socket_path, {"session/flush": flood}), Client.connect() as client:
        client.call("session/flush", {"sessionId": "s1"})
        lost = client.next_event(timeout=0)
        assert lost is not None
        assert isinstance(lost.event, EventsLost)
        rest: list[int] = []
        while params := client.next_event(timeout=0):
            rest.append(params.seq)
        assert (lost.event.first, rest) == (1, list(range(lost.event.last + 1, 101)))


def test_a_large_request_and_a_flood_of_events_do_not_wait_for_each_other(socket_path: str) -> None:
    """Both sides write more than the socket holds: a client that only writes would wait for ever."""

    def flood(_: Any, peer: Peer) -> Any:
        for _ in range(200):
            peer.event(update("x" * 10_000))
        return {"flushed": False}

    with ScriptedDaemon(socket_path, {"session/flush": flood}), Client.connect() as client:
        client._send(client_module.request_body(90, "session/flush", {"sessionId": "s1"}))
        assert client.call("session/flush", {"sessionId": "s" * 4_000_000}, timeout=20) == FlushResult(False)


def test_nobody_there_is_absent_and_a_daemon_that_hangs_is_not(socket_path: str) -> None:
    with pytest.raises(Unreachable) as missing:
        Client.connect()
    with open(socket_path, "w"):
        pass
    with pytest.raises(Unreachable) as regular:
        Client.connect()
    os.unlink(socket_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(socket_path)
        listener.listen()
        with pytest.raises(Unreachable, match="does not answer") as hanging:
            Client.connect(timeout=0.05)
    assert [missing.value.absent, regular.value.absent, hanging.value.absent] == [True, True, False]


def test_a_full_backlog_is_waited_for(socket_path: str) -> None:
    """Ten clients at once find the queue of a Unix listener full, which answers EAGAIN at once."""
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(socket_path)
        listener.listen(0)
        first.connect(socket_path)
        started = time.monotonic()
        with pytest.raises(Unreachable, match="accepts no connection"):
            Client.connect(timeout=0.1)
        assert time.monotonic() - started >= 0.1


def test_no_common_version_is_said(socket_path: str) -> None:
    refusal = RpcError("unsupported_version", "no common version", supported=[2])
    with ScriptedDaemon(socket_path, {"initialize": refusal}), pytest.raises(RpcError) as caught:
        Client.connect()
    assert caught.value.data["supported"] == [2]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_a_daemon_of_another_user_is_refused(socket_path: str) -> None:  # D-6
    # The peer's identity is that of whoever called listen().
    theirs = "import os, socket, sys; s = socket.socket(fileno=int(sys.argv[1])); os.setuid(12345); s.listen(); print()"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(socket_path)
        command = [sys.executable, "-c", theirs, str(listener.fileno())]
        subprocess.run(command, pass_fds=[listener.fileno()], check=True, stdout=subprocess.DEVNULL)
        with pytest.raises(Unreachable, match="user 12345"):
            Client.connect(timeout=1)


def test_a_newer_daemon_may_say_more(socket_path: str) -> None:
    def odd(_: Any, peer: Peer) -> Any:
        peer.send(b'{"jsonrpc":"2.0","method":"server/news","params":{}}\n')
        peer.send(b'[{"jsonrpc":"2.0","id":77,"result":1}]\n')
        return HELLO | {"later": 1}

    with ScriptedDaemon(socket_path, {"initialize": odd}), Client.connect() as client:
        assert client.next_notification(timeout=0) is None
