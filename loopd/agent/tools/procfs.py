"""The processes of this machine as ``/proc`` shows them; 7 µs for each of them, so call it in a thread."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

_ENVIRON = 256 * 1024


@dataclass(slots=True, frozen=True)
class Process:
    pid: int
    session: int
    started: int
    zombie: bool

    @property
    def key(self) -> tuple[int, int]:
        return self.pid, self.started


def process_table() -> defaultdict[int, list[Process]]:
    """All processes by their parent. ``/proc/PID/task/*/children`` would be less work; not every kernel has it."""
    table = defaultdict[int, list[Process]](list)
    for name in os.listdir("/proc"):
        if name.isdigit() and (found := _stat(int(name))):
            parent, process = found
            table[parent].append(process)
    return table


def _stat(pid: int) -> tuple[int, Process] | None:
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            fields = file.read(4096).rpartition(b")")[2].split()  # the name before may contain anything
    except OSError:
        return None
    return int(fields[1]), Process(pid, session=int(fields[3]), started=int(fields[19]), zombie=fields[0] in b"ZX")


def below(table: Mapping[int, list[Process]], pid: int) -> Iterator[Process]:
    for child in table.get(pid, ()):
        yield child
        yield from below(table, child.pid)


def mark_of(pid: int, name: str) -> str | None:
    """A variable that a process was started with; none for a zombie, or one that belongs to somebody else."""
    try:
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
            environ = b"\0" + file.read(_ENVIRON)
    except OSError:
        return None
    _, found, rest = environ.partition(f"\0{name}=".encode())
    return rest.partition(b"\0")[0].decode(errors="replace") if found else None


def kill(process: Process) -> None:
    send(process, signal.SIGKILL)


def send(process: Process, number: int) -> None:
    with suppress(OSError):  # it ended meanwhile, or is not ours to kill
        descriptor = os.pidfd_open(process.pid)
        try:
            now = _stat(process.pid)
            if now is not None and now[1].key == process.key:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)
