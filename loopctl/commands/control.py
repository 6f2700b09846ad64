"""``loopctl stop``, ``abort``, ``flush`` and ``dispose``: what one does to a session that is open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import msgspec

from loop_protocol.v1.types import SessionState

from ..exits import OK
from ..given import discard_option
from ..opening import discarding
from ..reach import ANSWER, daemon
from ..terminal import told
from ..waiting import tell_if_paused, tell_if_paused_now
from ..whereabouts import option_of, require_open, session_option

_Decorator = Callable[[Any], Any]
_WHICH: tuple[_Decorator, ...] = (
    session_option,
    click.option("--runtime", metavar="ID", help="The runtime with this id."),
    click.option("--json", "json", is_flag=True, help="Print the method's result."),
    click.pass_context,
)


def _options(command: Any) -> Any:
    for option in reversed(_WHICH):
        command = option(command)
    return command


@click.command()
@_options
def stop(ctx: click.Context, session: str | None, runtime: str | None, json: bool) -> int:
    """Stop the run of this directory's session; its history so far is kept."""
    with daemon(ctx, start=False) as client:
        row = require_open(client, session=session, runtime=runtime, running=True)
        state: SessionState = client.call("session/state", {"sessionId": row.session_id}, timeout=ANSWER)
        if state.run is None:
            told(b'{"stopped":false}', "nothing is running", json=json)
            tell_if_paused(state.queue, option_of(row))
            return OK
        request = {"sessionId": row.session_id, "runId": state.run.run_id}
        raw = client.call_raw("session/stop", request, timeout=ANSWER)
        told(raw, "stopped" if _is_true(raw, "stopped") else "it was over already", json=json)
        tell_if_paused_now(client, row.session_id, option_of(row))  # it does not start by itself
        return OK


@click.command()
@_options
def abort(ctx: click.Context, session: str | None, runtime: str | None, json: bool) -> int:
    """Cancel the run and everything else that goes on in this directory's session."""
    with daemon(ctx, start=False) as client:
        row = require_open(client, session=session, runtime=runtime, running=True)
        raw = client.call_raw("session/abort", {"sessionId": row.session_id}, timeout=ANSWER)
        told(raw, "aborted" if _is_true(raw, "stopped") else "nothing was running", json=json)
        tell_if_paused_now(client, row.session_id, option_of(row))  # it does not start by itself
        return OK


@click.command()
@_options
def flush(ctx: click.Context, session: str | None, runtime: str | None, json: bool) -> int:
    """Write the conversation that could not be saved; nothing is run again."""
    with daemon(ctx, start=False) as client:
        row = require_open(client, session=session, runtime=runtime)
        raw = client.call_raw("session/flush", {"sessionId": row.session_id}, timeout=ANSWER)
    return told(raw, "saved" if _is_true(raw, "flushed") else "nothing was unsaved", json=json)


@click.command()
@discard_option
@_options
def dispose(ctx: click.Context, session: str | None, runtime: str | None, json: bool, discard_queue: bool) -> int:
    """Close this directory's session: its run is stopped, everything is saved, and the runtime is given back.

    Refused while something is unsaved, or an input waits. The session can be opened again.
    """
    with daemon(ctx, start=False) as client:
        row = require_open(client, session=session, runtime=runtime)
        raw = client.call_raw("runtime/dispose", discarding(row.runtime_id, discard_queue), timeout=ANSWER)
    return told(raw, f"closed {row.path or row.session_id}", json=json)


def _is_true(raw: bytes, name: str) -> bool:
    return bool(msgspec.json.decode(raw).get(name))
