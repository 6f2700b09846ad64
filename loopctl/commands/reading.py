"""``loopctl state`` and ``loopctl messages``: read a session, whether it is open or only saved."""

from __future__ import annotations

import sys
from typing import Any

import click
import msgspec
from msgspec import Raw

from loop_protocol.client import Client
from loop_protocol.v1.methods import MessagesResult
from loop_protocol.v1.types import (
    AssistantMessage,
    Block,
    ImageBlock,
    Message,
    SessionState,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolResultMessage,
    UserMessage,
)

from ..approvals import summary
from ..exits import OK
from ..reach import ANSWER, daemon
from ..terminal import clock, document, facts, is_terminal, note, out, out_line, raw_option
from ..view import arguments_line, marks_of, title_of
from ..waiting import described
from ..whereabouts import readable, session_option
from .recover import offered


@click.command()
@session_option
@click.option("--json", "json", is_flag=True, help="Print the method's result.")
@raw_option
@click.pass_context
def state(ctx: click.Context, session: str | None, json: bool) -> int:
    """Show the state of the session that is open for this directory, else of its latest saved one."""
    with daemon(ctx, start=True) as client:
        raw = client.call_raw("session/state", readable(client, session=session), timeout=ANSWER)
    if json:
        document(raw)
    else:
        _show_state(msgspec.json.decode(raw, type=SessionState), named=session is not None)
    return OK


@click.command()
@session_option
@click.option("--start", type=click.IntRange(min=0), default=0, metavar="N", help="Begin with message N.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N messages.")
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="The last N messages.")
@click.option("--json", "json", is_flag=True, help="Print the method's result, its pages joined.")
@raw_option
@click.pass_context
def messages(
    ctx: click.Context, session: str | None, start: int, limit: int | None, last: int | None, json: bool
) -> int:
    """Show the conversation of this directory: of the open session, else of the latest saved one.

    It stays unread; `loopctl read` marks it as read.
    """
    if last is not None and (start or limit is not None):
        raise click.UsageError("--last goes neither with --start nor with --limit")
    with daemon(ctx, start=True) as client:
        which = readable(client, session=session)
        if last is not None:
            start = max(0, _total(client, which) - last)
        found = _pages(client, which, start=start, limit=limit)
        if not json and is_terminal(sys.stdout):
            _head(client, which)
    if json:
        document(msgspec.json.encode(found))
    else:
        if not found.messages:
            note(f"there are {found.total} messages, from 0 on" if found.total else "no messages yet")
        for raw in found.messages:
            _show_message(msgspec.json.decode(raw, type=Message), committed=found.committed)
    return OK


def _total(client: Client, which: dict[str, str]) -> int:
    page: MessagesResult = client.call("session/messages", {**which, "limit": 1}, timeout=ANSWER)
    return page.total


def _pages(client: Client, which: dict[str, str], *, start: int, limit: int | None) -> MessagesResult:
    """A page has a limit in bytes, a conversation has none."""
    gathered: list[Raw] = []
    while True:
        request: dict[str, Any] = {**which, "start": start + len(gathered)}
        if limit is not None:
            request["limit"] = limit - len(gathered)
        page: MessagesResult = client.call("session/messages", request, timeout=ANSWER)
        gathered += page.messages
        complete = start + len(gathered) >= page.total or len(gathered) == limit
        if complete or not page.messages:
            return MessagesResult(start=start, total=page.total, committed=page.committed, messages=gathered)


def _show_state(state: SessionState, *, named: bool) -> None:
    last, titles = state.last_run, state.title_usage
    unsaved = (state.save_error or "yes") + "; repair the cause, then `loopctl flush`"
    facts(
        [
            ("title", title_of(state)),
            ("no title", state.title_error and state.title_error.message),
            ("session", state.session_id),
            ("path", state.path),
            ("cwd", state.cwd),
            ("kind", None if state.kind == "persistent" else state.kind),
            ("model", state.model),
            ("permission", state.permission),
            ("messages", f"{state.live_count}, {state.message_count} of them saved"),
            ("created", clock(state.created_at)),
            ("updated", clock(state.updated_at)),
            ("unread", "yes" if state.unread else None),
            ("pinned", None if state.pinned_at is None else clock(state.pinned_at)),
            ("tokens", f"{state.usage.input_tokens} in, {state.usage.output_tokens} out"),
            ("title tokens", titles and f"{titles.input_tokens} in, {titles.output_tokens} out"),
            ("runtime", state.runtime_id or "not open"),
            ("doing", state.operation or ("nothing" if state.runtime_id else None)),
            ("run", state.run and f"{state.run.run_id}, since {clock(state.run.started_at)}"),
            ("allowed", "; ".join(state.grants) or None),
            *(("waits for", f"an approval: {summary(one)}; `loopctl approvals show`") for one in state.approvals),
            ("queue", described(state.queue, f" --session {state.session_id}" if named else "")),
            ("last run", last and f"{last.outcome}{': ' + last.error.message if last.error else ''}"),
            ("not saved", unsaved if state.has_pending_save else None),
            ("cut off", offered(state)),
        ]
    )


def _head(client: Client, which: dict[str, str]) -> None:
    """Which conversation it is, for a person; it is no part of what a pipe gets."""
    state: SessionState = client.call("session/state", which, timeout=ANSWER)
    note(" · ".join([title_of(state), *marks_of(state)]))
    if left := offered(state):
        note(left)


def _show_message(message: Message, *, committed: int) -> None:
    unsaved = "" if message.index < committed else " · not saved yet"
    match message:
        case UserMessage():
            who = "user"
        case AssistantMessage():
            ended = "" if message.stop_reason in ("stop", "toolUse") else f" · {message.stop_reason}"
            who = f"assistant · {message.provider}/{message.model}{ended}"
        case ToolResultMessage():
            who = f"tool result · {message.tool_name}{' · failed' if message.is_error else ''}"
    out_line(f"[{message.index}] {who} · {clock(message.timestamp)}{unsaved}")
    for block in message.content:
        _show_block(block)
    if isinstance(message, AssistantMessage) and message.error_message:
        out_line(f"(error: {message.error_message})")
    out_line()


def _show_block(block: Block) -> None:
    match block:
        case TextBlock(text=text):
            out(text if text.endswith("\n") else text + "\n")
        case ThinkingBlock(thinking=thinking):
            out_line(f"(thinking, {len(thinking)} characters)")
        case ToolCallBlock():
            out_line(f"→ {block.name} {arguments_line(block.arguments)}")
        case ImageBlock():
            out_line(f"(image, {block.mime_type})")
