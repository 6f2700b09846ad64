"""Requests for approval in words: all that is needed to decide one, what one is in a line, and what became of it.

What a person decides on is shown with escapes always, also to a pipe: it must not act on anything before it is decided
(A-8). Only ``approvals show --raw`` gives the bytes. Every line of it stands behind a bar, so no text of a model can
pass for one of ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from loop_protocol.v1.events import ApprovalResolved
from loop_protocol.v1.types import ApprovalOutcome, ApprovalRequest

from .terminal import clock, folded, one_line, visible, wrapped

SUMMARY = 120
# Of each text so much is shown at first; who wants the rest is told how to get it.
LINES = 24
LENGTH = 600
_BAR = "  │ "
_GOES_ON = "  ┊ "  # the same line, where the terminal is too narrow
_SHORT = 8

_OUTCOMES: dict[ApprovalOutcome, str] = {
    "allowed-once": "allowed once",
    "allowed-session": "allowed for the session",
    "rejected": "rejected",
    "cancelled": "cancelled, since its run ends",
    "timed-out": "not allowed: nobody answered in time",
    "unavailable": "not allowed: nobody is there who could be asked",
}


def short(approval_id: str) -> str:
    """What is enough to name it."""
    return approval_id[:_SHORT]


def summary(request: ApprovalRequest) -> str:
    """Its tool and what it wants, in a line that shows beginning and end."""
    return f"{request.tool_name}: {subject(request)}"


def subject(request: ApprovalRequest, limit: int = SUMMARY) -> str:
    match request:
        case ApprovalRequest(operation="command", arguments={"command": str() as command}):
            what = command
        case ApprovalRequest(path=str() as path):
            what = path
        case _:
            what = msgspec.json.encode(request.arguments).decode()
    return _in_a_line(what, limit)


def _in_a_line(text: str, limit: int) -> str:
    return one_line(visible(text.replace("\n", "\\u000a")), limit)


def described(
    request: ApprovalRequest, *, whole: bool, width: int | None = None, raw: bool = False
) -> tuple[str, bool]:
    """All that is known of it, and whether something is left out of it, which happens unless it is to be ``whole``.
    ``width``: of the terminal; a line that it would break itself could begin there with anything. ``raw``: its texts as
    they are, for somebody who asked for the bytes."""
    texts = [_text(name, text, whole=whole, width=width, raw=raw) for name, text in _texts(request)]
    lines = _fact(f"{request.tool_name} asks: {request.reason}", width=width and width - len("loopctl: "))
    lines += [line for text, _ in texts for line in text]
    lines += [line for name, value in _facts(request) for line in _fact(f"  {name}: {value}", width=width)]
    return "\n".join(lines) + "\n", any(cut for _, cut in texts)


def _texts(request: ApprovalRequest) -> Iterator[tuple[str, str]]:
    """What may be long, and what came from the model: the exact arguments first (A-8)."""
    for name, value in request.arguments.items():
        yield name, value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if request.diff is not None:
        yield "the change", request.diff
    if request.justification is not None and request.justification != request.arguments.get("justification"):
        yield "the model says", request.justification


def _text(name: str, text: str, *, whole: bool, width: int | None, raw: bool) -> tuple[list[str], bool]:
    shown = text if raw else visible(text)
    body = shown.removesuffix("\n")
    lines, cut = (body.split("\n"), False) if whole else folded(body, lines=LINES, length=LENGTH)
    ending = "" if shown.endswith("\n") or "\n" not in shown else ", without a newline at the end"
    pieces = [wrapped(line, width and width - len(_BAR)) for line in lines]
    barred = [(_BAR if index == 0 else _GOES_ON) + piece for line in pieces for index, piece in enumerate(line)]
    return [*_fact(f"  {name}{ending or (' (empty)' if not shown else '')}", width=width), *barred], cut


def _fact(text: str, *, width: int | None) -> list[str]:
    first, *more = (
        piece for line in visible(text).split("\n") for piece in wrapped(line, width and width - 6, words=True)
    )
    return [first, *("      " + piece for piece in more)]


def _facts(request: ApprovalRequest) -> Iterator[tuple[str, Any]]:
    yield "in", request.cwd
    if request.path is not None:
        yield "file", request.path
    if request.path is not None:
        yield "before", f"SHA-256 {request.sha256_before}" if request.sha256_before else "no such file"
    yield "without approval it may do", request.sandbox
    if request.rules:
        yield "for the session would allow", "; ".join(request.rules)
    else:
        yield "not for the session", request.rules_refused or "no rule can be made of it"
    if request.expires_at is not None:
        yield "until", clock(request.expires_at, seconds=True)


def became(resolved: ApprovalResolved, request: ApprovalRequest | None) -> str:
    """What became of it, who said so, and why."""
    said = _OUTCOMES[resolved.outcome] + (f" by {resolved.by}" if resolved.by else "")
    what = f": {summary(request)}" if request else ""
    if resolved.feedback:
        what += f"\ntold the model: {_in_a_line(resolved.feedback, SUMMARY)}"
    return said + what


def how_to_answer(request: ApprovalRequest) -> str:
    id = short(request.approval_id)
    return f"`loopctl approvals show {id}` shows all of it, `loopctl approvals allow {id}` or `reject {id}` answers"
