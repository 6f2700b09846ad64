"""What is shown: answers on stdout, all else on stderr, and nothing that could act on the terminal.

Text of models, tools and files is data. Where a terminal shows it, control, bidi and invisible characters are written
as escapes, so that what a person reads is what is there (K-45); ``--raw`` writes them as they are. A pipe or a file
gets every byte as it is.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from typing import Any, TextIO

import click

from .exits import OK, OutputClosed, OutputFailed

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but for tab and newline, DEL, C1
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f"  # soft hyphen, joiners, fillers, Arabic mark, Mongolian
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u2800\u3164\uffa0"  # zero width, bidi, separators, blanks with a width
    "\ufe00-\ufe0d\ufeff\ufff0-\ufffb"  # variation selectors, byte order mark, interlinear
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"  # of shorthand and music; tags, more selectors
    # One that makes text or a picture of the symbol before it is in every other answer of a model.
    "|(?<![\u203c-\u2bff\u3030\u303d\u3297\u3299\U0001f000-\U0001faff])[\ufe0e\ufe0f]"
)
ELLIPSIS = "…"
_RAW = "loopctl.raw"


def raw_option(command: Any) -> Any:
    """``--raw``, of whatever prints text of models and tools. It holds for all that the command prints."""
    return click.option(
        "--raw", is_flag=True, expose_value=False, callback=_set_raw, help="Print control characters as they are."
    )(command)


def _set_raw(ctx: click.Context, _option: click.Parameter, value: bool) -> None:
    ctx.meta[_RAW] = value or ctx.meta.get(_RAW, False)


def is_raw() -> bool:
    """Whether ``--raw`` was given."""
    ctx = click.get_current_context(silent=True)
    return ctx is not None and bool(ctx.meta.get(_RAW))


def visible(text: str) -> str:
    """The text with every such character as ``\\u…``. The same spelling as in JSON, so JSON stays JSON."""
    return _HIDDEN.sub(lambda found: _escape(found[0]), text)


def _escape(character: str) -> str:
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


def one_line(text: str, limit: int) -> str:
    """Text as one line: of a long one ``limit`` characters of its beginning and its end, and how much is between."""
    line = re.sub(" *\n *| {2,}", " ", text).strip(" ")
    return line if len(line) <= limit else _without_middle(line, limit)


def _without_middle(line: str, limit: int) -> str:
    tail = limit // 3
    left_out = f"{len(line) - limit:,} more characters"
    return f"{line[: limit - tail]}{ELLIPSIS} ({left_out}) {ELLIPSIS}{line[len(line) - tail :]}"


def folded(text: str, *, lines: int, length: int) -> tuple[list[str], bool]:
    """At most so many lines of at most so many characters, and whether that leaves something out: then out of the
    middle, and it says how much. Nothing can push the end of a text out of sight."""
    every = text.split("\n")
    kept = [line if len(line) <= length else _without_middle(line, length) for line in every]
    if len(every) > lines:
        tail = lines // 3
        left_out = f"{ELLIPSIS} ({len(every) - lines:,} more lines) {ELLIPSIS}"
        kept = [*kept[: lines - tail], left_out, *kept[len(kept) - tail :]]
    return kept, kept != every


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
    _write(sys.stdout, _shown(text) if is_terminal(sys.stdout) else text)


def out_line(text: str = "") -> None:
    out(text + "\n")


def note(text: str) -> None:
    """Something to say to the person; it is no part of the output."""
    for line in text.removesuffix("\n").split("\n"):  # and at nothing else that some take for the end of a line
        err(f"loopctl: {line}\n")


def err(text: str, *, dim: bool = False) -> None:
    if is_terminal(sys.stderr):
        text = f"\x1b[2m{_shown(text)}\x1b[22m" if dim else _shown(text)
    _write(sys.stderr, text)


def _shown(text: str) -> str:
    return text if is_raw() else visible(text)


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
    at_terminal = is_terminal(sys.stdout)
    rows = [[_shown(cell) if at_terminal else cell for cell in row] for row in rows]
    rows = [[cell.replace("\n", "\\u000a") for cell in row] for row in rows]  # a path may hold anything
    widths = [max(_width(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=False)]
        out_line("  ".join([*cells, row[-1]]).rstrip())


def _width(cell: str) -> int:
    """In columns of a terminal: titles are in anybody's language."""
    if cell.isascii():
        return len(cell)
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


def wrapped(line: str, width: int | None, *, words: bool = False) -> list[str]:
    """In pieces that a terminal does not break itself; None: there is none. ``words`` stay whole, if they fit."""
    if width is None or 8 * len(line) <= width:  # however wide its characters are; the loop takes 0.6 s for a million
        return [line]
    pieces, used = [""], 0
    for character in line:
        taken = _columns(character)
        if used + taken > width and pieces[-1]:
            end = pieces[-1].rfind(" ", width // 2) + 1 if words else 0
            pieces[-1:] = [pieces[-1][:end], pieces[-1][end:]] if end else [pieces[-1], ""]
            used = sum(map(_columns, pieces[-1]))
        pieces[-1] += character
        used += taken
    return pieces


def _columns(character: str) -> int:
    return 8 if character == "\t" else _width(character)  # of a tab: the most


def is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def somebody_is_there() -> bool:
    """A person who reads what is asked, and can type an answer. A shell's background job may not read."""
    if not (is_terminal(sys.stdin) and is_terminal(sys.stderr)):
        return False
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:  # a terminal of which this process has no jobs
        return True


def clock(milliseconds: int, *, seconds: bool = False) -> str:
    """A wire time as the local one; a number that is none, as old files may have it, as it is."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S" if seconds else "%Y-%m-%d %H:%M", time.localtime(milliseconds / 1000))
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
