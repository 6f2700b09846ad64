"""Everything that is known to lead out of a preset is tried in it, and nothing of the world is other than before (A-7).

``pytest -s`` prints the tables. Each row that can be tried without harm is tried where nothing stands in its way too,
and has to get through there: else it would prove nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio
from agent_recording import call
from escape_files import REACHES, Reach
from escape_trial import COMMANDS, PYTHON, Seen, Trial, try_all
from escape_world import World

from loop_protocol.v1.types import Permission
from loopd.agent import Ask, ToolEnvironment, ToolScope
from loopd.agent.permissions import DENIED
from loopd.agent.tools.edit import Edit, EditArguments
from loopd.agent.tools.read import Read, ReadArguments
from loopd.agent.tools.write import Write, WriteArguments

pytestmark = pytest.mark.usefixtures("subreaper", "sandbox")

RESTRICTED: list[Permission] = ["read-only", "workspace-write"]
CLAIMED = [attempt for attempt in COMMANDS if attempt.claimed]
# What not every machine has.
PROGRAMS = {"ssh-agent": "ssh-add", "curl to docker.sock": "curl", "tmux": "tmux"}
MakeTrial = Callable[[Permission], Awaitable[Trial]]
# Calls whose path a thief swaps meanwhile.
RACES = 150
NOBODY = 65534


# --- commands ---------------------------------------------------------------------------------------------------------


def judge(preset: str, seen: list[Seen]) -> None:
    """Prints the table, and fails for what got out or was not tried."""
    print(f"\n{preset}: {len(seen)} commands")
    for one in seen:
        print(f"  {one.name:45} expected blocked, seen {'OUT: ' + ', '.join(one.harm) if one.harm else 'blocked'}")
    assert [one.name for one in seen] == [attempt.name for attempt in CLAIMED]
    assert [one.name for one in seen if not one.ran] == []
    assert [(one.name, one.harm) for one in seen if one.harm] == []


@pytest.mark.parametrize("preset", RESTRICTED)
async def test_no_command_gets_out_of_a_restricted_preset(preset: Permission) -> None:
    with trio.fail_after(60):
        judge(preset, await try_all(preset, CLAIMED))


@pytest.mark.parametrize("preset", RESTRICTED)
def test_no_command_gets_out_for_a_user_who_is_not_root(preset: Permission) -> None:
    """The usual case; as the first test has it where whoever runs it is not root."""
    setpriv = shutil.which("setpriv")
    if os.getuid() != 0 or setpriv is None:
        pytest.skip("takes root, and setpriv")
    user = [setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    program = [sys.executable, str(Path(__file__).with_name("escape_trial.py")), preset]
    environ = {"PATH": os.environ["PATH"], "HOME": "/", "PYTHONDONTWRITEBYTECODE": "1"}
    if subprocess.run([*user, sys.executable, "-c", "import loopd"], env=environ, capture_output=True).returncode:
        pytest.skip("another user cannot read this Python")
    done = subprocess.run([*user, *program], env=environ, cwd="/", capture_output=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr.decode()
    judge(f"{preset} as another user", msgspec.json.decode(done.stdout, type=list[Seen]))


async def test_the_commands_get_through_where_nothing_stands_in_their_way() -> None:
    # In a container root may do less.
    who = ("anyone", "root") if os.access("/proc/sys/kernel/core_pattern", os.W_OK) else ("anyone",)
    there = [attempt for attempt in CLAIMED if shutil.which(PROGRAMS.get(attempt.name, "sh"))]
    attempts = [attempt for attempt in there if attempt.works in who]
    with trio.fail_after(120):
        seen = await try_all("danger-full-access", attempts, together=1)
    print(f"\ndanger-full-access: {len(seen)} commands")
    for one in seen:
        print(f"  {one.name:45} expected out, seen {'out' if one.harm else 'blocked'}")
    assert [(one.name, one.text) for one in seen if not one.harm] == []
    assert len(seen) > 60


async def test_what_the_sandbox_does_not_claim_is_known() -> None:
    """Each of these does get through; where one does not any more, `loopd/README.md` says too little."""
    attempts = [attempt for attempt in COMMANDS if not attempt.claimed]
    seen = await try_all("workspace-write", attempts, together=1)
    print("\nnot claimed:", *(f"\n  {one.name}" for one in seen))
    got_out = [one.name for one in seen if one.harm]
    assert set(got_out) | {"FIFO of the host"} == {attempt.name for attempt in attempts}


@pytest.mark.parametrize("preset", RESTRICTED)
async def test_an_escalation_that_is_refused_runs_nothing(trial: MakeTrial, preset: Permission) -> None:
    one = await trial(preset)
    text = await one.run("echo ran; echo x > $HOME/../out/file", escalate=True)
    assert text == "Not done: nobody is there."
    assert [ask.operation for ask in one.asked] == ["command"]
    assert one.look() == one.before


@pytest.fixture
def trial() -> Iterator[MakeTrial]:
    made: list[Trial] = []

    async def make(preset: Permission) -> Trial:
        made.append(Trial(preset))
        await made[-1].settle()
        return made[-1]

    yield make
    for one in made:
        one.close()


# --- a call that prepares the next one --------------------------------------------------------------------------------

PREPARED = {
    "git is the host's /proc": ("ln -s /proc .git", "cat /proc/[0-9]*/cmdline"),
    "git is what is protected": ("ln -s $P/data .git", "cat $P/data/sessions/one/*"),
    "git names what is protected": ("echo gitdir: $P/data > .git", "cat $P/data/sessions/one/*"),
    "git shares what is protected": ("mkdir .git; echo ../own/deep > .git/commondir", "cat $W/own/deep/*"),
    "git is a key": ("ln -s $P/key .git", "cat .git $P/key"),
    "git is a FIFO": ("mkfifo .git", "cat $P/key"),
    "git is a terminal": ("ln -s $PTS .git", "echo x > .git"),
    "git is the directory above": ("ln -s .. .git", "echo x > ../out/file"),
    "a stub in the PATH": ("cd bin; printf '#!/bin/sh\\necho x > %s' $O/file > sh; chmod +x sh; cp sh bwrap",
                           "true"),
    "a shell's settings": ("for n in .bashrc .profile .env; do echo \"echo x > $O/file\" > $n; done", "true"),
    "a Python's settings": ("for n in sitecustomize ctypes; do echo \"open('$O/file', 'w')\" > $n.py; done",
                            "$PY -c 'import ctypes'"),
    "git's settings in the workspace": ("printf '[core]\\nfsmonitor = touch $O/new' > .gitconfig", "git status"),
}  # fmt: skip


@pytest.mark.parametrize("name", PREPARED)
async def test_what_one_command_leaves_does_not_let_the_next_one_out(
    monkeypatch: pytest.MonkeyPatch, trial: MakeTrial, name: str
) -> None:
    one = await trial("workspace-write")
    world = one.world
    shutil.rmtree(world.ws / ".git")  # a workspace that is no repository yet
    (world.ws / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{world.ws}/bin:{os.environ['PATH']}")
    before = world.seen(writable=True)
    first, second = PREPARED[name]
    exports = "".join(f"export {key}='{value}'; " for key, value in {**world.variables, "PY": PYTHON}.items())
    told = [await one.run(f"{exports}cd $W; {command}; echo ran") for command in (first, second)]
    assert told[0] == "ran\n"
    assert "ran\n" in told[1]  # nor is it kept from running
    assert world.secret not in "".join(told)
    now = world.seen(writable=True)
    changed = {path for path in now.keys() | before.keys() if now.get(path) != before.get(path)}
    assert {path for path in changed if not path.startswith(f"{world.ws}/.git")} == set()


LINKED = [
    "echo x > real/hooks/sample", "mv real moved", "rm -rf real", "echo gitdir: x > .git", "rm .git",
    "ln real/hooks/sample s",
    "echo x > common/config", "mv common moved",
]  # fmt: skip


async def test_a_repository_whose_git_directory_has_another_name_is_read_only(
    trial: MakeTrial,
) -> None:
    """As `git init --separate-git-dir` and bare repositories with worktrees have it."""
    one = await trial("workspace-write")
    ws = one.world.ws = one.world.ws / "linked"
    (ws / "common").mkdir()
    (ws / "common/config").touch()
    (ws / "real/commondir").write_text("../common\n")
    before = one.world.seen(writable=False)
    text = await one.run("; ".join(f"{command} && echo done" for command in LINKED))
    assert "done" not in text
    assert one.world.seen(writable=False) == before
    for path in ("real/hooks/sample", "common/config"):
        await reach(one, Reach("write", "", path, "asks"))
    assert [ask.path for ask in one.asked] == [f"{ws}/real/hooks/sample", f"{ws}/common/config"]
    assert await one.run("echo x > file && echo done") == "done\n"


# --- files ------------------------------------------------------------------------------------------------------------


async def reach(trial: Trial, one: Reach, answer: str | None = "Not done: nobody is there.") -> str:
    async def ask(asked: Ask) -> str | None:
        trial.asked.append(asked)
        await trio.lowlevel.checkpoint()
        return answer

    world = trial.world
    env = ToolEnvironment({"PATH": os.environ["PATH"], "HOME": str(world.home)}, 0o022)
    scope = ToolScope("call", str(world.ws), env, trial.preset, ask, lambda _: None)
    path = one.path.format(**world.variables)
    with trio.fail_after(10):
        match one.tool:
            case "read":
                text, _ = await call(Read(world.protected), ReadArguments(path), scope)
            case "write":
                text, _ = await call(Write(world.protected), WriteArguments(path, "new"), scope)
            case "edit":
                text, _ = await call(Edit(world.protected), EditArguments(path, "o", "new", all=True), scope)
    return text


def outcome(text: str, *, asked: bool) -> str:
    return "asks" if asked else "denied" if DENIED in text else "fails"


def prepare(world: World, command: str) -> None:
    if command:
        subprocess.run(["sh", "-c", command], cwd=world.ws, env={**os.environ, **world.variables}, check=True)


@pytest.mark.parametrize("preset", RESTRICTED)
async def test_no_file_outside_and_none_of_the_daemon_s_is_reached(trial: MakeTrial, preset: Permission) -> None:
    one = await trial(preset)
    print(f"\n{preset}: {len(REACHES)} files")
    wrong = []
    for row in REACHES:
        prepare(one.world, row.before)
        before, asked = one.look(), len(one.asked)
        text = await reach(one, row)
        seen = outcome(text, asked=len(one.asked) > asked)
        harm = one.world.secret in text or one.look() != before
        print(f"  {row.tool:6}{row.name:40} expected {row.outcome:7} seen {'OUT' if harm else seen}")
        if harm or seen != row.outcome:
            wrong.append((row.tool, row.name, seen, text))
        one.world.tidy()
    assert wrong == []


async def test_the_files_are_reached_where_nothing_stands_in_their_way() -> None:
    missed = []
    for row in (row for row in REACHES if row.works):
        one = Trial("danger-full-access")
        try:
            prepare(one.world, row.before)
            before = one.look()
            text = await reach(one, row)
            if one.world.secret not in text and one.look() == before:
                missed.append((row.tool, row.name, text))
        finally:
            one.close()
    assert missed == []


# --- races ------------------------------------------------------------------------------------------------------------

THIEF = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
os.mkdir("s"); os.mkdir("s/here")
open("s/here/file", "w").write("inside"); open("s/here/key", "w").write("inside")
os.symlink(sys.argv[1], "s/there")
open("ready", "w")
while not os.path.exists("stop"):
    libc.renameat2(-100, b"s/here", -100, b"s/there", 2)
"""


@pytest.mark.parametrize("who", ["a command in the sandbox", "somebody else"])
@pytest.mark.parametrize("tool", ["read", "write", "edit"])
async def test_a_directory_that_is_swapped_for_a_link_all_the_time_is_never_followed(
    trial: MakeTrial, tool: str, who: str
) -> None:
    one = await trial("workspace-write")
    world = one.world
    target = str(world.own if tool == "read" else world.out / "dir")
    row = Reach(tool, "swapped", "s/here/key" if tool == "read" else "s/here/file", "asks")  # type: ignore[arg-type]
    (world.ws / "thief").write_text(THIEF)
    before = world.seen(writable=True)
    told: list[str] = []
    async with trio.open_nursery() as nursery:
        if who == "somebody else":
            nursery.start_soon(partial(trio.run_process, [PYTHON, "-I", "thief", target], cwd=world.ws))
        else:
            nursery.start_soon(one.run, f"exec {PYTHON} -I thief {target}")
        with trio.fail_after(10):
            while not (world.ws / "ready").exists():  # noqa: ASYNC110  # another process says so
                await trio.sleep(0.01)
        try:
            with trio.fail_after(20):
                while len(told) < RACES or len(set(told)) < 2:  # both sides of the race are met
                    told.append(await reach(one, row))
        finally:
            (world.ws / "stop").touch()
    now = world.seen(writable=True)
    assert {path for path in now if now[path] != before.get(path)} == set()
    assert world.secret not in "".join(told)


async def test_an_answer_is_good_for_one_change_of_one_file(trial: MakeTrial) -> None:
    one = await trial("workspace-write")
    first, second = Reach("write", "", "{O}/file", "asks"), Reach("write", "", "{O}/program", "asks")
    assert "replaced" in await reach(one, first, answer=None)
    before = one.look()
    for row in (first, second):  # the same again, and another one
        assert await reach(one, row) == "Not done: nobody is there."
    assert [ask.path for ask in one.asked] == [f"{one.world.out}/{name}" for name in ("file", "file", "program")]
    assert one.look() == before
