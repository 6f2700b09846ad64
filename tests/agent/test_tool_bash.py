"""``bash``: what the model is told, what people see, and that it always comes back."""

from __future__ import annotations

import os
import resource
import signal
import stat
import time
import tracemalloc
from pathlib import Path

import pytest
import trio
from agent_recording import MakeScope, call

from loop_protocol.v1.types import Permission
from loopd.agent import ToolEnvironment, ToolScope
from loopd.agent.tools.environment import tool_environment
from loopd.agent.tools.excerpt import BYTES, LINES
from loopd.agent.tools.shell import SHOWN, Bash, BashArguments

pytestmark = pytest.mark.usefixtures("subreaper")


async def bash(scope: ToolScope, command: str, *, timeout_ms: int | None = None) -> tuple[str, bool]:
    with trio.fail_after(20):
        return await call(Bash(timeout_s=15), BashArguments(command, timeout_ms), scope)


async def test_output_is_the_result_and_both_streams_are_in_it(
    make_scope: MakeScope, way: Permission, tmp_path: Path
) -> None:
    assert await bash(make_scope(permission=way), "echo out; echo err >&2; pwd") == (f"out\nerr\n{tmp_path}\n", False)


@pytest.mark.parametrize(
    ("command", "told", "is_error"),
    [
        ("true", "[no output]", False),
        ("exit 3", "[no output]\n[exit code 3]", True),
        ("printf x; exit 3", "x\n[exit code 3]", True),
        ("kill -9 $$", "[no output]\n[killed by signal 9: Killed]", True),
        ("-x", None, True),  # not an option of bash
        ("echo 'unclosed", None, True),
    ],
)
async def test_how_it_ended_is_told(make_scope: MakeScope, command: str, told: str | None, is_error: bool) -> None:
    text, failed = await bash(make_scope(), command)
    assert failed is is_error
    assert told is None or text == told


@pytest.mark.parametrize("command", ["echo \0", "echo " + "x" * 3_000_000])
async def test_a_command_that_cannot_be_started_is_an_error(
    make_scope: MakeScope, way: Permission, command: str
) -> None:
    text, is_error = await bash(make_scope(permission=way), command)
    assert is_error
    assert text.startswith("The command could not be started: ")


async def test_a_cwd_that_vanished_is_an_error(make_scope: MakeScope, way: Permission, tmp_path: Path) -> None:  # K-12
    text, is_error = await bash(make_scope(cwd=str(tmp_path / "gone"), permission=way), "cd")
    assert is_error
    assert text == f"The working directory {tmp_path}/gone does not exist any more."


@pytest.mark.parametrize(("command", "held"), [("sleep 30 & echo done", True), ("exec > >(tee f); echo done", False)])
async def test_a_background_process_does_not_delay_the_return(
    make_scope: MakeScope, command: str, held: bool
) -> None:  # K-21
    started = time.monotonic()
    text, is_error = await bash(make_scope(), command)
    assert time.monotonic() - started < 0.25 + 0.25  # the second quarter is this machine's
    assert text == "done\n" + "[what still ran in the background was ended]" * held
    assert not is_error


async def test_closed_output_does_not_end_the_command(make_scope: MakeScope, way: Permission, tmp_path: Path) -> None:
    await bash(make_scope(permission=way), "exec >&- 2>&-; sleep 0.1; touch made")
    assert (tmp_path / "made").exists()


async def test_a_command_that_ignores_term_is_killed_after_a_grace(make_scope: MakeScope) -> None:  # K-23
    started = time.monotonic()
    text, is_error = await bash(make_scope(), 'trap "" TERM; echo in; while :; do :; done', timeout_ms=300)
    assert 2.2 < time.monotonic() - started < 4
    assert is_error
    assert text == "in\n[stopped at the time limit of 0.3 s]"


async def test_a_command_may_tidy_up_at_its_time_limit_and_is_still_an_error(
    make_scope: MakeScope, way: Permission
) -> None:
    text, is_error = await bash(
        make_scope(permission=way), 'trap "sleep 0.5; echo bye; exit 0" TERM; sleep 30 & wait', timeout_ms=200
    )
    assert is_error
    assert text == "bye\n[stopped at the time limit of 0.2 s]"


@pytest.mark.parametrize("command", ["cat", "read x", "cat </dev/tty", "test -t 0", "test -t 1"])
async def test_there_is_no_input_and_no_terminal(make_scope: MakeScope, command: str) -> None:  # K-24
    with trio.fail_after(3):
        text, _ = await bash(make_scope(), command + "; echo $?")
    assert text == "0\n" if command == "cat" else text.endswith("1\n")


async def test_bad_bytes_are_replaced_and_the_exit_code_kept(make_scope: MakeScope) -> None:  # K-25
    shown: list[str] = []
    scope = make_scope(output=shown.append)
    assert await bash(scope, r"printf 'a\xe4b\n'; exit 4") == ("a\ufffdb\n[exit code 4]", True)
    assert "".join(shown) == "a\ufffdb\n"
    text, is_error = await bash(scope, "head -c 4096 /dev/urandom; exit 5")
    text.encode()
    assert text.endswith("[exit code 5]")
    assert is_error


@pytest.mark.parametrize("command", ["yes | head -c 200M", "head -c 50M /dev/zero | tr '\\0' x"])
async def test_endless_output_takes_bounded_memory_and_is_marked(make_scope: MakeScope, command: str) -> None:  # K-26
    shown: list[str] = []
    tracemalloc.start()
    try:
        text, is_error = await bash(make_scope(output=shown.append), command)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not is_error
    assert "\n[left out here and not kept: lines " in text
    assert len(text.encode()) <= BYTES
    assert text.count("\n") <= LINES
    assert peak < 2_000_000
    assert SHOWN <= len("".join(shown)) < SHOWN + 100


async def test_output_is_shown_while_the_command_runs(make_scope: MakeScope, way: Permission, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    seen = trio.Event()

    def show(text: str) -> None:
        assert text == "first\n" or seen.is_set()
        seen.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(bash, make_scope(output=show, permission=way), "echo first; read x <gate; echo second")
        await seen.wait()
        (tmp_path / "gate").write_text("go\n")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
async def test_the_environment_is_the_allowed_one_and_the_umask_the_persons(
    make_scope: MakeScope, way: Permission, tmp_path: Path, umask: int, mode: int
) -> None:
    allowed = tool_environment(None, daemon_env={**os.environ, "OPENAI_API_KEY": "sk-secret"})
    scope = make_scope()
    scope = ToolScope("c", scope.cwd, ToolEnvironment(allowed, umask), way, scope.ask, scope.output)
    before = os.umask(0o077)
    try:
        text, _ = await bash(scope, "env; touch made; ls /proc/self/fd | wc -l")
    finally:
        os.umask(before)
    assert "sk-secret" not in text  # K-31
    names = {line.partition("=")[0] for line in text.splitlines() if "=" in line}
    assert names <= allowed.keys() | {"LOOPD_CALL", "PWD", "SHLVL", "_", "OLDPWD", "TMPDIR"}
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == mode
    assert text.splitlines()[-1].strip() == "4"  # three streams, and the directory that ls reads


async def test_limits_and_signals_are_the_ordinary_ones(make_scope: MakeScope, way: Permission) -> None:
    """Not those of the interpreter, which ignores a closed pipe and a file that grew too large."""
    limits = [f"{limit}" for limit in resource.getrlimit(resource.RLIMIT_NOFILE)]
    # Under nohup these tests ignore a hang-up; the daemon, which acts on one, does not.
    ignored = f"{(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN) << (signal.SIGHUP - 1):016x}"
    text, _ = await bash(
        make_scope(permission=way),
        "ulimit -Sn; ulimit -Hn; grep -E 'Sig(Ign|Blk)' /proc/self/status; yes | head -1; echo ${PIPESTATUS[0]}",
    )
    assert text.split() == [*limits, "SigBlk:", "0" * 16, "SigIgn:", ignored, "y", "141"]


async def test_a_command_costs_little_more_than_its_process(make_scope: MakeScope) -> None:
    scope = make_scope()
    took = []
    for _ in range(10):
        started = time.thread_time()
        await bash(scope, "true")
        took.append(time.thread_time() - started)
    assert min(took) < 0.005
