"""``loopctl recover``: takes over what a crash left of a run; and the words that other commands have for it."""

from __future__ import annotations

import sys

import click
import msgspec

from loop_protocol.client import Client
from loop_protocol.v1.methods import RecoverResult
from loop_protocol.v1.types import SessionState

from ..exits import OK, REFUSED, RUN_FAILED, Failure
from ..opening import open_saved
from ..reach import ANSWER, daemon
from ..terminal import clock, document, is_terminal, note, out_line
from ..whereabouts import readable, session_option


@click.command()
@session_option
@click.option("--json", "json", is_flag=True, help="Print the method's result.")
@click.pass_context
def recover(ctx: click.Context, session: str | None, json: bool) -> int:
    """Take over the messages of a run that a crash cut off.

    In the session that is open for this directory, else in its latest saved one, which is open afterwards.
    """
    with daemon(ctx, start=True) as client:
        which = readable(client, session=session)
        state: SessionState = client.call("session/state", which, timeout=ANSWER)
        if state.recoverable is None:
            raise Failure(f"no crash cut off a run of {state.path or state.session_id}", RUN_FAILED)
        beside = session is not None
        session_id = which.get("sessionId") or open_saved(client, which["path"], beside=beside).session_id
        raw = client.call_raw("session/recover", {"sessionId": session_id}, timeout=ANSWER)
    if json:
        document(raw)
    else:
        taken = msgspec.json.decode(raw, type=RecoverResult).messages
        of = f" --session {session_id}" if beside else ""
        out_line(f"{counted(taken)} taken over; `loopctl messages{of}` shows them, `loopctl resume{of}` goes on")
    return OK


def counted(messages: int) -> str:
    return "1 message" if messages == 1 else f"{messages} messages"


def offered(state: SessionState) -> str | None:
    """What is recoverable of a session, and how."""
    if state.recoverable is None:
        return None
    run = state.recoverable
    return (
        f"{counted(run.messages)} of a run of {clock(run.started_at)}, which a crash cut off: "
        f"`loopctl recover --session {state.session_id}` takes them over; a new prompt leaves them behind"
    )


def recovered_first(client: Client, state: SessionState, *, required: bool = False) -> bool:
    """Before a prompt leaves behind what a crash cut off, a person is asked; a script is told. ``required``: what goes
    on with that work cannot leave it behind, and is refused. Nothing is taken over unasked (S-26)."""
    if state.recoverable is None:
        return False
    left = counted(state.recoverable.messages)
    if is_terminal(sys.stdin) and is_terminal(sys.stderr):
        note(str(offered(state)))
        if click.confirm("loopctl: take them over first?", default=True, err=True):
            client.call("session/recover", {"sessionId": state.session_id}, timeout=ANSWER)
            return True
    elif not required:
        note(f"a run was cut off by a crash; this prompt leaves {left} of it behind, in run.journal.old")
    if required:
        command = f"`loopctl recover --session {state.session_id}`"
        raise Failure(f"a run was cut off by a crash, and {left} of it must be taken over first:\n{command}", REFUSED)
    return False
