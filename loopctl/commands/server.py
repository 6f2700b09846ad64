"""``loopctl status`` and ``loopctl drain``: the daemon as a whole."""

from __future__ import annotations

import os
from typing import Any

import click
import msgspec

from loop_protocol.client import Client
from loop_protocol.v1.methods import DrainResult, PendingSave, SandboxStatus, ServerStatus

from ..exits import OK, REFUSED
from ..reach import ANSWER, daemon
from ..terminal import document, facts, note, out_line
from ..waiting import counted
from ..whereabouts import runtimes


@click.command()
@click.option("--json", "json", is_flag=True, help="Print the method's result.")
@click.pass_context
def status(ctx: click.Context, json: bool) -> int:
    """Show what the daemon does. Exit code 69 if none runs."""
    with daemon(ctx, start=False) as client:
        raw = client.call_raw("server/status", timeout=ANSWER)
    if json:
        document(raw)
    else:
        _show(msgspec.json.decode(raw, type=ServerStatus))
    return OK


def _show(status: ServerStatus) -> None:
    facts(
        [
            ("loopd", f"{status.version}, {'draining' if status.draining else 'serving'}"),
            ("pid", status.pid),
            ("up", _duration(status.uptime_ms // 1000)),
            ("socket", status.socket),
            ("data", status.data_dir),
            ("connections", status.connections),
            ("runtimes", status.runtimes),
            ("sessions", status.sessions),
            ("runs", status.runs),
            ("approvals", _waiting(status.pending_approvals)),
            ("sandbox", status.sandbox and _sandbox(status.sandbox)),
            ("not saved", len(status.pending_saves) or None),
        ]
    )
    tell_unsaved(status.pending_saves)


def _waiting(approvals: int) -> str | None:
    return f"{approvals}; `loopctl approvals` shows them" if approvals else None


def _sandbox(sandbox: SandboxStatus) -> str:
    return "works" if sandbox.works else f"does not work, so each command asks: {sandbox.reason or 'unknown'}"


def tell_asking(client: Client) -> None:
    """Before runs are let finish: one that waits for a person does not do that by itself."""
    if asking := sum(row.pending_approvals for row in runtimes(client)):
        waits, them = ("1 request waits", "it") if asking == 1 else (f"{asking} requests wait", "them")
        note(f"{waits} for approval; `loopctl approvals` shows and answers {them}")


def tell_queued(client: Client) -> int:
    """Before a daemon ends: how many inputs it has alone. Their number."""
    queued = sum(row.queued for row in runtimes(client))
    if queued:
        note(f"{counted(queued)}, in the daemon's memory only: what has not started when it ends is lost")
    return queued


def tell_dropped(queued: int, told: int) -> None:
    """Some may have come after that."""
    if queued > told:
        note(f"{counted(queued)} went with the daemon")


def tell_unsaved(pending: list[PendingSave]) -> None:
    for one in pending:
        note(f"not saved: {one.path or one.session_id}: {one.reason} (`loopctl flush` tries again)")


def tell_rescued(copies: list[str]) -> None:
    for path in copies:
        out_line(f"rescue copy: {path}")
        note(f"`loopd rescue apply {path}` puts it back")
    if any(path.startswith(_passing()) for path in copies):
        note(f"what is below {_passing()} is gone after a logout: put it back before")


def _passing() -> str:
    """The runtime directory: it is in memory, and lives as long as its user is logged in."""
    return os.path.join(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}", "")


def _duration(seconds: int) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


@click.command()
@click.option("--deadline", type=click.FloatRange(min=0), metavar="S", help="Stop what still runs after S seconds.")
@click.option("--exit", "exits", is_flag=True, help="End the daemon then.")
@click.option("--rescue", is_flag=True, help="With --exit: also over unsaved work, after writing a rescue copy.")
@click.option("--cancel", is_flag=True, help="Take work again.")
@click.option("--json", "json", is_flag=True, help="Print the method's result.")
@click.pass_context
def drain(ctx: click.Context, deadline: float | None, exits: bool, rescue: bool, cancel: bool, json: bool) -> int:
    """Let runs finish and take no new work; answers when all is quiet. Exit code 5 if something is unsaved."""
    if rescue and not exits:
        raise click.UsageError("--rescue goes with --exit only")
    if cancel and (exits or deadline is not None):
        raise click.UsageError("--cancel goes neither with --exit nor with --deadline")
    request: dict[str, Any] = {"exit": exits, "rescue": rescue, "cancel": cancel}
    if deadline is not None:
        request["deadlineMs"] = round(deadline * 1000)
    with daemon(ctx, start=False) as client:
        if not cancel:
            tell_asking(client)
        queued = tell_queued(client) if exits else 0
        raw = client.call_raw("server/drain", request)
    result = msgspec.json.decode(raw, type=DrainResult)
    if json:
        document(raw)
    else:
        out_line(_told(result))
        tell_rescued(result.rescued)
        if result.draining and not result.exiting:
            note(f"no new work is taken until `loopctl drain --cancel`{_held(result.queued)}")
    if result.exiting:
        tell_dropped(result.queued, queued)
    tell_unsaved(result.pending_saves)
    return REFUSED if result.pending_saves and not result.rescued and not cancel else OK


def _held(queued: int) -> str:
    """A run that the drain had to stop pauses the queue for longer than the drain (Q-3)."""
    return f"; {counted(queued)} {'waits' if queued == 1 else 'wait'}, `loopctl queue` says for what" if queued else ""


def _told(result: DrainResult) -> str:
    if not result.draining:
        return "the daemon takes work again"
    ending = ", the daemon exits" if result.exiting else ""
    return f"{'quiet' if result.quiet else f'still running: {result.runs}'}{ending}"
