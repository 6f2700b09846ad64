"""``loopctl resume``: goes on with work that was stopped or failed, and with a queue that is paused."""

from __future__ import annotations

import time

import click

from loop_protocol.v1.methods import ResumeResult

from .. import keys
from ..asking import Asking
from ..given import approving, run_options
from ..interrupts import Interrupts
from ..opening import reopened
from ..reach import ANSWER, daemon
from ..running import Following, crash_told, followed, left_alone
from ..view import View
from ..whereabouts import session_option
from .recover import recovered_first


@click.command()
@session_option
@run_options
@click.pass_context
def resume(
    ctx: click.Context,
    session: str | None,
    json: bool,
    no_wait: bool,
    timeout: float | None,
    approvals: str | None,
    approval_timeout: float | None,
) -> int:
    """Go on with work that was stopped or failed, and then with the inputs that wait; stream the answer.

    In the session that is open for this directory, else in its latest saved one. No prompt and no tool
    call is repeated.
    """
    if no_wait and timeout is not None:
        raise click.UsageError("--no-wait does not go with --timeout")
    policy = approving(approvals, approval_timeout, here=not json and not no_wait)
    with daemon(ctx, start=True, approvals=policy.asks) as client, keys.missing_told(client):
        place = reopened(client, session)
        if recovered_first(client, place.state, required=True):
            place = reopened(client, session)
        session_id = place.state.session_id
        of = f" --session {session_id}" if session else ""
        with crash_told(place.state), Interrupts() as interrupts:
            resumed: ResumeResult = client.call(
                "session/resume", {"sessionId": session_id} | policy.params, timeout=ANSWER
            )
            if no_wait:
                return left_alone({"runId": resumed.run_id, "sessionId": session_id}, json=json)
            deadline = None if timeout is None else time.monotonic() + timeout
            asking = Asking(client) if policy.asks else None
            following = Following(client, session_id, resumed.run_id, json, View(waits=policy.waits), asking)
            return followed(following, place.state, interrupts, deadline=deadline, of=of)
