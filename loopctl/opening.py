"""Finds the session that a prompt goes to: opens one, or joins the one that is open already."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from typing import Any

from msgspec.structs import replace

from loop_protocol.client import Client
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.methods import AttachResult, ReplaceResult, RuntimeOpenResult, SessionListResult
from loop_protocol.v1.types import ModelRef, SessionState

from .reach import ANSWER
from .terminal import note
from .whereabouts import callers_environment, callers_umask, here

# The runtime that a refusal names may be gone when we join it, and another one may be there then.
TRIES = 5


class Way(Enum):
    """Which session: the current one of the workspace, or what an option says."""

    CURRENT = "current"
    NEW = "new"
    CONTINUE = "continue"
    PATH = "path"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line asked for."""

    way: Way
    path: str | None
    model: dict[str, str] | None
    effort: str | None
    permission: str | None


@dataclass(frozen=True, slots=True)
class Place:
    """An attached runtime and its session, with model and permission as wished."""

    runtime_id: str
    state: SessionState


def enter(client: Client, wish: Wish) -> Place:
    """Open or join, set what was wished, attach. Raises :class:`RpcError`."""
    for _ in range(TRIES - 1):
        try:
            return _enter(client, wish)
        except RpcError as error:
            if error.kind not in ("runtime_not_found", "session_closed", "replacing"):
                raise
    return _enter(client, wish)


def _enter(client: Client, wish: Wish) -> Place:
    runtime_id = _open_or_join(client, wish)
    attached: AttachResult = client.call("runtime/attach", {"runtimeId": runtime_id}, timeout=ANSWER)
    if attached.state is None:  # only an answer to `since` has none
        raise RpcError("internal", "the daemon attached us without a snapshot")
    _adjust(client, attached.state, wish)
    return Place(runtime_id, attached.state)


def _open_or_join(client: Client, wish: Wish) -> str:
    """The runtime's id."""
    try:
        opened: RuntimeOpenResult = client.call("runtime/open", _request(wish), timeout=ANSWER)
    except RpcError as error:
        other = error.data.get("runtimeId")
        if error.kind not in ("conflict", "session_locked") or not isinstance(other, str):
            raise
        return _renewed(client, other) if wish.way is Way.NEW else other
    if opened.created:
        _say_if_unexpected(client, wish, opened.state)
    return opened.runtime_id


def _say_if_unexpected(client: Client, wish: Wish, state: SessionState) -> None:
    """Somebody who expects to go on with a conversation must not find out by the answer that it is another one."""
    if wish.way is Way.CONTINUE and not state.live_count:
        note("no session to go on with here: this is a new one")
    if wish.way is Way.CURRENT:
        saved: SessionListResult = client.call("session/list", {"cwd": here(), "limit": 2}, timeout=ANSWER)
        if len(saved.sessions) > 1:
            note("a new session, since none is open here; --continue goes on with the latest saved one")


def _renewed(client: Client, runtime_id: str) -> str:
    request = {"runtimeId": runtime_id, **_caller()}
    replaced: ReplaceResult = client.call("runtime/newSession", request, timeout=ANSWER)
    return replaced.runtime_id


def _caller() -> dict[str, Any]:
    return {"env": callers_environment(), "umask": callers_umask()}


def _request(wish: Wish) -> dict[str, Any]:
    request: dict[str, Any] = {"cwd": here(), **_caller()}
    match wish.way:
        case Way.CURRENT | Way.NEW:
            request["session"] = {"kind": "new"}
        case Way.CONTINUE:
            request["session"] = {"kind": "continue"}
        case Way.MEMORY:
            request |= {"session": {"kind": "memory"}, "runtimeId": "new"}
        case Way.PATH:
            request |= {"session": {"kind": "open", "path": os.path.abspath(wish.path or "")}, "runtimeId": "new"}
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
