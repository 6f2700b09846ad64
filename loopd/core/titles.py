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

# A block that nothing closes goes on to the end. Each is walked through once.
_THOUGHTS = re.compile(r"<(think|thinking)>.*?(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
# What is longer than that is no title in quotes.
_QUOTED_CAP = 1024
_QUOTES = dict(
    zip(
        "\"'`\u201c\u2018\u00ab\u2039\u300c\u300e\u201e\u201a",
        "\"'`\u201d\u2019\u00bb\u203a\u300d\u300f\u201c\u2018",
        strict=True,
    )
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


def from_answer(answer: str) -> str:
    """A model's answer as a title: without its thoughts and the quotes around it. Empty where nothing else is there."""
    said = normalised(_THOUGHTS.sub("", answer), _QUOTED_CAP)
    return normalised(_unquoted(said))


def _unquoted(text: str) -> str:
    """One pair around all of it goes. Where the first one is closed before the end they are two pairs, and stay."""
    closing = _QUOTES.get(text[:1])
    if closing is None or len(text) < 2 or text[-1] != closing:
        return text
    depth = 0
    for before, mark, after in zip(" " + text, text[:-1], text[1:], strict=False):
        # Where both look alike it is their place that tells them apart, and an apostrophe is neither. Words of the
        # languages that have the corner brackets touch these.
        if mark == text[0] and (mark != closing or not before.isalnum()):
            depth += 1
        elif mark == closing and (mark in "\u300d\u300f" or not after.isalnum()):
            depth -= 1
        if depth == 0:
            return text
    return text[1:-1]


def fallback(text: str) -> str:
    """The first words: eight at most, within 96 bytes. Empty where the text is not eligible."""
    return " ".join(normalised(text, FALLBACK_CAP).split(" ")[:FALLBACK_WORDS])


def text_of(message: UserMessage) -> str:
    """What titles are made of; images never count."""
    return "\n".join(block.text for block in message.content if isinstance(block, TextBlock))


def is_eligible(message: UserMessage) -> bool:
    """There is something to be seen in its text (T-2)."""
    return next(_parts(text_of(message)), None) is not None


def fallback_of(message: UserMessage) -> Title | None:
    """What a conversation is called whose first eligible message that is."""
    text = fallback(text_of(message))
    return Title(text=text, source="fallback", message_indices=[message.index]) if text else None
