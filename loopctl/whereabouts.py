"""Which runtime or saved session a command means: the one that is named, or the one of the current directory.

A name is the path of a ``meta.json``, the directory that it is in, or a whole id. On the wire it is a path or an id of
something open: the daemon searches nothing (S-2).
"""

from __future__ import annotations

import os

import click

from loop_protocol.client import Client
from loop_protocol.v1.methods import RuntimeRow, SessionListResult
from loop_protocol.v1.types import SessionRow

from .exits import NO_SESSION, USAGE, Failure
from .reach import ANSWER
from .view import title_of

session_option = click.option(
    "--session", metavar="SESSION", help="The session of this meta.json, of its directory, or with this id."
)
CANDIDATES = 5

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
    """The open runtime that is named, else the current directory's default one, else another one of it.

    ``running``: one with a run comes first, also the private one of a ``prompt --no-session`` that goes on just now.
    """
    if session is not None:
        return named(client, session)[0]
    rows = runtimes(client)
    if runtime is not None:
        return next((row for row in rows if row.runtime_id == runtime), None)
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
        raise Failure(f"the {what} is not open; `loopctl runtimes` lists what is", NO_SESSION)
    return row


def named(client: Client, session: str) -> tuple[RuntimeRow | None, str | None]:
    """What has the session with this name open, if anything, and its path; one in memory has none."""
    rows = runtimes(client)
    if not _is_path(session):
        rows = [row for row in rows if row.session_id == session]
        path = rows[0].path if rows and rows[0].path is None else _path_of_id(client, session, rows)
    else:
        path = _exact(session)
    same = None if path is None else _kept_in(path)
    return next((row for row in rows if same == (row.path and os.path.realpath(row.path))), None), path


def readable(client: Client, *, session: str | None) -> dict[str, str]:
    """The parameters that name the session to read: an open one by id, else a saved one by path. Creates none."""
    found = existing(client, session=session)
    return {"path": found} if isinstance(found, str) else {"sessionId": found.session_id}


def existing(client: Client, *, session: str | None) -> RuntimeRow | str:
    """The session that is named, else the one of this directory, else its latest saved one: where it is open, else its
    path."""
    row, path = named(client, session) if session is not None else (find_open(client), None)
    return row or path or _latest_saved(client, here())


def option_of(row: RuntimeRow) -> str:
    """What a command needs to be told to find that session from here; nothing, if it does by itself."""
    found = row.default and os.path.realpath(row.cwd) == os.path.realpath(here())
    return "" if found else f" --session {row.session_id}"


def _is_path(session: str) -> bool:
    """Ids have no slash; somebody who is in the directory may name what lies there without one."""
    return "/" in session or os.path.lexists(session)


def _exact(session: str) -> str:
    path = os.path.abspath(session)
    return os.path.join(path, "meta.json") if os.path.isdir(path) else path


def _path_of_id(client: Client, id: str, opened: list[RuntimeRow]) -> str:
    """A draft is open only; a copied directory has the id of its original, and then only a path says which."""
    saved: SessionListResult = client.call("session/list", timeout=ANSWER)
    mine = [row.path for row in saved.sessions if row.session_id == id]
    mine += [one.path for one in saved.damaged if os.path.basename(os.path.dirname(one.path)) == id]
    paths = sorted({row.path for row in opened if row.path} | set(mine))
    if len(paths) == 1:
        return paths[0]
    if paths:
        raise Failure("\n".join([f"several sessions have the id {id}; name one by its path:", *paths]), USAGE)
    raise Failure(f"no session {id}: there is no such path, and no session has this id{_near(id, saved)}", NO_SESSION)


def _near(id: str, saved: SessionListResult) -> str:
    """What may have been meant: ids that begin so, else the sessions of this directory."""
    meant = [row for row in saved.sessions if row.session_id.startswith(id)] or _of_cwd(saved.sessions)
    lines = [f"{row.session_id}  {title_of(row)}" for row in meant[:CANDIDATES]]
    return "\n".join(["; there are", *lines]) if lines else "; `loopctl sessions --all` lists them"


def _of_cwd(rows: list[SessionRow]) -> list[SessionRow]:
    cwd = os.path.realpath(here())
    return [row for row in rows if row.cwd == cwd]


def _latest_saved(client: Client, cwd: str) -> str:
    found: SessionListResult = client.call("session/list", {"cwd": cwd, "limit": 1}, timeout=ANSWER)
    if found.sessions:
        return found.sessions[0].path
    damaged = "".join(f"\ndamaged: {one.path}: {one.reason}" for one in found.damaged)
    raise Failure(f"no session of {cwd} yet{damaged}", NO_SESSION)
