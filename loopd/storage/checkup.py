"""What is amiss among the files: found session by session, without changing anything and without taking a lock.

A fault is what loopd refuses or must not be; a note is what somebody may want to know.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import Struct

from . import Metadata, SessionMalformed, SessionMissing, SessionUnsupported, StorageError
from .catalog import Catalog
from .copies import copies_in, read_copy, standing
from .document import META
from .files import read_session
from .fs import BLOCK, DIRECTORY, READ, FileSystem, explain, failing, opened
from .journal import JOURNAL, OLD
from .places import beside, workspace_key
from .reading import HISTORY

_LEFTOVERS = {f".{META}.tmp", f".{HISTORY}.tmp"}
_KNOWN = {META, HISTORY, JOURNAL, OLD} | _LEFTOVERS
_AT_THE_TOP = {"sessions", "rescue", "loopd.log"}
# Below this a session or two may be all that still fits.
_LITTLE_ROOM = 64 * 1024 * 1024


Files = dict[str, os.stat_result]


class Finding(Struct, frozen=True, omit_defaults=True):
    severity: Literal["fault", "note"]
    path: str
    what: str
    advice: str | None = None


class _JournalHead(Struct, rename="camel"):
    commit_id: str


_journal_head = msgspec.json.Decoder(_JournalHead)


@dataclass(slots=True)
class Checkup:
    """``sessions``, ``copies`` and so on count what was looked at so far."""

    fs: FileSystem
    data_dir: str
    rescue_roots: list[str]
    owner: int
    sessions: int = 0
    legacy: int = 0
    unsupported: int = 0
    copies: int = 0
    _seen_cwd: tuple[str, bool] = ("", False)

    def everything(self) -> Iterator[Finding]:
        """The data directory, each of its sessions, and the places for rescue copies."""
        root = os.path.join(self.data_dir, "sessions")
        for name, of in self._entries(self.data_dir):
            if name not in _AT_THE_TOP:
                yield Finding("note", os.path.join(self.data_dir, name), "is not loopd's")
            else:
                yield from self._private(os.path.join(self.data_dir, name), of)
        yield from self._directory(self.data_dir)
        for name, of in self._entries(root):
            yield from self._workspace(os.path.join(root, name), of)
        for place in self.rescue_roots:
            yield from self._rescue_place(place)
        yield from self._room()

    def session(self, directory: str, *, derived: bool) -> Iterator[Finding]:
        """One session. ``derived``: it lies where the workspace's name leads."""
        self.sessions += 1
        path = os.path.join(directory, META)
        try:
            with failing("look at", directory, then="try again"), opened(self.fs, directory, DIRECTORY) as fd:
                holder = self.fs.lock_holder(fd)
                yield from self._private(directory, self.fs.fstat(fd))
                files = dict(self._stats(fd))
                yield from self._files(directory, files, is_open=holder is not None)
        except StorageError as error:
            if not isinstance(error.__cause__, FileNotFoundError):  # removed meanwhile: not there to be judged
                yield Finding("fault", directory, str(error))
            return
        if holder:
            yield Finding("note", path, f"is open in process {holder}")
        yield from self._contents(path, files, is_open=holder is not None, derived=derived)

    # --- places -------------------------------------------------------------------------------------------------------

    def _workspace(self, place: str, of: os.stat_result) -> Iterator[Finding]:
        if not stat.S_ISDIR(of.st_mode):
            yield self._stray(place, of)
            return
        yield from self._private(place, of)
        entries = self._entries(place)
        has_files = any(name.endswith(".jsonl") for name, _ in entries)
        legacy = Catalog(self.fs, self.data_dir).list(None, place).legacy if has_files else []
        for name, of in entries:
            path = os.path.join(place, name)
            if name.startswith("."):
                yield Finding("note", path, "was cut off while it was made or removed", "remove it")
            elif stat.S_ISDIR(of.st_mode):
                yield from self.session(path, derived=True)
            elif name.endswith(".jsonl") and stat.S_ISREG(of.st_mode):
                yield self._one_file(path, legacy)
            else:
                yield self._stray(path, of)

    def _one_file(self, path: str, legacy: Sequence[str]) -> Finding:
        if path in legacy:
            self.legacy += 1
            return Finding("note", path, "is a session of an earlier version", "it migrates when it is opened")
        self.unsupported += 1
        return Finding("note", path, "is no session that this version reads")

    @staticmethod
    def _stray(path: str, of: os.stat_result) -> Finding:
        if stat.S_ISLNK(of.st_mode):
            return Finding("fault", path, "is a symbolic link, which is not followed", "put the real one there")
        return Finding("note", path, "is not loopd's")

    def _rescue_place(self, place: str) -> Iterator[Finding]:
        yield from self._directory(place)
        for name, of in self._entries(place):
            if name.startswith("."):
                text = "is a copy that was put back, cut off while it was removed"
                yield Finding("note", os.path.join(place, name), text, "remove it")
            elif not stat.S_ISDIR(of.st_mode):
                yield self._stray(os.path.join(place, name), of)
        with suppress(StorageError):  # told already
            for path in copies_in(self.fs, place):
                yield self._copy(path)

    def _copy(self, path: str) -> Finding:
        self.copies += 1
        try:
            copy = read_copy(self.fs, path)
        except (SessionMissing, SessionMalformed, SessionUnsupported, StorageError) as error:
            return Finding("fault", path, f"is a damaged rescue copy: {error}")
        state, reason = standing(self.fs, copy)
        told = f"is a rescue copy of {copy.beyond} unsaved messages ({state}: {reason})"
        return Finding("note", path, told, "see `loopd rescue list`")

    def _room(self) -> Iterator[Finding]:
        with suppress(OSError):
            free = self.fs.room(self.data_dir)
            if free < _LITTLE_ROOM:
                yield Finding("note", self.data_dir, f"only {free // 1024} KiB are free there", "make room")

    # --- one session --------------------------------------------------------------------------------------------------

    def _files(self, directory: str, files: Files, *, is_open: bool) -> Iterator[Finding]:
        for name, of in files.items():
            path = os.path.join(directory, name)
            if stat.S_ISLNK(of.st_mode) or name not in _KNOWN:
                yield self._stray(path, of)
                continue
            yield from self._private(path, of)
            if name in _LEFTOVERS and not is_open:
                yield Finding("note", path, "was left by a write that was cut off", "the next save replaces it")

    def _contents(self, path: str, files: Files, *, is_open: bool, derived: bool) -> Iterator[Finding]:
        try:
            meta, _ = read_session(self.fs, path)
        except SessionUnsupported as error:
            self.unsupported += 1
            yield Finding("note", path, str(error), "a newer loopd reads it")
        except SessionMissing:
            yield self._without_metadata(path, files)
        except (SessionMalformed, StorageError) as error:
            yield Finding("fault", path, str(error), "put the file back from a backup, or delete the session")
        else:
            yield from self._whole(path, meta, derived=derived)
            if not is_open:  # what a save or a run is writing right now is no leftover
                yield from self._beyond(path, meta, files)

    def _without_metadata(self, path: str, files: Files) -> Finding:
        if size := files[HISTORY].st_size if HISTORY in files else 0:
            return Finding("fault", path, f"is missing beside {size} bytes of history", "put it back from a backup")
        return Finding("note", os.path.dirname(path), "is an empty session whose creation was cut off", "remove it")

    def _whole(self, path: str, meta: Metadata, *, derived: bool) -> Iterator[Finding]:
        place = os.path.basename(os.path.dirname(os.path.dirname(path)))
        if derived and workspace_key(meta.cwd) != place:
            yield Finding("fault", path, f"its cwd {meta.cwd!r} does not belong into this directory", "move it back")
        if self._seen_cwd[0] != meta.cwd:  # a place's sessions share it
            self._seen_cwd = (meta.cwd, self._is_there(meta.cwd))
        if not self._seen_cwd[1]:
            yield Finding("note", path, f"its directory {meta.cwd} does not exist any more", "it opens once that does")

    def _is_there(self, path: str) -> bool:
        with suppress(OSError):
            return stat.S_ISDIR(self.fs.stat(os.path.join(path, ".")).st_mode)
        return False

    def _beyond(self, path: str, meta: Metadata, files: Files) -> Iterator[Finding]:
        history = beside(path, HISTORY)
        if beyond := files[HISTORY].st_size - meta.committed.bytes if HISTORY in files else 0:
            told = f"has {beyond} bytes that were never published, and are ignored"
            yield Finding("note", history, told, "the next save cuts them off")
        if JOURNAL in files:
            yield from self._journal(beside(path, JOURNAL), meta)

    def _journal(self, path: str, meta: Metadata) -> Iterator[Finding]:
        """What a run had said when its daemon died counts only after the very commit that the run began with."""
        try:
            with opened(self.fs, path, READ) as fd:
                head = self.fs.read(fd, BLOCK, 0).partition(b"\n")[0]
            is_valid = _journal_head.decode(head).commit_id == meta.committed.commit_id
        except OSError:
            return
        except (msgspec.DecodeError, UnicodeDecodeError):
            is_valid = False
        if is_valid:
            advice = f"`loopctl recover --session {meta.id}`"
            yield Finding("note", path, "has what a run had said when its daemon was killed", advice)
        else:
            yield Finding("note", path, "is of a run that was saved since, and is ignored")

    # --- files --------------------------------------------------------------------------------------------------------

    def _directory(self, path: str) -> Iterator[Finding]:
        """A place that the user may have chosen, hence open to readers: what loopd makes in it is not. None is as good
        as an empty one."""
        try:
            with opened(self.fs, os.path.join(path, "."), DIRECTORY) as fd:
                of = self.fs.fstat(fd)
        except FileNotFoundError:
            return
        except OSError as error:
            yield Finding("fault", path, explain("read", path, error, then="try again"))
            return
        yield from self._private(path, of, 0o022 if not of.st_mode & stat.S_ISVTX else 0)

    def _private(self, path: str, of: os.stat_result, others: int = 0o077) -> Iterator[Finding]:
        if of.st_uid != self.owner:
            yield Finding("fault", path, f"belongs to user {of.st_uid}", f"chown {self.owner}")
        if of.st_mode & others and not stat.S_ISLNK(of.st_mode):
            mode = "700" if stat.S_ISDIR(of.st_mode) else "600"
            told = f"is open to others (mode {stat.S_IMODE(of.st_mode):04o})"
            yield Finding("fault", path, told, f"chmod {mode}")

    def _entries(self, path: str) -> list[tuple[str, os.stat_result]]:
        try:
            with opened(self.fs, os.path.join(path, "."), DIRECTORY) as fd:
                return list(self._stats(fd))
        except OSError:  # `_directory` tells
            return []

    def _stats(self, directory: int) -> Iterator[tuple[str, os.stat_result]]:
        for name, _ in sorted(self.fs.scan(directory)):
            with suppress(FileNotFoundError):  # removed meanwhile
                yield name, self.fs.stat(name, dir_fd=directory)
