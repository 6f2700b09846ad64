"""``loopd doctor``: what is amiss with sessions, settings and directories; nothing is changed."""

from __future__ import annotations

import logging
import os
import stat
import sys
from collections.abc import Iterator

import click
import msgspec
import trio

from loop_protocol import paths
from loop_protocol.v1.methods import SandboxStatus
from loopd.agent.tools.process import become_subreaper
from loopd.agent.tools.sandbox import Sandbox
from loopd.config import ConfigError, load
from loopd.storage.checkup import Checkup, Finding
from loopd.storage.document import META
from loopd.storage.fs import FileSystem, printable
from loopd.storage.rescue import rescue_roots

from . import config as config_option
from . import data_dir as data_dir_option
from . import data_directory, visible
from . import rescue_dir as rescue_dir_option
from . import socket as socket_option

FAULTS = 1
ADVICE = "commands of restricted presets ask each time, until it works and `loopctl daemon restart` was run"


@click.command()
@click.argument("path", required=False)
@data_dir_option
@rescue_dir_option
@config_option
@socket_option
@click.option("--json", is_flag=True, help="One JSON document.")
def doctor(
    path: str | None,
    data_dir: str | None,
    rescue_dir: str | None,
    config: str | None,
    socket: str | None,
    json: bool,
) -> None:
    """Check everything on disk and whether the sandbox works, or only the session at PATH (its meta.json, or the
    directory of that).

    Nothing is changed or locked, whether a daemon runs or not. Ends with 1 if there are faults, else with 0.
    """
    data = data_directory(data_dir)
    roots = rescue_roots(data, os.environ, os.path.abspath(rescue_dir) if rescue_dir else None)
    checkup = Checkup(FileSystem(), data, roots, os.geteuid())
    sandbox = None if path else _sandbox()
    findings = _of_one(checkup, path) if path else _of_all(checkup, config, socket, sandbox)
    seen: list[Finding] = []
    for finding in map(_printable, findings):
        seen.append(finding)
        if not json:
            click.echo(visible(_line(finding)))
    faults = sum(finding.severity == "fault" for finding in seen)
    counts = {
        "sessions": checkup.sessions,
        "legacy": checkup.legacy,
        "unsupported": checkup.unsupported,
        "rescueCopies": checkup.copies,
        "faults": faults,
        "notes": len(seen) - faults,
    }
    if json:
        click.echo(msgspec.json.encode({"findings": seen, "summary": counts, "sandbox": sandbox}))
    else:
        click.echo(_summary(counts) + ("; the sandbox works" if sandbox and sandbox.works else ""))
    sys.exit(FAULTS if faults else 0)


def _of_one(checkup: Checkup, path: str) -> Iterator[Finding]:
    path = os.path.abspath(path)
    directory = os.path.dirname(path) if os.path.basename(path) == META else path
    try:
        is_directory = stat.S_ISDIR(checkup.fs.stat(directory).st_mode)
    except OSError as error:
        yield Finding("fault", path, f"there is no session: {error.strerror}")
        return
    if not is_directory:
        yield Finding("fault", path, f"is no session: that is a directory with a {META} (links are not followed)")
        return
    usual = os.path.join(checkup.data_dir, "sessions", "")
    yield from checkup.session(directory, derived=directory.startswith(usual))


def _of_all(
    checkup: Checkup, config: str | None, socket: str | None, sandbox: SandboxStatus | None
) -> Iterator[Finding]:
    yield from _of_settings(config)
    yield from _of_socket(socket)
    if sandbox is not None and sandbox.reason is not None:
        yield Finding("note", "sandbox", sandbox.reason, ADVICE)
    yield from checkup.everything()


def _sandbox() -> SandboxStatus:
    """Tried here and now, as the daemon tries it when it starts."""
    logging.getLogger("loopd").addHandler(logging.NullHandler())  # what the daemon logs of it is a finding here
    become_subreaper()
    return trio.run(Sandbox().tried)


def _of_settings(config: str | None) -> Iterator[Finding]:
    try:
        load(config)
    except ConfigError as error:
        where = config or paths.config_path(os.environ)
        for line in str(error).splitlines():
            yield Finding("fault", where, line.removeprefix(f"{where}:").strip(), "loopd does not start with it")


def _of_socket(socket: str | None) -> Iterator[Finding]:
    path = os.path.abspath(socket) if socket else paths.socket_path(os.environ)
    try:
        paths.check_socket_path(path)
        paths.check_private_directory(os.path.dirname(path))
    except FileNotFoundError:
        return  # the daemon makes it
    except (paths.PathProblem, OSError) as error:
        yield Finding("fault", path, str(error))


def _printable(finding: Finding) -> Finding:
    told = [printable(text) if text else text for text in (finding.path, finding.what, finding.advice)]
    return Finding(finding.severity, told[0] or "", told[1] or "", told[2])


def _line(finding: Finding) -> str:
    advice = f"; {finding.advice}" if finding.advice else ""
    return f"{finding.severity}  {finding.path}: {finding.what}{advice}"


def _summary(counts: dict[str, int]) -> str:
    looked = [_counted(counts["sessions"], "session"), _counted(counts["rescueCopies"], "rescue copy", "rescue copies")]
    return f"{', '.join(looked)}: {_counted(counts['faults'], 'fault')}, {_counted(counts['notes'], 'note')}"


def _counted(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
