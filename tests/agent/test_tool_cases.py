"""What broke other agents, with the real tools in the real loop: one result per call, stored, valid and bounded."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from agent_recording import Recording, left_over

from loop_protocol.v1.types import Permission, TextBlock, ToolCallBlock, Usage
from loopd.agent import Reply, Said, ToolEnded, ToolEnvironment, ToolOutput, ToolStarted
from loopd.agent.context import ConversationInput
from loopd.agent.loop import Agent
from loopd.agent.scripted import ScriptedModel
from loopd.agent.tools import session_tools
from loopd.agent.tools.excerpt import BYTES
from loopd.agent.tools.shell import SHOWN

pytestmark = pytest.mark.usefixtures("subreaper")

ANSWER = Reply([TextBlock("done")], Usage(1, 1), "stop")
HELD = "[what still ran in the background was ended]"


def calling(*calls: tuple[str, dict[str, Any]]) -> Reply:
    blocks = [ToolCallBlock(f"c{number}", name, arguments) for number, (name, arguments) in enumerate(calls, 1)]
    return Reply([*blocks], Usage(1, 1), "toolUse")


class Driven:
    """An agent over the real tools in ``cwd``, and what it left behind."""

    def __init__(
        self, cwd: Path, *replies: Reply, recording: type[Recording] = Recording, way: Permission = "danger-full-access"
    ) -> None:
        self.model = ScriptedModel([*replies, ANSWER])
        self.context = recording(ConversationInput(self.model), "go")
        self.agent = Agent(
            model=self.model,
            tools=session_tools(bash_timeout_s=10),
            input=self.context.input,
            system="",
            cwd=str(cwd),
            env=ToolEnvironment({"PATH": os.environ["PATH"], "HOME": str(cwd)}),
            permission=way,
        )

    async def run(self) -> list[tuple[str, bool]]:
        with trio.fail_after(20):
            await self.agent.run(self.context)
        return self.results()

    def results(self) -> list[tuple[str, bool]]:
        """From the stored lines, which are valid UTF-8 and pair."""
        self.context.history.require_paired()
        history = self.context.history
        messages = [msgspec.json.decode(history.line(place)) for place in range(history.messages)]
        return [(m["content"][0]["text"], m["isError"]) for m in messages if m["role"] == "toolResult"]

    def shown(self) -> str:
        return "".join(said.text for said in self.context.said if isinstance(said, ToolOutput))


async def bash(cwd: Path, command: str, way: Permission, **more: Any) -> tuple[str, bool]:
    ((text, is_error),) = await Driven(cwd, calling(("bash", {"command": command, **more})), way=way).run()
    return text, is_error


@pytest.mark.parametrize(
    ("command", "told"), [("sleep 30 & echo done", f"done\n{HELD}"), ("exec > >(tee f); echo done", "done\n")]
)
async def test_what_a_shell_left_in_the_background_does_not_hold_the_call(
    tmp_path: Path, way: Permission, command: str, told: str
) -> None:  # K-21
    started = time.monotonic()
    assert await bash(tmp_path, command, way) == (told, False)
    assert time.monotonic() - started < 0.25 + 0.25  # the second quarter is this machine's


async def test_a_stop_leaves_no_descendant_that_left_its_group(tmp_path: Path, way: Permission) -> None:  # K-22
    before = left_over()
    driven = Driven(tmp_path, calling(("bash", {"command": "(setsid yes >/dev/null &); echo up; sleep 30"})), way=way)
    with trio.CancelScope() as stop:

        def say(said: object) -> None:
            if isinstance(said, ToolOutput):
                stop.cancel()

        driven.context.say = say  # type: ignore[method-assign]
        with trio.fail_after(3):
            await driven.agent.run(driven.context)
    assert stop.cancelled_caught
    assert left_over() == before


async def test_a_command_that_ignores_its_time_limit_is_killed_after_a_grace(
    tmp_path: Path, way: Permission
) -> None:  # K-23
    started = time.monotonic()
    told = await bash(tmp_path, 'trap "" TERM; while :; do :; done', way, timeoutMs=1000)
    assert told == ("[no output]\n[stopped at the time limit of 1 s]", True)
    assert 3 < time.monotonic() - started < 10  # as a rule hardly more than 3: the rest is the machine's


SUDO = pytest.param("sudo -k; sudo true", marks=pytest.mark.skipif(not shutil.which("sudo"), reason="no sudo here"))


@pytest.mark.parametrize("command", ["cat", "read x", SUDO, "read x </dev/tty", "head -c 1 /dev/stdin"])
async def test_whoever_asks_for_input_finds_its_end_at_once(
    tmp_path: Path, way: Permission, command: str
) -> None:  # K-24
    started = time.monotonic()
    await bash(tmp_path, command, way)
    assert time.monotonic() - started < 2


async def test_bytes_that_are_no_text_are_replaced_and_the_rest_is_kept(
    tmp_path: Path, way: Permission
) -> None:  # K-25
    driven = Driven(
        tmp_path,
        calling(
            ("bash", {"command": r"printf 'a\xe4b\n' | tee bad; exit 4"}),
            ("bash", {"command": "echo begin; head -c 4096 /dev/urandom | tee random; echo; echo end; exit 5"}),
            ("read", {"path": "bad"}),
            ("read", {"path": "random"}),
        ),
        way=way,
    )
    first, second, third, fourth = await driven.run()
    assert first == ("a\ufffdb\n[exit code 4]", True)
    assert second[0].startswith("begin\n")
    assert second[0].endswith("\nend\n[exit code 5]")
    assert third == ("a\ufffdb\n", False)
    assert not fourth[1]


@pytest.mark.parametrize("command", ["yes | head -c 200M", "head -c 50M /dev/zero | tr '\\0' x | tee wide"])
async def test_endless_output_is_bounded_stored_with_a_marker_and_shown_in_part(
    tmp_path: Path, way: Permission, command: str
) -> None:  # K-26
    driven = Driven(tmp_path, calling(("bash", {"command": command}), ("read", {"path": "wide"})), way=way)
    (text, is_error), (part, _) = await driven.run()
    assert not is_error
    assert "\n[left out here and not kept: lines " in text
    assert len(text.encode()) <= BYTES
    assert len(part.encode()) <= BYTES + 300
    assert len(driven.shown()) < SHOWN + 100


async def test_a_lone_surrogate_from_a_tool_is_stored_as_valid_text(tmp_path: Path, way: Permission) -> None:  # K-27
    (tmp_path / os.fsdecode(b"a\xffb")).touch()
    (tmp_path / "half").write_bytes(b"x\xed\xa0\x80y\n")
    half = "x\ufffd\ufffd\ufffdy\n"
    driven = Driven(tmp_path, calling(("bash", {"command": "ls a*; cat half"}), ("read", {"path": "half"})), way=way)
    assert await driven.run() == [(f"a\ufffdb\n{half}", False), (half, False)]
    reread = ConversationInput(ScriptedModel([]))
    history = driven.context.history
    await reread.rebuild(ScriptedModel([]), map(history.line, range(history.messages)))
    assert reread.encoded == driven.context.input.encoded


class Timed(Recording):
    """Keeps how long each call took from its start to its end, in seconds."""

    def __init__(self, input: ConversationInput, prompt: str) -> None:
        super().__init__(input, prompt)
        self.took: list[float] = []

    def say(self, said: Said) -> None:
        if isinstance(said, ToolStarted):
            self._started = time.perf_counter()
        if isinstance(said, ToolEnded):
            self.took.append(time.perf_counter() - self._started)
        super().say(said)


def round_of(way: Permission) -> list[tuple[str, dict[str, Any]]]:
    bare: list[tuple[str, dict[str, Any]]] = [
        ("write", {"path": "f", "content": "a\n"}),
        ("edit", {"path": "f", "oldText": "a", "newText": "b"}),
    ]
    return [
        *[("bash", {"command": "true"})] * 44,
        *(bare if way == "danger-full-access" else [("bash", {"command": "echo a > f"}), ("read", {"path": "f"})]),
        ("read", {"path": "f"}),
        ("bash", {"command": "(setsid sleep 30 &); cat f"}),
        ("read", {"path": "missing"}),
        ("bash", {"command": "exit 3", "timeoutMs": 0}),
    ]


async def test_five_hundred_calls_leave_no_process_no_descriptor_no_mount_and_start_fast(
    tmp_path: Path, way: Permission
) -> None:
    before, mounts = left_over(), Path("/proc/self/mountinfo").read_text()
    rounds = 10 if way == "danger-full-access" else 3
    driven = Driven(tmp_path, *[calling(*round_of(way))] * rounds, recording=Timed, way=way)
    await trio.to_thread.run_sync(int)  # a thread that stays, with what it holds
    descriptors = sorted(os.listdir("/proc/self/fd"))
    with trio.fail_after(60):
        await driven.agent.run(driven.context)
    assert [is_error for _, is_error in driven.results()] == ([False] * 48 + [True] * 2) * rounds
    assert sorted(os.listdir("/proc/self/fd")) == descriptors
    assert left_over() == before
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert os.listdir(tmp_path) == ["f"]
    assert isinstance(driven.context, Timed)
    took = sorted(took for place, took in enumerate(driven.context.took) if place % 50 < 44)
    typical = statistics.median(took)
    print(f"`true`: least {took[0] * 1e3:.1f} ms, typical {typical * 1e3:.1f} ms, most {took[-1] * 1e3:.1f} ms")
    assert typical < (0.015 if way == "danger-full-access" else 0.05)
