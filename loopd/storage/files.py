"""The store on disk: whatever is acknowledged survives, and after any fault the old range or the new one reads.

A commit truncates to the committed length, appends, syncs, checks the size, writes the metadata beside it, syncs,
renames, syncs the directory (rule 1). No descriptor but the lock's outlives a call: a retry never syncs a failed one.
Locks bind those who ask for them: that another program wrote to our files is noticed before anything is written.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from msgspec import structs

from loop_protocol.v1.types import ModelRef, Permission
from loopd.core.history import History

from . import Metadata, SessionMalformed, SessionMissing, SessionUnsupported, Snapshot, StorageError
from .document import META, Document, checksum, encode, first_metadata, publication, rewritten
from .fs import (
    CREATE,
    DIRECTORY,
    WRITE,
    FileSystem,
    Touched,
    blocks,
    canonical,
    failing,
    opened,
    replace_file,
    sync_directory,
    touched,
    write_all,
)
from .journal import FileJournal
from .places import beside, found, id_of, leaving_nothing, lock, make_place, path_of, utf8
from .reading import HISTORY, blocks_of, read_history, read_metadata
from .rescue import Rescue, write_rescue


def create(
    fs: FileSystem,
    data_dir: str,
    *,
    meta_id: str,
    cwd: str,
    model: ModelRef,
    permission: Permission,
    now_ms: int,
    updated_at: int | None = None,
    session_dir: str | None = None,
    durable: bool = True,
) -> FileStore:
    """A new session: its metadata and an empty history are on disk, locked, when this returns (S-2). May be repeated
    with the same id after it failed."""
    workspace = utf8(canonical(cwd))
    path = utf8(path_of(data_dir, workspace, meta_id, session_dir))
    meta = first_metadata(
        id=meta_id, cwd=workspace, model=model, permission=permission, created_at=now_ms, updated_at=updated_at
    )
    return begin(fs, session_dir or data_dir, path, meta, durable=durable, then="try again")


def begin(fs: FileSystem, root: str, path: str, meta: Metadata, *, durable: bool, then: str = "flush") -> FileStore:
    """Put a session without messages on disk, below ``root``, and hold it. ``then``: what one does after a failure."""
    with leaving_nothing(fs, path):
        with failing("create", os.path.dirname(path), then=then):
            make_place(fs, root, os.path.dirname(path), durable=durable)
            directory = lock(fs, path)
        store = FileStore(fs, path, directory, meta, {}, 0, durable=durable)
        with _closing_on_error(store):
            store.begin(then=then)
    return store


def open_session(fs: FileSystem, path: str, *, durable: bool = True) -> tuple[FileStore, History]:
    """Lock and validate everything. Raises SessionMissing, SessionLocked, SessionMalformed, SessionUnsupported, or
    StorageError; the files stay as they are. Whether the session's cwd exists is the caller's to ask."""
    with found(path), failing("open", path, then="try again"):
        directory = lock(fs, path)
    try:
        meta, document = read_metadata(fs, directory, path=path, id=id_of(path))
        history = read_history(fs, directory, meta.committed, path=beside(path, HISTORY))
        store = FileStore(fs, path, directory, meta, document, len(history.lines), durable=durable)
        store.journal.look(meta.committed.commit_id, history)
    except BaseException:  # nobody has the session then, and nobody may be locked out of it
        with suppress(OSError):
            fs.close(directory)
        raise
    return store, history


def read_session(fs: FileSystem, path: str) -> tuple[Metadata, History]:
    """The same without a lock, whoever writes meanwhile (rule 6)."""
    with (
        found(path),
        failing("read", path, then="try again"),
        opened(fs, os.path.dirname(path), DIRECTORY) as directory,
    ):
        meta, _ = read_metadata(fs, directory, path=path, id=id_of(path))
        try:
            return meta, read_history(fs, directory, meta.committed, path=beside(path, HISTORY))
        except SessionMalformed:
            # A writer that rewrote the history between our two reads published other metadata as well.
            again, _ = read_metadata(fs, directory, path=path, id=id_of(path))
            if again.committed == meta.committed:
                raise
            return again, read_history(fs, directory, again.committed, path=beside(path, HISTORY))


class FileStore:
    """One open session directory, locked for the life of this object (rule 7)."""

    def __init__(
        self,
        fs: FileSystem,
        path: str,
        directory: int,
        meta: Metadata,
        document: Document,
        lines: int,
        *,
        durable: bool,
    ) -> None:
        self._fs = fs
        self._path = path
        self.journal = FileJournal(fs, path, self._held)
        self._history = beside(path, HISTORY)
        self._directory: int | None = directory
        self._meta = meta
        self._document = document
        self._lines = lines  # published ones
        self._durable = durable
        # After an error what is published is unknown until meta.json has been read again (rule 3): it may name the
        # commit that was attempted, since a fault after the rename leaves that in place.
        self._unsure = False
        self._attempted: tuple[str, int] = (meta.committed.commit_id, lines)
        # As we left them; None while we do not know, and then, as where they differ, it is their contents that count.
        self._meta_left: Touched | None = None
        self._history_left: Touched | None = None

    @property
    def path(self) -> str | None:
        return self._path

    @property
    def meta(self) -> Metadata:
        return self._meta

    def begin(self, *, then: str) -> None:
        """Put a new session on disk. Its first metadata may stand there already, from an attempt that failed."""
        directory = self._held()
        with suppress(SessionMissing):
            there, _ = read_metadata(self._fs, directory, path=self._path, id=self._meta.id)
            if there.committed != self._meta.committed:
                raise StorageError(f"there is a session at {self._path} already")
        with failing("create", self._history, then=then), opened(self._fs, HISTORY, CREATE, dir_fd=directory) as fd:
            self._fs.chmod(fd, 0o600)
            self._sync(fd)
        self._publish(directory, self._meta, then=then)

    def update(self, changes: dict[str, Any], *, rewrite: bool = False) -> Metadata:
        with self._writing(heal=rewrite) as (directory, was_unsure):
            meta = structs.replace(self._meta, **changes)
            if rewrite or was_unsure or meta != self._meta:
                self._publish(directory, meta)
        return self._meta

    def commit(self, snapshot: Snapshot, *, rewrite: bool = False) -> Metadata:
        with self._writing(heal=rewrite) as (directory, was_unsure):
            meta = publication(self._meta, snapshot, published=self._lines)
            if was_unsure or meta != self._meta:
                # Published already or not, after an error everything is synced once more: on new descriptors.
                self._extend(directory, snapshot, meta, rewrite=rewrite)
                self._attempted = (snapshot.commit_id, snapshot.count)
                self._publish(directory, meta)
                self._lines = snapshot.count
        return self._meta

    def rescue(self, roots: Sequence[str], snapshot: Snapshot) -> str:
        """May run beside a call that hangs: it reads what was published last and touches none of our files."""
        meta = publication(self._meta, snapshot, published=self._lines)
        document = rewritten(self._document, meta)
        return write_rescue(self._fs, roots, Rescue(self._path, self._meta, meta, document, snapshot))

    def close(self) -> None:
        directory, self._directory = self._directory, None
        if directory is not None:
            with suppress(OSError):
                self._fs.close(directory)

    # --- one write ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _writing(self, *, heal: bool = False) -> Iterator[tuple[int, bool]]:
        """Every write is in here: it begins with certainty about what is published, and leaves it only by an error."""
        directory = self._held()
        self._require_place(directory)
        was_unsure = self._unsure
        with failing("read", self._path):
            there = self._metadata_there(directory)
        if was_unsure or there is None or there != self._meta_left:
            self._read_again(directory, heal=heal)
            self._meta_left = there
        self._unsure = True
        yield directory, was_unsure
        self._unsure = False

    def _held(self) -> int:
        if self._directory is None:
            raise StorageError(f"{self._path} is closed")
        return self._directory

    def _require_place(self, directory: int) -> None:
        """Writing goes by descriptor; so a directory that was moved away must be noticed here (rule 8)."""
        place = os.path.dirname(self._path)
        with failing("reach", place):
            ours, there = self._fs.fstat(directory), self._fs.stat(place)
        if (ours.st_dev, ours.st_ino) != (there.st_dev, there.st_ino):
            raise StorageError(f"{place} was replaced by another directory; put the original back, then flush")

    def _metadata_there(self, directory: int) -> Touched | None:
        try:
            return touched(self._fs.stat(META, dir_fd=directory))
        except FileNotFoundError:
            return None

    def _read_again(self, directory: int, *, heal: bool) -> None:
        try:
            meta, document = read_metadata(self._fs, directory, path=self._path, id=self._meta.id)
        except SessionMissing:
            if heal:
                return  # nothing on disk contradicts what we know
            raise StorageError(f"{self._path} was removed; flush writes it anew") from None
        except SessionMalformed as error:
            if heal:
                return  # no more than damage
            raise StorageError(f"{error}: it was changed while it was open; flush writes it anew") from error
        except SessionUnsupported as error:
            raise StorageError(f"{self._path} was replaced while it was open: {error}") from error
        known = {self._meta.committed.commit_id: self._lines, self._attempted[0]: self._attempted[1]}
        if meta.committed.commit_id not in known:
            raise StorageError(
                f"{self._path} names a commit that is not ours: another program wrote it despite the lock"
            )
        self._meta, self._document, self._lines = meta, document, known[meta.committed.commit_id]

    def _extend(self, directory: int, snapshot: Snapshot, meta: Metadata, *, rewrite: bool) -> None:
        """Let the history file end with the snapshot's last line: only what is not published yet is written (S-23)."""
        published = self._meta.committed.bytes
        with failing("append to", self._history):
            try:
                with opened(self._fs, HISTORY, WRITE, dir_fd=directory) as fd:
                    there = self._fs.fstat(fd)
                    amiss = self._amiss(fd, touched(there), there.st_size)
                    if amiss is None:
                        if there.st_size > published:
                            self._fs.truncate(fd, published)
                        new = blocks(snapshot.lines, self._lines, snapshot.count)
                        return self._finish(fd, write_all(self._fs, fd, new, published), meta)
            except FileNotFoundError:
                amiss = "was removed"
        if not rewrite:
            raise StorageError(f"{self._history} {amiss}; flush writes it anew from memory")
        return self._rewrite(directory, snapshot, meta)

    def _amiss(self, fd: int, there: Touched, size: int) -> str | None:
        """What became of the committed range since we wrote it. Its bytes are read only if the file was touched."""
        committed = self._meta.committed
        if size < committed.bytes:
            return f"lost {committed.bytes - size} committed bytes"
        if there != self._history_left and checksum(blocks_of(self._fs, fd, committed.bytes)) != committed.crc32:
            return "was changed by another program while it was open"
        return None

    def _finish(self, fd: int, end: int, meta: Metadata) -> None:
        self._sync(fd)
        there = self._fs.fstat(fd)
        if not there.st_size == end == meta.committed.bytes:
            raise StorageError(f"{self._history} has {there.st_size} bytes after a write that ends at {end}")
        self._history_left = touched(there)

    def _rewrite(self, directory: int, snapshot: Snapshot, meta: Metadata) -> None:
        """The whole history from memory. What is published names a prefix of it, so it reads at any moment."""
        if checksum(blocks(snapshot.lines, 0, snapshot.count)) != meta.committed.crc32:
            raise StorageError(f"{self._history} cannot be written anew: memory is not what was committed")
        with failing("write", self._history):
            new = blocks(snapshot.lines, 0, snapshot.count)
            self._history_left = replace_file(self._fs, HISTORY, new, dir_fd=directory, durable=self._durable)
            self._sync_directory(directory)

    def _publish(self, directory: int, meta: Metadata, *, then: str = "flush") -> None:
        document = rewritten(self._document, meta)
        with failing("publish", self._path, then=then):
            left = replace_file(self._fs, META, [encode(document)], dir_fd=directory, durable=self._durable)
            self._sync_directory(directory)
        self._meta, self._document, self._meta_left = meta, document, left

    def _sync(self, fd: int) -> None:
        if self._durable:
            self._fs.fsync(fd)

    def _sync_directory(self, directory: int) -> None:
        if self._durable:
            sync_directory(self._fs, ".", dir_fd=directory)


@contextmanager
def _closing_on_error(store: FileStore) -> Iterator[None]:
    try:
        yield
    except BaseException:  # nobody has the store then
        store.close()
        raise
