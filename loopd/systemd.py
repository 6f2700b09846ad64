"""What systemd and the daemon tell each other: readiness, status, watchdog, sockets; without systemd, nothing.

The protocols are those of sd_notify(3), sd_watchdog_enabled(3) and sd_listen_fds(3).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


def notify(**facts: str) -> None:
    """Tell systemd, as in ``notify(READY="1", STATUS="serving")``.

    Never raises and never waits: a service manager that does not listen is no reason to fail.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not facts or address[:1] not in ("/", "@"):
        return
    # One line per fact, so a newline inside one would begin another assignment.
    message = "\n".join(f"{name}={' '.join(value.split())}" for name, value in facts.items())
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.setblocking(False)
            out.sendto(message.encode(errors="replace"), "\0" + address[1:] if address[0] == "@" else address)
    except OSError:
        pass


def watchdog_interval() -> float | None:
    """Seconds between two ``notify(WATCHDOG="1")``, half of what systemd waits; None when nobody watches."""
    micros = _number(os.environ, "WATCHDOG_USEC")
    if not micros or _number(os.environ, "WATCHDOG_PID") not in (None, os.getpid()):
        return None
    return micros / 2_000_000


def listen_fds(first: int = 3) -> list[socket.socket]:
    """The listening sockets that were handed over, once: the variables are removed, so that no child believes them.

    Raises ValueError when one of them is no listening Unix stream socket. ``first`` is 3 by the protocol.
    """
    names = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
    told = {name: os.environ.pop(name) for name in names if name in os.environ}
    if _number(told, "LISTEN_PID") != os.getpid():
        return []
    return [_listener(fd) for fd in range(first, first + (_number(told, "LISTEN_FDS") or 0))]


def _listener(fd: int) -> socket.socket:
    try:
        os.set_inheritable(fd, False)
        listener = socket.socket(fileno=fd)
        kind = (listener.family, listener.type, listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError as error:
        raise ValueError(f"descriptor {fd}, handed over by systemd: {error.strerror}") from error
    if kind != (socket.AF_UNIX, socket.SOCK_STREAM, 1):
        listener.close()
        raise ValueError(f"descriptor {fd}, handed over by systemd, is no listening Unix stream socket")
    return listener


def _number(variables: Mapping[str, str], name: str) -> int | None:
    value = variables.get(name, "")
    return int(value) if value.isascii() and value.isdecimal() else None
