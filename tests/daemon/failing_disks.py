"""Disks below a chosen directory that fail, or that do not answer until the test lets them."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import dataclass, field

from loopd.storage.fs import FileSystem


@dataclass
class Broken(FileSystem):
    """While ``below`` names a directory, every sync in it fails."""

    below: str | None = None

    def fsync(self, fd: int) -> None:
        if _is_below(fd, self.below):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().fsync(fd)


@dataclass
class Hanging(FileSystem):
    """While ``below`` names a directory, every sync in it waits for ``released``; ``reached`` counts them."""

    below: str | None = None
    released: threading.Event = field(default_factory=threading.Event)
    reached: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def fsync(self, fd: int) -> None:
        if _is_below(fd, self.below):
            self.reached.release()
            self.released.wait(60)
        super().fsync(fd)


def _is_below(fd: int, directory: str | None) -> bool:
    return directory is not None and os.readlink(f"/proc/self/fd/{fd}").startswith(directory)
