"""A mount namespace of the test's own: what is mounted there is gone with it, however the test ends."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True)
class Mounts:
    pid: int

    @property
    def enter(self) -> tuple[str, ...]:
        """The command that runs another one in here."""
        return ("nsenter", f"--mount=/proc/{self.pid}/ns/mnt", "--")

    def run(self, *command: str) -> None:
        subprocess.run([*self.enter, *command], check=True, capture_output=True, text=True, timeout=30)

    def attempt(self, *command: str) -> None:
        """The same; where it is refused the test is skipped, and says why."""
        try:
            self.run(*command)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"{' '.join(command)}: {getattr(error, 'stderr', None) or error}")

    def seen(self, path: str | Path) -> Path:
        """That path, as one in here is seen from outside."""
        return Path(f"/proc/{self.pid}/root{path}")


@contextmanager
def mounts() -> Iterator[Mounts]:
    """Skips the test where this process may not have one."""
    if os.geteuid() != 0:
        pytest.skip("needs root: it mounts file systems")
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo ready; exec cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != b"ready\n":
            pytest.skip(f"unshare --mount: {holder.stderr.read().decode()}")
        try:
            yield Mounts(holder.pid)
        finally:
            holder.stdin.close()
