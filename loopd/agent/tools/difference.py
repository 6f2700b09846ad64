"""What a change does to a text, as a unified diff: short for the model, longer for a person who is asked for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from loopd.agent.tools.excerpt import LINES, head_of

CONTEXT = 3
# Comparing takes up to the square of it.
MOST_LINES = 1000
_SHOWN_LINES = 120
_SHOWN_BYTES = 8 * 1024
_ASKED_BYTES = 64 * 1024


def difference(before: str, after: str) -> str:
    """Hunks as ``diff -u`` writes them, within bounds."""
    old, new, start = _middle(before, after)
    if len(old) + len(new) > MOST_LINES:
        return f"[changed within the lines {start + 1} to {start + len(new)}]"
    return _bounded(_hunks(old, new, start), lines=_SHOWN_LINES, size=_SHOWN_BYTES, rest="is left out")


def for_people(before: str, after: str) -> str:
    """The same, with more of it: for who has to decide about it. What was spread widely is one hunk, uncompared."""
    old, new, start = _middle(before, after)
    hunks = _hunks(old, new, start) if len(old) + len(new) <= MOST_LINES else _uncompared(old, new, start)
    return _bounded(hunks, lines=LINES, size=_ASKED_BYTES, rest="is left out here; the arguments say what is new")


def _middle(before: str, after: str) -> tuple[Sequence[str], Sequence[str], int]:
    """The lines of both that differ, with what is around them, and how many come before."""
    old, new = _lines(before), _lines(after)
    start, end = _common(old, new)
    start, end = max(0, start - CONTEXT), max(0, end - CONTEXT)
    return old[start : len(old) - end], new[start : len(new) - end], start


def _bounded(hunks: Iterator[str], *, lines: int, size: int, rest: str) -> str:
    text = "\n".join(hunks)
    shown = head_of(text, lines=lines, size=size)
    return text if shown == text else f"{shown}\n[the rest of the difference {rest}]"


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + lines[-1:] * bool(lines[-1])


def _common(old: Sequence[str], new: Sequence[str]) -> tuple[int, int]:
    """How many lines are the same at the beginning, and how many of the others at the end."""
    most = min(len(old), len(new))
    start = next((at for at in range(most) if old[at] != new[at]), most)
    end = next((at for at in range(most - start) if old[-1 - at] != new[-1 - at]), most - start)
    return start, end


def _hunks(old: Sequence[str], new: Sequence[str], start: int) -> Iterator[str]:
    for group in SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(CONTEXT):
        (_, old_from, _, new_from, _), (_, _, old_to, _, new_to) = group[0], group[-1]
        yield f"@@ -{_range(start, old_from, old_to)} +{_range(start, new_from, new_to)} @@"
        for kind, a, b, c, d in group:
            if kind == "equal":
                yield from (_shown(" ", line) for line in old[a:b])
            else:
                yield from (_shown("-", line) for line in old[a:b])
                yield from (_shown("+", line) for line in new[c:d])


def _uncompared(old: Sequence[str], new: Sequence[str], start: int) -> Iterator[str]:
    yield f"@@ -{_range(start, 0, len(old))} +{_range(start, 0, len(new))} @@"
    yield from (_shown("-", line) for line in old)
    yield from (_shown("+", line) for line in new)


def _range(start: int, first: int, stop: int) -> str:
    # An empty range is named by the line before it.
    return f"{start + first + (stop > first)},{stop - first}"


def _shown(sign: str, line: str) -> str:
    ended = line.endswith("\n")
    return sign + line.removesuffix("\n") + ("" if ended else "\n\\ No newline at end of file")
