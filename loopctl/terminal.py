"""What is shown: answers on stdout, all else on stderr, and nothing that could act on the terminal.

Text of models, tools and files is data. Where a terminal shows it, control, bidi and zero-width characters are written
as escapes, so that what a person reads is what is there (K-45); a pipe or a file gets every byte as it is.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from typing import TextIO

from .exits import OK, OutputClosed, OutputFailed

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but for tab and newline, DEL, C1
    "\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
ELLIPSIS = "…"


def visible(text: str) -> str:
    """The text with every such character as ``\\u…``. The same spelling as in JSON, so JSON stays JSON."""
    return _HIDDEN.sub(lambda found: _escape(found[0]), text)


def _escape(character: str) -> str:
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


def one_line(text: str, limit: int) -> str:
    """Text as one line of at most ``limit`` characters that says how much it leaves out."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[:limit]}{ELLIPSIS} ({len(line) - limit} more characters)"


def shortened(text: str, limit: int) -> str:
    """In at most so many columns, where the whole is elsewhere."""
    if _width(text) <= limit:
        return text
    kept = text[: limit - 1]
    while _width(kept) >= limit:
        kept = kept[:-1]
    return kept.rstrip() + ELLIPSIS


def out(text: str) -> None:
    """Write to stdout at once. Raises :class:`OutputClosed`."""
    _write(sys.stdout, visible(text) if is_terminal(sys.stdout) else text)


def out_line(text: str = "") -> None:
    out(text + "\n")


def note(text: str) -> None:
    """Something to say to the person; it is no part of the output."""
    for line in text.splitlines():
        err(f"loopctl: {line}\n")


def err(text: str, *, dim: bool = False) -> None:
    if is_terminal(sys.stderr):
        text = f"\x1b[2m{visible(text)}\x1b[22m" if dim else visible(text)
    _write(sys.stderr, text)


def document(raw: bytes) -> None:
    """One JSON document on stdout: laid out at a terminal, one line elsewhere."""
    import msgspec

    pretty = msgspec.json.format(raw, indent=2) if is_terminal(sys.stdout) else msgspec.json.format(raw, indent=-1)
    out_line(pretty.decode())


def told(raw: bytes, text: str, *, json: bool) -> int:
    """A command's result: as its method gave it, or as a line for people."""
    if json:
        document(raw)
    else:
        out_line(text)
    return OK


def table(rows: list[list[str]]) -> None:
    """Aligned columns; the first row is the heading, and the last column is as wide as it likes."""
    rows = [[cell.replace("\n", "\\u000a") for cell in row] for row in rows]  # a path may hold anything
    widths = [max(_width(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=False)]
        out_line("  ".join([*cells, row[-1]]).rstrip())


def _width(cell: str) -> int:
    """In columns of a terminal: titles are in anybody's language."""
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(character) else 1 + (east_asian_width(character) in "WF") for character in cell)


def facts(pairs: list[tuple[str, object]]) -> None:
    """Names and values; a value of None is left out."""
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        if value is not None:
            out_line(f"{name.ljust(width)}  {value}")


def columns() -> int | None:
    """How wide the terminal is that stdout goes to, if it is one."""
    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None


def is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def clock(milliseconds: int) -> str:
    """A wire time as the local one; a number that is none, as old files may have it, as it is."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(milliseconds / 1000))
    except (OverflowError, ValueError, OSError):
        return str(milliseconds)


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # closed by the caller, as in `>&-`
        return
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        raise OutputClosed from None
    except OSError as error:  # a full disk, for one
        raise OutputFailed(error.strerror or str(error)) from None
    except UnicodeEncodeError:  # a locale that lacks the character: show which it is
        stream.write(text.encode(stream.encoding, "backslashreplace").decode(stream.encoding))
        stream.flush()
