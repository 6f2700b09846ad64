"""``loopctl prompt``: one prompt, its answer streamed to stdout."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import click
import msgspec

from loop_protocol import paths
from loop_protocol.client import Client, LostConnection
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.methods import PromptResult

from .. import keys
from ..exits import OK, REFUSED, UNREACHABLE, Failure
from ..interrupts import Interrupts
from ..opening import Place, Way, Wish, enter
from ..reach import ANSWER, daemon
from ..running import Following, exit_code, mark_read, tell
from ..terminal import document, is_terminal, note, out_line
from ..unsaved import until_saved
from ..whereabouts import model_option, seconds_option
from .recover import recovered_first

PERMISSIONS = ["read-only", "workspace-write", "danger-full-access"]
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
@click.option("--json", "json", is_flag=True, help="Print the run's events, one JSON object per line.")
@click.option("--no-wait", is_flag=True, help="Print the ids of run and session, and leave the run alone.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True, max=10**9),
    callback=seconds_option,
    metavar="S",
    help="Stop the run after S seconds.",
)
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
    json: bool,
    no_wait: bool,
    timeout: float | None,
) -> int:
    """Send TEXT (- or nothing: what comes on stdin) and stream the answer.

    The prompt goes to the session that is open for this directory; where none is, a new one starts.
    """
    if ctx.args:
        raise click.UsageError("the text must be one argument: put it in quotes")
    wish = Wish(_way(new=new, latest=latest, memory=memory, path=path), path, model, effort, permission)
    if no_wait and (wish.way is Way.MEMORY or timeout is not None):
        raise click.UsageError("--no-wait goes neither with --no-session nor with --timeout")
    content = _content(text)
    with daemon(ctx, start=True) as client, _missing_key_told(client):
        place = enter(client, wish)
        if recovered_first(client, place.state):
            place = enter(client, wish)
        with _given_back(client, place, wish), _crash_told(place), Interrupts() as interrupts:
            run_id = _accepted(client, place, content)
            _say_if_practising(client, place, wish)
            if no_wait:
                return _leave(run_id, place, json=json)
            following = Following(client, place.state.session_id, run_id, json)
            interrupts.farewell = f"run {run_id} may go on: `loopctl attach` watches it, `loopctl stop` stops it"
            deadline = None if timeout is None else time.monotonic() + timeout
            result = following.until_settled(interrupts, deadline=deadline)
            tell(following, result)
            if not result.saved and not until_saved(client, following.session_id, interrupts):
                return REFUSED  # before any other outcome: nothing else is lost by being missed (S-25)
            mark_read(following, place.state)
            return exit_code(following, result)


@contextmanager
def _crash_told(place: Place) -> Iterator[None]:
    """Whoever just sends the next prompt would leave the run behind (S-26)."""
    try:
        yield
    except LostConnection as lost:
        if place.state.path is None:
            raise
        raise Failure(
            f"{lost}. What was saved of the conversation is kept, and\n"
            f"`loopctl recover --session {place.state.session_id}`\n"
            "takes over what is left of a run that was cut off.",
            UNREACHABLE,
        ) from None


def _way(*, new: bool, latest: bool, memory: bool, path: str | None) -> Way:
    ways = {Way.NEW: new, Way.CONTINUE: latest, Way.MEMORY: memory, Way.PATH: path is not None}
    chosen = [way for way, is_chosen in ways.items() if is_chosen]
    if len(chosen) > 1:
        raise click.UsageError("choose one of --new, --continue, --session, --no-session")
    return chosen[0] if chosen else Way.CURRENT


def _content(text: str | None) -> str:
    if text is None or text == "-":
        if text is None and is_terminal(sys.stdin):
            raise click.UsageError("nothing to send: give a text, or - to read it from stdin")
        text = _stdin()
    if not text.strip():
        raise click.UsageError("the text is empty")
    # An argument that is not UTF-8 comes with surrogates, which no JSON can hold.
    return os.fsencode(text).decode("utf-8", "replace") if not _encodable(text) else text


def _stdin() -> str:
    raw = sys.stdin.buffer.read() if sys.stdin is not None else b""
    text = raw.decode("utf-8", "replace")
    if "\ufffd" in text and not _is_utf8(raw):
        note("stdin is not UTF-8 everywhere: the bytes that are not became U+FFFD")
    return text


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _accepted(client: Client, place: Place, content: str) -> str:
    request = {"sessionId": place.state.session_id, "content": content, "requestId": str(uuid.uuid4())}
    accepted: PromptResult = client.call("session/prompt", request, timeout=ANSWER)
    return accepted.run_id


@contextmanager
def _given_back(client: Client, place: Place, wish: Wish) -> Iterator[None]:
    """A runtime that was made for this one prompt goes with it."""
    try:
        yield
    finally:
        if wish.way is Way.MEMORY:
            with suppress(RpcError, LostConnection, TimeoutError):  # gone already, which is what we want
                client.call("runtime/dispose", {"runtimeId": place.runtime_id}, timeout=ANSWER)


@contextmanager
def _missing_key_told(client: Client) -> Iterator[None]:
    """A refused model may only need the key that is here."""
    try:
        yield
    except RpcError as error:
        if error.kind == "model_unavailable":
            keys.warn_of(client)
        raise


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


def _leave(run_id: str, place: Place, *, json: bool) -> int:
    ids = {"runId": run_id, "sessionId": place.state.session_id}
    if json:
        document(msgspec.json.encode(ids))
    else:
        out_line("\n".join(f"{name} {id}" for name, id in ids.items()))
    return OK
