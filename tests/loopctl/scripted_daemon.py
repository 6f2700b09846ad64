"""A daemon that does what a test says: real socket, real frames, no sessions."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from loop_protocol.jsonrpc import FrameReader, Request, error_body, parse, request_body, result_body
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.types import ModelRef, PromptTiming, QueueState, RunInfo, SessionState, Usage


@dataclass(frozen=True)
class Ran:
    """What a call of ``loopctl`` came to."""

    code: int
    out: str
    err: str


Loopctl = Callable[..., Ran]


@dataclass
class Peer:
    """One connection, as the script sees it."""

    sock: socket.socket
    seq: int = 0
    hung_up: bool = False

    def send(self, body: bytes) -> None:
        self.sock.sendall(body)

    def event(self, event: Any, *, session: str = "s1", runtime: str = "r1") -> None:
        self.seq += 1
        params = {"runtimeId": runtime, "sessionId": session, "seq": self.seq, "at": 1, "event": event}
        self.send(request_body(None, "event", params))

    def server_event(self, event: Any) -> None:
        self.seq += 1
        self.send(request_body(None, "server/event", {"seq": self.seq, "at": 1_700_000_000_000, "event": event}))

    def hang_up(self) -> None:
        self.hung_up = True


@dataclass
class Then:
    """A result, and what happens after it was sent."""

    result: Any
    after: Callable[[Peer], None]


Answer = Any  # a result, an RpcError, a Then, None for no answer, or a function (params, peer) of one of these

HELLO = {
    "version": 1,
    "server": {"name": "loopd", "version": "0"},
    "capabilities": {"methods": [], "events": []},
    "limits": {
        name: 1
        for name in (
            *("frame", "frameBeforeInitialize", "batch", "nesting", "requestId", "connections"),
            *("requestsInFlight", "eventLogEvents", "eventLogBytes", "page"),
        )
    },
}


NOTHING_OPEN: dict[str, Any] = {"runtimes": []}
NO_SESSIONS: dict[str, Any] = {"sessions": [], "damaged": [], "legacy": [], "unsupported": 0}


@dataclass
class ScriptedDaemon:
    path: str
    answers: dict[str, Answer] = field(default_factory=dict)
    requests: list[tuple[str, Any]] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> ScriptedDaemon:
        self.answers = {"initialize": HELLO, "session/list": NO_SESSIONS, "runtime/list": NOTHING_OPEN} | self.answers
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(5)
            assert not thread.is_alive()
        os.unlink(self.path)

    def asked(self, method: str) -> list[Any]:
        return [params for name, params in self.requests if name == method]

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._start(lambda sock=sock: self._serve(sock))

    def _serve(self, sock: socket.socket) -> None:
        peer, frames = Peer(sock), FrameReader(1 << 26)
        with sock:
            while not peer.hung_up and (data := _received(sock)):
                frames.feed(data)
                while not peer.hung_up and (body := frames.next()) is not None:
                    self._answer(peer, body)

    def _answer(self, peer: Peer, body: bytes) -> None:
        request = parse(body)
        assert isinstance(request, Request)
        params = msgspec.json.decode(request.params) if request.params else None
        self.requests.append((request.method, params))
        if request.id is None:
            return
        answer = self.answers.get(request.method, RpcError("method_not_found", request.method))
        answer = answer(params, peer) if callable(answer) else answer
        try:
            if isinstance(answer, RpcError):
                peer.send(error_body(request.id, answer))
            elif isinstance(answer, Then):
                peer.send(result_body(request.id, answer.result))
                answer.after(peer)
            elif answer is not None:
                peer.send(result_body(request.id, answer))
        except (BrokenPipeError, ConnectionResetError):  # the client went away
            peer.hang_up()


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(65536)
    except ConnectionResetError:
        return b""


def state(cwd: str, **changes: Any) -> SessionState:
    facts: dict[str, Any] = {
        "session_id": "s1",
        "runtime_id": "r1",
        "cwd": cwd,
        "kind": "persistent",
        "model": ModelRef("ollama", "qwen"),
        "permission": "read-only",
        "unread": False,
        "created_at": 1_700_000_000_000,
        "updated_at": 1_700_000_060_000,
        "message_count": 2,
        "user_message_count": 1,
        "live_count": 2,
        "timings": [],
        "tools": [],
        "queue": QueueState([]),
        "approvals": [],
        "has_pending_save": False,
        "usage": Usage(10, 5),
        "path": f"{cwd}/s1/meta.json",
    }
    return SessionState(**(facts | changes))


def running(run_id: str) -> RunInfo:
    return RunInfo(run_id=run_id, started_at=1, timing=PromptTiming(user_message_index=0, started_at=1))


def row(cwd: str, **changes: Any) -> dict[str, Any]:
    facts = {
        "runtimeId": "r1",
        "cwd": cwd,
        "sessionId": "s1",
        "kind": "persistent",
        "messageCount": 2,
        "running": False,
        "hasPendingSave": False,
        "default": True,
        "path": f"{cwd}/s1/meta.json",
    }
    return facts | changes


def saved(path: str, cwd: str, **changes: Any) -> dict[str, Any]:
    """A row of ``session/list``."""
    facts = {
        "sessionId": "s1",
        "path": path,
        "cwd": cwd,
        "createdAt": 1,
        "updatedAt": 1_700_000_000_000,
        "messageCount": 12,
        "userMessageCount": 6,
        "unread": True,
        "live": False,
    }
    return facts | changes


def opened(cwd: str, **changes: Any) -> dict[str, Any]:
    facts = {"runtimeId": "r1", "sessionId": "s1", "created": True, "state": state(cwd), "path": f"{cwd}/s1/meta.json"}
    return facts | changes


def conversation(*events: Any, run_id: str = "run1", outcome: str = "success", **settled: Any) -> list[Any]:
    """The events of one run around the given ones."""
    return [
        {"type": "run_started", "runId": run_id, "operation": "prompt"},
        *events,
        {"type": "run_settled", "runId": run_id, "outcome": outcome, "saved": True} | settled,
    ]


def says(text: str, *, message: str = "m1") -> list[Any]:
    """An assistant's message, a delta per character pair."""
    deltas = [text[at : at + 2] for at in range(0, len(text), 2)]
    return [
        {"type": "message_start", "messageId": message, "message": {"role": "assistant"}},
        *({"type": "message_update", "messageId": message, "textDelta": delta} for delta in deltas),
        {"type": "message_end", "messageId": message, "index": 1, "message": assistant(text)},
    ]


def assistant(text: str) -> dict[str, Any]:
    return {
        "role": "assistant",
        "index": 1,
        "content": [{"type": "text", "text": text}],
        "timestamp": 1,
        "provider": "ollama",
        "model": "qwen",
        "usage": {"inputTokens": 1, "outputTokens": 1},
        "stopReason": "stop",
    }


def answering(cwd: str, *events: Any, **changes: Any) -> dict[str, Answer]:
    """The script of a daemon that opens, attaches, and answers a prompt with these events."""

    def play(peer: Peer) -> None:
        for event in events:
            peer.event(event)

    return {
        "runtime/open": opened(cwd),
        "runtime/attach": {"seq": 0, "state": state(cwd, **changes)},
        "session/prompt": Then({"runId": "run1"}, play),
    }
