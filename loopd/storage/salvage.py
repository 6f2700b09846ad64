"""Rescue copies are put back by the store's own commit (S-25).

At any moment the session is what it was, or holds all of the copy; and the copy goes only once all of it is published.
"""

from __future__ import annotations

import errno
import os.path
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from loop_protocol.v1.types import AssistantMessage
from loopd.core.history import History, decode_message

from . import (
    Committed,
    Metadata,
    SessionLocked,
    SessionMalformed,
    SessionMissing,
    SessionUnsupported,
    Snapshot,
    StorageError,
)
from .copies import Base, Copy, compared, read_copy
from .document import META, rewritten
from .files import FileStore, open_session, read_session
from .fs import DIRECTORY, FileSystem, failing, opened, sync_directory
from .places import id_of, lock, make_place, path_of, utf8
from .reading import HISTORY
from .rescue import BASE

# A copy that is being removed, and a session that is being made of one, are out of sight: nobody ever finds a part.
_REMOVED = ".{}.applied"
_UNFINISHED = ".{}.restoring"
_THEN = "apply again"
_OURS = {META, HISTORY, BASE, f".{META}.tmp", f".{HISTORY}.tmp", f".{BASE}.tmp"}
# The session of its own that a copy becomes has an id that follows from the copy's commit: a repeat finds it.
_NEW = uuid.UUID("2f0c2f0e-43a5-4c0b-9c3a-5e7b4e0f6d55")


class Refused(Exception):
    """Nothing was changed, and the copy stays; the text says why, and what to do."""


@dataclass(slots=True, frozen=True)
class Applied:
    """``path`` holds the copy now. ``already``: it did before. ``kept``: why the copy could not be removed."""

    path: str
    messages: int
    already: bool
    kept: str | None


def apply(fs: FileSystem, path: str, *, data_dir: str, as_new: bool = False) -> Applied:
    """Publish all of the copy at ``path``, then remove it. May be repeated after any fault.

    Raises :class:`Refused`, what :func:`read_copy` raises, and StorageError; the session then is old or new, and the
    copy is there. ``as_new``: a session of its own, the same one whenever that is repeated.
    """
    copy = read_copy(fs, path)
    if as_new:
        copy = _renamed(copy, path_of(data_dir, copy.meta.cwd, str(uuid.uuid5(_NEW, copy.meta.committed.commit_id))))
    if copy.base is None:
        raise Refused(f"{copy.flaw}. --as-new puts it into a session of its own")
    with _refusing():
        try:
            store, history = open_session(fs, copy.base.path)
        except SessionMissing:
            already, store = False, _put_whole(fs, copy, copy.base.path, data_dir)
        else:
            already = _put_on(store, history, copy)
    try:
        return _finish(fs, copy, copy.base.path, already=already)
    finally:
        store.close()


def _renamed(copy: Copy, target: str) -> Copy:
    """As if it had been made of a session at ``target`` of which nothing was saved yet."""
    meta = structs.replace(copy.meta, id=id_of(target))
    base = Base(path=utf8(target), commit_id=meta.id, bytes=0, crc32=0)
    return replace(copy, base=base, flaw=None, meta=meta, document=rewritten(copy.document, meta))


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except SessionLocked as error:
        close = "close it there (`loopctl daemon stop` ends a daemon), then apply again"
        raise Refused(f"{error}: {close}") from None
    except (SessionMalformed, SessionUnsupported) as error:
        raise Refused(f"{error}. --as-new puts the copy into a session of its own") from None


def _put_on(store: FileStore, history: History, copy: Copy) -> bool:
    """Append what is beyond the session's end; answers whether there was nothing to do."""
    try:
        state, why = compared(copy, history)
        if state == "differs":
            raise Refused(f"{why}: {store.path}. --as-new puts the copy into a session of its own")
        if state == "matches":
            store.commit(_snapshot(copy, _changes(store.meta, copy, published=len(history.lines))))
    except BaseException:
        store.close()
        raise
    return state == "applied"


def _changes(there: Metadata, copy: Copy, *, published: int) -> dict[str, Any]:
    """Settings, title and pin stay as they are at the session: a pending save lets none of them change, so what differs
    was changed since. What the copy adds has been read by nobody."""
    lines, places = copy.history.lines, copy.history.places
    added = (decode_message(lines[place]) for place in places if place >= published)
    has_output = any(isinstance(message, AssistantMessage) for message in added)
    return {
        "unread": there.unread or (copy.meta.unread and has_output),
        "updated_at": max(there.updated_at, copy.meta.updated_at),
    }


def _put_whole(fs: FileSystem, copy: Copy, path: str, data_dir: str) -> FileStore:
    """Where no session is: made out of sight, and renamed there once it is whole."""
    directory = os.path.dirname(path)
    place, name = os.path.split(directory)
    hidden = os.path.join(place, _UNFINISHED.format(name))
    with failing("create", directory, then=_THEN):
        root = data_dir if place.startswith(os.path.join(data_dir, "")) else place
        make_place(fs, root, hidden, durable=True)
        held = lock(fs, os.path.join(hidden, META))
        before = structs.replace(copy.meta, committed=_nothing_before(copy.meta))
        store = FileStore(fs, os.path.join(hidden, META), held, before, copy.document, 0, durable=True)
        try:
            _require_hidden(fs, held, hidden)
            _empty(fs, held)  # of an attempt that was cut off
            store.commit(_snapshot(copy, {}), rewrite=True)
            _show(fs, place, hidden, directory)
        except BaseException:
            with suppress(OSError):  # a full disk must not stay full of our attempt
                _clear(fs, hidden)
            store.close()
            raise
    return store


def _require_hidden(fs: FileSystem, held: int, hidden: str) -> None:
    """Whoever does the same may have renamed it just before we had the lock: then what we hold is the session."""
    with suppress(FileNotFoundError):
        ours, there = fs.fstat(held), fs.stat(hidden)
        if (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino):
            return
    raise Refused("another process has just put it back: apply again")


def _nothing_before(meta: Metadata) -> Committed:
    revision = meta.committed.revision - 1
    return Committed(commit_id=meta.id, revision=revision, bytes=0, crc32=0, messages=0, user_messages=0)


def _show(fs: FileSystem, place: str, hidden: str, directory: str) -> None:
    with opened(fs, os.path.join(place, "."), DIRECTORY) as fd:
        try:
            fs.rename(os.path.basename(hidden), os.path.basename(directory), dir_fd=fd)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise Refused(f"{directory} is no session, but not empty: move it away, then apply again") from None
    sync_directory(fs, place)


def _snapshot(copy: Copy, changes: dict[str, Any]) -> Snapshot:
    history = copy.history
    return Snapshot(
        commit_id=copy.meta.committed.commit_id,
        lines=history.lines,
        count=len(history.lines),
        messages=history.messages,
        user_messages=history.user_messages,
        fallback=history.fallback,
        changes=changes,
    )


def _finish(fs: FileSystem, copy: Copy, path: str, *, already: bool) -> Applied:
    """Read again what is on disk, while nobody else may write; only then the copy goes."""
    try:
        _, history = read_session(fs, path)
    except (SessionMissing, SessionMalformed, SessionUnsupported) as error:
        raise StorageError(f"{error}; the copy stays: {copy.path}") from error
    if compared(copy, history)[0] != "applied":
        raise StorageError(f"{path} does not hold what was written; the copy stays: {copy.path}")
    kept = None
    try:
        _remove(fs, copy.path)
    except StorageError as error:
        kept = str(error)
    return Applied(path, copy.beyond, already, kept)


def _remove(fs: FileSystem, path: str) -> None:
    root, name = os.path.split(path)
    hidden = os.path.join(root, _REMOVED.format(name))
    with failing("remove", path, then=_THEN):
        with opened(fs, path, DIRECTORY) as directory:
            if others := {name for name, _ in fs.scan(directory)} - _OURS:
                raise StorageError(f"{path} holds other files ({', '.join(sorted(others))}); remove it yourself")
        _clear(fs, hidden)
        with opened(fs, os.path.join(root, "."), DIRECTORY) as above:
            fs.rename(name, os.path.basename(hidden), dir_fd=above)
            fs.fsync(above)  # before any of its files goes
        _clear(fs, hidden)
        sync_directory(fs, root)


def _clear(fs: FileSystem, directory: str) -> None:
    with suppress(FileNotFoundError):
        with opened(fs, directory, DIRECTORY) as fd:
            _empty(fs, fd)
        fs.rmdir(directory)


def _empty(fs: FileSystem, fd: int) -> None:
    for name, _ in fs.scan(fd):
        fs.unlink(name, dir_fd=fd)
