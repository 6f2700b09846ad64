"""A blocking client on a standard socket: typed calls, and the events in the order in which they came.

Events that come while a reply is awaited are kept; beyond 8 MiB the oldest go, and an ``events_lost`` says which.

    with Client.connect() as client:
        opened = client.call("runtime/open", {"cwd": "/src/project", "session": {"kind": "new"}})
        client.call("runtime/attach", {"runtimeId": opened.runtime_id})
        run = client.call("session/prompt", {"sessionId": opened.session_id, "content": "hello"})
        for params in client.events():
            ...

Not for several threads at once. Neither trio nor asyncio is needed.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import msgspec
from msgspec import Raw, Struct

from . import PROTOCOL_VERSIONS, paths
from .backlog import Backlog, Notification, P
from .jsonrpc import FRAME, BadMessage, FrameReader, FramingError, Request, Response, parse, request_body
from .v1.errors import RpcError
from .v1.events import EventParams, ServerEventParams
from .v1.methods import METHODS, InitializeResult

CONNECT_TIMEOUT = 10.0
_CHUNK = 256 * 1024


class Unreachable(Exception):
    """Nobody answers on the socket. ``absent``: nobody listens there, so that a daemon may be started."""

    def __init__(self, message: str, *, absent: bool = False) -> None:
        super().__init__(message)
        self.absent = absent


class LostConnection(Exception):
    """The daemon closed the connection, or what it sent cannot be followed. What it had saved is kept."""


class Client:
    """One connection, past its handshake. Made by :meth:`connect`."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._frames = FrameReader(2 * FRAME)
        self._answers: dict[int, Response] = {}
        self._awaited: set[int] = set()
        self._backlog = Backlog(params=EventParams)
        self._server_backlog = Backlog(params=ServerEventParams)
        self._last_id = 0
        self.hello: InitializeResult | None = None

    @classmethod
    def connect(
        cls,
        path: str | None = None,
        *,
        timeout: float | None = None,
        name: str = "loop_protocol",
        approvals: bool = False,
    ) -> Self:
        """Connect and say hello. Without ``path``: where this user's daemon is found by the environment. ``approvals``:
        somebody is there who can be asked for approval, wherever this client attaches (A-6).

        Raises :class:`Unreachable`, and :class:`RpcError` when the versions do not fit.
        """
        path = paths.check_socket_path(path or paths.socket_path(os.environ))
        deadline = time.monotonic() + (CONNECT_TIMEOUT if timeout is None else timeout)
        client = cls(_open(path, deadline))
        try:
            hello: dict[str, Any] = {"versions": list(PROTOCOL_VERSIONS), "client": {"name": name}}
            if approvals:
                hello["capabilities"] = {"approvals": True}
            client.hello = client.call("initialize", hello, timeout=max(0.0, deadline - time.monotonic()))
        except (TimeoutError, LostConnection) as error:
            client.close()
            raise Unreachable(f"the daemon on {path} does not answer: {error}") from None
        except BaseException:
            client.close()
            raise
        return client

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def fileno(self) -> int:
        """For ``select``. Ask :meth:`next_notification` with timeout 0 first: something may have been read already."""
        return self._socket.fileno()

    # --- calls --------------------------------------------------------------------------------------------------------

    def call(self, method: str, params: Struct | dict[str, Any] | None = None, *, timeout: float | None = None) -> Any:
        """The result, as the record that the method table names for ``method``.

        Raises :class:`RpcError` for an error answer, TimeoutError, and :class:`LostConnection`.
        """
        raw = self.call_raw(method, params, timeout=timeout)
        try:
            return msgspec.json.decode(raw, type=METHODS[method].result)
        except msgspec.DecodeError as error:
            raise RpcError("internal", f"the answer to {method} does not fit this client: {error}") from None

    def call_raw(self, method: str, params: Any = None, *, timeout: float | None = None) -> bytes:
        """Any method, also one that this client does not know; the JSON of its result."""
        self._last_id += 1
        id = self._last_id
        self._awaited.add(id)
        try:
            self._send(request_body(id, method, {} if params is None else params))
            answer = self._await(id, None if timeout is None else time.monotonic() + timeout, method)
        finally:
            self._awaited.discard(id)
        if answer.error is not None:
            raise answer.error
        return b"null" if answer.result is None else bytes(answer.result)

    def _await(self, id: int, deadline: float | None, method: str) -> Response:
        while id not in self._answers:
            if not self._receive(deadline):
                # Ends a wait in the daemon; work that was started goes on. A late answer finds nobody and is dropped.
                self._send(request_body(None, "$/cancelRequest", {"id": id}))
                raise TimeoutError(f"no answer to {method} in time")
        return self._answers.pop(id)

    # --- events -------------------------------------------------------------------------------------------------------

    def next_notification(self, timeout: float | None = None) -> Notification[EventParams] | None:
        """The next event as it came, or None when none comes in time. With ``timeout=0`` it never waits."""
        return self._next(self._backlog, timeout)

    def next_event(self, timeout: float | None = None) -> EventParams | None:
        """Like :meth:`next_notification`, but only event types that this client knows."""
        return self._next_known(self._backlog, timeout)

    def events(self) -> Iterator[EventParams]:
        """Events for ever; ends with :class:`LostConnection`."""
        while True:
            params = self.next_event()
            if params is not None:
                yield params

    def next_server_event(self, timeout: float | None = None) -> ServerEventParams | None:
        """The next of the daemon's own, which ``server/watch`` asks for; they are kept apart from the runtimes'."""
        return self._next_known(self._server_backlog, timeout)

    def _next(self, backlog: Backlog[P], timeout: float | None) -> Notification[P] | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not backlog:
            if not self._receive(deadline):
                return None
        return backlog.take_notification()

    def _next_known(self, backlog: Backlog[P], timeout: float | None) -> P | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            notification = self._next(backlog, left)
            if notification is None or notification.params is not None:
                return None if notification is None else notification.params

    # --- the socket ---------------------------------------------------------------------------------------------------

    def _send(self, body: bytes) -> None:
        view = memoryview(body)
        while view:
            # The daemon may be writing too: who only sends while the other only sends, waits for ever.
            ready = self._ready(select.POLLIN | select.POLLOUT, None)
            if ready & ~select.POLLOUT:
                self._read()
            if ready & select.POLLOUT:
                view = view[self._write(view) :]

    def _write(self, view: memoryview) -> int:
        try:
            return self._socket.send(view)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise LostConnection(f"the daemon is gone: {error.strerror or error}") from None

    def _receive(self, deadline: float | None) -> bool:
        """Take what has arrived, waiting for it until the deadline. False: nothing came."""
        ready = self._ready(select.POLLIN, deadline)
        if ready:
            self._read()
        return bool(ready)

    def _ready(self, mask: int, deadline: float | None) -> int:
        poll = select.poll()  # select.select fails from descriptor 1,024 on
        poll.register(self._socket, mask)
        left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        return next((ready for _, ready in poll.poll(left)), 0)

    def _read(self) -> None:
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            raise LostConnection(f"the daemon is gone: {error.strerror or error}") from None
        if not data:
            raise LostConnection("the daemon closed the connection")
        self._frames.feed(data)
        try:
            while (body := self._frames.next()) is not None:
                self._take(body)
        except (FramingError, BadMessage, msgspec.DecodeError) as error:
            raise LostConnection(f"what the daemon sent is not the protocol: {error}") from None

    def _take(self, body: bytes) -> None:
        match parse(body):
            case Response(id=None, error=RpcError() as error):
                raise LostConnection(f"the daemon refused the connection: {error.message}")
            case Response() as answer if answer.id in self._awaited:
                self._answers[answer.id] = answer
            case Request(method="event", params=Raw() as params):
                self._backlog.add(params)
            case Request(method="server/event", params=Raw() as params):
                self._server_backlog.add(params)
            case _:
                pass  # a late answer, or something that a newer daemon says


def _open(path: str, deadline: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _reach(sock, path, deadline)
        _check_peer(sock, path)
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def _reach(sock: socket.socket, path: str, deadline: float) -> None:
    sock.setblocking(False)
    while True:
        try:
            return sock.connect(path)
        except BlockingIOError:
            # The listener's backlog is full; a Unix socket has no way to wait for a place in it.
            if time.monotonic() > deadline:
                raise Unreachable(f"the daemon on {path} accepts no connection") from None
            time.sleep(0.02)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            raise Unreachable(f"no daemon listens on {path}", absent=True) from None
        except OSError as error:
            raise Unreachable(f"cannot connect to {path}: {error.strerror or error}") from None


def _check_peer(sock: socket.socket, path: str) -> None:
    """Conversations go to a daemon of this user only, whoever made the socket (D-6)."""
    if not hasattr(socket, "SO_PEERCRED"):
        return
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        raise Unreachable(f"the daemon on {path} runs as user {uid}, not as you: refused")
