"""The session that a prompt goes to, and the seat of this directory: opened, joined, or given another session."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from loop_protocol.client import Client
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.methods import AttachResult, RuntimeOpenResult, RuntimeRow, SessionListResult
from loop_protocol.v1.types import ModelRef, SessionRow, SessionState

from .exits import REFUSED, USAGE, Failure
from .reach import ANSWER
from .terminal import note
from .whereabouts import callers_environment, callers_umask, existing, find_open, here, named

# The runtime that a refusal names may be gone when we join it, and another one may be there then.
TRIES = 5
T = TypeVar("T")
_SEAT_TAKEN = """\
that session belongs to another directory, which has one open already: run `loopctl switch`
there, or go on with `loopctl prompt --session`"""


class Way(Enum):
    """Which session: the current one of the workspace, or what an option says."""

    CURRENT = "current"
    NEW = "new"
    CONTINUE = "continue"
    PATH = "path"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line asked for. ``path``: the session's name, as :mod:`.whereabouts` takes it."""

    way: Way
    path: str | None = None
    model: dict[str, str] | None = None
    effort: str | None = None
    permission: str | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """An attached runtime and its session, with model and permission as wished."""

    runtime_id: str
    state: SessionState


def enter(client: Client, wish: Wish) -> Place:
    """Open or join, set what was wished, attach. Raises :class:`RpcError`."""
    return tried(lambda: _enter(client, wish))


def reopened(client: Client, session: str | None) -> Place:
    """The session that is named, else the one of this directory, else its latest saved one, open and attached. None is
    made. Raises :class:`RpcError`."""
    return tried(lambda: _attached(client, _reopened(client, session)))


def _reopened(client: Client, session: str | None) -> str:
    found = existing(client, session=session)
    if isinstance(found, str):
        return open_saved(client, found, beside=session is not None).runtime_id
    return found.runtime_id


def open_saved(client: Client, path: str, *, beside: bool) -> RuntimeOpenResult:
    """``beside``: whatever is open for this directory stays the one that a prompt here finds."""
    request = {"cwd": here(), **callers(), "session": {"kind": "open", "path": os.path.abspath(path)}}
    request |= {"runtimeId": "new"} if beside else {}
    opened: RuntimeOpenResult = client.call("runtime/open", request, timeout=ANSWER)
    return opened


def tried(attempt: Callable[[], T]) -> T:
    for _ in range(TRIES - 1):
        try:
            return attempt()
        except RpcError as error:
            if error.kind not in ("runtime_not_found", "session_closed", "replacing"):
                raise
    return attempt()


def _enter(client: Client, wish: Wish) -> Place:
    place = _attached(client, _open_or_join(client, wish))
    _adjust(client, place.state, wish)
    return place


def _attached(client: Client, runtime_id: str) -> Place:
    attached: AttachResult = client.call("runtime/attach", {"runtimeId": runtime_id}, timeout=ANSWER)
    if attached.state is None:  # only an answer to `since` has none
        raise RpcError("internal", "the daemon attached us without a snapshot")
    return Place(runtime_id, attached.state)


def _open_or_join(client: Client, wish: Wish) -> str:
    """The runtime's id."""
    if wish.way is Way.NEW:
        return msgspec.json.decode(renew(client, wish), type=RuntimeOpenResult).runtime_id
    row, path = named(client, wish.path) if wish.path is not None else (None, None)
    if row is not None:
        return row.runtime_id
    try:
        opened: RuntimeOpenResult = client.call("runtime/open", _request(wish, path), timeout=ANSWER)
    except RpcError as error:
        return _in_the_way(error)
    if opened.created:
        _say_if_unexpected(client, wish, opened.state)
    return opened.runtime_id


def renew(client: Client, wish: Wish, *, discard_queue: bool = False) -> bytes:
    """An empty session in the seat of this directory. The result of the method that made it: the two have the same
    fields, as far as an opening has them. ``discard_queue``: also over inputs that wait, which are lost then."""
    try:
        return client.call_raw("runtime/open", _request(wish, None), timeout=ANSWER)
    except RpcError as error:
        request = {**discarding(_in_the_way(error), discard_queue), **callers()}
        return client.call_raw("runtime/newSession", request, timeout=ANSWER)


def _in_the_way(error: RpcError) -> str:
    """The runtime that a refusal names, to be joined."""
    other = error.data.get("runtimeId")
    if error.kind not in ("conflict", "session_locked") or not isinstance(other, str):
        raise error
    return other


def discarding(runtime_id: str, discard_queue: bool) -> dict[str, Any]:
    """The parameters of what takes a session away: with inputs that wait only where that was asked for."""
    return {"runtimeId": runtime_id} | ({"discardQueue": True} if discard_queue else {})


def switch(client: Client, session: str, *, discard_queue: bool) -> bytes:
    """The named session in the seat of this directory, which is made if there is none; as :func:`renew`."""
    row, path = named(client, session)
    seat = find_open(client)
    if seat is not None and not seat.default:
        seat = None
    if path is None:
        raise Failure(f"session {session} is in memory only: its runtime alone can have it", USAGE)
    if row is not None and (seat is None or row.runtime_id != seat.runtime_id):
        raise _open_elsewhere(row)
    try:
        if seat is not None:
            request = {**discarding(seat.runtime_id, discard_queue), "path": path, **callers()}
            return client.call_raw("runtime/switchSession", request, timeout=ANSWER)
        request = {"cwd": here(), **callers(), "session": {"kind": "open", "path": path}}
        return client.call_raw("runtime/open", request, timeout=ANSWER)
    except RpcError as error:
        if error.kind != "conflict" or "queued" in error.data:
            raise
        raise Failure(_SEAT_TAKEN, REFUSED) from None


def _open_elsewhere(row: RuntimeRow) -> Failure:
    return Failure(
        f"it is open already, in runtime {row.runtime_id} of {row.cwd}: `loopctl prompt --session` goes on with it\n"
        f"there, `loopctl dispose --runtime {row.runtime_id}` closes it",
        REFUSED,
    )


def _say_if_unexpected(client: Client, wish: Wish, state: SessionState) -> None:
    """Somebody who expects to go on with a conversation must not find out by the answer that it is another one."""
    if wish.way is Way.CONTINUE and not state.live_count:
        note("no session to go on with here: this is a new one")
    if wish.way is Way.CURRENT:
        saved: SessionListResult = client.call("session/list", {"cwd": here(), "limit": 2}, timeout=ANSWER)
        older = [row for row in saved.sessions if row.session_id != state.session_id]
        if older:
            note("a new session, since none is open here; --continue goes on with the latest saved one")
            _say_if_cut_off(client, older[0])


def _say_if_cut_off(client: Client, session: SessionRow) -> None:
    """After a crash a prompt here is in a new session, where nothing speaks of the run that was cut off (S-26)."""
    with suppress(RpcError):  # a damaged one; `loopctl sessions` names it
        state: SessionState = client.call("session/state", {"path": session.path}, timeout=ANSWER)
        if state.recoverable is not None:
            note("a crash cut off the last run of that one, and this takes over what is left of it:")
            note(f"`loopctl recover --session {state.session_id}`")


def callers() -> dict[str, Any]:
    return {"env": callers_environment(), "umask": callers_umask()}


def _request(wish: Wish, path: str | None) -> dict[str, Any]:
    request: dict[str, Any] = {"cwd": here(), **callers()}
    match wish.way:
        case Way.CURRENT | Way.NEW:
            request["session"] = {"kind": "new"}
        case Way.CONTINUE:
            request["session"] = {"kind": "continue"}
        case Way.MEMORY:
            request |= {"session": {"kind": "memory"}, "runtimeId": "new"}
        case Way.PATH:
            request |= {"session": {"kind": "open", "path": path}, "runtimeId": "new"}
    if wish.model:
        request["model"] = wish.model | ({"effort": wish.effort} if wish.effort else {})
    if wish.permission:
        request["permission"] = wish.permission
    return request


def _adjust(client: Client, state: SessionState, wish: Wish) -> None:
    """A session that was open already may have another model or permission than the one asked for."""
    session = {"sessionId": state.session_id}
    model = _wished_model(state.model, wish)
    if model != state.model:
        client.call("session/setModel", session | {"model": model}, timeout=ANSWER)
        note(f"the session's model is now {_described(model)} (it was {_described(state.model)})")
    if wish.permission and state.permission != wish.permission:
        client.call("session/setPermission", session | {"permission": wish.permission}, timeout=ANSWER)
        note(f"the session's permission is now {wish.permission} (it was {state.permission})")


def _wished_model(current: ModelRef, wish: Wish) -> ModelRef:
    """An effort stays with its model until another is asked for."""
    named = ModelRef(**wish.model) if wish.model else ModelRef(current.provider, current.id)
    same = (named.provider, named.id) == (current.provider, current.id)
    return replace(named, effort=wish.effort or (current.effort if same else None))


def _described(model: ModelRef) -> str:
    return f"{model} with {model.effort} effort" if model.effort else str(model)
