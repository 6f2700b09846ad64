"""A path walked once, without following any link: what was decided about it is what is read and replaced.

Every step after the walk is relative to the directory that it found, so no link that is put in the way meanwhile leads
anywhere. All of it runs in a thread.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256

import trio

from loopd.agent.permissions import DENIED
from loopd.agent.protected import Identity, Protected, identity
from loopd.agent.tools.files import open_regular, require_regular

_WALK = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOCK = 1024 * 1024
_CHANGED = "it was changed by somebody else since it was looked at; read it again"


@dataclass(slots=True, frozen=True)
class Pinned:
    """``found``: what the first 0, 1, 2, … of ``names`` lead to, as far as that exists. ``directory`` is a descriptor
    of the last directory among these; ``status`` is None where the file does not exist."""

    names: tuple[str, ...]
    found: tuple[Identity, ...]
    directory: int
    status: os.stat_result | None

    @property
    def path(self) -> str:
        return "/" + "/".join(self.names)

    @property
    def missing(self) -> tuple[str, ...]:
        """Directories above it that do not exist."""
        return self.names[len(self.found) - 1 : -1]

    def open(self) -> int:
        """A descriptor of the very file that was found. Raises OSError."""
        if self.status is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        descriptor = open_regular(self.names[-1], dir_fd=self.directory)
        if identity(os.fstat(descriptor)) != identity(self.status):
            os.close(descriptor)
            raise changed()
        return descriptor


@dataclass(slots=True, frozen=True)
class Seen:
    """A file as it was looked at. ``content`` is None where it was not read or is too large; without ``sha256`` its
    time and size tell whether it is still the same."""

    status: os.stat_result
    content: bytes | None = None
    sha256: str | None = None


@contextmanager
def pinned(path: str) -> Iterator[Pinned]:
    """Of a real path. Raises OSError where a link or a file is in the place of a directory, or no file in its own."""
    names = tuple(filter(None, path.split("/")))
    directory = os.open("/", _WALK)
    try:
        found = [identity(os.fstat(directory))]
        for name in names[:-1]:
            try:
                below = os.open(name, _WALK, dir_fd=directory)
            except FileNotFoundError:
                break
            os.close(directory)
            directory = below
            found.append(identity(os.fstat(directory)))
        status = None
        if names and len(found) == len(names):
            with suppress(FileNotFoundError):
                status = os.stat(names[-1], dir_fd=directory, follow_symlinks=False)
                found.append(identity(status))
        yield Pinned(names, tuple(found), directory, status)
    finally:
        os.close(directory)


def real_path(path: str) -> str:
    """Where it leads, whether or not that exists. Raises OSError for one that can only be a directory."""
    if not os.path.basename(path):
        raise IsADirectoryError(errno.EISDIR, "a directory, not a file")
    return os.path.realpath(path)


def require_allowed(place: Pinned, protected: Protected) -> None:
    """Raises PermissionError for what is never allowed, OSError for what is there and no file."""
    if protected.covers(place.names, place.found, place.status):
        raise PermissionError(errno.EPERM, DENIED)
    if not place.names:
        raise IsADirectoryError(errno.EISDIR, "a directory, not a file")
    if place.status is not None:
        require_regular(place.status, place.path)


def look(place: Pinned, *, most: int) -> Seen:
    """What is in the file: all of its hash, and its content if that has at most ``most`` bytes."""
    with open(place.open(), "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        content = bytearray()
        digest = sha256()
        while block := file.read(_BLOCK):
            trio.from_thread.check_cancelled()
            digest.update(block)
            if len(content) <= most:
                content += block
    return Seen(status, bytes(content) if len(content) <= most else None, digest.hexdigest())


def changed() -> OSError:
    return OSError(errno.ESTALE, _CHANGED)


def replace(place: Pinned, data: bytes, *, seen: Seen | None, umask: int) -> None:
    """Make ``data`` the content of the file: a reader, or a power cut, finds the old or the new.

    Its mode but for setuid and setgid, its owner and its attributes are kept; a new one goes by ``umask``, as do
    directories that are missing. A further hard link keeps the old content.

    Raises OSError where it is not any more what was ``seen`` there (None: nothing), or its directory not where it was
    (A-8); then, as after a stop, everything is as it was.
    """
    if (place.status is None) != (seen is None):
        raise changed()
    directory = place.directory
    made: list[tuple[str, int]] = []
    with ExitStack() as opened:
        try:
            for name in place.missing:
                above, directory = directory, _make_directory(name, directory, made, umask=umask)
                opened.callback(os.close, directory)
            _put(place, data, directory, seen=seen, umask=umask)
        except BaseException:  # stopped or refused, no directory of the attempt stays
            for name, above in reversed(made):
                with suppress(OSError):  # somebody else uses it already
                    os.rmdir(name, dir_fd=above)
            raise


def _make_directory(name: str, above: int, made: list[tuple[str, int]], *, umask: int) -> int:
    """As the person's own ``mkdir`` makes it; answers a descriptor of it."""
    try:
        os.mkdir(name, 0o700, dir_fd=above)
    except FileExistsError:  # somebody else was faster
        return os.open(name, _WALK, dir_fd=above)
    made.append((name, above))
    directory = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    # Not by mkdir itself, which goes by the daemon's own umask; the higher bits come from the parent.
    inherited = stat.S_IMODE(os.fstat(directory).st_mode) & ~0o777
    os.fchmod(directory, inherited | 0o777 & ~umask)
    return directory


def _put(place: Pinned, data: bytes, directory: int, *, seen: Seen | None, umask: int) -> None:
    name, beside = place.names[-1], f".loopd-{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(beside, flags, 0o600, dir_fd=directory)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            _take_after(name, directory, place.status, descriptor, umask=umask)
            os.fsync(descriptor)
        _require_unchanged(place, directory, seen)
        trio.from_thread.check_cancelled()  # the last moment at which a stop means that nothing was done
        os.rename(beside, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:  # stopped or refused, nothing of the attempt stays
        with suppress(OSError):
            os.unlink(beside, dir_fd=directory)
        raise


def _take_after(name: str, directory: int, before: os.stat_result | None, descriptor: int, *, umask: int) -> None:
    if before is None:
        os.fchmod(descriptor, 0o666 & ~umask)
        return
    made = os.fstat(descriptor)
    if (made.st_uid, made.st_gid) != (before.st_uid, before.st_gid):
        try:
            os.fchown(descriptor, before.st_uid, before.st_gid)
        except PermissionError as error:
            raise PermissionError(errno.EPERM, "it belongs to another user or group, which would be lost") from error
    # After the owner, whose change takes bits away. Whose rights a program runs with was meant for the old content: the
    # kernel takes these bits away too from what is written in place.
    os.fchmod(descriptor, stat.S_IMODE(before.st_mode) & ~(stat.S_ISUID | stat.S_ISGID))
    path = f"/proc/self/fd/{directory}/{name}"  # there is no such call that takes a directory's descriptor
    with suppress(OSError):  # not every file system has them
        for attribute in os.listxattr(path, follow_symlinks=False):
            if attribute.startswith(("user.", "system.posix_acl")):
                value = os.getxattr(path, attribute, follow_symlinks=False)
                os.setxattr(descriptor, attribute, value)


def _require_unchanged(place: Pinned, directory: int, seen: Seen | None) -> None:
    """Or somebody else's change, of a person's editor, of another session, would be lost; or what was approved for one
    file would happen to another."""
    try:
        with pinned(place.path) as now:
            if now.missing or now.found[len(now.names) - 1] != identity(os.fstat(directory)):
                raise changed()
            if not _same(now, seen):
                raise changed()
    except (NotADirectoryError, FileNotFoundError) as error:
        raise changed() from error


def _same(now: Pinned, seen: Seen | None) -> bool:
    if now.status is None or seen is None:
        return now.status is None and seen is None
    if identity(now.status) != identity(seen.status):
        return False
    if seen.sha256 is None:
        return (now.status.st_size, now.status.st_mtime_ns) == (seen.status.st_size, seen.status.st_mtime_ns)
    return look(now, most=0).sha256 == seen.sha256
