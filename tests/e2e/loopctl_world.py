"""A machine of the test's own for ``loopctl`` and the daemon that it starts: directories, environment, processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loop_protocol.client import Client, Unreachable

COMMAND = [sys.executable, "-m", "loopctl"]
PATIENCE = 30


@dataclass(frozen=True, slots=True)
class World:
    """Everything below ``root``; commands run in ``workspace``."""

    root: Path

    @property
    def workspace(self) -> Path:
        return self.root / "w"

    @property
    def socket(self) -> str:
        return str(self.root / "r" / "loopd" / "loopd.sock")

    @property
    def log(self) -> Path:
        return self.root / "s" / "loopd" / "loopd.log"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.root),
            "XDG_RUNTIME_DIR": str(self.root / "r"),
            "XDG_STATE_HOME": str(self.root / "s"),
            "XDG_CONFIG_HOME": str(self.root / "c"),
        }

    def loopctl(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *arguments],
            cwd=self.workspace,
            env=self.environment | more,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """A command that goes on while the test does something else."""
        return subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=self.workspace,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def pid(self) -> int | None:
        """The daemon's, if one answers."""
        try:
            with Client.connect(self.socket) as client:
                pid: int = client.call("server/status", timeout=PATIENCE).pid
                return pid
        except Unreachable:
            return None

    def kill(self, number: int) -> None:
        """Send the daemon a signal that ends it, and wait until it has."""
        pid = self.pid()
        assert pid is not None
        descriptor = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(descriptor, number)
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            assert poll.poll(PATIENCE * 1000), "the daemon did not end"
        finally:
            os.close(descriptor)


@contextmanager
def made(root: Path) -> Iterator[World]:
    world = World(root)
    world.workspace.mkdir()
    try:
        yield world
    finally:
        while world.pid() is not None:
            world.kill(signal.SIGKILL)


def first_output(process: subprocess.Popen[bytes]) -> bytes:
    """What it prints first, so that a test knows that its run goes on."""
    assert process.stdout is not None
    return os.read(process.stdout.fileno(), 65536)


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out.decode(), err.decode()
