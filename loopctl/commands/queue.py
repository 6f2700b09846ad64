"""``loopctl queue``: what waits for its turn in a session, and every change of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import click
import msgspec

from loop_protocol.client import Client
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.methods import QueueResult, RuntimeRow
from loop_protocol.v1.types import QueuedItem, SessionState

from ..exits import OK, REFUSED, USAGE, Failure
from ..given import approval_options, approving, content
from ..reach import ANSWER, daemon
from ..terminal import columns, document, note, raw_option, table, told
from ..waiting import described, label, tell_if_asking, tell_if_paused_now
from ..whereabouts import option_of, require_open, session_option

_HEADING = ["", "ID", "", "INPUT"]
_GAPS = 2 * (len(_HEADING) - 1)


def _options(command: Callable[..., int]) -> Any:
    """``session`` and ``json``, which may stand before a subcommand too."""

    @wraps(command)
    def given(ctx: click.Context, /, session: str | None, json: bool, **rest: Any) -> int:
        before = ctx.parent.params if ctx.parent else {}
        session, json = session or before.get("session"), json or before.get("json", False)
        return command(ctx, session=session, json=json, **rest)

    option = click.option("--json", "json", is_flag=True, help="Print the method's result.")
    return session_option(option(raw_option(click.pass_context(given))))


def _beginning(_ctx: click.Context, _argument: click.Parameter, value: str) -> str:
    """Every id begins with the empty one."""
    if not value:
        raise click.BadParameter("it is empty; `loopctl queue` lists ids")
    return value


_id_argument = click.argument("id", callback=_beginning)


@click.group(invoke_without_command=True)
@_options
def queue(ctx: click.Context, session: str | None, json: bool) -> int:
    """Show and change the inputs that wait for their turn in the session of this directory.

    \b
    loopctl queue                     lists them: position, id, whether it steers, text
    loopctl queue add TEXT            one more; it starts at once where nothing goes on
    loopctl queue add --steer TEXT    it enters the run that goes on, as soon as it can

    ID is what the list shows, or the beginning of it. The queue is in the daemon's memory only.
    """
    return OK if ctx.invoked_subcommand else _list(ctx, session, json=json)


@queue.command("list", short_help="List what waits, the next one first.")
@_options
def list_(ctx: click.Context, session: str | None, json: bool) -> int:
    """List what waits, the next one first: position, id, whether it steers, and the first line of its text."""
    return _list(ctx, session, json=json)


@queue.command(short_help="Queue TEXT.")
@click.argument("text", required=False)
@click.option("--steer", is_flag=True, help="Let it enter the run that goes on, and not wait for its end.")
@approval_options
@_options
def add(
    ctx: click.Context,
    text: str | None,
    steer: bool,
    approvals: str | None,
    approval_timeout: float | None,
    session: str | None,
    json: bool,
) -> int:
    """Queue TEXT (- or nothing: what comes on stdin). Prints its id, or that of the run that it started at once."""
    sent = content(text)
    with _queue_of(ctx, session) as queued:
        raw = queued.ask("queue/add", content=sent, steer=steer, **approving(approvals, approval_timeout).params)
        added = msgspec.json.decode(raw, type=QueueResult)
        told(raw, f"itemId {added.item_id}" if added.run_id is None else f"runId {added.run_id}", json=json)
        if added.run_id is None:
            tell_if_paused_now(queued.client, queued.row.session_id, queued.of)
    return OK


@queue.command(short_help="Put TEXT in the place of an input.")
@_id_argument
@click.argument("text", required=False)
@click.option("--steer/--no-steer", default=None, help="Let it enter the run that goes on, or wait for its end.")
@_options
def edit(ctx: click.Context, id: str, text: str | None, steer: bool | None, session: str | None, json: bool) -> int:
    """Put TEXT (-: what comes on stdin) in the place of what ID says; or change only whether it steers."""
    if text is None and steer is None:
        raise click.UsageError("nothing to change: give a text, --steer or --no-steer")
    changes: dict[str, Any] = {} if text is None else {"content": content(text)}
    if steer is not None:
        changes["steer"] = steer
    with _queue_of(ctx, session) as queued:
        item = queued.find(id)
        try:
            raw = queued.ask("queue/edit", itemId=_id(item, id), revision=item.revision if item else 0, **changes)
        except RpcError as error:
            if error.kind != "conflict":
                raise
            said = f"somebody else has edited {_id(item, id)} just now: `loopctl queue{queued.of}` shows what it says"
            raise Failure(said, REFUSED) from None
    return _told(raw, "edited", json=json)


@queue.command(short_help="Let an input have its turn sooner, or later.")
@_id_argument
@click.argument("position", type=click.IntRange(min=0))
@_options
def move(ctx: click.Context, id: str, position: int, session: str | None, json: bool) -> int:
    """Put ID at POSITION: 0 is the next one, beyond the end is the end."""
    with _queue_of(ctx, session) as queued:
        raw = queued.ask("queue/move", itemId=_id(queued.find(id), id), to=position)
    return _told(raw, "moved", json=json)


@queue.command(short_help="Take an input out.")
@_id_argument
@_options
def remove(ctx: click.Context, id: str, session: str | None, json: bool) -> int:
    """Take ID out of the queue: it is never sent."""
    with _queue_of(ctx, session) as queued:
        raw = queued.ask("queue/remove", itemId=_id(queued.find(id), id))
    return _told(raw, "removed", json=json)


@dataclass(frozen=True, slots=True)
class _Queue:
    """Of one open session; ``of`` is the option that names it, where one is needed."""

    client: Client
    row: RuntimeRow
    of: str

    def state(self) -> SessionState:
        state: SessionState = self.client.call("session/state", {"sessionId": self.row.session_id}, timeout=ANSWER)
        return state

    def ask(self, method: str, **params: Any) -> bytes:
        return self.client.call_raw(method, {"sessionId": self.row.session_id, **params}, timeout=ANSWER)

    def find(self, id: str) -> QueuedItem | None:
        """The one that is meant. None: it does not wait, and the daemon knows why."""
        meant = [item for item in self.state().queue.items if item.item_id.startswith(id)]
        if len(meant) > 1:
            raise Failure(f"several begin with {id}: {', '.join(item.item_id for item in meant)}", USAGE)
        return meant[0] if meant else None


@contextmanager
def _queue_of(ctx: click.Context, session: str | None) -> Iterator[_Queue]:
    with daemon(ctx, start=False) as client:
        row = require_open(client, session=session)
        yield _Queue(client, row, option_of(row))


def _id(item: QueuedItem | None, given: str) -> str:
    return item.item_id if item else given


def _list(ctx: click.Context, session: str | None, *, json: bool) -> int:
    with _queue_of(ctx, session) as queued:
        state = queued.state()
    waits = state.queue
    if json:
        document(msgspec.json.encode(waits))
        return OK
    if waits.paused:
        note(str(described(waits, queued.of)))
    if waits.items:
        tell_if_asking(state)
        rows = [_row(position, item) for position, item in enumerate(waits.items)]
        width = columns()
        if width is not None:
            taken = sum(max(len(row[column]) for row in [_HEADING, *rows]) for column in range(len(_HEADING) - 1))
            width = max(20, width - taken - _GAPS)
        table([_HEADING, *([*row, label(item, width)] for row, item in zip(rows, waits.items, strict=True))])
    else:
        note("nothing waits")
    return OK


def _row(position: int, item: QueuedItem) -> list[str]:
    return [str(position), item.item_id, "steer" if item.steer else ""]


def _told(raw: bytes, done: str, *, json: bool) -> int:
    item = msgspec.json.decode(raw, type=QueueResult)
    said = f"{done} {item.item_id}{' (steers)' * item.steer}: "
    width = columns()
    return told(raw, said + label(item, None if width is None else max(20, width - len(said))), json=json)
