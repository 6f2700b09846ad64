"""The tool ``read``: part of a text file, in bounded memory; it never waits for a device or a FIFO.

Files of ``/proc`` are refused: read by the daemon itself they would show its own environment, keys included (K-31).
"""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from typing import Annotated

import trio
from msgspec import Meta, Struct

from loop_protocol.v1.types import TextBlock
from loopd.agent import ToolOutcome, ToolScope
from loopd.agent.tools.excerpt import BYTES, LINES, head_of

_BLOCK = 64 * 1024


class ReadArguments(Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    offset: Annotated[int, Meta(ge=1, description="first line, from 1")] | None = None
    limit: Annotated[int, Meta(ge=1, description="number of lines")] | None = None


class Read:
    name = "read"
    description = (
        "Read a text file; the path may be relative to the working directory. "
        f"At most {LINES} lines or {BYTES // 1024} KiB at once; the end of a longer part says how to read on."
    )
    parameters: type[Struct] = ReadArguments

    async def run(self, arguments: ReadArguments, scope: ToolScope) -> ToolOutcome:
        path = os.path.join(scope.cwd, arguments.path)
        lines = min(arguments.limit or LINES, LINES)
        try:
            # Abandoned on a hung disk; else it notices within a block. The descriptor is the thread's either way.
            part = await trio.to_thread.run_sync(_read, path, arguments.offset or 1, lines, abandon_on_cancel=True)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            return ToolOutcome([TextBlock(f"{path}: {reason}")], is_error=True)
        return ToolOutcome([TextBlock(part)])


def open_regular(path: str) -> int:
    """A descriptor of a regular file. Raises OSError for everything else, ValueError for a NUL byte; never waits."""
    _require_regular(os.stat(path), path)  # first: merely opening a device can make it do something
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _require_regular(os.fstat(descriptor), path)  # it may have been swapped since
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _require_regular(status: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "a directory, not a file", path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    if status.st_dev == os.stat("/proc").st_dev:
        raise PermissionError(errno.EPERM, "files of /proc are not read by this tool", path)


# --- in a thread ------------------------------------------------------------------------------------------------------


def _read(path: str, offset: int, lines: int) -> str:
    with open(open_regular(path), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        data = bytearray(_skip(file, offset - 1))
        at_end = False
        while not at_end and len(data) <= BYTES and data.count(b"\n") <= lines:
            block = _block(file)
            data += block
            at_end = not block
    if not data and offset > 1:
        raise _too_short(offset - 1)
    return _part(data.decode(errors="replace"), offset, lines, size) if data else "[the file is empty]"


def _block(file: FileIO) -> bytes:
    trio.from_thread.check_cancelled()
    return file.read(_BLOCK)


def _skip(file: FileIO, count: int) -> bytes:
    """Pass ``count`` lines; answers what was read beyond them. Raises ValueError when there are fewer."""
    left, last = count, b""
    while left:
        block = _block(file)
        if not block:
            raise _too_short(count - left + (last not in (b"", b"\n")))
        if block.count(b"\n") >= left:
            at = 0
            for _ in range(left):
                at = block.index(b"\n", at) + 1
            return block[at:]
        left -= block.count(b"\n")
        last = block[-1:]
    return b""


def _too_short(lines: int) -> ValueError:
    return ValueError(f"the file has only {lines} lines")


def _part(text: str, offset: int, lines: int, size: int) -> str:
    """``text`` begins at line ``offset``, and is longer than what fits unless the file ends there."""
    shown = head_of(text, lines=lines, size=BYTES)
    rest = text[len(shown) :]
    if rest in ("", "\n"):
        return text
    if not rest.startswith("\n"):
        return f"{shown}\n[line {offset} is cut here, it is too long; the next one is at offset {offset + 1}]"
    following = offset + shown.count("\n") + 1
    return f"{shown}\n[lines {offset} to {following - 1} of a file of {size} bytes; read on with offset {following}]"
