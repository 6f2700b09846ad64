"""What a command line gives beside names: a text, a model, a time, and how a run is followed."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from .terminal import is_terminal, note, raw_option, somebody_is_there

PERMISSIONS = ["read-only", "workspace-write", "danger-full-access"]
discard_option = click.option("--discard-queue", is_flag=True, help="Also over inputs that wait: they are lost.")


def content(text: str | None) -> str:
    """The text to send: ``-``, or none, is what comes on stdin."""
    if text is None or text == "-":
        if text is None and is_terminal(sys.stdin):
            raise click.UsageError("nothing to send: give a text, or - to read it from stdin")
        text = _stdin()
    if not text.strip():
        raise click.UsageError("the text is empty")
    # An argument that is not UTF-8 comes with surrogates, which no JSON can hold.
    return os.fsencode(text).decode("utf-8", "replace") if not _encodable(text) else text


def _stdin() -> str:
    raw = sys.stdin.buffer.read() if sys.stdin is not None else b""
    text = raw.decode("utf-8", "replace")
    if "\ufffd" in text and not _is_utf8(raw):
        note("stdin is not UTF-8 everywhere: the bytes that are not became U+FFFD")
    return text


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def seconds_option(_ctx: click.Context, _option: click.Parameter, value: float | None) -> float | None:
    """``nan`` passes every range check, and no deadline ever comes."""
    if value is not None and math.isnan(value):
        raise click.BadParameter("expected a number of seconds")
    return value


def model_option(_ctx: click.Context, _option: click.Parameter, value: str | None) -> dict[str, str] | None:
    """``provider/id``; the id may contain slashes."""
    if value is None:
        return None
    provider, slash, id = value.partition("/")
    if not (provider and slash and id):
        raise click.BadParameter("expected PROVIDER/ID; `loopctl models` lists them")
    return {"provider": provider, "id": id}


@dataclass(frozen=True, slots=True)
class Approving:
    """What becomes of a run's requests for approval. ``waits``: for whoever answers. ``asks``: whoever is here is
    asked. ``params``: what the daemon is told."""

    waits: bool
    asks: bool
    params: dict[str, Any]


def approving(choice: str | None, timeout: float | None, *, here: bool = False) -> Approving:
    """Unless the person chose: requests wait where somebody is there, and are rejected where nobody is (A-6). ``here``:
    the command goes on, and can ask."""
    there = somebody_is_there()
    waits = there if choice is None else choice == "wait"
    params: dict[str, Any] = {} if waits else {"approvals": "reject"}
    if timeout is not None:
        params["approvalTimeoutMs"] = max(1, round(timeout * 1000))
    return Approving(waits, waits and there and here, params)


def approval_options(command: Any) -> Any:
    """What every command takes that sends something which becomes a run: ``approvals``, ``approval_timeout``."""
    for option in reversed(_APPROVALS):
        command = option(command)
    return command


def run_options(command: Any) -> Any:
    """What every command that starts a run takes: ``json``, ``no_wait``, ``timeout``, and the above."""
    for option in reversed(_RUN):
        command = option(command)
    return command


_APPROVALS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--approvals",
        type=click.Choice(["wait", "reject"]),
        help="What needs an approval waits for it (at a terminal), or is rejected unless a client that can approve "
        "watches (elsewhere).",
    ),
    click.option(
        "--approval-timeout",
        type=click.FloatRange(min=0, min_open=True, max=2**31 / 1000),
        callback=seconds_option,
        metavar="S",
        help="Let each approval wait S seconds only.",
    ),
)
_RUN: tuple[Callable[[Any], Any], ...] = (
    click.option("--json", "json", is_flag=True, help="Print the run's events, one JSON object per line."),
    click.option("--no-wait", is_flag=True, help="Print the ids of run and session, and leave the run alone."),
    click.option(
        "--timeout",
        type=click.FloatRange(min=0, min_open=True, max=10**9),
        callback=seconds_option,
        metavar="S",
        help="Stop the run after S seconds.",
    ),
    approval_options,
    raw_option,
)
