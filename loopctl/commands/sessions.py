"""``loopctl sessions``: what is saved, newest first."""

from __future__ import annotations

import os
from typing import Any

import click
import msgspec

from loop_protocol.v1.methods import SessionListResult
from loop_protocol.v1.types import SessionRow

from ..exits import OK
from ..reach import ANSWER, daemon
from ..terminal import clock, document, note, shortened, table
from ..view import marks_of, title_of
from ..whereabouts import here

TITLE = 40


@click.command()
@click.option("--all", "everywhere", is_flag=True, help="Those of all directories.")
@click.option("--session-dir", metavar="DIR", help="Look in this directory instead of the usual one.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N sessions.")
@click.option("--json", "json", is_flag=True, help="Print the method's result.")
@click.pass_context
def sessions(ctx: click.Context, everywhere: bool, session_dir: str | None, limit: int | None, json: bool) -> int:
    """List the saved sessions of this directory. `--session` takes the path, or the id in it."""
    request: dict[str, Any] = {} if everywhere else {"cwd": here()}
    if session_dir is not None:
        request["sessionDir"] = os.path.abspath(session_dir)
    if limit is not None:
        request["limit"] = limit
    with daemon(ctx, start=True) as client:
        raw = client.call_raw("session/list", request, timeout=ANSWER)
    if json:
        document(raw)
    else:
        _show(msgspec.json.decode(raw, type=SessionListResult))
    return OK


def _show(listing: SessionListResult) -> None:
    if listing.sessions:
        table([["UPDATED", "TITLE", "MESSAGES", "", "CWD", "PATH"], *map(_row, listing.sessions)])
    elif not listing.legacy:
        note("no sessions yet")
    for path in listing.legacy:
        note(f"older format, migrated when it is opened: {path}")
    for damaged in listing.damaged:
        note(f"damaged: {damaged.path}: {damaged.reason}")
    if listing.unsupported:
        note(f"{listing.unsupported} of a newer format, left alone")


def _row(session: SessionRow) -> list[str]:
    marks = ", ".join([*(["open"] if session.live else []), *marks_of(session)])
    title, count = shortened(title_of(session), TITLE), str(session.message_count)
    return [clock(session.updated_at), title, count, marks, session.cwd, session.path]
