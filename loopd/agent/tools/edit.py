"""The tool ``edit``: puts one text in another's place and changes nothing else of the file.

What is not UTF-8 is refused rather than converted, so a byte that was not named is never another one afterwards.
"""

from __future__ import annotations

import errno
import os
import re
from bisect import bisect_left
from functools import partial
from typing import Annotated

from msgspec import Meta, Struct

from loopd.agent import ToolOutcome, ToolScope
from loopd.agent.protected import NOTHING, Protected
from loopd.agent.tools.changing import MOST, change
from loopd.agent.tools.difference import difference
from loopd.agent.tools.files import locate
from loopd.agent.tools.pinned import Seen

_NAMED = 8

Span = tuple[int, int]


class EditArguments(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    path: str
    old_text: Annotated[str, Meta(min_length=1)]
    new_text: str
    all: Annotated[bool, Meta(description="change every occurrence")] = False


class Edit:
    name = "edit"
    description = (
        "Change a file: newText takes the place of oldText, which must be in the file exactly once, unless all is set. "
        "oldText is compared exactly, white space too. Line endings are kept. The result is the difference."
    )
    parameters: type[Struct] = EditArguments

    def __init__(self, protected: Protected = NOTHING) -> None:
        self._protected = protected

    async def run(self, arguments: EditArguments, scope: ToolScope) -> ToolOutcome:
        path = locate(arguments.path, scope)
        plan = partial(_edit, path, arguments)
        return await change("edit", path, plan, scope=scope, protected=self._protected)


# --- in a thread ------------------------------------------------------------------------------------------------------


def _edit(path: str, arguments: EditArguments, seen: Seen | None) -> tuple[bytes, str]:
    text = _text(seen)
    spans = find(text, arguments.old_text, overlapping=not arguments.all)
    if not spans:
        raise ValueError(_missing(text, arguments.old_text))
    if len(spans) > 1 and not arguments.all:
        raise ValueError(_ambiguous(text, spans))
    changed = substitute(text, spans, arguments)
    if changed == text:
        raise ValueError("nothing changes: oldText and newText are the same")
    places = f" in {len(spans)} places" if len(spans) > 1 else ""
    return changed.encode(), f"changed {path}{places}\n{difference(text, changed)}"


def _text(seen: Seen | None) -> str:
    if seen is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    if seen.content is None:  # it grew while it was read
        raise ValueError(f"it has more than {MOST} bytes: use a command")
    try:
        # A byte order mark is a character like any other, and stays unless it is named.
        return seen.content.decode()
    except UnicodeDecodeError as error:
        byte = seen.content[error.start]
        raise ValueError(f"not UTF-8 text (byte {error.start} is {byte:#04x}): use a command") from None


def find(text: str, wanted: str, *, overlapping: bool) -> list[Span]:
    """Where it is. A line feed in it stands for CR LF too, unless it has a CR of its own."""
    if "\n" not in wanted or "\r" in wanted or "\r\n" not in text:
        return _places(text, wanted, overlapping=overlapping)
    # As if all of the text had line feeds only; then every CR LF before a place moves it by one.
    ends = [found.start() - number for number, found in enumerate(re.finditer("\r\n", text))]
    spans = _places(text.replace("\r\n", "\n"), wanted, overlapping=overlapping)
    return [(start + bisect_left(ends, start), stop + bisect_left(ends, stop)) for start, stop in spans]


def _places(text: str, wanted: str, *, overlapping: bool) -> list[Span]:
    spans = []
    step = 1 if overlapping else len(wanted)
    at = text.find(wanted)
    while at >= 0:
        spans.append((at, at + len(wanted)))
        at = text.find(wanted, at + step)
    return spans


def substitute(text: str, spans: list[Span], arguments: EditArguments) -> str:
    """New lines get the ending that lines have at that place, unless the call itself says something of CR."""
    verbatim = "\r" in arguments.old_text + arguments.new_text
    pieces, at = [], 0
    for start, stop in spans:
        new = arguments.new_text if verbatim else arguments.new_text.replace("\n", _line_end(text, start))
        pieces += [text[at:start], new]
        at = stop
    return "".join([*pieces, text[at:]])


def _line_end(text: str, at: int) -> str:
    found = text.find("\n", at)
    if found < 0:
        found = text.rfind("\n")
    return "\r\n" if text[max(0, found - 1) : found + 1] == "\r\n" else "\n"


# --- why not ----------------------------------------------------------------------------------------------------------


def _ambiguous(text: str, spans: list[Span]) -> str:
    lines = _named([text.count("\n", 0, start) + 1 for start, _ in spans[:_NAMED]], len(spans))
    return f"oldText is there {len(spans)} times, at {lines}: give more of what stands around it, or set all"


def _missing(text: str, wanted: str) -> str:
    """With the place that was probably meant: models are often wrong about white space."""
    reason = "oldText is not in the file; it must match exactly, white space too"
    first = next((line.strip() for line in wanted.split("\n") if line.strip()), None)
    alike = [number for number, line in enumerate(text.split("\n"), 1) if line.strip() == first]
    if not alike:
        return f"{reason}: read the file again"
    return f"{reason}. Its first line is, but for white space, at {_named(alike[:_NAMED], len(alike))}"


def _named(numbers: list[int], count: int) -> str:
    listed = ", ".join(map(str, numbers))
    return f"line{'s' * (count > 1)} {listed}" + (", …" if count > len(numbers) else "")
