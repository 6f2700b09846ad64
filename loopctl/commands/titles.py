"""``loopctl title``: what a session is called, by hand or by a model."""

from __future__ import annotations

import click
import msgspec

from loop_protocol.v1.methods import TitleCancelResult, TitleResult, TitleWaitResult
from loop_protocol.v1.types import SessionState

from ..exits import OK, RUN_FAILED
from ..reach import ANSWER, daemon
from ..terminal import document, note, out_line, raw_option, told
from ..view import title_of
from ..whereabouts import readable, require_open, session_option


@click.command()
@click.argument("text", required=False)
@click.option("--refresh", "ask", flag_value="refresh", help="Make it anew of what was said, also instead of your own.")
@click.option("--cancel", "ask", flag_value="cancel", help="Stop making one; a run goes on.")
@click.option("--wait", "ask", flag_value="wait", help="Wait until none is being made any more.")
@session_option
@click.option("--json", "json", is_flag=True, help="Print the method's result.")
@raw_option
@click.pass_context
def title(ctx: click.Context, text: str | None, ask: str | None, session: str | None, json: bool) -> int:
    """Show the title of the session that is open for this directory, else of its latest saved one; with TEXT, set it.

    A title by hand is kept until you change it. A model makes one where the configuration says so ([default] title);
    --refresh, --cancel and --wait are for a session that is open. Exit code 1 if no title came.
    """
    if text is not None and (ask is not None or not text.strip()):
        raise click.UsageError("the title is empty" if ask is None else f"--{ask} takes no text")
    with daemon(ctx, start=ask is None) as client:
        if text is not None:
            raw = client.call_raw("title/rename", {**readable(client, session=session), "text": text}, timeout=ANSWER)
            return told(raw, msgspec.json.decode(raw, type=TitleResult).title.text, json=json)
        if ask is None:
            state: SessionState = client.call("session/state", readable(client, session=session), timeout=ANSWER)
            return _show(TitleWaitResult(title=state.title, title_error=state.title_error), title_of(state), json=json)
        row = require_open(client, session=session)
        # A model may take its time; Ctrl-C ends the waiting, not the work.
        raw = client.call_raw(f"title/{ask}", {"sessionId": row.session_id}, timeout=None)
    match ask:
        case "cancel":
            cancelled = msgspec.json.decode(raw, type=TitleCancelResult).cancelled
            return told(raw, "cancelled" if cancelled else "no title was being made", json=json)
        case "refresh":
            return told(raw, msgspec.json.decode(raw, type=TitleResult).title.text, json=json)
    waited = msgspec.json.decode(raw, type=TitleWaitResult)
    _show(waited, waited.title.text if waited.title else "New session", json=json)
    return RUN_FAILED if waited.title_error else OK


def _show(found: TitleWaitResult, text: str, *, json: bool) -> int:
    if json:
        document(msgspec.json.encode(found))
    else:
        out_line(text)
    if found.title_error is not None:
        note(f"no title came by itself: {found.title_error.message}")
    return OK
