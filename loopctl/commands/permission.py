"""``loopctl permission``: what the tools of a session may do by themselves."""

from __future__ import annotations

import click
import msgspec

from loop_protocol.v1.methods import SetPermissionResult
from loop_protocol.v1.types import Permission, SessionState

from ..exits import OK
from ..given import PERMISSIONS
from ..reach import ANSWER, daemon
from ..terminal import document, out_line
from ..whereabouts import require_open, session_option

_MEANS: dict[Permission, str] = {
    "read-only": "reading is free; writing files asks",
    "workspace-write": "reading, and writing in its directory, is free; writing elsewhere asks",
    "danger-full-access": "nothing asks, nothing is kept from its tools",
}


@click.command()
@click.argument("preset", type=click.Choice(PERMISSIONS), required=False, metavar="[PRESET]")
@session_option
@click.option("--runtime", metavar="ID", help="The runtime with this id.")
@click.option("--json", "json", is_flag=True, help="Print the method's result.")
@click.pass_context
def permission(
    ctx: click.Context, preset: Permission | None, session: str | None, runtime: str | None, json: bool
) -> int:
    """Show what the tools of this directory's session may do by themselves; with PRESET, set it.

    \b
    read-only            files are written after asking; commands can change nothing
    workspace-write      files in the session's directory are free; commands can change them
    danger-full-access   nothing asks, and nothing is kept from tools

    It is stored with the session, and refused while a run goes on. A new session begins with [default] permission.
    """
    with daemon(ctx, start=False) as client:
        row = require_open(client, session=session, runtime=runtime)
        which = {"sessionId": row.session_id}
        if preset is None:
            state: SessionState = client.call("session/state", which, timeout=ANSWER)
            raw = msgspec.json.encode(SetPermissionResult(state.permission))
        else:
            raw = client.call_raw("session/setPermission", which | {"permission": preset}, timeout=ANSWER)
    if json:
        document(raw)
    else:
        now = msgspec.json.decode(raw, type=SetPermissionResult).permission
        out_line(f"{now}: {_MEANS[now]}")
    return OK
