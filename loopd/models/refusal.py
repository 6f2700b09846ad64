"""What a provider's refusal means: its status or error object as a :class:`ModelError` that quotes it."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from ..agent import ModelError
from .lenient_json import NotJson, decode

# A page is looked at no further; what is quoted of anything is cut by whoever shows it, once no secret is in it.
PAGE = 4096

KINDS = {
    400: "refused",
    401: "auth",
    402: "refused",
    403: "auth",
    404: "refused",
    408: "overloaded",
    413: "refused",
    422: "refused",
    429: "rate_limit",
    503: "overloaded",
    529: "overloaded",
}
# Errors in mid-stream have names, which differ between servers, where answers have a status.
NAMES = (
    ("rate_limit", "rate_limit"),
    ("overloaded", "overloaded"),
    ("content_filter", "content_filter"),
    ("authentication", "auth"),
    ("permission", "auth"),
    ("invalid_request", "refused"),
    ("invalid_prompt", "refused"),
)

_anything: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_TAG = re.compile(r"<(script|style)\b.*?</\1\s*>|<[^<>]*>", re.DOTALL | re.IGNORECASE)


def refusal(status: int, body: bytes) -> ModelError:
    """An answer with another status than 200."""
    return ModelError(KINDS.get(status, "provider"), f"answered with status {status}: {quote(body)}")


def stream_error(error: Any) -> ModelError:
    """An error object in the middle of a stream."""
    named = " ".join(str(error.get(key)) for key in ("type", "code", "status")) if isinstance(error, dict) else ""
    kind = next((kind for part, kind in NAMES if part in named.lower()), None)
    code = error.get("code") if isinstance(error, dict) else None
    by_code = KINDS.get(code, "provider") if isinstance(code, int) else "provider"
    return ModelError(kind or by_code, f"failed in the middle of its answer: {_said(error)}")


def error_event(data: bytes) -> ModelError:
    """An event whose name is error: its data is the error object, or holds it, or is only text."""
    try:
        value = decode(data, _anything)
    except NotJson:
        value = _line(data[:PAGE].decode("utf-8", "replace"))
    inner = value.get("error") if isinstance(value, dict) else None
    return stream_error(inner or value)


def quote(body: bytes) -> str:
    """What a body says, in one line: the message of a JSON error, the text of a page, or its start."""
    try:
        return _said(decode(body, _anything))
    except NotJson:
        return _line(_TAG.sub(" ", body[:PAGE].decode("utf-8", "replace")))


def _said(value: Any) -> str:
    """Servers write ``{"error": {"message"}}`` or ``{"error": "text"}``, ``{"message"}``, ``{"detail"}``, or a list."""
    match value:
        case {"error": inner} if inner:
            return _said(inner)
        case {"message": str(text)} | {"detail": str(text)} if text:
            return _line(text)
        case [first, *_]:
            return _said(first)
        case str():
            return _line(value)
    return _line(msgspec.json.encode(value).decode())


def _line(text: str) -> str:
    return " ".join(text.split()) or "(nothing)"
