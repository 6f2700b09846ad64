"""``loopd rescue``: what could not be saved when a daemon ended is listed, and put back where it belongs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import click
import msgspec
from msgspec import Struct

from loopd.storage import SessionMalformed, SessionMissing, SessionUnsupported, StorageError
from loopd.storage.copies import Copy, copies_in, read_copy, standing
from loopd.storage.fs import FileSystem, printable
from loopd.storage.rescue import rescue_roots
from loopd.storage.salvage import Applied, Refused
from loopd.storage.salvage import apply as put_back

from . import data_dir as data_dir_option
from . import data_directory, visible
from . import rescue_dir as rescue_dir_option

REFUSED = 1
_ADVICE = {
    "matches": "`loopd rescue apply` appends it to its session",
    "gone": "`loopd rescue apply` puts all of it back",
    "applied": "`loopd rescue apply` removes the copy",
    "differs": "`loopd rescue apply --as-new` makes a session of its own of it",
    "unreadable": "`loopd rescue apply --as-new` makes a session of its own of it",
    "open": "close it there (`loopctl daemon stop` ends a daemon) before `loopd rescue apply`",
    "damaged": "what can be read of it is in its history.jsonl",
}


class Row(Struct, rename="camel", omit_defaults=True, kw_only=True):
    """A copy, and whether it can be put back: ``state`` is a key of the advice above, ``reason`` says it in words."""

    path: str
    state: str
    reason: str
    session: str | None = None
    session_id: str | None = None
    cwd: str | None = None
    updated_at: int | None = None
    messages: int | None = None
    beyond: int | None = None


@click.group()
def rescue() -> None:
    """List and put back what could not be saved when a daemon ended."""


@rescue.command("list")
@data_dir_option
@rescue_dir_option
@click.option("--json", is_flag=True, help="One JSON document.")
def list_copies(data_dir: str | None, rescue_dir: str | None, json: bool) -> None:
    """List rescue copies, and whether each can be put back."""
    rows = list(_rows(FileSystem(), rescue_roots(data_directory(data_dir), os.environ, _absolute(rescue_dir))))
    if json:
        click.echo(msgspec.json.encode({"copies": rows}))
        return
    for row in rows:
        click.echo(_described(row))
    click.echo(f"{len(rows)} rescue {'copy' if len(rows) == 1 else 'copies'}")


@rescue.command("apply")
@click.argument("path")
@data_dir_option
@click.option("--as-new", is_flag=True, help="Make a session of its own of it, whatever became of the one it was of.")
def apply(path: str, data_dir: str | None, as_new: bool) -> None:
    """Put the copy at PATH back, and remove it once that is on disk."""
    try:
        done = put_back(FileSystem(), os.path.abspath(path), data_dir=data_directory(data_dir), as_new=as_new)
    except (Refused, SessionMissing, SessionMalformed, SessionUnsupported, StorageError) as error:
        click.echo(f"loopd: {visible(printable(str(error)))}", err=True)
        sys.exit(REFUSED)
    click.echo(_told(done))
    if done.kept:
        click.echo(f"loopd: {visible(printable(done.kept))}", err=True)


def _told(done: Applied) -> str:
    what = "was put back already:" if done.already else f"{done.messages} messages put back:"
    return f"{what} {visible(printable(done.path))}"


def _rows(fs: FileSystem, roots: list[str]) -> Iterator[Row]:
    for root in roots:
        try:
            for path in copies_in(fs, root):
                yield _row(fs, path)
        except StorageError as error:
            click.echo(f"loopd: {visible(printable(str(error)))}", err=True)


def _row(fs: FileSystem, path: str) -> Row:
    try:
        copy = read_copy(fs, path)
    except (SessionMissing, SessionMalformed, SessionUnsupported, StorageError) as error:
        return Row(path=printable(path), state="damaged", reason=printable(str(error)))
    state, reason = standing(fs, copy)
    return _of(copy, state, reason)


def _of(copy: Copy, state: str, reason: str) -> Row:
    return Row(
        path=printable(copy.path),
        state=state,
        reason=printable(reason),
        session=printable(copy.base.path) if copy.base else None,
        session_id=copy.meta.id,
        cwd=copy.meta.cwd,
        updated_at=copy.meta.updated_at,
        messages=copy.history.messages,
        beyond=copy.beyond,
    )


def _described(row: Row) -> str:
    lines = [row.path]
    if row.updated_at is not None:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.updated_at / 1000))
        lines.append(f"  {row.beyond} of {row.messages} messages are not in session {row.session_id}")
        lines.append(f"  of {when}, in {row.cwd}")
    lines.append(f"  {row.state}: {row.reason}; {_ADVICE[row.state]}")
    return "\n".join(map(visible, lines))


def _absolute(path: str | None) -> str | None:
    return os.path.abspath(path) if path else None
