"""What a provider's refusal means: its status or error object as a :class:`ModelError` that quotes it."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
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
# What need not be so again a moment later. The other statuses are about the request, which stays the same.
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
# Comes as a rate limit, and no waiting helps: there is nothing left to pay with.
SPENT = b"insufficient_quota"
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

# What of them passes without being named above.
FAULTS = ("server_error", "internal_error", "api_error", "timeout")
SPAN = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}

_anything: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_TAG = re.compile(r"<(script|style)\b.*?</\1\s*>|<[^<>]*>", re.DOTALL | re.IGNORECASE)


def refusal(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> ModelError:
    """An answer with another status than 200. ``headers`` by their names in lower case."""
    headers = headers or {}
    said = headers.get("x-should-retry", "")  # both vendors' word on it
    passing = said == "true" or (status in PASSING and said != "false" and SPENT not in body)
    text = f"answered with status {status}: {quote(body)}"
    return ModelError(
        KINDS.get(status, "provider"), text, retryable=passing, retry_after_s=retry_after(headers) if passing else None
    )


def retry_after(headers: Mapping[str, str]) -> float | None:
    """The seconds that a provider wants to be left alone: as it says, else until the limit that was hit is lifted."""
    waits = [
        _seconds(headers.get("retry-after-ms", ""), 0.001),
        _seconds(headers.get("retry-after", "")),
        _until(headers.get("retry-after", "")),
        *(
            _span(headers.get(f"x-ratelimit-reset-{what}", ""))
            for what in ("requests", "tokens")
            if _hit(headers, what)
        ),
    ]
    return next((wait for wait in waits if wait is not None), None)


def _hit(headers: Mapping[str, str], what: str) -> bool:
    return headers.get(f"x-ratelimit-remaining-{what}") == "0"


def _seconds(text: str, unit: float = 1) -> float | None:
    return float(text) * unit if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,9})?", text) else None


def _until(text: str) -> float | None:
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _span(text: str) -> float | None:
    """``1s``, ``6m0s``, ``20ms``."""
    if not re.fullmatch(r"([0-9]{1,9}(\.[0-9]{1,9})?(ms|s|m|h|d))+", text):
        return None
    parts: list[tuple[str, str]] = re.findall(r"([0-9.]+)(ms|[smhd])", text)
    return sum(float(number) * SPAN[unit] for number, unit in parts)


def stream_error(error: Any) -> ModelError:
    """An error object in the middle of a stream."""
    named = " ".join(str(error.get(key)) for key in ("type", "code", "status")) if isinstance(error, dict) else ""
    kind = next((kind for part, kind in NAMES if part in named.lower()), None)
    code = error.get("code") if isinstance(error, dict) else None
    by_code = KINDS.get(code, "provider") if isinstance(code, int) else "provider"
    passing = code in PASSING or any(name in named.lower() for name in FAULTS) or None
    return ModelError(kind or by_code, f"failed in the middle of its answer: {_said(error)}", retryable=passing)


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
