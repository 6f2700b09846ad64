"""``loopctl prompt``: one prompt, its answer streamed to stdout."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from loop_protocol import paths
from loop_protocol.client import Client, LostConnection
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.methods import PromptResult, QueueResult

from .. import keys
from ..asking import Asking
from ..exits import OK, REFUSED, Failure, refusal
from ..given import PERMISSIONS, approving, content, model_option, run_options
from ..interrupts import Interrupts
from ..opening import Place, Way, Wish, enter
from ..reach import ANSWER, daemon
from ..running import Following, crash_told, followed, left_alone
from ..terminal import note
from ..turn import Turn
from ..view import View
from ..waiting import tell_if_paused_now
from .recover import recovered_first

EFFORTS = ["low", "medium", "high"]


@click.command(context_settings={"allow_extra_args": True})
@click.argument("text", required=False)
@click.option("--new", is_flag=True, help="Start a new session in this directory.")
@click.option("--continue", "latest", is_flag=True, help="Go on with the latest session of this directory.")
@click.option("--no-session", "memory", is_flag=True, help="Keep nothing: no file is written.")
@click.option("--session", "path", metavar="SESSION", help="Go on with this one: a meta.json, its directory, or an id.")
@click.option("--model", metavar="PROVIDER/ID", callback=model_option, help="Set the session's model first.")
@click.option("--effort", type=click.Choice(EFFORTS), help="Set first how much its model reasons.")
@click.option("--permission", type=click.Choice(PERMISSIONS), help="Set what tools may do first.")
@click.option("--queue", is_flag=True, help="Where something else goes on, wait for its turn.")
@run_options
@click.pass_context
def prompt(
    ctx: click.Context,
    text: str | None,
    new: bool,
    latest: bool,
    memory: bool,
    path: str | None,
    model: dict[str, str] | None,
    effort: str | None,
    permission: str | None,
    queue: bool,
    json: bool,
    no_wait: bool,
    timeout: float | None,
    approvals: str | None,
    approval_timeout: float | None,
) -> int:
    """Send TEXT (- or nothing: what comes on stdin) and stream the answer.

    The prompt goes to the session that is open for this directory; where none is, a new one starts. Where that is busy,
    the prompt is refused, or with --queue waits: --timeout counts from now on, and Ctrl-C takes it back.

    What the run may not do by itself is asked here: y, s or n and Enter. With --json or --no-wait nobody is asked here;
    `loopctl approvals` answers from any terminal.
    """
    if ctx.args:
        raise click.UsageError("the text must be one argument: put it in quotes")
    wish = Wish(_way(new=new, latest=latest, memory=memory, path=path), path, model, effort, permission)
    if no_wait and (wish.way is Way.MEMORY or timeout is not None):
        raise click.UsageError("--no-wait goes neither with --no-session nor with --timeout")
    sent = content(text)
    policy = approving(approvals, approval_timeout, here=not json and not no_wait)
    with daemon(ctx, start=True, approvals=policy.asks) as client, keys.missing_told(client):
        place = enter(client, wish)
        if recovered_first(client, place.state):
            place = enter(client, wish)
        of = f" --session {place.state.session_id}" if path else ""
        with _given_back(client, place, wish), crash_told(place.state), Interrupts() as interrupts:
            request = _request(place, sent) | policy.params
            accepted = _queued(client, request) if queue else _accepted(client, request)
            deadline = None if timeout is None else time.monotonic() + timeout
            _say_if_practising(client, place, wish)
            if no_wait:
                left_alone(accepted | {"sessionId": place.state.session_id}, json=json)
                if "itemId" in accepted:
                    tell_if_paused_now(client, place.state.session_id, of)
                return OK
            asking = Asking(client) if policy.asks else None
            if item_id := accepted.get("itemId"):
                turn = Turn(client, place.state.session_id, item_id, of, json, asking, policy.waits)
                following = turn.awaited(interrupts, deadline=deadline)
            else:
                view = View(waits=policy.waits)
                following = Following(client, place.state.session_id, accepted["runId"], json, view, asking)
            return followed(following, place.state, interrupts, deadline=deadline, of=of)


def _way(*, new: bool, latest: bool, memory: bool, path: str | None) -> Way:
    ways = {Way.NEW: new, Way.CONTINUE: latest, Way.MEMORY: memory, Way.PATH: path is not None}
    chosen = [way for way, is_chosen in ways.items() if is_chosen]
    if len(chosen) > 1:
        raise click.UsageError("choose one of --new, --continue, --session, --no-session")
    return chosen[0] if chosen else Way.CURRENT


def _accepted(client: Client, request: dict[str, Any]) -> dict[str, str]:
    """The run, by its name on the wire; as :func:`_queued`."""
    try:
        accepted: PromptResult = client.call("session/prompt", request, timeout=ANSWER)
    except RpcError as error:
        if error.kind not in ("session_busy", "approvals_pending"):
            raise
        refused = refusal(error.kind, error.message, error.data)
        raise Failure(f"{refused}\n`loopctl prompt --queue` waits for its turn.", REFUSED) from None
    return {"runId": accepted.run_id}


def _queued(client: Client, request: dict[str, Any]) -> dict[str, str]:
    """The item that waits, or the run where nothing was in its way."""
    added: QueueResult = client.call("queue/add", request, timeout=ANSWER)
    return {"itemId": added.item_id} if added.run_id is None else {"runId": added.run_id}


def _request(place: Place, content: str) -> dict[str, Any]:
    return {"sessionId": place.state.session_id, "content": content, "requestId": str(uuid.uuid4())}


@contextmanager
def _given_back(client: Client, place: Place, wish: Wish) -> Iterator[None]:
    """A runtime that was made for this one prompt goes with it."""
    try:
        yield
    finally:
        if wish.way is Way.MEMORY:
            with suppress(LostConnection, TimeoutError):
                _dispose(client, place.runtime_id)


def _dispose(client: Client, runtime_id: str) -> None:
    try:
        client.call("runtime/dispose", {"runtimeId": runtime_id}, timeout=ANSWER)
    except RpcError as error:  # gone already, which is what we want; but what others queued there is not ours to drop
        if error.data.get("queued"):
            command = f"`loopctl dispose --runtime {runtime_id} --discard-queue`"
            note(f"others' inputs wait in the session, which stays open therefore; {command} drops them")


def _say_if_practising(client: Client, place: Place, wish: Wish) -> None:
    """A newcomer must know that no real model answers, and what to do about it. Once in a conversation is enough."""
    if place.state.model.provider != "practice" or keys.warn_of(client):
        return
    if wish.model is None and not place.state.live_count:
        note(
            f"{place.state.model} answers, since no real model is configured. Set\n"
            f"OPENAI_API_KEY or ANTHROPIC_API_KEY and run `loopctl daemon restart`,\n"
            f"or name a provider in {paths.config_path(os.environ)}"
        )
