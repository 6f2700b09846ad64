"""A session is read completely or refused with the place that is wrong; reading takes no lock and changes nothing.

Metadata first, then the range of ``history.jsonl`` that it names (rule 6); what lies beyond belongs to nobody yet.
"""

from __future__ import annotations

import errno
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from loopd.core.history import History, Malformed

from . import Committed, Metadata, SessionMalformed, SessionMissing
from .document import LIMIT, META, Document, decode
from .fs import BLOCK, READ, FileSystem, failing, opened

HISTORY = "history.jsonl"


def read_metadata(fs: FileSystem, directory: int, *, path: str, id: str) -> tuple[Metadata, Document]:
    """Raises :class:`SessionMissing` where there is none."""
    with failing("read", path, then="try again"):
        try:
            with _regular(fs, META, directory, path) as (fd, size):
                # As much as there is: a buffer of the limit's size is a seventh of what a list of sessions costs.
                body = fs.read(fd, min(size, LIMIT) + 1, 0)
        except FileNotFoundError:
            raise SessionMissing(f"there is no session at {path}") from None
    if len(body) > LIMIT:
        raise SessionMalformed(path, f"is larger than {LIMIT} bytes", LIMIT)
    return decode(body, path=path, id=id)


def read_history(fs: FileSystem, directory: int, committed: Committed, *, path: str) -> History:
    """Every byte of the committed range counts: lines, records, pairing, counts, length and checksum (S-5, S-24)."""
    with failing("read", path, then="try again"):
        try:
            with _regular(fs, HISTORY, directory, path) as (fd, _):
                history = _read_range(fs, fd, committed, path)
        except FileNotFoundError:
            raise SessionMalformed(path, f"is missing; {committed.bytes} bytes of it are committed", 0) from None
    try:
        history.require_paired()
    except Malformed as error:
        raise SessionMalformed(path, str(error), committed.bytes) from None
    if (history.messages, history.user_messages) != (committed.messages, committed.user_messages):
        counted = f"{history.messages} messages, {history.user_messages} of them a user's"
        raise SessionMalformed(path, f"has {counted}; {committed.messages} and {committed.user_messages} are committed")
    return history


@contextmanager
def _regular(fs: FileSystem, name: str, directory: int, path: str) -> Iterator[tuple[int, int]]:
    """Its descriptor and its size."""
    try:
        with opened(fs, name, READ, dir_fd=directory) as fd:
            of = fs.fstat(fd)
            if not stat.S_ISREG(of.st_mode):
                raise SessionMalformed(path, "is no regular file")
            yield fd, of.st_size
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise SessionMalformed(path, "is a symbolic link") from None


def _read_range(fs: FileSystem, fd: int, committed: Committed, path: str) -> History:
    history = History()
    read = start = crc32 = 0
    parts: list[bytes] = []  # of the line that goes on in the next block
    for block in blocks_of(fs, fd, committed.bytes):
        read += len(block)
        crc32 = zlib.crc32(block, crc32)
        *ends, rest = block.split(b"\n")
        for end in ends:
            line = b"".join((*parts, end, b"\n"))
            _read_line(history, line, start, path)
            start += len(line)
            parts.clear()
        if rest:
            parts.append(rest)
    if read < committed.bytes:
        raise SessionMalformed(path, f"ends {committed.bytes - read} bytes before the committed range does", read)
    if parts:
        raise SessionMalformed(path, "the committed range ends within this line", start)
    if crc32 != committed.crc32:
        at = _locate(crc32 ^ committed.crc32, committed.bytes)
        raise SessionMalformed(path, "the checksum does not fit; if one byte is wrong, it is this one", at)
    return history


def _read_line(history: History, line: bytes, start: int, path: str) -> None:
    try:
        history.read(line)
    except Malformed as error:
        raise SessionMalformed(path, str(error), start) from None


def blocks_of(fs: FileSystem, fd: int, length: int) -> Iterator[bytes]:
    """The first ``length`` bytes, or fewer where the file is shorter."""
    offset = 0
    while offset < length and (block := fs.read(fd, min(BLOCK, length - offset), offset)):
        yield block
        offset += len(block)


# --- which byte a checksum misses -------------------------------------------------------------------------------------

# A checksum is linear: the difference of two depends only on the wrong byte and how many bytes follow it. So it is
# wound back byte by byte from the end, until it is the difference that one wrong byte makes.
_TABLE = [zlib.crc32(bytes([value])) ^ zlib.crc32(b"\0") for value in range(256)]
_BY_TOP = {entry >> 24: value for value, entry in enumerate(_TABLE)}
_FARTHEST = 4 * 1024 * 1024  # about a second, and farther back chance hits would outnumber true ones


def _locate(difference: int, length: int) -> int | None:
    """The offset of the only byte that can be wrong, if it is only one and not far from the end."""
    for after in range(min(length, _FARTHEST)):
        value = _BY_TOP[difference >> 24]
        difference = ((difference ^ _TABLE[value]) << 8 | value) & 0xFFFFFFFF
        if difference < 256:
            return length - 1 - after
    return None
