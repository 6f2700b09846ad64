"""Files as tools reach them: regular ones only, found from the working directory.

Devices and FIFOs are never opened, and files of ``/proc`` are refused: used by the daemon itself they would show its
own environment, keys included (K-31).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import TypeVar

import trio

from loopd.agent import ToolOutcome, ToolScope
from loopd.agent.tools.outcomes import told

T = TypeVar("T")


def locate(path: str, scope: ToolScope) -> str:
    """From the working directory; ``~`` as the person's shell has it, since models write it."""
    home = scope.env.variables.get("HOME", "")
    if path.startswith("~/") and os.path.isabs(home):
        path = os.path.join(home, path[2:])
    return os.path.join(scope.cwd, path)


async def on_disk(path: str, work: Callable[[], T]) -> T | ToolOutcome:
    """``work`` in a thread; what the system refuses is an outcome.

    A stop does not wait for a hung disk: the thread is left alone, and ends where it looks for that. It takes no place
    from other calls.
    """
    try:
        return await trio.to_thread.run_sync(work, limiter=trio.CapacityLimiter(1), abandon_on_cancel=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return told(f"{path}: {reason}", is_error=True)


# --- in a thread ------------------------------------------------------------------------------------------------------


def open_regular(path: str, *, dir_fd: int | None = None) -> int:
    """A descriptor of a regular file. Raises OSError for everything else, ValueError for a NUL byte; never waits.

    With ``dir_fd`` it is a name in that directory, which is no link.
    """
    follow = dir_fd is None
    # First: merely opening a device can make it do something.
    require_regular(os.stat(path, dir_fd=dir_fd, follow_symlinks=follow), path)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, dir_fd=dir_fd)
    try:
        require_regular(os.fstat(descriptor), path)  # it may have been swapped since
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def require_regular(status: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "a directory, not a file", path)
    if stat.S_ISLNK(status.st_mode):  # all links are resolved before
        raise OSError(errno.ELOOP, "a link that leads to itself, or was put there at this moment", path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    if status.st_dev == os.stat("/proc").st_dev:
        raise PermissionError(errno.EPERM, "files of /proc are left alone by this tool", path)
