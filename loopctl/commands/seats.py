"""``loopctl new``, ``switch`` and ``runtimes``: which session is open where."""

from __future__ import annotations

import os
import sys

import click
import msgspec

from loop_protocol.v1.methods import RuntimeListResult, RuntimeOpenResult, RuntimeRow

from ..exits import OK
from ..given import discard_option
from ..opening import Way, Wish, renew, tried
from ..opening import switch as put
from ..reach import ANSWER, daemon
from ..terminal import document, is_terminal, note, out_line, raw_option, table
from ..view import title_of
from ..whereabouts import here


@click.command()
@discard_option
@click.option("--json", "json", is_flag=True, help="Print the method's result.")
@click.pass_context
def new(ctx: click.Context, discard_queue: bool, json: bool) -> int:
    """Start a new session in this directory. The one that is open here is closed and stays saved."""
    with daemon(ctx, start=True) as client:
        raw = tried(lambda: renew(client, Wish(Way.NEW), discard_queue=discard_queue))
    return _told(raw, json=json)


@click.command()
@click.argument("session")
@discard_option
@click.option("--json", "json", is_flag=True, help="Print the method's result.")
@click.pass_context
def switch(ctx: click.Context, session: str, discard_queue: bool, json: bool) -> int:
    """Go on with SESSION in this directory: a meta.json, its directory, or an id.

    It takes the place of the session that is open here, which is closed and stays saved.
    """
    with daemon(ctx, start=True) as client:
        raw = tried(lambda: put(client, session, discard_queue=discard_queue))
    return _told(raw, json=json)


def _told(raw: bytes, *, json: bool) -> int:
    if json:
        document(raw)
        return OK
    state = msgspec.json.decode(raw, type=RuntimeOpenResult).state
    count = f"{state.live_count} messages" if state.live_count else "no messages yet"
    out_line(f"{title_of(state)} ({count}): {state.path or state.session_id}")
    if os.path.realpath(state.cwd) != os.path.realpath(here()):
        note(f"it belongs to {state.cwd}, and a prompt reaches it from there")
    return OK


@click.command()
@click.option("--json", "json", is_flag=True, help="Print the method's result.")
@raw_option
@click.pass_context
def runtimes(ctx: click.Context, json: bool) -> int:
    """List what is open, and where: a runtime is the seat of one session."""
    with daemon(ctx, start=False) as client:
        raw = client.call_raw("runtime/list", timeout=ANSWER)
    rows = msgspec.json.decode(raw, type=RuntimeListResult).runtimes
    if json:
        document(raw)
    elif rows:
        table([["RUNTIME", "MESSAGES", "", "CWD", "SESSION"], *map(_row, rows)])
    else:
        note("nothing is open")
    return OK


def _row(row: RuntimeRow) -> list[str]:
    """Not the default one of its directory: a prompt there does not go to it."""
    facts = {
        row.kind: row.kind != "persistent",
        "running": row.running,
        f"{row.pending_approvals} to approve": bool(row.pending_approvals),
        "not saved": row.has_pending_save,
        f"{row.queued} queued": bool(row.queued),
        "beside": not row.default,
    }
    marks = [mark for mark, is_so in facts.items() if is_so]
    session = row.session_id if is_terminal(sys.stdout) else row.path or row.session_id  # a path is too long for one
    return [row.runtime_id, str(row.message_count), ", ".join(marks), row.cwd, session]
