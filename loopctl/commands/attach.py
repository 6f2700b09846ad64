"""``loopctl attach``: watches a session as it goes on, also what other clients start."""

from __future__ import annotations

import click

from loop_protocol.client import Client
from loop_protocol.v1.events import SessionClosed
from loop_protocol.v1.methods import AttachResult
from loop_protocol.v1.types import SessionState, TextBlock

from ..exits import INTERRUPTED, OK
from ..interrupts import Interrupts
from ..reach import ANSWER, daemon
from ..terminal import note, out_line, raw_option
from ..view import View, title_of
from ..waiting import QueueNews, described
from ..whereabouts import option_of, require_open, session_option


@click.command()
@session_option
@click.option("--runtime", metavar="ID", help="The runtime with this id.")
@click.option("--since", type=click.IntRange(min=0), metavar="SEQ", help="Begin after this event, if it is remembered.")
@click.option("--json", "json", is_flag=True, help="Print the events, one JSON object per line.")
@raw_option
@click.pass_context
def attach(ctx: click.Context, session: str | None, runtime: str | None, since: int | None, json: bool) -> int:
    """Watch the session of this directory until Ctrl-C. What goes on there is not touched."""
    with daemon(ctx, start=False) as client, Interrupts() as interrupts:
        row = require_open(client, session=session, runtime=runtime, running=True)
        view = View(prompts=True)
        request = {"runtimeId": row.runtime_id} | ({} if since is None else {"since": since})
        attached: AttachResult = client.call("runtime/attach", request, timeout=ANSWER)
        of = option_of(row)
        queue = QueueNews(attached.state.queue if attached.state else None, of)
        if attached.state is not None and not json:
            _show_state(view, attached.state, of)
        try:
            return _watch(client, view, queue, interrupts, json=json)
        finally:
            view.end_line()


def _show_state(view: View, state: SessionState, of: str) -> None:
    where = state.path or f"session {state.session_id} (in memory)"
    note(title_of(state))
    if state.title_error is not None:
        note(f"no title came by itself: {state.title_error.message}")
    note(f"{where}: {state.live_count} messages, {state.model}, {state.permission}, {state.operation or 'idle'}")
    if waiting := described(state.queue, of):
        note(f"{waiting}; `loopctl queue{of}` shows what waits")
    for request in state.approvals:
        view.tell_request(request)
    if state.draft is not None:
        said = "".join(block.text for block in state.draft.content if isinstance(block, TextBlock))
        view.continue_message(state.draft.message_id, said)


def _watch(client: Client, view: View, queue: QueueNews, interrupts: Interrupts, *, json: bool) -> int:
    while not interrupts.asked:
        notification = client.next_notification(timeout=0)
        if notification is None:
            interrupts.wait(client, timeout=None)
            continue
        if json:
            out_line(notification.raw.decode())
        elif notification.params is not None:
            for line in queue.of(notification.params):
                view.aside(line)
            view.show(notification.params)
        if notification.params is not None and isinstance(notification.params.event, SessionClosed):
            return OK
    return INTERRUPTED
