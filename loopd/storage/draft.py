"""The store of a draft: id and path are settled, and nothing is on disk until a commit holds a user message (S-3)."""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from msgspec import structs

from loop_protocol.v1.types import ModelRef, Permission

from . import (
    Journal,
    Metadata,
    SessionLocked,
    SessionMalformed,
    SessionMissing,
    SessionUnsupported,
    Snapshot,
    StorageError,
)
from .document import META, first_metadata, rewritten
from .files import FileStore, begin
from .fs import DIRECTORY, WRITE, FileSystem, canonical, opened
from .memory import MemoryStore
from .places import leaving_nothing, path_of, utf8
from .reading import HISTORY, read_metadata
from .rescue import Rescue, write_rescue


def draft(
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
) -> DraftStore:
    """What ``files.create`` makes, and not on disk yet."""
    workspace = utf8(canonical(cwd))
    path = utf8(path_of(data_dir, workspace, meta_id, session_dir))
    meta = first_metadata(
        id=meta_id, cwd=workspace, model=model, permission=permission, created_at=now_ms, updated_at=updated_at
    )
    return DraftStore(fs, session_dir or data_dir, path, meta, durable=durable)


class DraftStore:
    """In memory first; from the commit that holds a user message on, the session that it put on disk."""

    def __init__(self, fs: FileSystem, root: str, path: str, meta: Metadata, *, durable: bool) -> None:
        self._fs = fs
        self._root = root
        self._path = path
        self._empty = meta.committed
        self._durable = durable
        self._store: MemoryStore | FileStore = MemoryStore(meta)

    @property
    def path(self) -> str | None:
        return self._path

    @property
    def journal(self) -> Journal:
        return self._store.journal

    @property
    def meta(self) -> Metadata:
        return self._store.meta

    def update(self, changes: dict[str, Any], *, rewrite: bool = False) -> Metadata:
        return self._store.update(changes, rewrite=rewrite)

    def commit(self, snapshot: Snapshot, *, rewrite: bool = False) -> Metadata:
        if isinstance(self._store, MemoryStore) and snapshot.user_messages:
            return self._put_on_disk(snapshot)
        return self._store.commit(snapshot, rewrite=rewrite)

    def rescue(self, roots: Sequence[str], snapshot: Snapshot) -> str:
        store = self._store
        if isinstance(store, FileStore):
            return store.rescue(roots, snapshot)
        meta = store.publication(snapshot)
        return write_rescue(self._fs, roots, Rescue(self._path, self._blank(), meta, rewritten({}, meta), snapshot))

    def close(self) -> None:
        self._store.close()

    # --- the first save -----------------------------------------------------------------------------------------------

    def _blank(self) -> Metadata:
        """What was said of it so far, with nothing committed."""
        return structs.replace(self._store.meta, committed=self._empty)

    def _put_on_disk(self, snapshot: Snapshot) -> Metadata:
        """The session begins empty, so that a crash leaves nothing that is damaged, and is committed to at once."""
        memory = self._store
        with leaving_nothing(self._fs, self._path):
            try:
                self._store = begin(self._fs, self._root, self._path, self._blank(), durable=self._durable)
                return self._store.commit(snapshot)
            except SessionLocked as error:
                raise StorageError(str(error)) from error
            except StorageError:
                # An error does not mean that it was not published: then that store knows how to go on (rule 3).
                if self._withdrawn():
                    self._store.close()
                    self._store = memory
                raise

    def _withdrawn(self) -> bool:
        """Whether the session on disk was still empty, and could be taken back. Each step leaves something legal."""
        with (
            suppress(OSError, StorageError, SessionMissing, SessionMalformed, SessionUnsupported),
            opened(self._fs, os.path.dirname(self._path), DIRECTORY) as directory,
        ):
            there, _ = read_metadata(self._fs, directory, path=self._path, id=self._store.meta.id)
            if there.committed == self._empty:
                with opened(self._fs, HISTORY, WRITE, dir_fd=directory) as fd:
                    self._fs.truncate(fd, 0)
                self._fs.unlink(META, dir_fd=directory)
                return True
        return False
