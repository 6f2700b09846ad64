"""A person at a terminal: ``loopctl`` in a pty, what it shows, and what is typed."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PATIENCE = 20.0


@dataclass
class Terminal:
    master: int
    process: subprocess.Popen[bytes]
    shown: str = ""
    _new: str = field(default="", repr=False)

    def waits_for(self, text: str) -> None:
        """Until this is shown, after what was waited for before."""
        deadline = time.monotonic() + PATIENCE
        while text not in self._new:
            left = deadline - time.monotonic()
            more = left > 0 and self._reads(left)
            assert more, f"not shown: {text!r}; but {self.shown!r}"
        self._new = self._new.split(text, 1)[1]

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def hang_up(self) -> None:
        os.close(self.master)
        self.master = -1

    def ends(self) -> int:
        """The exit code; all that is shown until then is read."""
        while self.master >= 0 and self._reads(PATIENCE):
            pass
        return self.process.wait(PATIENCE)

    def _reads(self, timeout: float) -> bool:
        if not select.select([self.master], [], [], timeout)[0]:
            return False
        try:
            text = os.read(self.master, 65536).decode()
        except OSError:  # the other side is closed
            return False
        self.shown += text
        self._new += text
        return bool(text)


@contextmanager
def at_terminal(
    *arguments: str,
    stdin: int | None = None,
    stdout: int | None = None,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> Iterator[Terminal]:
    """``loopctl`` with all three at a terminal, but for what is given."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "loopctl", *arguments],
        stdin=slave if stdin is None else stdin,
        stdout=slave if stdout is None else stdout,
        stderr=slave,
        cwd=cwd,
        env=env,
    )
    os.close(slave)
    terminal = Terminal(master, process)
    try:
        yield terminal
    finally:
        process.kill()
        process.wait()
        if terminal.master >= 0:
            os.close(terminal.master)
