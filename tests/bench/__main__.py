"""``python -m tests.bench``: measures what the daemon costs and prints it beside its targets."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from . import prompting, starting, storing, streaming
from .machine import facts, pace
from .rows import Measure, Row, Settings, head, line

MEASURES: dict[str, Measure] = {
    "cold": starting.cold,
    "ready": starting.ready,
    "memory": starting.memory,
    "prompts": prompting.prompts,
    "deltas": streaming.deltas,
    "paced": streaming.paced,
    "large": storing.large,
    "many": storing.many,
    "saving": storing.saving,
    "tool": starting.tool,
}
EPILOG = "\b\nNAMES, all of them without one:\n" + "\n".join(
    f"  {name:<9}{measure.__doc__}" for name, measure in MEASURES.items()
)


@click.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 130})
@click.argument("names", nargs=-1, type=click.Choice(list(MEASURES)), metavar="[NAMES]...")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write all samples there too.")
@click.option("--repeat", default=1.0, show_default=True, help="Do everything so many times as often.")
@click.option("--idle-wait", default=65.0, show_default=True, help="Seconds that sessions idle before `memory` looks.")
def main(names: tuple[str, ...], file: Path | None, repeat: float, idle_wait: float) -> None:
    """Measure what loopd costs on this machine, beside its targets.

    Everything runs on loopback and in private directories below $TMPDIR (which must be the disk that is meant), against
    a model provider of the bench's own, and is ended by its pid. Clients and provider are processes of their own: CPU
    is the daemon's alone, all its threads, per piece of work. All of it takes about four minutes.

    "best" is the minimum of times and the maximum of rates: it can be trusted while others use the machine. "met" goes
    by the median; "at best" means that the best meets the target and the median does not. Holds of the loop are the
    longest round trip of a client that asks `server/status` every 2 ms, less the same in a daemon at rest. What is
    written is counted by strace, in a pass of its own, and left out where there is none. "Syncs apart" is measured
    with `durability = "process"`, which is the same work without the fsyncs. "pace" is what a fixed piece of Python
    took right after the row: where it is twice that of another row or run, the machine was half as fast.
    """
    settings = Settings(repeat=repeat, idle_wait_s=idle_wait)
    about = facts()
    click.echo(", ".join(f"{name}: {value}" for name, value in about.items()) + "\n\n" + head())
    start, rows = time.monotonic(), []
    for name in names or MEASURES:
        for row in MEASURES[name](settings):
            row.pace_ms = pace()
            rows.append(row)
            click.echo(line(row))
    click.echo(f"\n{time.monotonic() - start:.0f} s", err=True)
    if file:
        file.write_text(json.dumps(document(about, rows), indent=1) + "\n")


def document(about: dict[str, Any], rows: list[Row]) -> dict[str, Any]:
    return {"machine": about, "rows": [row.document() for row in rows]}


if __name__ == "__main__":
    main()
