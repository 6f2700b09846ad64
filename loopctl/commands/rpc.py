"""``loopctl rpc``: any method of the protocol, as the daemon answers it."""

from __future__ import annotations

import sys

import click
import msgspec

from loop_protocol.v1.errors import RpcError

from ..exits import OK, of_kind
from ..reach import daemon
from ..terminal import document, err, raw_option


@click.command()
@click.argument("method")
@click.argument("params", required=False, metavar="[JSON]")
@click.option("--json", is_flag=True, expose_value=False, help="Accepted for symmetry: the output is JSON anyway.")
@raw_option
@click.pass_context
def rpc(ctx: click.Context, method: str, params: str | None) -> int:
    """Call METHOD with the parameters JSON (- for stdin) and print its result; an error goes to stderr as JSON."""
    parsed = _parsed(sys.stdin.read() if params == "-" else params)
    with daemon(ctx, start=True) as client:
        try:
            document(client.call_raw(method, parsed))
        except RpcError as error:
            wire = {"code": error.code, "message": error.message, "data": error.data}
            err(msgspec.json.encode(wire).decode() + "\n")
            return of_kind(error.kind)
    return OK


def _parsed(params: str | None) -> msgspec.Raw | None:
    if params is None:
        return None
    try:
        msgspec.json.decode(params)
    except (msgspec.DecodeError, RecursionError) as error:
        raise click.BadParameter(f"not JSON: {error}", param_hint="JSON") from None
    return msgspec.Raw(params)
