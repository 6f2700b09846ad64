"""``loopctl models``: what can be chosen, and why the rest cannot."""

from __future__ import annotations

import click
import msgspec

from loop_protocol.v1.methods import ModelListResult, ModelRow

from .. import keys
from ..exits import OK
from ..reach import ANSWER, daemon
from ..terminal import document, table


@click.command()
@click.option("--json", "json", is_flag=True, help="Print the method's result.")
@click.pass_context
def models(ctx: click.Context, json: bool) -> int:
    """List the models that can be chosen; * marks what a new session gets."""
    with daemon(ctx, start=True) as client:
        raw = client.call_raw("model/list", timeout=ANSWER)
    rows = msgspec.json.decode(raw, type=ModelListResult).models
    if json:
        document(raw)
    else:
        table([["", "MODEL", "CONTEXT", "INPUT", "EFFORT", ""], *map(_row, rows)])
    keys.warn(rows)
    return OK


def _row(model: ModelRow) -> list[str]:
    why = "" if model.usable else f"not usable: {model.reason or 'unknown'}"
    context, effort = str(model.context_window or ""), "yes" if model.reasoning else ""
    name = f"{model.provider}/{model.id}"
    return ["*" if model.default else "", name, context, ", ".join(model.input), effort, why]
