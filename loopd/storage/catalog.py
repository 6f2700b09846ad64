"""Lists the sessions of a workspace, newest first, from metadata alone; what is damaged is named and hides nothing.

A scan is plain Python between short system calls, so it never holds the interpreter for long. It runs in worker
threads, one scan of a place at a time: a disk that hangs holds up nobody but those who ask about it.
"""

from __future__ import annotations

import os.path
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from . import FORMAT, Metadata, SessionMalformed, SessionMissing, SessionUnsupported, StorageError
from .document import META
from .fs import DIRECTORY, READ, FileSystem, Touched, canonical, explain, failing, opened, printable, touched
from .legacy import SUFFIX
from .places import place_of, workspace_key
from .reading import HISTORY, read_metadata
from .version2 import VERSION, lines_of, text


class Row(Struct, frozen=True, gc=False):
    path: str
    meta: Metadata

    @property
    def cwd(self) -> str | None:
        return self.meta.cwd


class Damaged(Struct, frozen=True):
    """``cwd`` is None where it could not be read."""

    path: str
    reason: str
    cwd: str | None = None


class Unreadable(Damaged, frozen=True):
    """The system refuses to read it now: whether it is damaged, and how recent it is, nobody knows."""


class Legacy(Struct, frozen=True):
    """A session in one file of an earlier version; it migrates when it is opened explicitly (S-18)."""

    path: str
    cwd: str | None


class Unsupported(Struct, frozen=True):
    cwd: str | None = None


Found = Row | Damaged | Legacy | Unsupported


@dataclass(slots=True)
class Listing:
    rows: list[Row] = field(default_factory=list)
    damaged: list[Damaged] = field(default_factory=list)
    legacy: list[str] = field(default_factory=list)
    unsupported: int = 0


# A file may be replaced twice within one tick of the clock that stamps it, under an inode number used again: what is
# that young when it is read is read again next time.
_SETTLED_NS = 100_000_000


class _Seen(Struct, frozen=True, gc=False):
    key: Touched | None
    found: Found | None


class _Header(Struct):
    """The first line of a one-file session."""

    format: str
    version: int
    cwd: str | None = None


_header = msgspec.json.Decoder(_Header)


class Catalog:
    """What is known about the sessions on disk. ``note`` may be called from anywhere, the rest from worker threads."""

    def __init__(self, fs: FileSystem, data_dir: str) -> None:
        self._fs = fs
        self._data_dir = data_dir
        self._scanning: dict[str, threading.Lock] = {}
        self._seen: dict[str, dict[str, _Seen]] = {}
        self._noting = threading.Lock()
        self._highest: dict[str, int] = {}

    def list(self, cwd: str | None, session_dir: str | None, limit: int | None = None) -> Listing:
        """Without ``cwd``: all workspaces. A directory that does not exist is empty (S-4)."""
        listing = Listing()
        workspace = None if cwd is None else canonical(cwd)
        for place in self._places(workspace, session_dir):
            for found in self._scan(place, derived=session_dir is None):
                _sort_in(listing, found, workspace)
        self._take_whole(listing, limit)
        listing.damaged.sort(key=lambda one: one.path)
        listing.legacy.sort()
        return listing

    def _take_whole(self, listing: Listing, limit: int | None) -> None:
        """The newest rows whose history is there: it may have been cut since the metadata was looked at."""
        rows, listing.rows = listing.rows, []
        # Twice, by one thing each: half as long as by both at once, and nobody else runs while a sort compares.
        rows.sort(key=lambda row: row.meta.id, reverse=True)
        rows.sort(key=lambda row: row.meta.updated_at, reverse=True)
        for row in rows:
            if len(listing.rows) == limit:
                break
            match _whole(self._fs, row):
                case Row():
                    listing.rows.append(row)
                case Damaged() as damaged:
                    listing.damaged.append(damaged)

    def most_recent(self, cwd: str, session_dir: str | None) -> str | None:
        """Damaged ones are passed over. Raises ``StorageError`` when it may be one that cannot be read now: another
        session, or a new one, would go on in its place and nobody would be told."""
        listing = self.list(cwd, session_dir, 1)
        for one in listing.damaged:
            if isinstance(one, Unreadable):
                raise StorageError(one.reason)
        return listing.rows[0].path if listing.rows else None

    def highest(self, cwd: str, session_dir: str | None) -> int:
        """The newest ``updatedAt`` known of the workspace, 0 without one (rule 9). Scans only when first asked."""
        workspace = canonical(cwd)
        for place in self._places(workspace, session_dir):
            if place not in self._seen:
                self._scan(place, derived=session_dir is None)
        return self._highest.get(workspace, 0)

    def highest_known(self, cwd: str) -> int:
        """The same from memory, for a canonical workspace that ``highest`` was asked about before."""
        with self._noting:
            return self._highest.get(cwd, 0)

    def note(self, cwd: str, updated_at: int) -> None:
        """A session of that canonical workspace was published with that time."""
        with self._noting:
            self._highest[cwd] = max(updated_at, self._highest.get(cwd, 0))

    def _places(self, workspace: str | None, session_dir: str | None) -> tuple[str, ...]:
        if session_dir is not None or workspace is not None:
            return (place_of(self._data_dir, workspace or "/", session_dir),)
        root = os.path.join(self._data_dir, "sessions")
        return tuple(os.path.join(root, name) for name, is_directory in self._names(root) if is_directory)

    def _names(self, path: str) -> tuple[tuple[str, bool], ...]:
        with failing("list", path, then="try again"):
            try:
                with opened(self._fs, os.path.join(path, "."), DIRECTORY) as fd:
                    return tuple(self._fs.scan(fd))
            except (FileNotFoundError, NotADirectoryError):
                return ()

    def _scan(self, place: str, *, derived: bool) -> tuple[Found, ...]:
        """Look at each session of a place, reading what has changed. ``derived``: its name comes from the cwd."""
        with self._scanning.setdefault(place, threading.Lock()):
            before = self._seen.get(place, {})
            names = self._names(place)
            seen: dict[str, _Seen] = {}
            for name, now in self._look(place, names, before, derived=derived) if names else ():
                seen[name] = now
                if now is not before.get(name) and isinstance(now.found, Row):
                    self.note(now.found.meta.cwd, now.found.meta.updated_at)
            self._seen[place] = seen
            return tuple(one.found for name, one in seen.items() if one.found and not _is_moved(name, one.found, seen))

    def _look(
        self, place: str, names: Sequence[tuple[str, bool]], before: Mapping[str, _Seen], *, derived: bool
    ) -> Iterator[tuple[str, _Seen]]:
        with (
            failing("list", place, then="try again"),
            opened(self._fs, os.path.join(place, "."), DIRECTORY) as fd,
        ):
            look = _Look(self._fs, place, fd, derived)
            for name, is_directory in names:
                yield name, look.at(name, before.get(name), is_directory=is_directory)


def _is_moved(name: str, found: Found, seen: Mapping[str, _Seen]) -> bool:
    """A one-file session whose new form is there is left over from a migration that was cut off at its end."""
    beside = seen.get(name.removesuffix(SUFFIX)) if isinstance(found, Legacy) else None
    return beside is not None and beside.found is not None


def _sort_in(listing: Listing, found: Found, workspace: str | None) -> None:
    if workspace is not None and found.cwd is not None and found.cwd != workspace:
        return
    match found:
        case Row():
            listing.rows.append(found)
        case Damaged():
            listing.damaged.append(found)
        case Legacy():
            listing.legacy.append(found.path)
        case Unsupported():
            listing.unsupported += 1


def _whole(fs: FileSystem, row: Row) -> Row | Damaged | None:
    """None where the session was deleted since its metadata was looked at."""
    # Not `beside`: with every session of a long list, taking paths apart is a third of the work.
    history, committed = row.path.removesuffix(META) + HISTORY, row.meta.committed.bytes
    try:
        size = fs.stat(history).st_size
        there = f"has {size} bytes"
    except FileNotFoundError:
        if not _is_there(fs, row.path):
            return None
        size, there = -1, "is missing"
    except OSError as error:
        return Unreadable(row.path, explain("read", history, error, then="try again"), row.cwd)
    return row if size >= committed else Damaged(row.path, f"{history} {there}; {committed} are committed", row.cwd)


def _is_there(fs: FileSystem, path: str) -> bool:
    try:
        fs.stat(path)
    except FileNotFoundError:
        return False
    return True


@dataclass(slots=True, frozen=True)
class _Look:
    """One look at the entries of a place, whose descriptor it has."""

    fs: FileSystem
    place: str
    fd: int
    derived: bool

    def at(self, name: str, before: _Seen | None, *, is_directory: bool) -> _Seen:
        file = f"{name}/{META}" if is_directory else name
        # A hidden directory is a session that is being made or removed, whole or not.
        if name.startswith(".") or not (is_directory or name.endswith(SUFFIX)):
            return _Seen(None, None)
        try:
            stat = self.fs.stat(file, dir_fd=self.fd)
            key = touched(stat)
            if before is not None and before.key == key:
                return before
            if (path := self._path(file)) != os.path.join(self.place, file):
                return _Seen(None, Damaged(path, "its path is not UTF-8, so nobody can ask for it; rename it"))
            settled = time.time_ns() - stat.st_mtime_ns > _SETTLED_NS
            found = self._session(name) if is_directory else self._legacy(name)
            return _Seen(None if isinstance(found, Damaged) or not settled else key, found)
        except FileNotFoundError:
            return _Seen(None, self._without_metadata(name) if is_directory else None)
        except OSError as error:
            refused = Unreadable if is_directory else Damaged  # one file is never the most recent session
            path = self._path(file)
            return _Seen(None, refused(path, explain("read", path, error, then="try again")))

    def _session(self, name: str) -> Found | None:
        path = self._path(f"{name}/{META}")
        try:
            with opened(self.fs, name, DIRECTORY, dir_fd=self.fd) as fd:
                meta, _ = read_metadata(self.fs, fd, path=path, id=name)
        except SessionUnsupported:
            return Unsupported()
        except SessionMissing:
            return self._without_metadata(name)  # deleted since the directory was opened
        except StorageError as error:
            return Unreadable(path, str(error))
        except SessionMalformed as error:
            return Damaged(path, str(error))
        if self.derived and workspace_key(meta.cwd) != os.path.basename(self.place):
            return Damaged(path, f"its cwd {meta.cwd!r} does not belong into this directory")
        return Row(path, meta)  # whether its history is whole is asked of those that are shown (`_take_whole`)

    def _without_metadata(self, name: str) -> Found | None:
        """A creation that was cut off leaves an empty history at most: that never was a session."""
        try:
            size = self.fs.stat(f"{name}/{HISTORY}", dir_fd=self.fd).st_size
        except OSError:
            return None
        return Damaged(self._path(f"{name}/{META}"), f"is missing beside {size} bytes of history") if size else None

    def _legacy(self, name: str) -> Found:
        with opened(self.fs, name, READ, dir_fd=self.fd) as fd:
            _, head = next(lines_of(self.fs, fd, self.fs.fstat(fd).st_size), (0, b""))
        try:
            header = _header.decode(text(head))
        except (msgspec.DecodeError, ValueError, RecursionError):
            return Unsupported()
        cwd = header.cwd
        if cwd is not None and cwd.startswith("/") and "\0" not in cwd:
            cwd = canonical(cwd)
        if header.format != FORMAT or header.version != VERSION:
            return Unsupported(cwd)
        return Legacy(self._path(name), cwd)

    def _path(self, name: str) -> str:
        """As it is told: of what is not UTF-8 only that it is there."""
        return printable(os.path.join(self.place, name))
