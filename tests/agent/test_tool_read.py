"""``read``: parts of files with a way to read on, and plain refusals for everything that is no file."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest
import trio
from agent_recording import MakeScope, call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loopd.agent.tools.excerpt import BYTES, LINES
from loopd.agent.tools.read import Read, ReadArguments


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    return tmp_path


async def read(make_scope: MakeScope, path: str | Path, **part: int) -> tuple[str, bool]:
    return await call(Read(), ReadArguments(str(path), **part), make_scope(permission="read-only"))


async def test_a_short_file_is_read_verbatim_relative_to_the_cwd(cwd: Path, make_scope: MakeScope) -> None:
    (cwd / "a.txt").write_bytes(b"one\r\ntw\xe4o\n")
    assert await read(make_scope, "a.txt") == ("one\r\ntw\ufffdo\n", False)
    (cwd / "empty").touch()
    assert await read(make_scope, "empty") == ("[the file is empty]", False)


async def test_a_long_file_is_cut_at_2000_lines_and_says_how_to_read_on(cwd: Path, make_scope: MakeScope) -> None:
    (cwd / "long").write_text("".join(f"{number}\n" for number in range(1, 4001)))
    text, is_error = await read(make_scope, "long")
    assert not is_error
    assert text.split("\n")[LINES - 1] == "2000"
    assert "read on with offset 2001" in text.split("\n")[LINES]
    text, _ = await read(make_scope, "long", offset=2001)
    assert text.startswith("2001\n")
    assert text.endswith("\n4000\n")


async def test_an_offset_past_the_end_is_an_error_that_tells_the_length(cwd: Path, make_scope: MakeScope) -> None:
    (cwd / "ended").write_text("a\nb\n")
    (cwd / "open").write_text("a\nb")
    for name in ("ended", "open"):
        assert (await read(make_scope, name, offset=2))[0].startswith("b")
        for offset in (3, 9):
            text, is_error = await read(make_scope, name, offset=offset)
            assert is_error
            assert "only 2 lines" in text


async def test_a_line_longer_than_the_limit_is_cut_and_the_next_one_named(cwd: Path, make_scope: MakeScope) -> None:
    (cwd / "wide").write_text("ä" * BYTES + "\nnext\n")
    text, _ = await read(make_scope, "wide")
    assert text.startswith("ä" * (BYTES // 2) + "\n[line 1 is cut here")
    assert f"offset 2, the rest of it: sed -n 1p {cwd}/wide | tail -c +{BYTES + 1}]" in text
    assert (await read(make_scope, "wide", offset=2))[0] == "next\n"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(lines=st.lists(st.text(alphabet="abä", max_size=9), max_size=12), limit=st.integers(1, 5), end=st.booleans())
def test_reading_on_as_told_gives_the_whole_file(
    cwd: Path, make_scope: MakeScope, lines: list[str], limit: int, end: bool
) -> None:
    whole = "\n".join(lines) + "\n" * end
    (cwd / "file").write_text(whole)
    seen, offset = "", 1
    while True:
        text, is_error = trio.run(lambda: read(make_scope, "file", offset=offset, limit=limit))  # noqa: B023
        assert not is_error
        part, found, _ = text.partition("\n[lines ")
        if not found:
            seen += text.replace("[the file is empty]", "")
            break
        seen += part + "\n"
        offset = int(re.findall(r"\d+", text)[-1])
    assert seen == whole


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/tty", "fifo", "socket", ".", "missing", "nul\0", "x" * 300, "a/b"])
async def test_what_is_no_file_is_refused_at_once(cwd: Path, make_scope: MakeScope, path: str) -> None:
    os.mkfifo(cwd / "fifo")
    (cwd / "a").touch()
    with socket.socket(socket.AF_UNIX) as listener, trio.fail_after(5):
        listener.bind(str(cwd / "socket"))
        text, is_error = await read(make_scope, path)
    assert is_error
    assert text.startswith(f"{cwd}/{path}: " if path[0] != "/" else f"{path}: ")


@pytest.mark.parametrize("path", ["/proc/self/environ", "/proc/thread-self/environ", "/proc/{pid}/environ", "link"])
async def test_the_daemons_own_environment_cannot_be_read(cwd: Path, make_scope: MakeScope, path: str) -> None:  # K-31
    (cwd / "link").symlink_to("/proc/self/environ")
    text, is_error = await read(make_scope, path.format(pid=os.getpid()))
    assert is_error
    assert "PATH" not in text


async def test_a_file_in_a_cwd_that_vanished_is_an_error(cwd: Path, make_scope: MakeScope) -> None:  # K-12
    text, is_error = await call(Read(), ReadArguments("a"), make_scope(cwd=str(cwd / "gone")))
    assert is_error
    assert "No such file" in text


async def test_a_huge_sparse_file_is_read_in_bounded_parts_and_can_be_stopped(cwd: Path, make_scope: MakeScope) -> None:
    (cwd / "huge").touch()
    os.truncate(cwd / "huge", 1 << 40)
    text, _ = await read(make_scope, "huge")
    assert len(text) < BYTES + 200
    with trio.move_on_after(0.05) as scope:
        await read(make_scope, "huge", offset=2)
    assert scope.cancelled_caught


async def test_a_tilde_is_the_persons_home_as_in_a_shell(cwd: Path, make_scope: MakeScope) -> None:
    (cwd / "at home").write_text("sweet")  # HOME of the scope is the cwd
    assert await read(make_scope, "~/at home") == ("sweet", False)
    assert (await read(make_scope, "~other/file"))[1]
