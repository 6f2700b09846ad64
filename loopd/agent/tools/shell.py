"""The tool ``bash``: one command in a new shell, without terminal and input, bounded in time and output."""

from __future__ import annotations

import codecs
import os
import shlex
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import trio
from msgspec import Meta, Struct

from loopd.agent import Ask, ToolOutcome, ToolScope
from loopd.agent.tools.commands import BASH, Rules, rules_of
from loopd.agent.tools.enclosure import Enclose
from loopd.agent.tools.excerpt import Excerpt
from loopd.agent.tools.outcomes import refused, told
from loopd.agent.tools.process import Tree, start
from loopd.agent.tools.sandbox import ALLOWED, PLACES, Sandbox, first_line

# From SIGTERM to SIGKILL.
GRACE_S = 2.0
# A background process may hold the pipe open after the shell's end: 250 ms all in all (K-21).
DRAIN_S = 0.2
# What is shown while a command runs; the result has its end in any case.
SHOWN = 256 * 1024


class BashArguments(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    command: str
    timeout_ms: Annotated[int, Meta(ge=1, le=2147483647)] | None = None
    escalate: bool = False
    justification: str | None = None


class Bash:
    name = "bash"
    parameters: type[Struct] = BashArguments

    def __init__(self, *, timeout_s: float, sandbox: Sandbox | None = None) -> None:
        self._timeout_s = timeout_s
        self._sandbox = sandbox or Sandbox()
        self._shell = shutil.which("bash", path=PLACES) or shutil.which("bash") or "/bin/sh"
        self.description = (
            "Run a command with bash in the working directory; the result is what it prints, and how it ended. "
            "Each call is a new shell. There is no terminal and no input. Background processes end with the shell. "
            f"Of long output the middle is left out. The time limit is timeoutMs, else {timeout_s:g} seconds. "
            "Unless the permission is danger-full-access it runs in a sandbox: no network, no sockets, and nothing can "
            "be written but $TMPDIR and, with workspace-write, the working directory without its .git. What needs "
            "more, git commit for example, takes escalate with a justification: the person is asked."
        )

    async def run(self, arguments: BashArguments, scope: ToolScope) -> ToolOutcome:
        enclose = None
        if scope.permission != "danger-full-access":
            if arguments.escalate and not (arguments.justification or "").strip():
                return told("Nothing ran: escalate takes a justification, for the person who is asked.", is_error=True)
            status = await self._sandbox.tried()
            allowed = ALLOWED[scope.permission] if status.works else f"there is no sandbox here: {status.reason}"
            if status.works and not arguments.escalate:
                enclose = partial(self._sandbox.enclosure, scope.permission, scope.cwd)
            elif refusal := await refused(scope, await _ask(arguments, allowed, scope, works=status.works)):
                return refusal
        return await self._in_shell(arguments, scope, enclose)

    async def _in_shell(self, arguments: BashArguments, scope: ToolScope, enclose: Enclose | None) -> ToolOutcome:
        argv = [self._shell, "-c", "--", arguments.command]
        try:
            tree = await start(argv, cwd=scope.cwd, env=scope.env.variables, umask=scope.env.umask, enclose=enclose)
        except (OSError, ValueError) as error:
            return told(_not_started(error, scope.cwd), is_error=True)
        limit_s = self._timeout_s if arguments.timeout_ms is None else arguments.timeout_ms / 1000
        printed = Printed(scope.output)
        async with tree:
            course = await _follow(tree, printed, limit_s=limit_s)
        output = printed.finish()
        if enclose is None:
            text, is_error = _result(output, course, tree.returncode, limit_s)
        elif not tree.entered and not course.timed_out and (tree.returncode or 0) > 0:
            return told(f"Nothing ran, the sandbox could not be set up: {first_line(output)}", is_error=True)
        else:
            text, is_error = _result(output, course, tree.returncode, limit_s, enclosed=True)
        return told(text, is_error=is_error)


async def _ask(arguments: BashArguments, allowed: str, scope: ToolScope, *, works: bool) -> Ask:
    def find() -> Rules:
        rules = rules_of(arguments.command)
        located = _located(rules.rules, scope.env.variables.get("PATH", ""), scope.cwd)
        return Rules(tuple(located), rules.refused)

    # A dead disk on the PATH holds this thread and no other call's.
    rules = await trio.to_thread.run_sync(find, limiter=trio.CapacityLimiter(1), abandon_on_cancel=True)
    return Ask(
        operation="command",
        reason="it wants all your rights, loopd's own files included, outside the sandbox"
        if works
        else f"each command takes a person: {allowed}",
        sandbox=allowed if works else "nothing: there is no sandbox",
        rules=rules.rules,
        rules_refused=rules.refused,
        justification=arguments.justification,
    )


def _located(rules: Sequence[str], places: str, cwd: str) -> list[str]:
    """The rules, with the whole path of each program that is found in the workspace, as in a virtual environment there:
    what was allowed of `git` must not cover a `git` that a later command leaves before it."""
    located = []
    for rule in rules:
        program = shlex.split(rule.removeprefix(BASH))[0]
        for directory in () if "/" in program else places.split(":"):
            place = os.path.realpath(os.path.join(cwd, directory))
            path = os.path.join(place, program)
            if os.path.isfile(path) and os.access(path, os.X_OK):
                if any(one == cwd or one.startswith(cwd.rstrip("/") + "/") for one in (place, os.path.realpath(path))):
                    rule = BASH + shlex.quote(path) + rule.removeprefix(BASH + shlex.quote(program))
                break
        located.append(rule)
    return located


class Printed:
    """Output as it arrives: the first of it is shown at once, an excerpt of all of it is kept."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._left = SHOWN
        self._excerpt = Excerpt()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> None:
        self._excerpt.feed(data)
        if self._left > 0:
            self._say(self._decoder.decode(data[: self._left]))
            self._left -= len(data)
            if self._left < 0:
                self._say("\n[no more is shown while it runs]\n")

    def finish(self) -> str:
        if self._left > 0:
            self._say(self._decoder.decode(b"", final=True))
        return self._excerpt.text()

    def _say(self, text: str) -> None:
        if text:
            self._show(text)


@dataclass(slots=True, frozen=True)
class Course:
    """How it went: ``held`` when something still held the output open after the shell's end."""

    timed_out: bool
    held: bool


async def _follow(tree: Tree, printed: Printed, *, limit_s: float) -> Course:
    closed = trio.Event()

    async def read() -> None:
        while data := await tree.read():
            printed.feed(data)
        closed.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        with trio.move_on_after(limit_s) as timer:
            await tree.exited()
        if timer.cancelled_caught:
            with trio.move_on_after(GRACE_S):
                await tree.terminate()
                await tree.exited()
        with trio.move_on_after(DRAIN_S):
            await closed.wait()
        nursery.cancel_scope.cancel()
    return Course(timed_out=timer.cancelled_caught, held=not closed.is_set())


def _result(
    output: str, course: Course, returncode: int | None, limit_s: float, *, enclosed: bool = False
) -> tuple[str, bool]:
    """What the model reads, and whether it is an error."""
    notes = []
    if course.timed_out:
        notes.append(f"[stopped at the time limit of {limit_s:g} s]")
    elif course.held:
        notes.append("[what still ran in the background was ended]")
    if returncode != 0 and not course.timed_out:
        notes.append(_ending(returncode, enclosed=enclosed))
    if not output:
        notes.insert(0, "[no output]")
    elif notes and not output.endswith("\n"):
        output += "\n"
    return output + "\n".join(notes), course.timed_out or returncode != 0


def _ending(returncode: int | None, *, enclosed: bool) -> str:
    if returncode is None:
        return "[it did not die when it was killed]"
    if returncode < 0:
        return f"[killed by signal {-returncode}: {signal.strsignal(-returncode)}]"
    # Out of a sandbox a signal comes as shells tell it, and a program may end with the same number by itself.
    if enclosed and returncode - 128 in signal.valid_signals():
        return f"[exit code {returncode}, as of signal {returncode - 128}: {signal.strsignal(returncode - 128)}]"
    return f"[exit code {returncode}]"


def _not_started(error: OSError | ValueError, cwd: str) -> str:
    # By the error alone: to look at a directory that is in trouble may take for ever.
    if isinstance(error, (FileNotFoundError, NotADirectoryError)) and error.filename == cwd:
        return f"The working directory {cwd} does not exist any more."
    reason = error.strerror if isinstance(error, OSError) else error
    what = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
    return f"The command could not be started: {reason}{what}"
