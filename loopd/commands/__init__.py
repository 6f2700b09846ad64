"""What ``loopd`` does besides serving: commands that are imported when they are run, and the options that they share.

The shared options may stand before or after the command's name; the daemon takes the same ones.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import click

from loop_protocol import paths

# The name of a command is that of its module; what --help says stands here, so that --help needs none of them.
COMMANDS = {
    "rescue": "List and put back what could not be saved when a daemon ended.",
    "doctor": "Check sessions, settings, directories and sandbox; changes nothing.",
}
# Which of the shared options a command has, for those that are given before its name.
_TAKES: dict[str, tuple[str, ...]] = {
    "list": ("data_dir", "rescue_dir"),
    "apply": ("data_dir",),
    "doctor": ("data_dir", "rescue_dir", "config", "socket"),
}

socket = click.option(
    "--socket", metavar="PATH", help="The daemon's socket. [default: $LOOPD_SOCKET, else below $XDG_RUNTIME_DIR]"
)
data_dir = click.option(
    "--data-dir", metavar="DIR", help="Where sessions are kept. [default: $LOOPD_DATA_DIR, else ~/.local/state/loopd]"
)
config = click.option(
    "--config", metavar="FILE", help="Settings. [default: $LOOPD_CONFIG, else ~/.config/loopd/config.toml]"
)
rescue_dir = click.option(
    "--rescue-dir", metavar="DIR", help="A further place for rescue copies of what cannot be saved."
)


class Commands(click.Group):
    """A group that lists its commands without importing any."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f".{cmd_name}", __package__), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def given_before(**options: str | None) -> dict[str, Any]:
    """Click's defaults for the commands: what was said before their names."""
    given = {name: value for name, value in options.items() if value is not None}
    of = {command: {name: given[name] for name in takes if name in given} for command, takes in _TAKES.items()}
    return {"doctor": of["doctor"], "rescue": {"list": of["list"], "apply": of["apply"]}}


def data_directory(data_dir: str | None) -> str:
    return os.path.abspath(data_dir) if data_dir else paths.data_dir(os.environ)


def visible(text: str) -> str:
    """On one line, and nothing in it acts on a terminal (K-45)."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
