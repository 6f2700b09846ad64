"""``loopctl daemon start|stop|log``."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator
from typing import BinaryIO

import click

from loop_protocol import paths
from loop_protocol.client import Client, LostConnection, Unreachable
from loop_protocol.v1.methods import DrainResult, ServerStatus

from ..exits import OK, REFUSED, RUN_FAILED, UNREACHABLE, Failure
from ..reach import ANSWER, socket_of, translated
from ..reach import daemon as connected
from ..terminal import note, out, out_line, raw_option
from .server import tell_asking, tell_dropped, tell_queued, tell_rescued, tell_unsaved

# A daemon that was asked to exit has ended its runs within 10 s (D-4); some more for a loaded machine.
EXIT_TIMEOUT = 20.0
BLOCK = 64 * 1024
FOLLOW_INTERVAL = 0.2


@click.group()
def daemon() -> None:
    """Start or stop the daemon, or show its log."""


@daemon.command(short_help="Start the daemon, if it does not run yet.")
@click.pass_context
def start(ctx: click.Context) -> int:
    """Start the daemon, if it does not run yet, and wait until it answers."""
    return _start(socket_of(ctx))


def _start(socket: str) -> int:
    from ..launch import start as start_daemon

    with translated():
        try:
            client, started = Client.connect(socket, name="loopctl"), False
        except Unreachable as unreachable:
            if not unreachable.absent:
                raise
            client, started = start_daemon(socket)
        with client:
            status: ServerStatus = client.call("server/status", timeout=ANSWER)
    out_line(f"{'started' if started else 'already running'}, pid {status.pid}, on {status.socket}")
    return OK


@daemon.command(short_help="Stop the daemon, and start it with the settings of now.")
@click.pass_context
def restart(ctx: click.Context) -> int:
    """Stop the daemon, if one runs, and start it with this environment and the settings of now."""
    from ..launch import check_settings

    socket = socket_of(ctx)
    with translated():
        try:
            client = Client.connect(socket, name="loopctl")
        except Unreachable as unreachable:
            if not unreachable.absent:
                raise
        else:
            with client:
                check_settings()  # while there still is one
                code = _stop(client, rescue=False)
            if code != OK:
                return code
    return _start(socket)


@daemon.command(short_help="Let runs end, save everything, end the daemon.")
@click.option("--rescue", is_flag=True, help="Also over unsaved work, after writing a rescue copy of it.")
@click.pass_context
def stop(ctx: click.Context, rescue: bool) -> int:
    """Let runs end, save everything, end the daemon. Exit code 5 if it stays because something is unsaved."""
    with connected(ctx, start=False) as client:
        return _stop(client, rescue=rescue)


def _stop(client: Client, *, rescue: bool) -> int:
    status: ServerStatus = client.call("server/status", timeout=ANSWER)
    if status.runs:
        note("a run goes on; it may end by itself for some seconds, then it is stopped")
        tell_asking(client)
    queued = tell_queued(client)
    try:
        result: DrainResult | None = client.call("server/drain", {"exit": True, "rescue": rescue})
    except LostConnection:
        result = None  # it was faster than its answer
    if result is not None and not result.exiting:
        tell_unsaved(result.pending_saves)
        note("so the daemon stays; `loopctl daemon stop --rescue` writes a rescue copy and ends it")
        return REFUSED
    if not _ended(status.pid):
        raise Failure(f"the daemon, pid {status.pid}, has not ended after {EXIT_TIMEOUT:.0f} s", RUN_FAILED)
    out_line("stopped")
    if result is not None:
        tell_dropped(result.queued, queued)
        tell_rescued(result.rescued)
    return OK


def _ended(pid: int) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(EXIT_TIMEOUT * 1000))
    finally:
        os.close(descriptor)


@daemon.command(short_help="Show the log of a daemon that was started on demand.")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=50, metavar="N", help="The last N lines (50).")
@click.option("-f", "--follow", is_flag=True, help="Go on with what is added, until Ctrl-C.")
@raw_option
def log(lines: int, follow: bool) -> int:
    """Show the log of a daemon that was started on demand."""
    path = paths.log_path(os.environ)
    try:
        with open(path, "rb") as file:
            out(_last(file, lines).decode("utf-8", "replace"))
            for added in _added(file) if follow else ():
                out(added.decode("utf-8", "replace"))
    except FileNotFoundError:
        raise Failure(
            f"no log at {path} yet; `loopctl daemon start` starts a daemon\n"
            "The log of a systemd service is shown by `journalctl --user -u loopd`.",
            UNREACHABLE,
        ) from None
    return OK


def _last(file: BinaryIO, lines: int) -> bytes:
    """The end of the file, read backwards: a log may be large. Leaves the file at its end."""
    position = file.seek(0, os.SEEK_END)
    end, found = position, b""
    while position > 0 and found.count(b"\n") <= lines:
        start = max(0, position - BLOCK)
        file.seek(start)
        found = file.read(position - start) + found
        position = start
    file.seek(end)
    return b"".join(found.splitlines(keepends=True)[-lines:]) if lines else b""


def _added(file: BinaryIO) -> Iterator[bytes]:
    while True:
        if added := file.read(BLOCK):
            yield added
        else:
            time.sleep(FOLLOW_INTERVAL)
