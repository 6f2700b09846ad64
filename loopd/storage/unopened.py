"""What is done to a session that is not open: its metadata changed, or all of it deleted, under the lock of a writer.

A deletion renames the session's directory to a hidden name first. So a list shows it whole or not at all, whenever the
deletion is cut off; what that leaves behind goes with the next deletion in the same place.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from msgspec import structs

from . import Metadata, SessionLocked, SessionMalformed, SessionMissing
from .document import META, encode, rewritten
from .fs import DIRECTORY, FileSystem, failing, opened, printable, replace_file, sync_directory
from .journal import JOURNAL, OLD
from .places import deleted, found, id_of, is_deleted, lock
from .reading import HISTORY, read_metadata

# All that a session's directory ever holds; metadata first, since nothing is a session without.
_FILES = (META, HISTORY, JOURNAL, OLD, f".{META}.tmp", f".{HISTORY}.tmp")


def change_metadata(
    fs: FileSystem, path: str, decide: Callable[[Metadata], dict[str, Any]], *, durable: bool = True
) -> Metadata:
    """Publish what ``decide`` answers to the metadata there is; the history is not even read. Answers what holds then.
    Raises what opening raises, and ``StorageError``."""
    with found(path), failing("change", path, then="try again"), _locked(fs, path) as directory:
        meta, document = read_metadata(fs, directory, path=path, id=id_of(path))
        changed = structs.replace(meta, **decide(meta))
        if changed != meta:
            replace_file(fs, META, [encode(rewritten(document, changed))], dir_fd=directory, durable=durable)
            if durable:
                sync_directory(fs, ".", dir_fd=directory)
    return changed


def delete(fs: FileSystem, path: str, *, gone: Callable[[], None] = lambda: None, durable: bool = True) -> None:
    """Remove a session, a damaged one too, and nothing that is not a session's: where there is more in its directory
    nothing happens. Raises what opening raises, and ``StorageError``. Once no list shows it, ``gone`` is called; what
    fails after that may leave the rest of its files."""
    with found(path), failing("delete", path, then="try again"):
        place, name = os.path.split(os.path.dirname(path))
        _remove_leftovers(fs, place, durable=durable)
        with _locked(fs, path) as directory, opened(fs, os.path.join(place, "."), DIRECTORY) as around:
            _require_session(fs, directory, path)
            fs.rename(name, deleted(name), dir_fd=around)
            gone()
            if durable:
                sync_directory(fs, place)
            _remove(fs, directory, os.path.join(place, deleted(name)))


@contextmanager
def _locked(fs: FileSystem, path: str) -> Iterator[int]:
    directory = lock(fs, path)
    try:
        yield directory
    finally:
        fs.close(directory)


def _require_session(fs: FileSystem, directory: int, path: str) -> None:
    """Its metadata is ours, or is damaged or gone beside a history, and there is nothing else."""
    files = fs.scan(directory)
    try:
        read_metadata(fs, directory, path=path, id=id_of(path))
    except (SessionMalformed, SessionMissing):
        if HISTORY not in dict(files):
            raise
    strange = sorted(printable(name) for name, is_directory in files if is_directory or name not in _FILES)
    if strange:
        raise SessionMalformed(path, f"beside it is what belongs to no session: {', '.join(strange)}; move that away")


def _remove_leftovers(fs: FileSystem, place: str, *, durable: bool) -> None:
    """Of deletions that were cut off, unless somebody is at them just now."""
    with opened(fs, os.path.join(place, "."), DIRECTORY) as around:
        left = [name for name, is_directory in fs.scan(around) if is_directory and is_deleted(name)]
    if left and durable:
        sync_directory(fs, place)  # or a crash could bring an emptied directory back under its name
    for name in left:
        with suppress(OSError, SessionLocked), _locked(fs, os.path.join(place, name, META)) as directory:
            _remove(fs, directory, os.path.join(place, name))


def _remove(fs: FileSystem, directory: int, path: str) -> None:
    for name in _FILES:
        with suppress(FileNotFoundError):
            fs.unlink(name, dir_fd=directory)
    fs.rmdir(path)
