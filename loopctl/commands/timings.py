"""``loopctl timings``: how long each prompt took."""

from __future__ import annotations

import click
import msgspec
from msgspec import Raw

from loop_protocol.v1.types import PromptTiming, SessionState

from ..exits import OK
from ..reach import ANSWER, daemon
from ..terminal import clock, document, note, table
from ..whereabouts import readable, session_option


@click.command()
@session_option
@click.option("--json", "json", is_flag=True, help="Print the session's finished timings as the daemon has them.")
@click.pass_context
def timings(ctx: click.Context, session: str | None, json: bool) -> int:
    """Show how long each prompt took: of the session that is open for this directory, else of its latest saved one.

    The time is that of the model and its tools, waits included; saving is not part of it. MESSAGES says where in the
    conversation it is, for `loopctl messages --start`.
    """
    with daemon(ctx, start=True) as client:
        raw = client.call_raw("session/state", readable(client, session=session), timeout=ANSWER)
    if json:
        document(msgspec.json.encode({"timings": msgspec.json.decode(raw, type=dict[str, Raw])["timings"]}))
    else:
        _show(msgspec.json.decode(raw, type=SessionState))
    return OK


def _show(state: SessionState) -> None:
    under_way = [state.run.timing] if state.run and state.run.timing.finished_at is None else []
    rows = [_row(timing, state) for timing in [*state.timings, *under_way]]
    if rows:
        table([["STARTED", "LENGTH", "MESSAGES", ""], *rows])
    else:
        note("no timings yet")


def _row(timing: PromptTiming, state: SessionState) -> list[str]:
    length = "" if timing.finished_at is None else _length(timing.finished_at - timing.started_at)
    resumed = timing.message_start_index not in (None, timing.user_message_index)
    marks = [*(["resumed"] if resumed else []), *_ending(timing, state)]
    return [clock(timing.started_at), length, _range(timing), ", ".join(marks)]


def _ending(timing: PromptTiming, state: SessionState) -> list[str]:
    """The state has the outcome of the last run only."""
    last = state.last_run
    if timing.finished_at is None:
        return ["goes on" if state.run and state.run.timing == timing else "cut off by a crash"]
    if timing.stopped:
        return ["stopped"]
    return ["failed"] if last and last.run_id == timing.id and last.outcome == "error" else []


def _range(timing: PromptTiming) -> str:
    start, end = timing.message_start_index, timing.message_end_index
    return f"{timing.user_message_index if start is None else start}-{'' if end is None else end - 1}"


def _length(milliseconds: int) -> str:
    seconds = milliseconds // 1000
    if not seconds:
        return f"{milliseconds} ms"
    if seconds < 60:
        return f"{milliseconds / 1000:.1f} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02} s"
    return f"{seconds // 3600} h {seconds // 60 % 60:02} min"
