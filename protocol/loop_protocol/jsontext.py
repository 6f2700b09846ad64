"""What can be said about JSON without decoding it: whether it is Unicode throughout, and how deep it nests.

Both are questions that msgspec does not answer for a ``Raw``, and that must cost no memory for objects.
"""

from __future__ import annotations

import codecs
import re

_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_BLOCK = 64 * 1024


def check_text(body: bytes) -> None:
    """UTF-8 without lone surrogates: what msgspec does not look at in a ``Raw``."""
    if not body.isascii():
        utf8 = codecs.getincrementaldecoder("utf-8")()
        try:
            for at in range(0, len(body), _BLOCK):  # in blocks, or one emoji makes the text four times as large
                utf8.decode(body[at : at + _BLOCK], final=at + _BLOCK >= len(body))
        except UnicodeDecodeError:
            raise ValueError(f"not UTF-8 after byte {at}") from None
    if _HALF.search(body) and _HALF.search(_PAIR.sub(b"", body.replace(b"\\\\", b""))):
        raise ValueError("not Unicode: half of a surrogate pair")


_TO_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKET = bytes(set(range(256)) - set(b'{}[]"'))


def depth(body: bytes) -> int:
    """How deep JSON nests; for what is no JSON, some number. Nearly all in C: 7 ms for a prompt with 1 MiB of code."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(_TO_SQUARE, _NO_BRACKET)
    # Strings without brackets are empty now. That the end of one and the start of the next may go too changes nothing:
    # what stood between them was no bracket.
    brackets = b"".join(plain.replace(b'""', b"").split(b'"')[::2])
    flat = 0
    while flat < 8 and b"[]" in brackets:  # most is flat and gone at once, so that few turns are left for the loop
        brackets = brackets.replace(b"[]", b"")
        flat += 1
    level = deepest = 0
    for mountain in brackets.replace(b"][", b"] [").split():
        up = mountain.count(b"[")
        deepest = max(deepest, level + up)
        level += 2 * up - len(mountain)
    return flat + deepest
