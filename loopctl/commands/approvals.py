"""``loopctl approvals``: what waits for a person's answer, in all sessions, and the answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import click
import msgspec

from loop_protocol.client import Client
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.events import ApprovalRequested, ApprovalResolved, EventsLost, ServerEventParams
from loop_protocol.v1.methods import ApprovalListResult
from loop_protocol.v1.types import ApprovalRequest

from ..approvals import described, short, subject
from ..asking import Asking
from ..exits import INTERRUPTED, NO_SESSION, OK, USAGE, Failure
from ..interrupts import Interrupts
from ..reach import ANSWER, daemon
from ..terminal import (
    columns,
    document,
    is_raw,
    note,
    out,
    out_line,
    raw_option,
    somebody_is_there,
    table,
    told,
    visible,
)
from ..view import View

_HEADING = ["ID", "AGE", "CWD", "TOOL", "WHAT"]


def _options(command: Callable[..., int]) -> Any:
    """``json``, which may stand before a subcommand too."""

    @wraps(command)
    def given(ctx: click.Context, /, json: bool, **rest: Any) -> int:
        before = ctx.parent.params if ctx.parent else {}
        return command(ctx, json=json or before.get("json", False), **rest)

    option = click.option("--json", "json", is_flag=True, help="Print the method's result.")
    return option(raw_option(click.pass_context(given)))


_id_argument = click.argument("id", required=False)


@click.group(invoke_without_command=True)
@click.option("--watch", is_flag=True, help="Go on with every request as it comes, until Ctrl-C; at a terminal, ask.")
@_options
def approvals(ctx: click.Context, watch: bool, json: bool) -> int:
    """Show and answer what the tools of all sessions may not do by themselves.

    \b
    loopctl approvals                 lists what waits: id, age, directory, tool, what it wants
    loopctl approvals show ID         all that is needed to decide it
    loopctl approvals allow ID        it runs, once, exactly as shown
    loopctl approvals reject ID       it does not; --reason says why, to the model

    ID is what the list shows, or the beginning of it; where one request waits `show` and `reject` need none. The first
    answer holds, wherever it is given.
    """
    if ctx.invoked_subcommand is None:
        return _watch(ctx, json=json) if watch else _list(ctx, json=json)
    if watch:
        raise click.UsageError("--watch takes no subcommand")
    return OK


@approvals.command("list", short_help="List what waits, the oldest first.")
@_options
def list_(ctx: click.Context, json: bool) -> int:
    """List what waits, the oldest first: id, age, directory, tool, what it wants."""
    return _list(ctx, json=json)


@approvals.command(short_help="Show all that is needed to decide one.")
@_id_argument
@_options
def show(ctx: click.Context, id: str | None, json: bool) -> int:
    """Show all of ID: what exactly would run or change, where, why, and what --session would allow."""
    with daemon(ctx, start=False) as client:
        raw = client.call_raw("approval/list", timeout=ANSWER)
    found = _one(_requests(raw), id)
    if found is None:
        raise Failure(f"no approval {id} waits; `loopctl approvals` lists what does", NO_SESSION)
    if json:
        document(msgspec.json.encode(found))
    else:
        out(described(found, whole=True, width=columns(), raw=is_raw())[0])
    return OK


@approvals.command(short_help="Let it run.")
@click.argument("id")
@click.option(
    "--session", "session", is_flag=True, help="And what is like it, as `show` tells, while the session is open."
)
@_options
def allow(ctx: click.Context, id: str, session: bool, json: bool) -> int:
    """Let what ID asks run: once, exactly as `show` tells. It takes an ID: what waits may be another by now."""
    decision = "allowed-session" if session else "allowed-once"
    return _resolve(ctx, id, {"decision": decision}, "allowed", json=json)


@approvals.command(short_help="Do not let it run.")
@_id_argument
@click.option("--reason", metavar="TEXT", help="Why not, for the model.")
@_options
def reject(ctx: click.Context, id: str | None, reason: str | None, json: bool) -> int:
    """Do not let what ID asks run. The run goes on, and its model is told."""
    answer = {"decision": "rejected"} | ({"feedback": reason} if reason else {})
    return _resolve(ctx, id, answer, "rejected", json=json)


def _resolve(ctx: click.Context, id: str | None, answer: dict[str, str], done: str, *, json: bool) -> int:
    with daemon(ctx, start=False) as client:
        request = _one(_requests(client.call_raw("approval/list", timeout=ANSWER)), id)
        if request and not request.rules and answer["decision"] == "allowed-session":
            why = f"this cannot be allowed for the session: {request.rules_refused or 'no rule can be made of it'}"
            raise Failure(f"{why}\nWithout --session it is allowed once.", USAGE)
        whole = request.approval_id if request else str(id)
        try:
            raw = client.call_raw("approval/resolve", {"approvalId": whole, **answer}, timeout=ANSWER)
        except RpcError as error:
            if error.kind != "approval_not_pending" or "outcome" in error.data:
                raise
            said = f"no approval {id} waits, and it may have been answered; `loopctl approvals` lists what does"
            raise Failure(said, NO_SESSION) from None
    what = f": {request.tool_name}: {subject(request)}" if request else ""
    return told(raw, f"{done}{what}", json=json)


def _requests(raw: bytes) -> list[ApprovalRequest]:
    return msgspec.json.decode(raw, type=ApprovalListResult).approvals


def _one(requests: list[ApprovalRequest], id: str | None) -> ApprovalRequest | None:
    """The one that is meant. None: it does not wait, and the daemon may know why."""
    if id == "":  # a script's variable that is not set: whatever waits is not meant
        raise Failure("the ID is empty; `loopctl approvals` lists them", USAGE)
    if id is None and not requests:
        raise Failure("nothing waits for an approval", NO_SESSION)
    meant = [one for one in requests if one.approval_id.startswith(id or "")]
    if len(meant) > 1:
        several = "\n".join(f"{short(one.approval_id)}  {one.tool_name}: {subject(one)}" for one in meant)
        raise Failure(f"which one?\n{several}", USAGE)
    return meant[0] if meant else None


# --- what waits, and what comes ---------------------------------------------------------------------------------------


def _list(ctx: click.Context, *, json: bool) -> int:
    with daemon(ctx, start=False) as client:
        raw = client.call_raw("approval/list", timeout=ANSWER)
    if json:
        document(raw)
    elif requests := _requests(raw):
        _show_table(requests)
    else:
        note("nothing waits for an approval")
    return OK


def _show_table(requests: list[ApprovalRequest]) -> None:
    now = time.time()
    rows = [
        [short(one.approval_id), _age(now - one.created_at / 1000), visible(one.cwd), one.tool_name] for one in requests
    ]
    width = columns()
    if width is not None:
        taken = sum(max(len(row[column]) for row in [_HEADING, *rows]) + 2 for column in range(len(_HEADING) - 1))
        width = max(40, width - taken)
    table([_HEADING, *([*row, _what(one, width)] for row, one in zip(rows, requests, strict=True))])


def _what(request: ApprovalRequest, width: int | None) -> str:
    whole = subject(request) if width is None else subject(request, width)
    if width is None or len(whole) <= width:
        return whole
    # Beginning, end, and how much is between them.
    return subject(request, max(20, width - len("… (10,000 more characters) …")))


def _age(seconds: float) -> str:
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def _watch(ctx: click.Context, *, json: bool) -> int:
    with daemon(ctx, start=False) as client, Interrupts() as interrupts:
        client.call_raw("server/watch", timeout=ANSWER)  # before the list: what changes meanwhile comes twice
        raw = client.call_raw("approval/list", timeout=ANSWER)
        asking = Asking(client) if not json and somebody_is_there() else None
        watched = _Watched(client, asking)
        if json:
            out_line(msgspec.json.format(raw, indent=-1).decode())
        else:
            watched.found(_requests(raw))
        while not interrupts.asked:
            change = client.next_server_event(timeout=0)
            if change is not None:
                _take(watched, change, json=json)
            elif asking is not None and asking.has_typed():
                asking.take_typed()
            else:
                interrupts.wait(client, *(asking.sources() if asking else ()), timeout=None)
        if asking is not None:
            asking.end()
    return INTERRUPTED


def _take(watched: _Watched, change: ServerEventParams, *, json: bool) -> None:
    if isinstance(change.event, ApprovalRequested | ApprovalResolved | EventsLost):
        if json:
            out_line(msgspec.json.encode(change).decode())
        else:
            watched.take(change.event)


class _Watched:
    """Tells each request and what became of it, in all sessions; or asks."""

    def __init__(self, client: Client, asking: Asking | None) -> None:
        self._client = client
        self._asking = asking
        self._view = View()
        self._known: set[str] = set()

    def found(self, requests: list[ApprovalRequest]) -> None:
        if not requests:
            note("nothing waits for an approval")
        if self._asking is not None:
            return self._asking.found(requests)
        for request in requests:
            self.take(ApprovalRequested(request))
        return None

    def take(self, event: ApprovalRequested | ApprovalResolved | EventsLost) -> None:
        match event:
            case EventsLost():
                self.found(self._client.call("approval/list", timeout=ANSWER).approvals)
            case ApprovalRequested() if self._asking is not None:
                self._asking.requested(event)
            case ApprovalResolved() if self._asking is not None:
                self._asking.resolved(event)
            case ApprovalRequested(request):
                if request.approval_id not in self._known:
                    self._known.add(request.approval_id)
                    self._view.tell_request(request)
            case ApprovalResolved():
                self._view.tell_resolved(event)
