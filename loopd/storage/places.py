"""Where sessions lie: each in a directory of its own, found by its canonical workspace, held by a lock on itself."""

from __future__ import annotations

import hashlib
import os.path
from contextlib import suppress
from functools import lru_cache

from . import SessionLocked
from .document import META
from .fs import DIRECTORY, FileSystem, canonical, make_directories, sync_directory


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
    except BaseException:
        with suppress(OSError):
            fs.close(directory)
        raise
    return directory
