"""The store of an in-memory session: it publishes like the one on disk, and no file ever exists (S-2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import structs

from . import Metadata, Snapshot, StorageError
from .document import publication


class MemoryStore:
    def __init__(self, meta: Metadata) -> None:
        self._meta = meta
        self._lines = 0

    @property
    def path(self) -> str | None:
        return None

    @property
    def meta(self) -> Metadata:
        return self._meta

    def update(self, changes: dict[str, Any], *, rewrite: bool = False) -> Metadata:  # noqa: ARG002 nothing is damaged
        self._meta = structs.replace(self._meta, **changes)
        return self._meta

    def commit(self, snapshot: Snapshot, *, rewrite: bool = False) -> Metadata:  # noqa: ARG002 nothing can be missing
        self._meta = publication(self._meta, snapshot, published=self._lines)
        self._lines = snapshot.count
        return self._meta

    def rescue(self, roots: Sequence[str], snapshot: Snapshot) -> str:  # noqa: ARG002 the port
        raise StorageError("an in-memory session is never written to disk")

    def close(self) -> None:
        """Nothing is held."""
