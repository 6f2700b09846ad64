"""The socket: made so that only its owner gets in, and that there is one daemon per socket; then accepting.

A ``flock`` beside the socket tells a live daemon from a stale socket: a stopped process keeps it, a dead one cannot.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat

import trio

from loop_protocol import jsonrpc, paths
from loop_protocol.v1.errors import RpcError

from . import api
from .connection import Connection, peer

CONNECTIONS = 64
BACKLOG = 128

log = logging.getLogger("loopd.server")


class CannotServe(Exception):
    """The socket cannot be had; the text says why and what to do."""


class AlreadyServed(CannotServe):
    """Another daemon has this socket."""


class Listener:
    """A listening, non-blocking Unix socket. One that was made here is removed at the end, an inherited one is not."""

    def __init__(self, sock: socket.socket, path: str, *, lock: int | None) -> None:
        self.path = path
        self._sock = sock
        self._lock = lock
        self._made = _identity(path) if lock is not None else None
        sock.setblocking(False)

    async def serve(self, daemon: api.Daemon, clients: set[Connection], nursery: trio.Nursery) -> None:
        """Accept for ever; connections run in ``nursery``, which outlives this."""
        while True:
            await trio.lowlevel.wait_readable(self._sock)
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue
            except OSError as error:  # out of descriptors: those who wait will be served when some are free again
                log.error("cannot accept: %s", error)
                await trio.sleep(0.1)
                continue
            if self._admit(sock, clients):
                connection = Connection(sock, daemon)
                clients.add(connection)  # here, so that the next one to be admitted is counted right
                nursery.start_soon(self._serve_one, connection, clients)

    @staticmethod
    async def _serve_one(connection: Connection, clients: set[Connection]) -> None:
        try:
            await connection.serve()
        finally:
            clients.discard(connection)

    @staticmethod
    def _admit(sock: socket.socket, clients: set[Connection]) -> bool:
        """Only the user's own processes, and not too many of them (D-6)."""
        sock.setblocking(False)
        if peer_uid(sock) != os.getuid():
            log.warning("refused a client of user %d", peer_uid(sock))
            sock.close()
            return False
        if len(clients) < CONNECTIONS:
            return True
        error = RpcError("limit_exceeded", f"{CONNECTIONS} connections are open; close some", limit="connections")
        with contextlib.suppress(OSError):
            sock.send(jsonrpc.error_body(None, error))
        sock.close()
        return False

    def close(self) -> None:
        """Stop listening. The socket's file goes only if it is still the one that was made here."""
        trio.lowlevel.notify_closing(self._sock)
        self._sock.close()
        if self._made is not None and _identity(self.path) == self._made:
            os.unlink(self.path)
        if self._lock is not None:
            os.close(self._lock)


def listen(path: str) -> Listener:
    """Make the socket. A stale one is replaced, a live one never, and a file that is no socket is refused (K-53)."""
    try:
        paths.check_socket_path(path)
        paths.private_directory(os.path.dirname(path))
    except paths.PathProblem as error:
        raise CannotServe(str(error)) from None
    try:
        lock = _take_lock(path + ".lock", path)
        try:
            _remove_stale(path)
            return Listener(_bind(path), path, lock=lock)
        except BaseException:  # whoever tries next must get the lock
            os.close(lock)
            raise
    except OSError as error:
        raise CannotServe(f"cannot serve on {path}: {error.strerror or error}") from None


def inherited(sock: socket.socket) -> Listener:
    """A socket that systemd made."""
    return Listener(sock, str(sock.getsockname()), lock=None)


def peer_uid(sock: socket.socket) -> int:
    """Whose process is at the other end."""
    return peer(sock).uid


def _take_lock(lock_path: str, path: str) -> int:
    lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise AlreadyServed(f"another loopd serves {path}; `loopctl status` shows it") from None
    return lock


def _remove_stale(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise CannotServe(f"{path} is not a socket; move it away, or choose another path with --socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        # Anything but "refused" means that somebody listens, even if too busy to take one more.
        if probe.connect_ex(path) != errno.ECONNREFUSED:
            raise AlreadyServed(f"another program serves {path}; `loopctl status` shows whether it is a loopd")
    os.unlink(path)


def _bind(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        # Before bind, so that there is no moment at which others could connect.
        os.fchmod(sock.fileno(), 0o600)
        sock.bind(path)
        sock.listen(BACKLOG)
    except BaseException:  # nobody else has it yet
        sock.close()
        raise
    return sock


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
