"""Server-sent events, bytes in and events out, however the stream was cut; memory is bounded by one event.

Line ends may be CRLF, LF or CR, a byte order mark may come first, comments keep a connection alive and say nothing.
"""

from __future__ import annotations

from typing import NamedTuple

EVENT = 8 * 1024 * 1024
BOM = b"\xef\xbb\xbf"


class Event(NamedTuple):
    """``name`` is empty where the server gave none; ``data`` lines are joined by newlines.

    ``cut``: the stream ended before the empty line that ends an event, so the data may be a part.
    """

    name: bytes
    data: bytes
    cut: bool = False


class EventTooLarge(ValueError):
    """One event has more than ``limit`` bytes."""


class EventReader:
    """``feed`` what arrives, and ``close`` at the end of the stream: a last event may lack its empty line."""

    def __init__(self, limit: int = EVENT) -> None:
        self._limit = limit
        self._line: list[bytes] = []  # pieces of a line that has not ended: joining them once keeps this linear
        self._data: list[bytes] = []
        self._name = b""
        self._size = 0
        self._after_cr = False
        self._at_start = True

    def feed(self, chunk: bytes) -> list[Event]:
        lines = self._lines(chunk)
        return [event for line in lines if (event := self._take(line)) is not None]

    def close(self) -> list[Event]:
        line = b"".join(self._line)
        self._line.clear()
        if line:
            self._take(line)
        event = self._dispatch()
        return [event._replace(cut=True)] if event is not None else []

    def _lines(self, chunk: bytes) -> list[bytes]:
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
            self._after_cr = False
        if chunk:
            self._after_cr = chunk.endswith(b"\r")
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        first, *others = chunk.split(b"\n")
        self._line.append(first)
        self._count(first)
        if not others:
            return []
        lines = [b"".join(self._line), *others[:-1]]
        self._line = [others[-1]]
        return lines

    def _take(self, line: bytes) -> Event | None:
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(BOM)
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
            self._count(value)
        elif field == b"event":
            self._name = value
        return None

    def _dispatch(self) -> Event | None:
        event = Event(self._name, b"\n".join(self._data)) if self._data else None
        self._data, self._name, self._size = [], b"", 0
        return event

    def _count(self, piece: bytes) -> None:
        # Comments and what stands before the next empty line count too, so that no endless line gets past this.
        self._size += len(piece)
        if self._size > self._limit:
            raise EventTooLarge(f"an event of more than {self._limit} bytes")
