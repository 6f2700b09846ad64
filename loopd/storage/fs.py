"""Every file call of the store goes through one small object, so that a test can count, record and break each of them.

Descriptors are opened close-on-exec and never through a symbolic link in the last component; names are relative to a
directory's descriptor wherever one is held.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from . import StorageError

# A fifo in a file's place must not block the reader: hence O_NONBLOCK, which regular files ignore.
READ = os.O_RDONLY | os.O_NONBLOCK
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
WRITE = os.O_RDWR | os.O_NONBLOCK
CREATE = WRITE | os.O_CREAT
FRESH = CREATE | os.O_TRUNC

# No single C call touches more Python objects than this, since a worker thread holds the GIL meanwhile.
BLOCK = 256 * 1024


class FileSystem:
    """The real one. A call is one step that can fail: tests subclass it and fail the k-th."""

    def open(self, name: str, flags: int, *, dir_fd: int | None = None) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        return os.pread(fd, size, offset)

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        """May be short, like the system call."""
        return os.pwrite(fd, data, offset)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def chmod(self, fd: int, mode: int) -> None:
        os.fchmod(fd, mode)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def stat(self, name: str, *, dir_fd: int | None = None) -> os.stat_result:
        """Of the link itself, where it is one."""
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)

    def rename(self, source: str, target: str, *, dir_fd: int) -> None:
        os.rename(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def unlink(self, name: str, *, dir_fd: int) -> None:
        os.unlink(name, dir_fd=dir_fd)

    def rmdir(self, path: str) -> None:
        """Refused while anything is in it."""
        os.rmdir(path)

    def mkdir(self, path: str) -> None:
        """0700 whatever the umask (S-20)."""
        os.mkdir(path, 0o700)
        os.chmod(path, 0o700)

    def scan(self, fd: int) -> list[tuple[str, bool]]:
        """The names in a directory, each with whether it is a directory itself (a link to one is not)."""
        with os.scandir(fd) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]

    def room(self, path: str) -> int:
        """How many bytes may still be written to the file system that holds ``path``."""
        of = os.statvfs(path)
        return of.f_bavail * of.f_frsize

    def lock(self, fd: int) -> None:
        """Raises BlockingIOError at once if somebody else holds it. ``flock``, because record locks vanish when any
        descriptor of the file is closed."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def lock_holder(self, fd: int) -> int | None:
        """The pid that holds the lock on that file, as far as the system tells."""
        of = os.fstat(fd)
        place = f"{os.major(of.st_dev):02x}:{os.minor(of.st_dev):02x}:{of.st_ino}"
        with suppress(OSError, ValueError), open("/proc/locks", encoding="ascii") as table:
            for words in map(str.split, table):
                if len(words) > 5 and words[1] == "FLOCK" and words[5] == place:
                    return max(int(words[4]), 0) or None
        return None


def canonical(path: str) -> str:
    return os.path.realpath(path)


def printable(path: str) -> str:
    """The path as clients and people are told it: a byte that is not UTF-8 is a ``\\xNN``."""
    return os.fsencode(path).decode(errors="backslashreplace")


def is_absence(error: BaseException | None) -> bool:
    """Whether it says that nothing is there: a name longer than any name is nobody's."""
    return isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)


Touched = tuple[int, int, int]


def touched(stat: os.stat_result) -> Touched:
    """What differs once a file was replaced or written to. Not the time of its inode: renaming it changes that."""
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


class opened:
    """A file or directory, open within a ``with``. No generator: in a long list those are a tenth of the work."""

    __slots__ = ("_fd", "_fs")

    def __init__(self, fs: FileSystem, name: str, flags: int, *, dir_fd: int | None = None) -> None:
        self._fs = fs
        self._fd = fs.open(name, flags, dir_fd=dir_fd)

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        self._fs.close(self._fd)


def blocks(lines: Sequence[bytes], start: int, stop: int) -> Iterator[bytes]:
    """Those lines joined, a block or a little more at a time."""
    part: list[bytes] = []
    size = 0
    for number in range(start, stop):
        part.append(lines[number])
        size += len(lines[number])
        if size >= BLOCK:
            yield b"".join(part)
            part, size = [], 0
    if part:
        yield b"".join(part)


def write_all(fs: FileSystem, fd: int, blocks: Iterable[bytes], offset: int) -> int:
    """Write the blocks one after the other from ``offset``, however short each write is; answers where they end."""
    for block in blocks:
        rest = memoryview(block)
        while rest:
            written = fs.write(fd, rest, offset)
            if written == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            rest = rest[written:]
            offset += written
    return offset


def replace_file(fs: FileSystem, name: str, blocks: Iterable[bytes], *, dir_fd: int, durable: bool) -> Touched:
    """Write a file beside ``name``, sync it, and rename it there; answers by what it is known again. The directory is
    not synced yet."""
    beside = f".{name}.tmp"
    try:
        with opened(fs, beside, FRESH, dir_fd=dir_fd) as fd:
            fs.chmod(fd, 0o600)
            write_all(fs, fd, blocks, 0)
            if durable:
                fs.fsync(fd)
            written = touched(fs.fstat(fd))
        fs.rename(beside, name, dir_fd=dir_fd)
    except BaseException:  # whatever it is, the attempt goes
        with suppress(OSError):  # a full disk must not stay full of our attempt
            fs.unlink(beside, dir_fd=dir_fd)
        raise
    return written


def sync_directory(fs: FileSystem, path: str, *, dir_fd: int | None = None) -> None:
    """On a descriptor of its own, since a failed fsync is final for the descriptor that saw it (rule 4)."""
    # With "/." a link in the last component is followed: parents may be what the user made of them.
    with opened(fs, os.path.join(path, "."), DIRECTORY, dir_fd=dir_fd) as fd:
        fs.fsync(fd)


def make_directories(fs: FileSystem, path: str, *, durable: bool) -> None:
    """Make what is missing of ``path``, each entry synced before the next."""
    try:
        fs.mkdir(path)
    except FileExistsError:
        return
    except FileNotFoundError:
        if os.path.dirname(path) in ("", path):
            raise
        make_directories(fs, os.path.dirname(path), durable=durable)
        with suppress(FileExistsError):  # somebody else was faster
            fs.mkdir(path)
    if durable:
        sync_directory(fs, os.path.dirname(path))


# --- errors as people read them ---------------------------------------------------------------------------------------

_ADVICE = {
    errno.ENOSPC: "free space on that file system",
    errno.EDQUOT: "free space or raise the quota",
    errno.EROFS: "mount it writable again",
    errno.EIO: "the device reports errors: check it (dmesg)",
    errno.EMFILE: "too many files are open: close sessions or raise the limit (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine: close some",
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EACCES: "restore its permissions",
    errno.EPERM: "restore its permissions",
    errno.ENOENT: "put it back",
    errno.ENOTDIR: "put the directory back",
    errno.ELOOP: "it is a symbolic link, which is refused: put the real one there",
}


def explain(doing: str, path: str, error: OSError, *, then: str = "flush") -> str:
    """What failed, where, why, and what to do."""
    number = error.errno or 0
    name = errno.errorcode.get(number, "unknown error")
    advice = _ADVICE.get(number, "repair the cause")
    reason = os.strerror(number) if number else error
    return f"could not {doing} {printable(path)}: {reason} ({name}); {advice}, then {then}"


@contextmanager
def failing(doing: str, path: str, *, then: str = "flush") -> Iterator[None]:
    """Whatever the system refuses inside becomes a :class:`StorageError` that says so."""
    try:
        yield
    except OSError as error:
        raise StorageError(explain(doing, path, error, then=then)) from error
