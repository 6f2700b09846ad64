"""A real ``python -m loopd`` in a place of its own, ended by its pid however the test ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loop_protocol.client import Client

PATIENCE = 30.0


@dataclass(slots=True)
class DaemonProcess:
    """``place`` holds all that it has: socket, data, settings, log, workspace."""

    place: Path
    popen: subprocess.Popen[bytes]
    inbox: socket.socket

    @property
    def socket(self) -> str:
        return str(self.place / "s")

    @property
    def workspace(self) -> str:
        return str(self.place / "ws")

    @property
    def rescue(self) -> Path:
        return self.place / "data" / "rescue"

    @property
    def log(self) -> str:
        return (self.place / "log").read_text()

    def told(self, text: str) -> str:
        """The next thing that it tells its service manager with ``text`` in it."""
        while text not in (facts := self.inbox.recv(4096).decode()):
            pass
        return facts

    def connect(self) -> Client:
        return Client.connect(self.socket, timeout=PATIENCE)

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def ended(self, within: float = PATIENCE) -> int:
        return self.popen.wait(within)


@contextmanager
def started(
    *options: str,
    settings: str = "",
    place: Path | None = None,
    environ: dict[str, str] | None = None,
    under: Sequence[str] = (),
) -> Iterator[DaemonProcess]:
    """Ready when this enters: it says so. ``under`` is a command that becomes it, such as ``nsenter``."""
    with tempfile.TemporaryDirectory(prefix="loopd-") as fresh:
        root = place or Path(fresh)
        (root / "ws").mkdir(exist_ok=True)
        (root / "config.toml").write_text(settings)
        (root / "notify").unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
            inbox.settimeout(PATIENCE)
            inbox.bind(str(root / "notify"))
            daemon = DaemonProcess(root, spawned(root, *options, under=under, **(environ or {})), inbox)
            try:
                daemon.told("READY=1")
                yield daemon
            finally:
                daemon.signal(signal.SIGKILL)  # ends a stopped one too
                daemon.popen.wait()


def spawned(root: Path, *options: str, under: Sequence[str] = (), **environ: str) -> subprocess.Popen[bytes]:
    """Started, and nothing awaited."""
    (root / "config.toml").touch()
    with (root / "log").open("ab") as log:
        return subprocess.Popen(
            [*under, sys.executable, "-m", "loopd", "--socket", str(root / "s"), *options],
            cwd="/",
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(root),
                "XDG_RUNTIME_DIR": str(root / "run"),
                "LOOPD_DATA_DIR": str(root / "data"),
                "LOOPD_CONFIG": str(root / "config.toml"),
                "NOTIFY_SOCKET": str(root / "notify"),
                **environ,
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            umask=0,  # as bad as it can be
        )


def open_session(client: Client, daemon: DaemonProcess, **options: Any) -> Any:
    """A new session, attached."""
    opened = client.call("runtime/open", {"cwd": daemon.workspace, "session": {"kind": "new"}, **options})
    client.call("runtime/attach", {"runtimeId": opened.runtime_id})
    return opened


def prompt(client: Client, session_id: str, content: str, **options: Any) -> Any:
    return client.call("session/prompt", {"sessionId": session_id, "content": content, **options}, timeout=PATIENCE)


def next_event(client: Client, tag: str) -> Any:
    """The next event of that type."""
    while (params := client.next_event(PATIENCE)) is not None:
        if params.event.__struct_config__.tag == tag:
            return params.event
    raise TimeoutError(tag)


def processes_with(mark: str) -> list[int]:
    """Those whose command line holds ``mark``, zombies excepted."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue  # it ended meanwhile
    return found


def deaf(daemon: DaemonProcess, requests: Sequence[bytes]) -> socket.socket:
    """A client that sends and never reads."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(daemon.socket)
    sock.sendall(b"".join(requests))
    return sock
