"""A connection for a command: found, or made by starting the daemon; its errors become exit codes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import click

from loop_protocol import paths
from loop_protocol.client import Client, LostConnection, Unreachable
from loop_protocol.v1.errors import RpcError

from .exits import RUN_FAILED, UNREACHABLE, Failure, refusal

# An answer that does not wait for work. Beyond it the daemon hangs, and saying so is better than hanging with it.
ANSWER = 30.0


def socket_of(ctx: click.Context) -> str:
    chosen = ctx.find_object(str)
    return os.path.abspath(chosen) if chosen else paths.socket_path(os.environ)


@contextmanager
def daemon(ctx: click.Context, *, start: bool, approvals: bool = False) -> Iterator[Client]:
    """The daemon's connection. ``start``: start one if none is there; otherwise that is exit code 69. ``approvals``: a
    person is here, who is asked."""
    with translated(), _connected(socket_of(ctx), start, approvals) as client:
        yield client


def _connected(socket: str, start: bool, approvals: bool) -> Client:
    try:
        return Client.connect(socket, name="loopctl", approvals=approvals)
    except Unreachable as unreachable:
        if not unreachable.absent:
            raise
        if not start:
            raise Failure(f"{unreachable}; `loopctl daemon start` starts one", UNREACHABLE) from None
    from .launch import start as start_daemon

    return start_daemon(socket, approvals=approvals)[0]


@contextmanager
def translated() -> Iterator[None]:
    """What the client raises, as a line for people and an exit code."""
    try:
        yield
    except RpcError as error:
        raise refusal(error.kind, error.message, error.data) from None
    except (Unreachable, paths.PathProblem) as error:
        raise Failure(str(error), UNREACHABLE) from None
    except LostConnection as error:
        raise Failure(
            f"{error}. What was saved of the conversation is kept: `loopctl messages` shows it.", UNREACHABLE
        ) from None
    except TimeoutError as error:
        raise Failure(f"{error}: the daemon hangs; `loopctl daemon log` may say why", RUN_FAILED) from None
