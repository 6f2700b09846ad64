"""``write``: exactly the content, as a whole or not at all, with what a file had besides its content."""

from __future__ import annotations

import os
import resource
import socket
import stat
import tempfile
import threading
import time
from pathlib import Path

import pytest
import trio
from agent_recording import MakeScope, call

from loopd.agent.tools.write import Write, WriteArguments


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    return tmp_path


async def write(
    make_scope: MakeScope,
    path: str | Path,
    content: str = "new\n",
    *,
    umask: int = 0o022,
) -> tuple[str, bool]:
    with trio.fail_after(5):
        return await call(Write(), WriteArguments(str(path), content), make_scope(umask=umask))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_a_new_file_is_created_with_its_directories_and_exactly_the_content(
    cwd: Path, make_scope: MakeScope
) -> None:
    content = "a\r\nä\0\u2028\n\nno end"
    size = len(content.encode())
    assert await write(make_scope, "deep/er/new", content) == (f"created {cwd}/deep/er/new: {size} bytes", False)
    assert (cwd / "deep/er/new").read_bytes() == content.encode()
    assert await write(make_scope, "empty", "") == (f"created {cwd}/empty: 0 bytes", False)
    assert (cwd / "empty").read_bytes() == b""


@pytest.mark.parametrize(("umask", "file", "directory"), [(0o022, 0o644, 0o755), (0o007, 0o660, 0o770)])
async def test_what_is_made_has_the_persons_umask_not_the_daemons(
    cwd: Path, make_scope: MakeScope, umask: int, file: int, directory: int
) -> None:
    before = os.umask(0o077)
    try:
        await write(make_scope, "one/two/new", umask=umask)
    finally:
        os.umask(before)
    assert (mode(cwd / "one/two/new"), mode(cwd / "one/two"), mode(cwd / "one")) == (file, directory, directory)


@pytest.mark.parametrize("bits", [0o755, 0o600, 0o444, 0o1711])
async def test_a_replaced_file_keeps_its_mode_bits(cwd: Path, make_scope: MakeScope, bits: int) -> None:
    (cwd / "old").write_text("old text")
    (cwd / "old").chmod(bits)
    assert await write(make_scope, "old") == (f"replaced {cwd}/old: 4 bytes instead of 8", False)
    assert (cwd / "old").read_text() == "new\n"
    assert mode(cwd / "old") == bits


@pytest.mark.parametrize("bits", [0o4711, 0o2755, 0o6777])
async def test_new_content_does_not_run_with_the_rights_that_the_old_had(
    cwd: Path, make_scope: MakeScope, bits: int
) -> None:
    (cwd / "old").write_text("old")
    (cwd / "old").chmod(bits)
    assert not (await call(Write(), WriteArguments("old", "new"), make_scope()))[1]
    assert mode(cwd / "old") == bits & 0o777


@pytest.fixture
def attributed(cwd: Path) -> Path:
    path = cwd / "attributed"
    path.touch()
    try:
        os.setxattr(path, "user.mime", b"text/plain")
    except OSError as error:
        pytest.skip(f"this file system keeps no attributes: {error}")
    return path


async def test_a_replaced_file_keeps_its_attributes(attributed: Path, make_scope: MakeScope) -> None:
    await write(make_scope, attributed)
    assert os.getxattr(attributed, "user.mime") == b"text/plain"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
async def test_a_replaced_file_keeps_its_owner_or_stays_as_it_is(make_scope: MakeScope) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # where somebody else gets in too
        theirs, shared = Path(place, "theirs"), Path(place, "shared")
        for path in (theirs, shared):
            path.touch()
        os.chown(theirs, 12345, 12346)
        await write(make_scope, theirs)
        assert (theirs.stat().st_uid, theirs.stat().st_gid) == (12345, 12346)
        os.chmod(place, 0o777)
        shared.chmod(0o666)
        os.seteuid(12345)
        try:
            text, is_error = await write(lambda **_: make_scope(cwd=place), shared)
        finally:
            os.seteuid(0)
        assert is_error
        assert "it belongs to another user or group, which would be lost" in text
        assert (shared.read_text(), sorted(os.listdir(place))) == ("", ["shared", "theirs"])


async def test_a_link_stays_and_what_it_leads_to_is_replaced_or_made(cwd: Path, make_scope: MakeScope) -> None:
    (cwd / "real").write_text("old")
    (cwd / "link").symlink_to("real")
    (cwd / "dangling").symlink_to("not/yet")
    for name, target in (("link", "real"), ("dangling", "not/yet")):
        assert not (await write(make_scope, name))[1]
        assert (cwd / name).is_symlink()
        assert (cwd / target).read_text() == "new\n"


async def test_another_hard_link_keeps_the_old_content(cwd: Path, make_scope: MakeScope) -> None:
    (cwd / "store").write_text("old")
    (cwd / "here").hardlink_to(cwd / "store")
    await write(make_scope, "here")
    assert ((cwd / "here").read_text(), (cwd / "store").read_text()) == ("new\n", "old")


@pytest.mark.parametrize(
    "path", ["/dev/null", "fifo", "socket", ".", "dir", "new/", "", "loop", "file/new", "file/", "nul\0", "x" * 300]
)
async def test_what_is_no_file_is_refused_at_once_and_left_alone(cwd: Path, make_scope: MakeScope, path: str) -> None:
    os.mkfifo(cwd / "fifo")
    (cwd / "dir").mkdir()
    (cwd / "file").write_text("old")
    (cwd / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(cwd / "socket"))
        before = sorted(os.listdir(cwd))
        text, is_error = await write(make_scope, path)
    assert is_error, text
    assert sorted(os.listdir(cwd)) == before
    assert (cwd / "file").read_text() == "old"


@pytest.mark.parametrize("path", ["/proc/self/comm", "/proc/self/oom_score_adj", "/proc/self/new"])
async def test_the_daemon_itself_cannot_be_changed_through_proc(make_scope: MakeScope, path: str) -> None:
    text, is_error = await write(make_scope, path, "0")
    assert is_error, text


async def test_a_cwd_that_vanished_is_an_error_and_is_not_made_again(cwd: Path, make_scope: MakeScope) -> None:  # K-12
    text, is_error = await write(lambda **_: make_scope(cwd=str(cwd / "gone")), "new")
    assert is_error
    assert f"the working directory {cwd}/gone does not exist any more" in text
    assert not (cwd / "gone").exists()


async def test_a_disk_that_takes_no_more_leaves_the_old_file_and_nothing_beside_it(
    cwd: Path, make_scope: MakeScope
) -> None:
    (cwd / "old").write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        text, is_error = await write(make_scope, "old", "x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (text, is_error) == (f"{cwd}/old: File too large", True)
    assert (cwd / "old").read_text() == "old"
    assert os.listdir(cwd) == ["old"]


@pytest.mark.parametrize("path", ["old", "new/er/file"])
async def test_a_stop_does_not_wait_for_the_disk_and_then_nothing_is_put_in_place(
    cwd: Path, make_scope: MakeScope, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    (cwd / "old").write_text("old")
    stopped = threading.Event()

    def hang(_: int) -> None:
        trio.from_thread.run_sync(stop.cancel)
        stopped.wait(5)

    def wait_for_the_end() -> None:
        while os.listdir(cwd) != ["old"]:
            time.sleep(0.001)

    monkeypatch.setattr(os, "fsync", hang)
    with trio.CancelScope() as stop:
        await write(make_scope, path)
    assert stop.cancelled_caught
    assert os.listdir(cwd) != ["old"]  # it is still at it
    stopped.set()
    with trio.fail_after(5):
        await trio.to_thread.run_sync(wait_for_the_end, abandon_on_cancel=True)
    assert (cwd / "old").read_text() == "old"


@pytest.mark.parametrize("existed", [True, False])
async def test_what_somebody_else_wrote_meanwhile_is_not_lost(
    cwd: Path, make_scope: MakeScope, monkeypatch: pytest.MonkeyPatch, existed: bool
) -> None:
    path = cwd / "shared"
    if existed:
        path.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda _: path.write_text("of an editor"))
    text, is_error = await write(make_scope, path)
    assert is_error
    assert "changed by somebody else" in text
    assert path.read_text() == "of an editor"
    assert os.listdir(cwd) == ["shared"]


async def test_readers_see_the_old_content_or_the_new_never_a_part(cwd: Path, make_scope: MakeScope) -> None:
    contents = ["a" * 300_000, "b" * 200_000]
    (cwd / "file").write_text(contents[0])
    seen: set[str] = set()
    done = trio.Event()

    async def look() -> None:
        while not done.is_set():
            seen.add(await trio.to_thread.run_sync((cwd / "file").read_text))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        for turn in range(20):
            await write(make_scope, "file", contents[turn % 2])
        done.set()
    assert seen <= set(contents)
