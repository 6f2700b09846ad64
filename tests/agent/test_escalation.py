"""When a command asks: where there is no sandbox, and where the model wants out of it. Nothing runs unasked."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from agent_recording import MakeScope, call

from loop_protocol.v1.types import Permission
from loopd.agent import Ask, ToolEnvironment
from loopd.agent.tools.sandbox import Sandbox
from loopd.agent.tools.shell import Bash, BashArguments

pytestmark = pytest.mark.usefixtures("subreaper")

RESTRICTED: list[Permission] = ["read-only", "workspace-write"]


class Person:
    """Answers all that is asked with ``answer``."""

    def __init__(self, answer: str | None) -> None:
        self.answer = answer
        self.asked: list[Ask] = []

    async def ask(self, ask: Ask) -> str | None:
        await trio.lowlevel.checkpoint()
        self.asked.append(ask)
        return self.answer


def fake_bwrap(place: Path, script: str) -> str:
    place.mkdir()
    (place / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
    (place / "bwrap").chmod(0o755)
    return str(place)


FAILING = {
    "none": (None, "bubblewrap is not installed (package: bubblewrap)"),
    "refused": ("echo 'bwrap: setting up uid map: Permission denied' >&2; exit 1", "setting up uid map: Permission"),
    "silent": ("exit 1", "it said nothing"),
    "pretends": ("exit 0", "does not work here"),
}


@pytest.mark.parametrize("permission", RESTRICTED)
@pytest.mark.parametrize("name", FAILING)
@pytest.mark.parametrize("allowed", [True, False])
async def test_without_a_sandbox_each_command_asks_and_says_why(
    make_scope: MakeScope, tmp_path: Path, permission: Permission, name: str, allowed: bool
) -> None:
    script, why = FAILING[name]
    sandbox = Sandbox(places=fake_bwrap(tmp_path / "bin", script) if script else str(tmp_path))
    assert sandbox.status is None
    bash, person = Bash(timeout_s=5, sandbox=sandbox), Person(None if allowed else "Not done: no.")
    scope = replace(make_scope(permission=permission), ask=person.ask)
    for _ in range(2):
        told = await call(bash, BashArguments("touch made; echo ran"), scope)
        assert told == (("ran\n", False) if allowed else ("Not done: no.", True))
    assert (tmp_path / "made").exists() is allowed
    assert sandbox.status is not None
    assert not sandbox.status.works
    assert why in (sandbox.status.reason or "")
    assert [(ask.operation, ask.sandbox) for ask in person.asked] == [("command", "nothing: there is no sandbox")] * 2
    assert all(why in ask.reason for ask in person.asked)


@pytest.mark.parametrize("way", ["directory of all", "file of all", "relative"])
async def test_a_bubblewrap_that_others_could_put_there_is_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A command of an earlier session, for one: whatever it left there would run with all rights."""
    place = tmp_path / "bin"
    fake_bwrap(place, f"touch {tmp_path}/ran; exit 1")
    {"directory of all": place, "file of all": place / "bwrap", "relative": tmp_path}[way].chmod(0o777)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "bin" if way == "relative" else str(place))
    assert "not installed" in ((await Sandbox().tried()).reason or "")
    assert not (tmp_path / "ran").exists()


async def test_a_bubblewrap_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopd.agent.tools.sandbox.TRIAL_S", 0.2)
    with trio.fail_after(5):
        status = await Sandbox(places=fake_bwrap(tmp_path / "bin", "exec sleep 20")).tried()
    assert "it did not end in time" in (status.reason or "")


@pytest.mark.parametrize("permission", RESTRICTED)
async def test_escalation_takes_a_justification_and_a_person(
    make_scope: MakeScope, sandbox: Sandbox, permission: Permission
) -> None:
    bash, person = Bash(timeout_s=5, sandbox=sandbox), Person("Not done: no.")
    scope = replace(make_scope(permission=permission), ask=person.ask)
    outside = f"/var/tmp/loopd-escalated-{os.getpid()}"
    command = f"touch {outside} && rm {outside} && echo got out"
    for missing in (None, "  "):
        text, is_error = await call(bash, BashArguments(command, escalate=True, justification=missing), scope)
        assert is_error
        assert "justification" in text
    assert not person.asked
    wanted = BashArguments(command, escalate=True, justification="to see")
    assert await call(bash, wanted, scope) == ("Not done: no.", True)
    (ask,) = person.asked
    assert (ask.operation, ask.justification) == ("command", "to see")
    assert "no network" in ask.sandbox
    person.answer = None
    assert await call(bash, wanted, scope) == ("got out\n", False)
    assert len(person.asked) == 2


async def test_a_program_that_is_left_in_the_workspace_is_not_the_one_that_was_allowed(
    make_scope: MakeScope, tmp_path: Path
) -> None:
    person, outside, inside = Person("Not done: no."), tmp_path / "bin", tmp_path / "ws" / "venv" / "bin"
    outside.mkdir()
    inside.mkdir(parents=True)
    (outside / "git").write_text("")
    (outside / "git").chmod(0o755)
    bash = Bash(timeout_s=5, sandbox=Sandbox(places=str(outside)))

    async def rules(path: str) -> list[str]:
        scope = make_scope(cwd=str(tmp_path / "ws"), permission="workspace-write")
        scope = replace(scope, ask=person.ask, env=ToolEnvironment({"PATH": path}))
        await call(bash, BashArguments("git status && ls"), scope)
        return list(person.asked[-1].rules)

    path = f"{inside}:{outside}:/usr/bin:/bin"
    assert await rules(path) == ["bash: git status …", "bash: ls"]
    (inside / "git").write_text("#!/bin/sh\n")
    assert await rules(path) == ["bash: git status …", "bash: ls"]  # bash does not run it
    (inside / "git").chmod(0o755)
    for way in (path, f"venv/bin:{outside}", f"{tmp_path}/ws/../ws/venv/bin:{outside}"):
        assert (await rules(way))[0] == f"bash: {inside}/git status …"
    (outside / "git").unlink()
    (outside / "git").symlink_to(inside / "git")
    assert (await rules(str(outside)))[0] == f"bash: {outside}/git status …"


@pytest.mark.parametrize("permission", RESTRICTED)
async def test_what_fails_in_the_sandbox_is_not_tried_again_with_more_rights(
    make_scope: MakeScope, sandbox: Sandbox, permission: Permission
) -> None:
    person = Person(None)
    scope = replace(make_scope(permission=permission), ask=person.ask)
    text, is_error = await call(Bash(timeout_s=5, sandbox=sandbox), BashArguments("touch /made-outside"), scope)
    assert is_error
    assert "Read-only file system" in text
    assert not person.asked


async def test_with_full_access_nothing_asks_and_escalate_changes_nothing(make_scope: MakeScope) -> None:
    person = Person("Not done: no.")
    scope = replace(make_scope(), ask=person.ask)
    bash = Bash(timeout_s=5)
    assert await call(bash, BashArguments("echo ran", escalate=True), scope) == ("ran\n", False)
    assert not person.asked


async def test_a_sandbox_that_fails_for_one_command_says_that_nothing_ran(
    make_scope: MakeScope, tmp_path: Path, sandbox: Sandbox
) -> None:
    """Told from the command's own exit by what bubblewrap reports: this one works once, for its trial."""
    real = sandbox._bwrap
    places = fake_bwrap(
        tmp_path / "bin", f'[ -e {tmp_path}/tried ] && exec {real} --ro-bind / / --ro-bind /not-there /mnt "$@"\n'
        f'touch {tmp_path}/tried; exec {real} "$@"'
    )  # fmt: skip
    bash = Bash(timeout_s=5, sandbox=Sandbox(places=places))
    told = await call(bash, BashArguments("touch made; exit 1"), make_scope(permission="workspace-write"))
    assert told[1]
    assert told[0].startswith("Nothing ran, the sandbox could not be set up: bwrap: Can't find source path /not-there")
    assert not (tmp_path / "made").exists()


async def test_a_bubblewrap_that_is_gone_is_named(make_scope: MakeScope, tmp_path: Path, sandbox: Sandbox) -> None:
    places = fake_bwrap(tmp_path / "bin", f'exec {sandbox._bwrap} "$@"')
    bash = Bash(timeout_s=5, sandbox=Sandbox(places=places))
    assert await call(bash, BashArguments("echo ran"), make_scope(permission="read-only")) == ("ran\n", False)
    (tmp_path / "bin" / "bwrap").unlink()
    text, is_error = await call(bash, BashArguments("echo ran"), make_scope(permission="read-only"))
    assert is_error
    assert text == f"The command could not be started: No such file or directory ({tmp_path}/bin/bwrap)"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("exit 1", "[no output]\n[exit code 1]"),
        ("exit 127", "[no output]\n[exit code 127]"),
        ("kill -9 $$", "[no output]\n[exit code 137, as of signal 9: Killed]"),
        ("echo bwrap: x; exit 255", "bwrap: x\n[exit code 255]"),
        ("kill -9 1; echo alive", "alive\n"),
    ],
)
async def test_how_a_command_ended_in_the_sandbox_is_told(
    make_scope: MakeScope, sandbox: Sandbox, command: str, told: str
) -> None:
    scope = make_scope(permission="workspace-write")
    text, _ = await call(Bash(timeout_s=5, sandbox=sandbox), BashArguments(command), scope)
    assert text == told
