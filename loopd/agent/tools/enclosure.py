"""How a command gets into a sandbox, and whether it did: the descriptors that go with one bubblewrap command."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Enclosure:
    """A bubblewrap command that ``argv`` begins, with the program of its filter of system calls. ``env`` is what it
    changes of the command's environment."""

    argv: Sequence[str]
    filter: bytes
    env: Mapping[str, str]


Enclose = Callable[[], Enclosure]


class Entry:
    """One way in. ``close`` it, whatever came of it."""

    __slots__ = ("_enclosure", "_open", "_report", "passed")

    def __init__(self, enclosure: Enclosure) -> None:
        self._enclosure = enclosure
        self._open: set[int] = set()
        try:
            self._report, reports = self._pipe()
            os.set_blocking(self._report, False)
            program, write = self._pipe()
            os.write(write, enclosure.filter)  # it fits into a pipe
            self._close(write)
        except OSError:
            self._close(*self._open)
            raise
        self.passed = (program, reports)

    def argv(self, command: Sequence[str]) -> list[str]:
        program, reports = map(str, self.passed)
        return [*self._enclosure.argv, "--seccomp", program, "--json-status-fd", reports, "--", *command]

    def env(self, env: Mapping[str, str]) -> dict[str, str]:
        return {**env, **self._enclosure.env}

    def taken(self) -> None:
        """The process has its copies."""
        self._close(*self.passed)

    def close(self) -> bool:
        """After the end: whether the command ran. Bubblewrap reports its exit code, and of one that it could not start
        nothing; where it was killed itself nobody knows."""
        ran = False
        with suppress(BlockingIOError):  # of a process that did not come up
            ran = b'"exit-code"' in os.read(self._report, 4096)
        self._close(*self._open)
        return ran

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        self._open.update(ends)
        return ends

    def _close(self, *descriptors: int) -> None:
        for descriptor in descriptors:
            self._open.discard(descriptor)
            os.close(descriptor)
