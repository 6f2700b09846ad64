"""Files as tools reach them: regular ones only, found from the working directory, replaced as a whole or not at all.

Devices and FIFOs are never opened, and files of ``/proc`` are refused: used by the daemon itself they would show its
own environment, keys included (K-31).
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress

import trio

from loopd.agent import ToolOutcome, ToolScope
from loopd.agent.tools.outcomes import told


def locate(path: str, scope: ToolScope) -> str:
    """From the working directory; ``~`` as the person's shell has it, since models write it."""
    home = scope.env.variables.get("HOME", "")
    if path.startswith("~/") and os.path.isabs(home):
        path = os.path.join(home, path[2:])
    return os.path.join(scope.cwd, path)


async def on_disk(path: str, work: Callable[[], ToolOutcome]) -> ToolOutcome:
    """``work`` in a thread; what the system refuses is the outcome.

    A stop does not wait for a hung disk: the thread is left alone, and ends where it looks for that. It takes no place
    from other calls.
    """
    try:
        return await trio.to_thread.run_sync(work, limiter=trio.CapacityLimiter(1), abandon_on_cancel=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return told(f"{path}: {reason}", is_error=True)


# --- in a thread ------------------------------------------------------------------------------------------------------


def open_regular(path: str) -> int:
    """A descriptor of a regular file. Raises OSError for everything else, ValueError for a NUL byte; never waits."""
    require_regular(os.stat(path), path)  # first: merely opening a device can make it do something
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        require_regular(os.fstat(descriptor), path)  # it may have been swapped since
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def require_regular(status: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "a directory, not a file", path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    if status.st_dev == os.stat("/proc").st_dev:
        raise PermissionError(errno.EPERM, "files of /proc are left alone by this tool", path)


def make_directories(path: str, *, umask: int) -> None:
    """What is missing of ``path``, as the person's own ``mkdir -p`` makes it."""
    missing = []
    while not os.path.exists(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        with suppress(FileExistsError):  # somebody else was faster
            os.mkdir(directory, 0o700)
            # Not by mkdir itself, which goes by the daemon's own umask; the higher bits come from the parent.
            inherited = stat.S_IMODE(os.stat(directory).st_mode) & ~0o777
            os.chmod(directory, inherited | 0o777 & ~umask)


def replace_file(path: str, data: bytes, *, before: os.stat_result | None, umask: int = 0o077) -> None:
    """Make ``data`` the content of ``path``, which is no link: a reader, or a power cut, finds the old or the new.

    ``before`` is what was found there, whose mode, owner and attributes are kept; None for nothing: then ``umask``
    counts. A further hard link keeps the old content. Raises OSError, and the file is as it was.
    """
    beside = os.path.join(os.path.dirname(path), f".loopd-{secrets.token_hex(8)}.tmp")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            _take_after(path, before, descriptor, umask=umask)
            os.fsync(descriptor)
        _require_unchanged(path, before)
        trio.from_thread.check_cancelled()  # the last moment at which a stop means that nothing was done
        os.rename(beside, path)
    except BaseException:  # stopped or refused, nothing of the attempt stays
        with suppress(OSError):
            os.unlink(beside)
        raise


def _take_after(path: str, before: os.stat_result | None, descriptor: int, *, umask: int) -> None:
    if before is None:
        os.fchmod(descriptor, 0o666 & ~umask)
        return
    made = os.fstat(descriptor)
    if (made.st_uid, made.st_gid) != (before.st_uid, before.st_gid):
        try:
            os.fchown(descriptor, before.st_uid, before.st_gid)
        except PermissionError as error:
            raise PermissionError(errno.EPERM, "it belongs to another user or group, which would be lost") from error
    os.fchmod(descriptor, stat.S_IMODE(before.st_mode))  # after the owner, whose change takes bits away
    with suppress(OSError):  # not every file system has them
        for name in os.listxattr(path):
            if name.startswith(("user.", "system.posix_acl")):
                os.setxattr(descriptor, name, os.getxattr(path, name))


def _require_unchanged(path: str, before: os.stat_result | None) -> None:
    """Or somebody else's change, of a person's editor, of another session, would be lost."""
    try:
        now = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        now = None
    if _identity(now) != _identity(before):
        raise OSError(errno.ESTALE, "it was changed by somebody else at this moment; read it again")


def _identity(status: os.stat_result | None) -> tuple[int, ...] | None:
    return status and (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
