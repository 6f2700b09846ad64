"""Titles as text: any text as one clean line (T-7), and what a conversation is called after its first words (T-2)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from loop_protocol.v1.types import TextBlock, Title, UserMessage

CAP = 120
FALLBACK_CAP = 96
FALLBACK_WORDS = 8
# What a title is made of stands at the beginning of a text: no call looks at more than this, however long that is.
_LOOKED_AT = 64 * 1024

# Sequences before the single characters that they begin with; one that does not end is only those. What begins the next
# one ends the search, so that no text is walked through twice.
_PARTS = re.compile(
    r"(?:\x1b\]|\x9d)[^\x07\x1b\x9c\x9d]*(?:\x07|\x1b\\|\x9c)"  # OSC
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI
    r"|(?P<space>[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+)"
    r"|(?:[\x00-\x1a\x1c-\x1f\x7f-\x9a\x9c\x9e\x9f\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
    r"|[\x1b\x9b\x9d](?=[\x1b\x9b\x9d]))+|[\x1b\x9b\x9d]"
    r"|(?P<shown>.)",
    re.DOTALL,
)


def normalised(text: str, cap: int = CAP) -> str:
    """One line of at most ``cap`` bytes of UTF-8, without terminal sequences, controls and invisible characters; empty
    where nothing else is there."""
    line, size = "", 0
    for part in _parts(text):
        size += len(part.encode())
        if size > cap:
            break
        line += part
    return line.rstrip(" ")


def _parts(text: str) -> Iterator[str]:
    """Every visible character, with one space before it where there was white space after another."""
    gap = begun = False
    for match in _PARTS.finditer(text, 0, _LOOKED_AT):
        if match["space"]:
            gap = begun
        elif match["shown"]:
            if gap:
                yield " "
            yield match["shown"]
            gap, begun = False, True


def fallback(text: str) -> str:
    """The first words: eight at most, within 96 bytes. Empty where the text is not eligible."""
    return " ".join(normalised(text, FALLBACK_CAP).split(" ")[:FALLBACK_WORDS])


def fallback_of(message: UserMessage) -> Title | None:
    """What a conversation is called whose first eligible message that is; images never count."""
    text = fallback("\n".join(block.text for block in message.content if isinstance(block, TextBlock)))
    return Title(text=text, source="fallback", message_indices=[message.index]) if text else None
