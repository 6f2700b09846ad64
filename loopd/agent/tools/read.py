"""The tool ``read``: part of a text file in bounded memory, or an image for a model that sees images."""

from __future__ import annotations

import os
import shlex
from binascii import b2a_base64
from functools import partial
from io import FileIO
from typing import Annotated

import trio
from msgspec import Meta, Struct

from loop_protocol.v1.types import ImageBlock, TextBlock
from loopd.agent import ToolOutcome, ToolScope
from loopd.agent.protected import NOTHING, Protected
from loopd.agent.tools import images
from loopd.agent.tools.excerpt import BYTES, LINES, head_of
from loopd.agent.tools.files import locate, on_disk, open_regular
from loopd.agent.tools.outcomes import told
from loopd.agent.tools.pinned import pinned, real_path, require_allowed

_BLOCK = 64 * 1024


class ReadArguments(Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    offset: Annotated[int, Meta(ge=1, description="first line, from 1")] | None = None
    limit: Annotated[int, Meta(ge=1, description="number of lines")] | None = None


class Read:
    name = "read"
    description = (
        "Read a text file, or look at an image (PNG, JPEG, GIF, WebP); the path may be relative to the working "
        f"directory. At most {LINES} lines or {BYTES // 1024} KiB at once; the end of a longer part says how to read "
        "on."
    )
    parameters: type[Struct] = ReadArguments

    def __init__(self, protected: Protected = NOTHING) -> None:
        self._protected = protected

    async def run(self, arguments: ReadArguments, scope: ToolScope) -> ToolOutcome:
        path = locate(arguments.path, scope)
        protected = NOTHING if scope.permission == "danger-full-access" else self._protected
        return await on_disk(path, partial(_read, path, arguments, protected, sees="image" in scope.accepts))


# --- in a thread ------------------------------------------------------------------------------------------------------


def _read(path: str, arguments: ReadArguments, protected: Protected, *, sees: bool) -> ToolOutcome:
    with open(_opened(path, protected), "rb", buffering=0) as file:
        type = images.image_type(file.read(images.HEAD))
        file.seek(0)
        if type is not None:
            return _image(file, type, path) if sees else told(_unseen(file, type))
        return told(_text(file, arguments.offset or 1, min(arguments.limit or LINES, LINES), path))


def _opened(path: str, protected: Protected) -> int:
    if not protected.paths:
        return open_regular(path)
    with pinned(real_path(path)) as place:
        require_allowed(place, protected)
        return place.open()


def _image(file: FileIO, type: str, path: str) -> ToolOutcome:
    size = os.fstat(file.fileno()).st_size
    if size > images.BYTES:
        raise ValueError(f"an image of {size} bytes, {images.BYTES} can be shown: read a copy that was scaled down")
    data = file.read(images.BYTES)
    width, height = images.dimensions(data, type=type)
    if max(width, height) > images.PIXELS:
        measure = f"{width} x {height} pixels, {images.PIXELS} a side"
        raise ValueError(f"an image of {measure} can be shown: read a copy that was scaled down")
    note = TextBlock(f"[{path}: {type}, {width} x {height} pixels]")
    return ToolOutcome([note, ImageBlock(mime_type=type, data=b2a_base64(data, newline=False).decode())])


def _unseen(file: FileIO, type: str) -> str:
    return f"[an image ({type}, {os.fstat(file.fileno()).st_size} bytes), and you cannot see images]"


def _text(file: FileIO, offset: int, lines: int, path: str) -> str:
    size = os.fstat(file.fileno()).st_size
    data = bytearray(_skip(file, offset - 1))
    at_end = False
    while not at_end and len(data) <= BYTES and data.count(b"\n") <= lines:
        block = _block(file)
        data += block
        at_end = not block
    if not data and offset > 1:
        raise _too_short(offset - 1)
    return _part(data.decode(errors="replace"), offset, lines, size, path) if data else "[the file is empty]"


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


def _part(text: str, offset: int, lines: int, size: int, path: str) -> str:
    """``text`` begins at line ``offset``, and is longer than what fits unless the file ends there."""
    shown = head_of(text, lines=lines, size=BYTES)
    rest = text[len(shown) :]
    if rest in ("", "\n"):
        return text
    if not rest.startswith("\n"):
        more = f"sed -n {offset}p {shlex.quote(path)} | tail -c +{len(shown.encode()) + 1}"
        return f"{shown}\n[line {offset} is cut here; the next one is at offset {offset + 1}, the rest of it: {more}]"
    following = offset + shown.count("\n") + 1
    return f"{shown}\n[lines {offset} to {following - 1} of a file of {size} bytes; read on with offset {following}]"
