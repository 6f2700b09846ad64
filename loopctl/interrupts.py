"""Ctrl-C, twice: the first is a wish that a waiting loop sees; the second ends the process at once.

An exception out of the signal handler could fall between a read and what follows it, and lose a part of the stream. So
the handler only takes a note, and a pipe wakes whoever waits.
"""

from __future__ import annotations

import os
import select
import signal
from types import FrameType
from typing import Self, TextIO

from loop_protocol.client import Client

from .exits import INTERRUPTED


class Interrupts:
    """While entered, Ctrl-C sets ``asked``; a second one prints ``farewell`` and exits with 130."""

    def __init__(self) -> None:
        self.asked = False
        self.farewell = "interrupted"

    def __enter__(self) -> Self:
        self._awake, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_wake = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._old = signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._old)
        signal.set_wakeup_fd(self._old_wake)
        os.close(self._awake)
        os.close(self._wake)

    def _interrupted(self, _signal: int, _frame: FrameType | None) -> None:
        if self.asked:
            os.write(2, f"\nloopctl: {self.farewell}\n".encode())
            os._exit(INTERRUPTED)  # at once: nothing is buffered, and the daemon notices the closed socket
        self.asked = True

    def wait(self, *sources: Client | TextIO, timeout: float | None) -> None:
        """Until the daemon sends or somebody types something, Ctrl-C is pressed, or the time is over."""
        poll = select.poll()
        for source in sources:
            poll.register(source, select.POLLIN)
        poll.register(self._awake, select.POLLIN)
        ready = poll.poll(None if timeout is None else max(0.0, timeout) * 1000)
        if any(descriptor == self._awake for descriptor, _ in ready):
            os.read(self._awake, 4096)
