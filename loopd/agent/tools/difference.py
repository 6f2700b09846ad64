"""What an edit changed, as a short unified diff."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from loopd.agent.tools.excerpt import head_of

CONTEXT = 3
# Comparing takes up to the square of it.
MOST_LINES = 1000
_SHOWN_LINES = 120
_SHOWN_BYTES = 8 * 1024


def difference(before: str, after: str) -> str:
    """Hunks as ``diff -u`` writes them, within bounds."""
    old, new = _lines(before), _lines(after)
    start, end = _common(old, new)
    start, end = max(0, start - CONTEXT), max(0, end - CONTEXT)
    old, new = old[start : len(old) - end], new[start : len(new) - end]
    if len(old) + len(new) > MOST_LINES:
        return f"[changed within the lines {start + 1} to {start + len(new)}]"
    text = "\n".join(_hunks(old, new, start))
    shown = head_of(text, lines=_SHOWN_LINES, size=_SHOWN_BYTES)
    return text if shown == text else f"{shown}\n[the rest of the difference is left out]"


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


def _range(start: int, first: int, stop: int) -> str:
    # An empty range is named by the line before it.
    return f"{start + first + (stop > first)},{stop - first}"


def _shown(sign: str, line: str) -> str:
    ended = line.endswith("\n")
    return sign + line.removesuffix("\n") + ("" if ended else "\n\\ No newline at end of file")
