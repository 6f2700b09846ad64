"""Reads the JSON that models and their servers write, which is often almost right.

Fast where it is right. Else lone surrogates and bytes that are no UTF-8 become U+FFFD, here where they enter, and
control characters in strings are taken as they are.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec

from ..agent import MALFORMED_KEY

T = TypeVar("T")

# What a model nests deeper than this would make the stored record unreadable for programs with a lower limit.
NESTING = 48
TOO_DEEP = f"nested more than {NESTING} deep"
# Larger numbers, and what is no number, can be written but not read again.
LARGEST = 1e300
# How much of arguments that cannot be read is kept, to be shown to the model.
MALFORMED = 2000

_SURROGATE = re.compile("[\ud800-\udfff]")
_arguments: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


class NotJson(ValueError):
    """Nothing of that form can be read from it."""


def decode(data: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """``data`` as the decoder's type. Raises :class:`NotJson`."""
    try:
        # More brackets than levels may be nested too deep, and only the slow way can tell.
        if data.count(b"{") + data.count(b"[") <= NESTING:
            return decoder.decode(data)
    except msgspec.DecodeError:
        pass
    try:
        value: T = msgspec.convert(_cleaned(_loads(data), NESTING), decoder.type)
    except RecursionError:
        raise NotJson(TOO_DEEP) from None
    except ValueError as error:  # also msgspec's ValidationError
        raise NotJson(str(error)) from None
    return value


def arguments(text: str) -> dict[str, Any]:
    """A call's arguments; empty text is no arguments.

    What is no JSON object becomes ``{"__malformed__": the text}``: no tool has such a parameter, so the loop refuses it
    as it refuses any unknown one, quotes it, and the model can mend its call.
    """
    if not text.strip():
        return {}
    try:
        return decode(text.encode(), _arguments)
    except NotJson:
        return {MALFORMED_KEY: text[:MALFORMED]}


def _loads(data: bytes) -> Any:
    return json.loads(data.decode("utf-8", "replace"), strict=False)


def _cleaned(value: Any, depth: int) -> Any:
    if depth < 0:
        raise ValueError(TOO_DEEP)
    match value:
        case int() | float() if not abs(value) < LARGEST:
            raise ValueError("a number out of range")
        case str():
            return _SURROGATE.sub("\ufffd", value)
        case list():
            return [_cleaned(item, depth - 1) for item in value]
        case dict():
            return {_SURROGATE.sub("\ufffd", key): _cleaned(item, depth - 1) for key, item in value.items()}
    return value
