"""``loopctl pin``, ``unpin``, ``read``, ``rename``, ``delete``: how a session is kept, whether it is open or not."""

from __future__ import annotations

import sys

import click
import msgspec

from loop_protocol.client import Client
from loop_protocol.v1.methods import MarkReadResult, SessionListResult, TitleResult
from loop_protocol.v1.types import SessionState

from ..exits import REFUSED, USAGE, Failure
from ..reach import ANSWER, daemon
from ..terminal import document, is_terminal, note, told, visible
from ..view import title_of
from ..whereabouts import named, readable, session_option


@click.command()
@session_option
@click.option("--json", "json", is_flag=True, help="Print the method's result.")
@click.pass_context
def pin(ctx: click.Context, session: str | None, json: bool) -> int:
    """Pin the session that is open for this directory, else its latest saved one."""
    return _set_pinned(ctx, session, pinned=True, json=json)


@click.command()
@session_option
@click.option("--json", "json", is_flag=True, help="Print the method's result.")
@click.pass_context
def unpin(ctx: click.Context, session: str | None, json: bool) -> int:
    """Unpin the session that is open for this directory, else its latest saved one."""
    return _set_pinned(ctx, session, pinned=False, json=json)


def _set_pinned(ctx: click.Context, session: str | None, *, pinned: bool, json: bool) -> int:
    with daemon(ctx, start=True) as client:
        request = {**readable(client, session=session), "pinned": pinned}
        raw = client.call_raw("session/setPinned", request, timeout=ANSWER)
    return told(raw, "pinned" if pinned else "not pinned any more", json=json)


@click.command()
@session_option
@click.option("--json", "json", is_flag=True, help="Print the method's result.")
@click.pass_context
def read(ctx: click.Context, session: str | None, json: bool) -> int:
    """Mark as read what is saved of the session that is open for this directory, else of its latest saved one.

    Exit code 5 if something newer was saved just then: the session stays unread.
    """
    with daemon(ctx, start=True) as client:
        which = readable(client, session=session)
        state: SessionState = client.call("session/state", which, timeout=ANSWER)
        raw = client.call_raw("session/markRead", {**which, "messageCount": state.message_count}, timeout=ANSWER)
    is_read = msgspec.json.decode(raw, type=MarkReadResult).read
    if is_read or not state.message_count:
        return told(raw, "read" if is_read else "there is nothing to read yet", json=json)
    if json:
        document(raw)
    note("newer messages have come in the meantime, so it stays unread; `loopctl messages` shows them")
    return REFUSED


@click.command()
@click.argument("text")
@session_option
@click.option("--json", "json", is_flag=True, help="Print the method's result.")
@click.pass_context
def rename(ctx: click.Context, text: str, session: str | None, json: bool) -> int:
    """Give the title TEXT to the session that is open for this directory, else to its latest saved one.

    It becomes one line of at most 120 bytes, and is kept until it is changed by you.
    """
    if not text.strip():
        raise click.UsageError("the title is empty")
    with daemon(ctx, start=True) as client:
        raw = client.call_raw("title/rename", {**readable(client, session=session), "text": text}, timeout=ANSWER)
    return told(raw, msgspec.json.decode(raw, type=TitleResult).title.text, json=json)


@click.command()
@click.argument("session")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "json", is_flag=True, help="Print the method's result.")
@click.pass_context
def delete(ctx: click.Context, session: str, yes: bool, json: bool) -> int:
    """Delete SESSION for good: a meta.json, its directory, or an id. One that is open is refused."""
    if not yes and not is_terminal(sys.stdin):
        raise Failure("nobody can be asked here whether to delete it: --yes says so", USAGE)
    with daemon(ctx, start=True) as client:
        path = _closed(client, session)
        if not yes and not click.confirm(f"Delete {visible(_described(client, path))} for good?", err=True):
            note("it is kept")
            return REFUSED
        raw = client.call_raw("session/delete", {"path": path}, timeout=ANSWER)
    return told(raw, f"deleted {path}", json=json)


def _closed(client: Client, session: str) -> str:
    row, path = named(client, session)
    if row is not None or path is None:
        close = f"`loopctl dispose --runtime {row.runtime_id}` closes it" if row else ""
        raise Failure(f"session {session} is open: {close} first", REFUSED)
    return path


def _described(client: Client, path: str) -> str:
    """What the list says of it; it says nothing of a damaged one, or of one in another place."""
    listing: SessionListResult = client.call("session/list", timeout=ANSWER)
    row = next((row for row in listing.sessions if row.path == path), None)
    return f'"{title_of(row)}", {row.message_count} messages, {path}' if row else path
