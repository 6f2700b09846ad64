"""A snapshot that could not be saved where it belongs is kept elsewhere, whole, with what is needed to take it back."""

from __future__ import annotations

import os.path
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count

import msgspec

from . import Metadata, SessionMalformed, SessionMissing, SessionUnsupported, Snapshot, StorageError
from .document import META, Document, encode
from .fs import DIRECTORY, FileSystem, blocks, failing, make_directories, opened, replace_file, sync_directory
from .reading import HISTORY, read_metadata

BASE = "base.json"


def rescue_roots(data_dir: str, environ: Mapping[str, str], further: str | None = None) -> list[str]:
    """The places for copies, in the order in which they are tried: the second is on another file system, as a rule."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    below_runtime = [os.path.join(runtime, "loopd", "rescue")] if os.path.isabs(runtime) else []
    return [os.path.join(data_dir, "rescue"), *below_runtime, *([further] if further else [])]


@dataclass(slots=True, frozen=True)
class Rescue:
    """``base`` is what ``path`` publishes, ``meta`` (as ``document``) what ``snapshot`` would."""

    path: str
    base: Metadata
    meta: Metadata
    document: Document
    snapshot: Snapshot

    @property
    def base_body(self) -> bytes:
        committed = self.base.committed
        told = {"path": self.path, "commitId": committed.commit_id, "bytes": committed.bytes, "crc32": committed.crc32}
        return msgspec.json.encode(told) + b"\n"


def write_rescue(fs: FileSystem, roots: Sequence[str], rescue: Rescue) -> str:
    """``<root>/<session>-<revision>`` below the first root that takes it. A repeat answers the copy that is there."""
    refusals: list[str] = []
    for root in roots:
        try:
            with failing("write a rescue copy below", root):
                return _write_below(fs, root, rescue)
        except StorageError as error:
            refusals.append(str(error))
    raise StorageError("; ".join(refusals) or "no place for a rescue copy is configured")


def _write_below(fs: FileSystem, root: str, rescue: Rescue) -> str:
    make_directories(fs, root, durable=True)
    name = f"{rescue.meta.id}-{rescue.meta.committed.revision}"
    for attempt in count(1):
        # What an earlier daemon left of that revision, whole or not, is never written over.
        target = os.path.join(root, name if attempt == 1 else f"{name}-{attempt}")
        with _leaving_nothing(fs, target):
            make_directories(fs, target, durable=True)
            with opened(fs, target, DIRECTORY) as directory:
                there = _commit_there(fs, directory, target, rescue.meta.id)
                if there is None:
                    _write(fs, directory, rescue)
                if there in (None, rescue.meta.committed.commit_id):
                    sync_directory(fs, root)
                    return target
    raise AssertionError("count() never ends")


@contextmanager
def _leaving_nothing(fs: FileSystem, target: str) -> Iterator[None]:
    """A full disk takes a directory and nothing in it. Left there, it would be listed as a damaged copy for good."""
    try:
        yield
    except BaseException:
        with suppress(OSError):  # there is something in it, which may be all that is left
            fs.rmdir(target)
        raise


def _commit_there(fs: FileSystem, directory: int, target: str, id: str) -> str | None:
    """The commit of a complete copy, empty where there is something else, None where there is nothing. The metadata is
    written last, so where it reads the rest is there too."""
    if not fs.scan(directory):
        return None
    try:
        meta, _ = read_metadata(fs, directory, path=os.path.join(target, META), id=id)
        size = fs.stat(HISTORY, dir_fd=directory).st_size
    except (SessionMissing, SessionMalformed, SessionUnsupported, FileNotFoundError):
        return ""
    return meta.committed.commit_id if size >= meta.committed.bytes else ""


def _write(fs: FileSystem, directory: int, rescue: Rescue) -> None:
    try:
        _write_all(fs, directory, rescue)
    except BaseException:
        with suppress(OSError):
            _take_back(fs, directory)
        raise


def _take_back(fs: FileSystem, directory: int) -> None:
    """A full disk must not stay full of our attempt; but what is whole stays, synced or not."""
    names = [name for name, _ in fs.scan(directory)]
    for name in names if META not in names else ():
        fs.unlink(name, dir_fd=directory)


def _write_all(fs: FileSystem, directory: int, rescue: Rescue) -> None:
    history = blocks(rescue.snapshot.lines, 0, rescue.snapshot.count)
    replace_file(fs, HISTORY, history, dir_fd=directory, durable=True)
    replace_file(fs, BASE, [rescue.base_body], dir_fd=directory, durable=True)
    sync_directory(fs, ".", dir_fd=directory)
    replace_file(fs, META, [encode(rescue.document)], dir_fd=directory, durable=True)
    sync_directory(fs, ".", dir_fd=directory)
