"""The entry of ``loopctl``: finds the command, and turns what it raises into a line on stderr and an exit code."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module

import click

from .exits import INTERRUPTED, OK, RUN_FAILED, USAGE, Failure, OutputClosed, OutputFailed
from .terminal import note

# name: where it is, and what --help says, so that --help needs none of these modules
COMMANDS = {
    "prompt": ("prompt", "Send a prompt and stream the answer."),
    "resume": ("resume", "Go on with work that was stopped or failed."),
    "queue": ("queue", "Show and change what waits for its turn."),
    "approvals": ("approvals", "Show and answer what tools ask for."),
    "permission": ("permission", "Show or set what tools may do by themselves."),
    "attach": ("attach", "Watch the session of this directory."),
    "new": ("seats", "Start a new session in this directory."),
    "switch": ("seats", "Go on with another session in this directory."),
    "sessions": ("sessions", "List saved sessions."),
    "state": ("reading", "Show the state of a session."),
    "messages": ("reading", "Show a conversation."),
    "timings": ("timings", "Show how long each prompt took."),
    "title": ("titles", "Show, set or make the title of a session."),
    "rename": ("keeping", "Give a session a title."),
    "read": ("keeping", "Mark a session as read."),
    "pin": ("keeping", "Pin a session."),
    "unpin": ("keeping", "Unpin a session."),
    "delete": ("keeping", "Delete a session for good."),
    "stop": ("control", "Stop the run that goes on."),
    "abort": ("control", "Cancel everything that goes on in the session."),
    "flush": ("control", "Save what could not be saved."),
    "recover": ("recover", "Take over what a crash left of a run."),
    "runtimes": ("seats", "List what is open, and where."),
    "dispose": ("control", "Close an open session."),
    "models": ("models", "List the models that can be chosen."),
    "status": ("server", "Show what the daemon does."),
    "drain": ("server", "Let the daemon finish its work and take no more."),
    "daemon": ("daemon", "Start or stop the daemon, or show its log."),
    "rpc": ("rpc", "Call any method of the protocol."),
}


class Lazy(click.Group):
    """A group that imports a command when it is run, and lists all of them without importing any."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f".commands.{COMMANDS[cmd_name][0]}", __package__)
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--socket", metavar="PATH", help="The daemon's socket (else LOOPD_SOCKET, else the user's own place).")
@click.version_option(package_name="loopd")
@click.pass_context
def cli(ctx: click.Context, socket: str | None) -> None:
    """Talk to loopd, the session daemon for coding agents.

    \b
    loopctl prompt 'What does this project do?'    asks in the session of this directory
    loopctl messages                               shows the conversation
    """
    ctx.obj = socket


def run(arguments: list[str]) -> int:
    """Run one command; the exit code."""
    try:
        code = cli.main(arguments, prog_name="loopctl", standalone_mode=False)
        return code if isinstance(code, int) else OK
    except Failure as failure:
        note(str(failure))
        return failure.exit_code
    except click.ClickException as usage:
        usage.show()
        return usage.exit_code
    except click.Abort:  # Ctrl-C, where no command gives it a meaning of its own
        return INTERRUPTED
    except (OutputClosed, BrokenPipeError):
        _forget_stdout()  # `loopctl messages | head`: not our failure
        return OK
    except OutputFailed as failed:
        _forget_stdout()
        with suppress(OutputClosed, OutputFailed):  # stderr may be the same full disk
            note(f"cannot write: {failed}")
        return RUN_FAILED
    except UnicodeEncodeError:
        note("the protocol is UTF-8, and a path or an argument is not")
        return USAGE


def _forget_stdout() -> None:
    """At exit Python would flush once more, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
