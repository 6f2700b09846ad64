"""Rescue copies are read, and judged by what became of the session that each of them continues; nothing is changed."""

from __future__ import annotations

import os.path
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import msgspec
from msgspec import Struct

from loopd.core.history import History

from . import Metadata, SessionLocked, SessionMalformed, SessionMissing, SessionUnsupported, StorageError
from .document import META, Document
from .files import read_session
from .fs import BLOCK, DIRECTORY, READ, FileSystem, failing, opened
from .places import id_of
from .reading import HISTORY, read_history, read_metadata
from .rescue import BASE

State = Literal["matches", "gone", "applied", "differs", "open", "unreadable"]


class Base(Struct, frozen=True, rename="camel"):
    """What was published when the copy was made, and where: the copy continues exactly that."""

    path: str
    commit_id: str
    bytes: int
    crc32: int


_base = msgspec.json.Decoder(Base)


@dataclass(slots=True, frozen=True)
class Copy:
    """A whole copy, validated as a session is. Where ``base`` is None, ``flaw`` says why it cannot be put back."""

    path: str
    base: Base | None
    flaw: str | None
    meta: Metadata
    document: Document
    history: History

    @property
    def beyond(self) -> int:
        """How many messages it has that its base has not."""
        size = self.base.bytes if self.base else 0
        lines = sum(end <= size for end in accumulate(map(len, self.history.lines)))
        return sum(place >= lines for place in self.history.places)


# --- which there are, and what became of what they continue -----------------------------------------------------------


def copies_in(fs: FileSystem, root: str) -> list[str]:
    """The paths of the copies in one place, whole or not."""
    with failing("list", root, then="try again"):
        try:
            with opened(fs, os.path.join(root, "."), DIRECTORY) as fd:
                names = sorted(name for name, is_directory in fs.scan(fd) if is_directory and not name.startswith("."))
        except FileNotFoundError:
            return []
    return [os.path.join(root, name) for name in names]


def read_copy(fs: FileSystem, path: str) -> Copy:
    """Raises SessionMissing, SessionMalformed, SessionUnsupported or StorageError, as reading a session does."""
    with failing("read", path, then="try again"):
        try:
            with opened(fs, path, DIRECTORY) as directory:
                return _read_copy(fs, directory, path)
        except (FileNotFoundError, NotADirectoryError):
            raise SessionMissing(f"there is no rescue copy at {path}") from None


def _read_copy(fs: FileSystem, directory: int, path: str) -> Copy:
    base, flaw = _read_base(fs, directory, os.path.join(path, BASE))
    id = id_of(base.path) if base else os.path.basename(path).rpartition("-")[0]
    try:
        meta, document = read_metadata(fs, directory, path=os.path.join(path, META), id=id)
    except SessionMissing:  # it is written last
        raise SessionMalformed(os.path.join(path, META), "is missing: the copy was never finished") from None
    history = read_history(fs, directory, meta.committed, path=os.path.join(path, HISTORY))
    if base and checksum_of_first(history.lines, base.bytes) != base.crc32:
        base, flaw = None, f"{os.path.join(path, HISTORY)}: does not begin with what {BASE} says it continues"
    return Copy(path, base, flaw, meta, document, history)


def _read_base(fs: FileSystem, directory: int, path: str) -> tuple[Base | None, str | None]:
    try:
        with opened(fs, BASE, READ, dir_fd=directory) as fd:
            base = _base.decode(fs.read(fd, BLOCK, 0))
    except FileNotFoundError:
        return None, f"{path}: is missing"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return None, f"{path}: {error}"
    if not os.path.isabs(base.path) or os.path.basename(base.path) != META or not id_of(base.path):
        return None, f"{path}: names no session's {META}"
    return base, None


def standing(fs: FileSystem, copy: Copy) -> tuple[State, str]:
    """Whether it can be put back, and in words why not. Takes no lock: nobody is kept from opening it."""
    if copy.base is None:
        return "unreadable", f"{copy.flaw}"
    path = copy.base.path
    if holder := holder_of(fs, os.path.dirname(path)):
        return "open", str(SessionLocked(path, holder))
    try:
        _, history = read_session(fs, path)
    except SessionMissing:
        return "gone", "there is no session any more"
    except (SessionMalformed, SessionUnsupported, StorageError) as error:
        return "unreadable", str(error)
    return compared(copy, history)


def holder_of(fs: FileSystem, directory: str) -> int | None:
    """The process that has the session in that directory open, where there is one and the system tells."""
    with suppress(OSError), opened(fs, directory, DIRECTORY) as fd:
        return fs.lock_holder(fd)
    return None


def compared(copy: Copy, history: History) -> tuple[State, str]:
    """Line by line: what is saved in the session may have come from another copy, and commit ids would not say so."""
    ours, there = copy.history.lines, history.lines
    if there[: len(ours)] == ours:
        return "applied", "the session has all of it already"
    if ours[: len(there)] == there:
        return "matches", "it continues what is saved"
    return "differs", "something else was saved in the session since the copy was made"


def checksum_of_first(lines: Sequence[bytes], size: int) -> int | None:
    """Of the first ``size`` bytes of these lines joined; None where there are fewer."""
    checked, rest = 0, size
    for line in lines:
        if rest == 0:
            break
        part = line[:rest]
        checked, rest = zlib.crc32(part, checked), rest - len(part)
    return checked if rest == 0 else None
