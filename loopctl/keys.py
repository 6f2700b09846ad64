"""Keys that this shell has and the running daemon lacks, which got its environment when it was started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from loop_protocol.client import Client
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.methods import ModelListResult, ModelRow

from .reach import ANSWER
from .terminal import note


def lacking(rows: Sequence[ModelRow]) -> dict[str, str]:
    """By the variable, whose key it is. Values are looked at only for being there."""
    return {row.key_env: row.provider for row in rows if row.key_env and os.environ.get(row.key_env)}


def warn(rows: Sequence[ModelRow]) -> bool:
    """Say what the daemon lacks and how it gets it; whether there was anything to say."""
    found = lacking(rows)
    for variable, provider in found.items():
        note(
            f"{variable} is set here, but not in the running daemon, which cannot use {provider} without it: run\n"
            "`loopctl daemon restart`, then the same again. A daemon of systemd gets it with\n"
            f"`systemctl --user import-environment {variable}` before"
        )
    return bool(found)


def warn_of(client: Client) -> bool:
    """The same, for what the daemon has now. Nothing fails because that cannot be had."""
    try:
        listed: ModelListResult = client.call("model/list", timeout=ANSWER)
    except RpcError:
        return False
    return warn(listed.models)


@contextmanager
def missing_told(client: Client) -> Iterator[None]:
    """A refused model may only need the key that is here."""
    try:
        yield
    except RpcError as error:
        if error.kind == "model_unavailable":
            warn_of(client)
        raise
