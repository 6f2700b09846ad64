"""Sessions of an earlier version, one file each: read where they are, moved into the present form when opened (S-18).

Moving is all or nothing: everything is written into a directory that no list shows, which then gets its name; only
after that the file goes. What such a file says is told by ``version2``.
"""

from __future__ import annotations

import errno
import os.path
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from loop_protocol.v1.types import ModelRef, Permission
from loopd.core.history import History

from . import Metadata, SessionLocked, SessionMalformed, SessionMissing, SessionUnsupported, StorageError
from .document import META, encode
from .files import read_session
from .fs import (
    DIRECTORY,
    READ,
    FileSystem,
    Touched,
    blocks,
    failing,
    is_absence,
    opened,
    replace_file,
    sync_directory,
    touched,
)
from .reading import HISTORY
from .version2 import Converted, converted

SUFFIX = ".jsonl"


def read(fs: FileSystem, path: str, *, model: ModelRef, permission: Permission) -> tuple[str, Metadata, History]:
    """The session as opening would find it, and the path it has now; nothing is written. Raises what ``files`` does."""
    with failing("read", path, then="try again"), _at(fs, path) as old, old.unmoved() as fd:
        if fd is not None:
            now = converted(fs, fd, path, old.id, model=model, permission=permission)
            return path, now.meta, now.history
    return old.new_path, *read_session(fs, old.new_path)


def migrate(
    fs: FileSystem,
    path: str,
    *,
    model: ModelRef,
    permission: Permission,
    require_cwd: Callable[[str], None],
    durable: bool = True,
) -> str:
    """Move the session into ``<id>/`` beside the file, unless that was done before; answers the path to open.

    ``model`` and ``permission`` are for a header without; ``require_cwd`` raises where the session's directory is gone.
    Whatever is raised, the file is as it was, or the new form is complete and the next call says so. Two at once make
    one session: the other one is answered the same path, or SessionLocked."""
    with failing("migrate", path, then="try again"), _at(fs, path) as old:
        with old.unmoved(lock=True) as fd:
            if fd is not None:
                before = touched(fs.fstat(fd))
                now = converted(fs, fd, path, old.id, model=model, permission=permission)
                require_cwd(now.meta.cwd)
                old.move(now, before, durable=durable)
        if durable:
            sync_directory(fs, os.path.dirname(path))  # where it was moved before, too: that may have died at this
        if fd is not None:
            with suppress(OSError):  # left over beside the new form it is never listed again
                fs.unlink(old.name, dir_fd=old.place)
        return old.new_path


def refuse_unmoved(fs: FileSystem, path: str) -> None:
    """What is done by path is done to the present form. Raises SessionUnsupported where there only is a file."""
    with suppress(OSError):
        fs.stat(path)
        raise SessionUnsupported(f"{path} is of an earlier version; opening it moves it first")


@contextmanager
def _at(fs: FileSystem, path: str) -> Iterator[_OldFile]:
    name = os.path.basename(path)
    id = name.removesuffix(SUFFIX)
    if not os.path.isabs(path) or not name.endswith(SUFFIX) or not id or id.startswith("."):
        raise SessionMissing(f"{path} is not the absolute path of a session's <id>{SUFFIX}")
    try:
        place = fs.open(os.path.join(os.path.dirname(path), "."), DIRECTORY)
    except OSError as error:
        if not is_absence(error):
            raise
        raise SessionMissing(f"there is no session at {path}") from None
    try:
        yield _OldFile(fs, path, name, id, place)
    finally:
        fs.close(place)


@dataclass(slots=True, frozen=True)
class _OldFile:
    """``place`` is the descriptor of the directory that it is in."""

    fs: FileSystem
    path: str
    name: str
    id: str
    place: int

    @property
    def new_path(self) -> str:
        return os.path.join(os.path.dirname(self.path), self.id, META)

    @contextmanager
    def unmoved(self, *, lock: bool = False) -> Iterator[int | None]:
        """Its descriptor; None where the session was moved. That is asked last, when nobody else can move it any more;
        and what was opened before reads the same even if it goes meanwhile."""
        try:
            fd = self.fs.open(self.name, READ, dir_fd=self.place)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise SessionMalformed(self.path, "is a symbolic link") from None
            if not is_absence(error):
                raise
            if not self._is_moved():
                raise SessionMissing(f"there is no session at {self.path}") from None
            yield None
            return
        try:
            if lock:
                self._lock(fd)
            yield None if self._is_moved() else fd
        finally:
            self.fs.close(fd)

    def _lock(self, fd: int) -> None:
        try:
            self.fs.lock(fd)
        except BlockingIOError:
            raise SessionLocked(self.path, self.fs.lock_holder(fd)) from None

    def _is_moved(self) -> bool:
        try:
            self.fs.stat(f"{self.id}/{META}", dir_fd=self.place)
        except OSError as error:
            if not is_absence(error):
                raise
            return False
        return True

    def move(self, now: Converted, before: Touched, *, durable: bool) -> None:
        """Refused where an older program, which knows no lock, has written since."""
        beside = f".{self.id}.migrating"  # a list leaves out what starts with a dot
        with self._leaving_nothing(beside):
            self._write(beside, now, durable=durable)
            if touched(self.fs.stat(self.name, dir_fd=self.place)) != before:
                raise StorageError(f"{self.path} was changed while it was read; open it again")
            self.fs.rename(beside, self.id, dir_fd=self.place)

    def _write(self, beside: str, now: Converted, *, durable: bool) -> None:
        fs, lines = self.fs, now.history.lines
        with suppress(FileExistsError):  # what an attempt left that was cut off is written over
            fs.mkdir(os.path.join(os.path.dirname(self.path), beside))
        with opened(fs, beside, DIRECTORY, dir_fd=self.place) as directory:
            replace_file(fs, HISTORY, blocks(lines, 0, len(lines)), dir_fd=directory, durable=durable)
            replace_file(fs, META, [encode(now.document)], dir_fd=directory, durable=durable)
            if durable:
                sync_directory(fs, ".", dir_fd=directory)

    @contextmanager
    def _leaving_nothing(self, beside: str) -> Iterator[None]:
        """A full disk must not stay full of our attempt. By its name: once renamed it is not ours to remove."""
        fs = self.fs
        try:
            yield
        except BaseException:  # whatever it is, the attempt goes
            with suppress(OSError), opened(fs, beside, DIRECTORY, dir_fd=self.place) as directory:
                for name, _ in fs.scan(directory):
                    fs.unlink(name, dir_fd=directory)
                fs.rmdir(os.path.join(os.path.dirname(self.path), beside))
            raise
