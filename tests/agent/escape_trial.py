"""Tries a table of attempts in one preset and tells what came of each. As a program it does so for whoever runs it."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import trio
from agent_recording import call, left_over
from escape_kernel import KERNEL, PROCESSES, SOCKETS
from escape_table import FILES, GIT, LATER, OWN, Attempt
from escape_world import OTHER_RIGHTS, World

from loop_protocol.v1.types import Permission
from loopd.agent import Ask, ToolEnvironment, ToolScope
from loopd.agent.tools.process import become_subreaper
from loopd.agent.tools.sandbox import Sandbox
from loopd.agent.tools.seccomp import MACHINES
from loopd.agent.tools.shell import Bash, BashArguments

COMMANDS = [*FILES, *GIT, *OWN, *PROCESSES, *SOCKETS, *KERNEL, *LATER]
# Of one call, and so of one sandbox: a world that nothing happened to is as good as new.
TOGETHER = 12
# Not one that only root or only the host's /tmp has.
PYTHON = shutil.which("python3", path="/usr/bin:/bin") or os.path.realpath(sys.executable)


@dataclass(slots=True)
class Seen:
    """``harm`` is empty where nothing of the world is other than before. ``ran``: it was begun at all."""

    name: str
    ran: bool
    harm: list[str]
    text: str = ""


class Trial:
    """``asked`` is what came to the person, who is not there."""

    def __init__(self, preset: Permission) -> None:
        self.preset = preset
        self.asked: list[Ask] = []
        self.world = World()
        self.before: dict[str, object] = {}

    def close(self) -> None:
        self.world.close()

    async def settle(self) -> None:
        """The sandbox makes what it has to cover in a workspace, once."""
        if self.preset != "danger-full-access":
            await self.run("true")
        self.before = self.look()

    async def each(self, attempts: Sequence[Attempt]) -> list[Seen]:
        """One by one if they do harm, each in a world of its own then."""
        text = await self.run(self._script(attempts))
        harm = await self._harm(text, later=any(one.name.startswith("later") for one in attempts))
        if harm:
            self.world.close()
            self.world = World()
            await self.settle()
        if harm and len(attempts) > 1:
            return [seen for one in attempts for seen in await self.each([one])]
        return [Seen(one.name, f"#{at}\n" in text, harm, text) for at, one in enumerate(attempts)]

    async def run(self, command: str, *, escalate: bool = False) -> str:
        async def nobody(ask: Ask) -> str | None:
            self.asked.append(ask)
            await trio.lowlevel.checkpoint()
            return "Not done: nobody is there."

        world = self.world
        bash = Bash(timeout_s=40, sandbox=Sandbox(world.protected))
        env = ToolEnvironment({"PATH": os.environ["PATH"], "HOME": str(world.home)}, 0o022)
        scope = ToolScope("call", str(world.ws), env, self.preset, nobody, lambda _: None)
        arguments = BashArguments(command, escalate=escalate, justification="to try it" if escalate else None)
        text, _ = await call(bash, arguments, scope)
        return text

    def _script(self, attempts: Sequence[Attempt]) -> str:
        """Quoted and bounded each for itself, so none keeps the next from being tried."""
        machine = MACHINES[os.uname().machine]
        loopctl = f"{sys.executable} -P {sysconfig.get_path('scripts')}/loopctl"
        variables = {**self.world.variables, "PY": PYTHON, "KEYCTL": str(machine.keys[2]), "LOOPCTL": loopctl}
        lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        scratch = '"$TMPDIR"' if self.preset == "read-only" else '"$W"'
        lines += ["won() { printf 'wo%s\\n' n; }; export -f won"]
        for at, one in enumerate(attempts):
            lines += [f"mkdir {scratch}/s{at} && cd {scratch}/s{at} && echo '#{at}'"]
            lines += [f"timeout -k 1 8 bash -uc {shlex.quote(one.command)} < /dev/null 2>&1"]
        return "\n".join(lines)

    async def _harm(self, text: str, *, later: bool) -> list[str]:
        if later:
            await trio.sleep(0.5)
        return self._harm_now(text)

    def _harm_now(self, text: str) -> list[str]:
        harm = ["a secret was told"] * (self.world.secret in text) + ["won"] * ("\nwon\n" in f"\n{text}\n")
        harm += ["a process is left"] * bool(left_over())
        now = self.look()
        if self.preset != "read-only" and self.world.ws.is_dir():
            # What it made in the workspace is its own, but for files with other rights than its user has.
            harm += [path for path, fact in now.items() if fact == OTHER_RIGHTS]
            self.world.tidy()
            now = {**self.look(), "heard": now["heard"]}
        return harm + sorted(name for name in now.keys() | self.before.keys() if now.get(name) != self.before.get(name))

    def look(self) -> dict[str, object]:
        return self.world.seen(writable=self.preset != "read-only")


async def try_all(preset: Permission, attempts: Sequence[Attempt], *, together: int = TOGETHER) -> list[Seen]:
    trial = Trial(preset)
    try:
        await trial.settle()
        parts = [attempts[at : at + together] for at in range(0, len(attempts), together)]
        seen = [one for part in parts for one in await trial.each(part)]
        assert not trial.asked, trial.asked
    finally:
        trial.close()
    return seen


def main() -> None:
    become_subreaper()
    claimed = [attempt for attempt in COMMANDS if attempt.claimed]
    preset = msgspec.convert(sys.argv[1], Permission)
    sys.stdout.buffer.write(msgspec.json.encode(trio.run(try_all, preset, claimed)))
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


if __name__ == "__main__":
    main()
