"""Bytes in, frames out: newline-delimited JSON, and ``Content-Length`` headers as in LSP.

Which of the two a connection uses shows in its first byte, and answers use the same.
"""

from __future__ import annotations

import re
from enum import Enum

from .v1.errors import RpcError

FRAME_BEFORE_INITIALIZE = 64 * 1024
FRAME = 32 * 1024 * 1024
HEADER = 4 * 1024

BOM = b"\xef\xbb\xbf"
BLANKS = b" \t\r\n"
_BLANKS = re.compile(rb"[ \t\r\n]*")


class Framing(Enum):
    LINES = "lines"
    HEADERS = "headers"


def frame(body: bytes, framing: Framing) -> bytes:
    """``body`` is one JSON document that ends in a newline; the newline counts as part of a ``Content-Length`` body."""
    return body if framing is Framing.LINES else b"Content-Length: %d\r\n\r\n" % len(body) + body


class FramingError(Exception):
    """The stream cannot be followed any further: answer once with this, then close."""

    def __init__(self, error: RpcError) -> None:
        super().__init__(error.message)
        self.error = error


class FrameReader:
    """Splits a byte stream into frames. ``limit`` bounds a frame and may be raised between calls.

    Memory is bounded by the limit plus one chunk; each byte is scanned once, however the stream was cut. Blanks and
    byte order marks before a frame are skipped, and so are frames that hold nothing else.
    """

    def __init__(self, limit: int = FRAME_BEFORE_INITIALIZE) -> None:
        self.limit = limit
        self.framing: Framing | None = None
        self._buffer = bytearray()
        self._scanned = 0
        self._body: int | None = None

    @property
    def buffered(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes | bytearray) -> None:
        self._buffer += data

    def next(self) -> bytes | None:
        """The next whole frame, never an empty one, or None until there is more. Raises :class:`FramingError`."""
        if self.framing is None and not self._detect():
            return None
        return self._line() if self.framing is Framing.LINES else self._headed()

    def rest(self) -> bytes | None:
        """What stands after the last newline when the peer has closed its side: a last line may lack its newline."""
        if self.framing is not Framing.LINES:
            return None
        line = _stripped(bytes(self._buffer))
        self._buffer.clear()
        self._scanned = 0
        return line or None

    def _detect(self) -> bool:
        del self._buffer[: _lead(self._buffer)]
        if not self._buffer or (len(self._buffer) < 3 and BOM.startswith(self._buffer)):
            return False
        first = self._buffer[:1]
        if first in b"{[":
            self.framing = Framing.LINES
        elif first.isalpha():
            self.framing = Framing.HEADERS
        else:
            raise FramingError(RpcError("parse_error", "expected JSON lines, or Content-Length headers"))
        return True

    def _line(self) -> bytes | None:
        while True:
            end = self._buffer.find(b"\n", self._scanned)
            self._check(len(self._buffer) if end < 0 else end)
            self._scanned = len(self._buffer) if end < 0 else 0
            if end < 0:
                return None
            if line := _stripped(self._take(end, skip=1)):
                return line

    def _headed(self) -> bytes | None:
        while True:
            if self._body is None:
                self._body = self._header()
            if self._body is None or len(self._buffer) < self._body:
                return None
            length, self._body = self._body, None
            if body := _stripped(self._take(length)):
                return body

    def _header(self) -> int | None:
        """The length that the header at the front of the buffer tells, once it is whole; it is removed then."""
        del self._buffer[: _lead(self._buffer)]
        end = self._buffer.find(b"\r\n\r\n", max(0, self._scanned - 3))
        # The empty line that ends a header of exactly the limit may have arrived but for its last byte.
        if end > HEADER or (end < 0 and len(self._buffer) > HEADER + 3):
            raise FramingError(RpcError("parse_error", f"a header may have {HEADER} bytes and ends in an empty line"))
        self._scanned = len(self._buffer) if end < 0 else 0
        if end < 0:
            return None
        length = _content_length(bytes(self._buffer[:end]))
        self._check(length)
        del self._buffer[: end + 4]
        return length

    def _check(self, length: int) -> None:
        if length > self.limit:
            raise FramingError(RpcError("limit_exceeded", f"a frame may have {self.limit} bytes", limit="frame"))

    def _take(self, length: int, *, skip: int = 0) -> bytes:
        taken = bytes(memoryview(self._buffer)[:length])
        del self._buffer[: length + skip]
        return taken


def _lead(data: bytes | bytearray) -> int:
    """How many bytes at the front are blanks and byte order marks."""
    at = 0
    while True:
        blanks = _BLANKS.match(data, at)
        at = blanks.end() if blanks else at
        if not data.startswith(BOM, at):
            return at
        at += len(BOM)


def _stripped(body: bytes) -> bytes:
    return body[_lead(body) :].rstrip(BLANKS)


def _content_length(header: bytes) -> int:
    for line in header.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length" and re.fullmatch(rb"\s*[0-9]{1,12}\s*", value):
            return int(value)
    raise FramingError(RpcError("parse_error", "expected JSON, or a Content-Length header"))
