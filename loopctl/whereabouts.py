"""Which runtime or saved session a command means: the one that is named, or the one of the current directory."""

from __future__ import annotations

import math
import os

import click

from loop_protocol.client import Client
from loop_protocol.v1.methods import RuntimeRow, SessionListResult

from .exits import NO_SESSION, USAGE, Failure
from .reach import ANSWER

# What a tool needs to know about the caller. The daemon has a list of its own, and takes nothing else.
_CALLERS_ENVIRONMENT = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "TMPDIR")


def here() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise Failure("the current directory does not exist any more", USAGE) from None


def callers_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name in _CALLERS_ENVIRONMENT or name.startswith("LC_")}


def callers_umask() -> int:
    umask = os.umask(0o077)  # it can only be read by setting it
    os.umask(umask)
    return umask


def runtimes(client: Client) -> list[RuntimeRow]:
    rows: list[RuntimeRow] = client.call("runtime/list", timeout=ANSWER).runtimes
    return rows


def find_open(
    client: Client, *, session: str | None = None, runtime: str | None = None, running: bool = False
) -> RuntimeRow | None:
    """The open runtime with this path or id, else the current directory's default one, else another one of it.

    ``running``: one with a run comes first, also the private one of a ``prompt --no-session`` that goes on just now.
    """
    rows = runtimes(client)
    if runtime is not None:
        return next((row for row in rows if row.runtime_id == runtime), None)
    if session is not None:
        path = _kept_in(session)
        return next((row for row in rows if row.path and os.path.realpath(row.path) == path), None)
    cwd = os.path.realpath(here())
    mine = [
        row for row in rows if os.path.realpath(row.cwd) == cwd and (running or row.default or row.kind != "memory")
    ]
    return min(mine, key=lambda row: (running and not row.running, not row.default, not row.running), default=None)


def _kept_in(session: str) -> str:
    """A one-file session of an earlier version is kept beside that file once it is open."""
    path = os.path.realpath(session)
    return os.path.join(path.removesuffix(".jsonl"), "meta.json") if path.endswith(".jsonl") else path


def require_open(
    client: Client, *, session: str | None = None, runtime: str | None = None, running: bool = False
) -> RuntimeRow:
    row = find_open(client, session=session, runtime=runtime, running=running)
    if row is None:
        what = f"runtime {runtime}" if runtime else f"session {session}" if session else f"session of {here()}"
        raise Failure(f"the {what} is not open", NO_SESSION)
    return row


def readable(client: Client, *, session: str | None) -> dict[str, str]:
    """The parameters that name the session to read: an open one by id, else a saved one by path. Creates none."""
    row = find_open(client, session=session)
    if row is not None:
        return {"sessionId": row.session_id}
    return {"path": os.path.abspath(session) if session else _latest_saved(client, here())}


def _latest_saved(client: Client, cwd: str) -> str:
    found: SessionListResult = client.call("session/list", {"cwd": cwd, "limit": 1}, timeout=ANSWER)
    if found.sessions:
        return found.sessions[0].path
    damaged = "".join(f"\ndamaged: {one.path}: {one.reason}" for one in found.damaged)
    raise Failure(f"no session of {cwd} yet{damaged}", NO_SESSION)


def seconds_option(_ctx: click.Context, _option: click.Parameter, value: float | None) -> float | None:
    """``nan`` passes every range check, and no deadline ever comes."""
    if value is not None and math.isnan(value):
        raise click.BadParameter("expected a number of seconds")
    return value


def model_option(_ctx: click.Context, _option: click.Parameter, value: str | None) -> dict[str, str] | None:
    """``provider/id``; the id may contain slashes."""
    if value is None:
        return None
    provider, slash, id = value.partition("/")
    if not (provider and slash and id):
        raise click.BadParameter("expected PROVIDER/ID; `loopctl models` lists them")
    return {"provider": provider, "id": id}
