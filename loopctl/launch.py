"""Starts a daemon that outlives us, at most one however many ask at once, and waits until it answers."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from loop_protocol import paths
from loop_protocol.client import Client, Unreachable

from .exits import UNREACHABLE, Failure

START_TIMEOUT = 10.0
# A daemon that found another one on its socket ends with this code; it leaves us so long to meet that other one.
EX_UNAVAILABLE = 69
RIVAL_TIMEOUT = 1.5
# They are about the process that got them, not about the one that we start.
_NOT_INHERITED = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


def start(socket: str, *, approvals: bool = False) -> tuple[Client, bool]:
    """A connection to the daemon on ``socket``, and whether it was started here. ``approvals``: a person is here, who
    is asked."""
    paths.check_socket_path(socket)
    directory = os.path.dirname(socket)
    paths.private_directory(directory)
    deadline = time.monotonic() + START_TIMEOUT
    with _turn(directory, deadline):
        try:
            return Client.connect(
                socket, name="loopctl", approvals=approvals
            ), False  # whoever had the turn before us started it
        except Unreachable as unreachable:
            if not unreachable.absent:
                raise
        log = paths.log_path(os.environ)
        paths.private_directory(os.path.dirname(log))
        before = os.path.getsize(log) if os.path.exists(log) else 0
        process = _spawn(socket, log)
        return _await(socket, process, deadline, approvals=approvals, log=log, before=before), True


def check_settings() -> None:
    """Raises :class:`Failure` where no daemon would start with the settings of now."""
    check = [sys.executable, "-P", "-m", "loopd", "--check"]
    done = subprocess.run(check, cwd="/", env=_environment(), stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode:
        raise Failure(done.stderr.decode("utf-8", "replace").strip().removeprefix("loopd: "), UNREACHABLE)


@contextmanager
def _turn(directory: str, deadline: float) -> Iterator[None]:
    """One starter at a time: ten starting daemons would fight for the machine only for nine to go again.

    The lock is on the directory, so no file is left; the daemon has a lock of its own, and is safe without this one.
    Where it cannot be had in time (somebody else's directory), we go on without.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise Failure(f"cannot use {directory}: {error.strerror}", UNREACHABLE) from None
    try:
        while time.monotonic() < deadline:
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def _spawn(socket: str, log: str) -> subprocess.Popen[bytes]:
    # -P: nothing of the current directory, `/`, is imported.
    command = [sys.executable, "-P", "-m", "loopd", "--socket", socket, "--log-file", log, "--on-demand"]
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise Failure(f"cannot write the daemon's log {log}: {error.strerror}", UNREACHABLE) from None
    try:
        # Its stderr goes to the log too: a daemon that fails before it opens its log says why there.
        return subprocess.Popen(
            command,
            cwd="/",
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=descriptor,
            start_new_session=True,
        )
    finally:
        os.close(descriptor)


def _environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    for name in ("LOOPD_DATA_DIR", "LOOPD_CONFIG"):
        if inherited.get(name):
            inherited[name] = os.path.abspath(inherited[name])  # it starts in `/`, not here
    return inherited


def _await(
    socket: str, process: subprocess.Popen[bytes], deadline: float, *, approvals: bool, log: str, before: int
) -> Client:
    has_ended = False
    while time.monotonic() < deadline:
        try:
            left = max(0.1, deadline - time.monotonic())
            client = Client.connect(socket, timeout=left, name="loopctl", approvals=approvals)
        except Unreachable:
            if not has_ended and process.poll() is not None:
                has_ended = True
                deadline = min(deadline, time.monotonic() + RIVAL_TIMEOUT * (process.returncode == EX_UNAVAILABLE))
            time.sleep(0.02)
        else:
            process.returncode = process.returncode or 0  # ours no more: forgotten without a ResourceWarning
            return client
    process.returncode = process.returncode or 0
    raise Failure(f"the daemon did not start. The end of {log}:\n{_end_of(log, before)}", UNREACHABLE)


def _end_of(log: str, before: int) -> str:
    with open(log, "rb") as file:
        file.seek(before)
        lines = file.read(64 * 1024).decode("utf-8", "replace").splitlines()
    return "\n".join(lines[-20:]) or f"(nothing was written to {Path(log).name})"
