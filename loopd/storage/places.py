"""Where sessions lie: each in a directory of its own, found by its canonical workspace, held by a lock on itself."""

from __future__ import annotations

import hashlib
import os.path
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache

from . import SessionLocked, SessionMissing, StorageError
from .document import META
from .fs import DIRECTORY, FileSystem, canonical, is_absence, make_directories, opened, printable, sync_directory
from .reading import HISTORY

_DELETED = ".loopd-deleted"


@lru_cache(256)  # a list asks for it session by session
def workspace_key(workspace: str) -> str:
    return hashlib.sha256(os.fsencode(workspace)).hexdigest()[:24]


def place_of(data_dir: str, cwd: str, session_dir: str | None = None) -> str:
    """The directory of a workspace's sessions; every link to the workspace leads to the same one (K-11)."""
    if session_dir is not None:
        return session_dir
    return os.path.join(data_dir, "sessions", workspace_key(canonical(cwd)))


def path_of(data_dir: str, cwd: str, id: str, session_dir: str | None = None) -> str:
    """The exact path by which that session is opened."""
    return os.path.join(place_of(data_dir, cwd, session_dir), id, META)


def id_of(path: str) -> str:
    return os.path.basename(os.path.dirname(path))


def is_deleted(name: str) -> bool:
    """Whether a directory of that name is what a deletion that was cut off left behind (``unopened.py``)."""
    return name.startswith(".") and name.endswith(_DELETED)


def deleted(name: str) -> str:
    return f".{name}{_DELETED}"


def beside(path: str, name: str) -> str:
    return os.path.join(os.path.dirname(path), name)


def make_place(fs: FileSystem, root: str, directory: str, *, durable: bool) -> None:
    """Below ``root`` entries are synced even where they exist: an attempt before this one may have died at that."""
    make_directories(fs, root, durable=durable)
    for name in os.path.relpath(directory, root).split("/"):
        parent, root = root, os.path.join(root, name)
        with suppress(FileExistsError):
            fs.mkdir(root)
        if durable:
            sync_directory(fs, parent)


def lock(fs: FileSystem, path: str) -> int:
    """The descriptor of the session's directory: as long as it is open, nobody else is a writer (rule 7)."""
    directory = fs.open(os.path.dirname(path), DIRECTORY)
    try:
        fs.lock(directory)
    except BlockingIOError:
        holder = fs.lock_holder(directory)
        fs.close(directory)
        raise SessionLocked(path, holder) from None
    except BaseException:  # a lock that nobody has must not stay
        with suppress(OSError):
            fs.close(directory)
        raise
    return directory


def utf8(path: str) -> str:
    if printable(path) != path:
        raise StorageError(f"the path {printable(path)} is not UTF-8: no session can be kept for it")
    return path


@contextmanager
def found(path: str) -> Iterator[None]:
    """An exact path, never a fuzzy one (S-2); what is not there, or is no directory, is no session."""
    if not os.path.isabs(path) or os.path.basename(path) != META or id_of(path) in ("", ".", ".."):
        raise SessionMissing(f"{path} is not the absolute path of a session's {META}")
    try:
        yield
    except StorageError as error:
        if is_absence(error.__cause__):
            raise SessionMissing(f"there is no session at {path} (links are not followed)") from None
        raise


@contextmanager
def leaving_nothing(fs: FileSystem, path: str) -> Iterator[None]:
    """What a creation made before it failed goes again, where it can: it never was a session. Metadata stays."""
    try:
        yield
    except StorageError:
        with suppress(OSError), opened(fs, os.path.dirname(path), DIRECTORY) as directory:
            if META not in (names := {name for name, _ in fs.scan(directory)}):
                if HISTORY in names and fs.stat(HISTORY, dir_fd=directory).st_size == 0:
                    fs.unlink(HISTORY, dir_fd=directory)
                fs.rmdir(os.path.dirname(path))
        raise
