"""What a model gets to see of a long text: whole lines of its beginning and its end, in bounded memory."""

from __future__ import annotations

LINES = 2000
BYTES = 50 * 1024

# Of a command's output the end matters most, while the beginning tells what it was about. Together they leave room for
# the marker, and for what the tool itself says after the output.
_HEAD_LINES = 400
_HEAD_BYTES = 10 * 1024
_TAIL_LINES = 1590
_TAIL_BYTES = 39 * 1024


class Excerpt:
    """Takes bytes of any number, keeps about 150 KiB of them, and gives at most ``LINES`` lines and ``BYTES`` bytes."""

    __slots__ = ("_first", "_last", "_line_ends", "_total")

    def __init__(self) -> None:
        self._first = bytearray()
        self._last = bytearray()
        self._line_ends = 0
        self._total = 0

    def feed(self, data: bytes) -> None:
        self._total += len(data)
        self._line_ends += data.count(b"\n")
        self._first += data[: BYTES - len(self._first)]
        self._last += data[-BYTES:]
        if len(self._last) > 2 * BYTES:
            del self._last[:-BYTES]

    def text(self) -> str:
        first = self._first.decode(errors="replace")
        if self._total <= BYTES and self._lines <= LINES and len(first.encode()) <= BYTES:  # a bad byte becomes three
            return first
        # The two do not overlap: together they have fewer lines and fewer bytes than the whole.
        head = head_of(first, lines=_HEAD_LINES, size=_HEAD_BYTES)
        last = self._last.decode(errors="replace")
        tail = tail_of(last, lines=_TAIL_LINES, size=_TAIL_BYTES)
        start = head.count("\n") + 1 + (first[len(head)] == "\n")
        stop = self._lines - tail.count("\n") - (not tail.endswith("\n")) + (last[-len(tail) - 1] != "\n")
        left_out = f"lines {start} to {stop} of {self._lines}, {self._total} bytes in all"
        advice = "to see them, run it again with its output in a file, and read that"
        return f"{head}\n[left out here and not kept: {left_out}; {advice}]\n{tail}"

    @property
    def _lines(self) -> int:
        return self._line_ends + (self._total > 0 and not self._last.endswith(b"\n"))


def head_of(text: str, *, lines: int, size: int) -> str:
    """A beginning of ``text`` within the limits, whole lines without the last line's end if there is a whole one."""
    kept = text.encode()[:size].decode(errors="ignore")
    kept = "\n".join(kept.split("\n", lines)[:lines])
    if text[len(kept) : len(kept) + 1] in ("", "\n"):
        return kept
    return kept.rpartition("\n")[0] if "\n" in kept else kept


def tail_of(text: str, *, lines: int, size: int) -> str:
    """An end of ``text`` within the limits, whole lines if there is a whole one."""
    kept = text.encode()[-size:].decode(errors="ignore")
    kept = "\n".join(kept.rsplit("\n", lines)[-lines:])
    if text[-len(kept) - 1 : -len(kept)] in ("", "\n"):
        return kept
    return kept.partition("\n")[2] or kept
