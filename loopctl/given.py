"""What a command line gives beside names: a text, a model, a time, and how a run is followed."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from .terminal import is_terminal, note

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


def run_options(command: Any) -> Any:
    """What every command that starts a run takes: ``json``, ``no_wait``, ``timeout``."""
    for option in reversed(_RUN):
        command = option(command)
    return command


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
)
