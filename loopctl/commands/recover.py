"""``loopctl recover``: takes over what a crash left of a run; and the words that other commands have for it."""

from __future__ import annotations

import os
import sys

import click
import msgspec

from loop_protocol.client import Client
from loop_protocol.v1.methods import RecoverResult, RuntimeOpenResult
from loop_protocol.v1.types import SessionState

from ..exits import OK, RUN_FAILED, Failure
from ..opening import callers
from ..reach import ANSWER, daemon
from ..terminal import clock, document, is_terminal, note, out_line
from ..whereabouts import here, readable, session_option


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
        session_id = which.get("sessionId") or _opened(client, which["path"], beside=session is not None)
        raw = client.call_raw("session/recover", {"sessionId": session_id}, timeout=ANSWER)
    if json:
        document(raw)
    else:
        taken = msgspec.json.decode(raw, type=RecoverResult).messages
        out_line(f"{counted(taken)} taken over; `loopctl messages` shows them")
    return OK


def _opened(client: Client, path: str, *, beside: bool) -> str:
    """Its id. ``beside``: whatever is open for this directory stays the one that a prompt here finds."""
    request = {"cwd": here(), **callers(), "session": {"kind": "open", "path": os.path.abspath(path)}}
    opened: RuntimeOpenResult = client.call(
        "runtime/open", request | ({"runtimeId": "new"} if beside else {}), timeout=ANSWER
    )
    return opened.session_id


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


def recovered_first(client: Client, state: SessionState) -> bool:
    """Before a prompt leaves behind what a crash cut off, a person is asked; a script is told."""
    if state.recoverable is None:
        return False
    if not (is_terminal(sys.stdin) and is_terminal(sys.stderr)):
        left = counted(state.recoverable.messages)
        note(f"a run was cut off by a crash; this prompt leaves {left} of it behind, in run.journal.old")
        return False
    note(str(offered(state)))
    if not click.confirm("loopctl: take them over first?", default=True, err=True):
        return False
    client.call("session/recover", {"sessionId": state.session_id}, timeout=ANSWER)
    return True
