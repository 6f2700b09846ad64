"""``loopctl sessions``: what is saved, newest first, and with ``--watch`` every change of it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import click
import msgspec

from loop_protocol.client import Client
from loop_protocol.v1.methods import SessionListResult
from loop_protocol.v1.types import SessionRow

from ..exits import INTERRUPTED, OK
from ..interrupts import Interrupts
from ..reach import ANSWER, daemon
from ..terminal import clock, document, is_terminal, note, out_line, raw_option, shortened, table
from ..view import arguments_line, marks_of, title_of
from ..whereabouts import here

TITLE = 40


@click.command()
@click.option("--all", "everywhere", is_flag=True, help="Those of all directories.")
@click.option("--session-dir", metavar="DIR", help="Look in this directory instead of the usual one.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N sessions.")
@click.option("--watch", is_flag=True, help="Go on with every change, until Ctrl-C.")
@click.option(
    "--json", "json", is_flag=True, help="Print the method's result; with --watch a line, then one per change."
)
@raw_option
@click.pass_context
def sessions(
    ctx: click.Context, everywhere: bool, session_dir: str | None, limit: int | None, watch: bool, json: bool
) -> int:
    """List the saved sessions of this directory. `--session` takes what is in the last column."""
    request: dict[str, Any] = {} if everywhere else {"cwd": here()}
    if session_dir is not None:
        request["sessionDir"] = os.path.abspath(session_dir)
    if limit is not None:
        request["limit"] = limit
    with daemon(ctx, start=True) as client:
        if watch:
            client.call_raw("server/watch", timeout=ANSWER)  # before the list: what changes meanwhile comes twice
        raw = client.call_raw("session/list", request, timeout=ANSWER)
        listing = msgspec.json.decode(raw, type=SessionListResult)
        shown = Shown(everywhere, by_id=is_terminal(sys.stdout) and session_dir is None)
        _print(raw, listing, None if json else shown, watch=watch)
        cwd = None if everywhere else os.path.realpath(here())
        return _watch(client, Watched(cwd, listing), None if json else shown) if watch else OK


@dataclass(frozen=True, slots=True)
class Shown:
    """What of a session is shown. ``by_id``: a path is too long for a terminal, and an id serves as well where it can
    be looked up."""

    everywhere: bool
    by_id: bool

    @property
    def heading(self) -> list[str]:
        return ["UPDATED", "TITLE", "MESSAGES", "", *self._where("CWD"), "ID" if self.by_id else "PATH"]

    def row(self, session: SessionRow) -> list[str]:
        title, count = shortened(title_of(session), TITLE), str(session.message_count)
        marks = ", ".join(_marks(session))
        return [clock(session.updated_at), title, count, marks, *self._where(session.cwd), self.name(session)]

    def name(self, session: SessionRow) -> str:
        return session.session_id if self.by_id else session.path

    def _where(self, cwd: str) -> list[str]:
        return [cwd] if self.everywhere else []


def _print(raw: bytes, listing: SessionListResult, shown: Shown | None, *, watch: bool) -> None:
    if shown is not None:
        _show(listing, shown)
    elif watch:
        out_line(msgspec.json.format(raw, indent=-1).decode())
    else:
        document(raw)


def _show(listing: SessionListResult, shown: Shown) -> None:
    if listing.sessions:
        table([shown.heading, *map(shown.row, listing.sessions)])
    elif not listing.legacy:
        note("no sessions yet")
    for path in listing.legacy:
        note(f"older format, migrated when it is opened: {path}")
    for damaged in listing.damaged:
        note(f"damaged: {damaged.path}: {damaged.reason}")
    if listing.unsupported:
        note(f"{listing.unsupported} of a newer format, left alone")


def _marks(session: SessionRow) -> list[str]:
    return [*(["open"] if session.live else []), *marks_of(session)]


# --- changes ----------------------------------------------------------------------------------------------------------


class Watched:
    """What of the daemon's news is about the list: all of it, or what concerns one directory."""

    def __init__(self, cwd: str | None, listing: SessionListResult) -> None:
        self._cwd = cwd
        self._paths = {row.path for row in listing.sessions}

    def concerns(self, event: dict[str, Any]) -> bool:
        row, path = event.get("session"), event.get("path")
        if self._cwd is None:
            return True
        if isinstance(row, dict):
            if row.get("cwd") == self._cwd:
                self._paths.add(row["path"])
            path = row["path"]
        return path is None or path in self._paths


def _watch(client: Client, watched: Watched, shown: Shown | None) -> int:
    with Interrupts() as interrupts:
        while not interrupts.asked:
            change = client.next_server_event(timeout=0)
            if change is None:
                interrupts.wait(client, timeout=None)
                continue
            raw = msgspec.json.encode(change)
            said = msgspec.json.decode(raw)
            if watched.concerns(said["event"]):
                out_line(f"{clock(said['at'])}  {_change(said['event'], shown)}" if shown else raw.decode())
    return INTERRUPTED


def _change(event: dict[str, Any], shown: Shown) -> str:
    match event:
        case {"type": "session_listed", "session": row}:
            session = msgspec.convert(row, SessionRow)
            facts = [title_of(session), f"{session.message_count} messages", *_marks(session), shown.name(session)]
            return ", ".join(facts)
        case {"type": "session_removed", "path": path, "sessionId": id}:
            return f"deleted: {id if shown.by_id else path}"
        case {"type": "daemon_state", "draining": draining, "runs": runs, "pendingSaves": pending}:
            unsaved = "".join(f", not saved: {one.get('path', one['sessionId'])}" for one in pending)
            return f"the daemon {'drains' if draining else 'serves'}, running: {runs}{unsaved}"
        case {"type": "events_lost"}:
            return "some changes are not shown here, since they came too fast"
        case _:  # a newer daemon
            return arguments_line(event)
