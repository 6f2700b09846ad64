"""What is swapped under ``write``, ``edit`` and ``read`` between the look, the answer and the change: none of it is
followed, and none is lost (A-8, K-32)."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from agent_recording import MakeScope
from guarded_files import Guarded

from loopd.agent import Ask
from loopd.agent.protected import Protected
from loopd.agent.tools import pinned

CHANGED = "it was changed by somebody else since it was looked at; read it again"

Swap = Callable[[Guarded], None]


@pytest.fixture
def guarded(tmp_path: Path, make_scope: MakeScope) -> Guarded:
    guarded = Guarded(tmp_path, make_scope)
    guarded.permission = "read-only"
    return guarded


def directory_for_a_link(guarded: Guarded) -> None:
    (guarded.ws / "sub").rename(guarded.ws / "moved")
    (guarded.ws / "sub").symlink_to("../out")


def directory_for_its_twin(guarded: Guarded) -> None:
    (guarded.ws / "sub").rename(guarded.ws / "moved")
    (guarded.ws / "sub").mkdir()
    with suppress(FileNotFoundError):
        shutil.copy(guarded.ws / "moved/file", guarded.ws / "sub/file")


def directory_for_a_file(guarded: Guarded) -> None:
    (guarded.ws / "sub").rename(guarded.ws / "moved")
    (guarded.ws / "sub").write_text("")


def directory_moved_out(guarded: Guarded) -> None:
    (guarded.ws / "sub").rename(guarded.out / "sub")


def directory_above_for_a_link(guarded: Guarded) -> None:
    guarded.ws.rename(guarded.root / "moved")
    guarded.ws.symlink_to("moved")


def file_for_a_link(guarded: Guarded) -> None:
    (guarded.ws / "sub/file").unlink()
    (guarded.ws / "sub/file").symlink_to("../../out/file")


def file_for_a_dangling_link(guarded: Guarded) -> None:
    with suppress(FileNotFoundError):
        (guarded.ws / "sub/file").unlink()
    (guarded.ws / "sub/file").symlink_to("../../out/new")


def file_edited(guarded: Guarded) -> None:
    """With the same size and the same times."""
    path = guarded.ws / "sub/file"
    status = path.stat()
    path.write_text("OLD\n")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def file_for_its_twin(guarded: Guarded) -> None:
    (guarded.ws / "sub/twin").write_text("old\n")
    (guarded.ws / "sub/twin").rename(guarded.ws / "sub/file")


def file_for_a_hard_link(guarded: Guarded) -> None:
    (guarded.ws / "sub/file").unlink()
    (guarded.ws / "sub/file").hardlink_to(guarded.out / "file")


def file_removed(guarded: Guarded) -> None:
    (guarded.ws / "sub/file").unlink()


def file_made(guarded: Guarded) -> None:
    (guarded.ws / "sub/file").write_text("of an editor")


def fifo_made(guarded: Guarded) -> None:
    os.mkfifo(guarded.ws / "sub/file")


OF_A_DIRECTORY = [
    directory_for_a_link,
    directory_for_its_twin,
    directory_for_a_file,
    directory_moved_out,
    directory_above_for_a_link,
]
OF_A_FILE = [
    file_for_a_link,
    file_for_a_dangling_link,
    file_edited,
    file_for_its_twin,
    file_for_a_hard_link,
    file_removed,
]
MAKING = [file_for_a_dangling_link, file_made, fifo_made]
SWAPS = [
    *((True, swap) for swap in OF_A_DIRECTORY + OF_A_FILE),
    *((False, swap) for swap in OF_A_DIRECTORY + MAKING),
]
swaps = pytest.mark.parametrize(
    ("existed", "swap"), SWAPS, ids=[f"{swap.__name__}, {'old' if existed else 'new'}" for existed, swap in SWAPS]
)


@swaps
@pytest.mark.parametrize("operation", ["write", "edit"])
async def test_what_was_swapped_while_a_person_was_asked_is_left_alone(
    guarded: Guarded, existed: bool, swap: Swap, operation: str
) -> None:
    if not existed and operation == "edit":
        return
    if existed:
        (guarded.ws / "sub/file").write_text("old\n")
    after: list[dict[str, str | None]] = []

    def answer(_: Ask) -> str | None:
        swap(guarded)
        after.append(guarded.everything())
        return None

    guarded.answer = answer
    path = guarded.ws / "sub/file"
    assert await getattr(guarded, operation)(path) == (f"{path}: {CHANGED}", True)
    assert [guarded.everything()] == after
    assert len(guarded.asked) == 1


async def test_directories_that_came_up_while_a_person_was_asked_are_looked_at_again(guarded: Guarded) -> None:
    def answer(_: Ask) -> str | None:
        (guarded.ws / "new").symlink_to("../out")
        return None

    guarded.answer = answer
    path = guarded.ws / "new/er/file"
    assert await guarded.write(path) == (f"{path}: {CHANGED}", True)
    assert sorted(os.listdir(guarded.out)) == ["file"]


async def test_the_daemons_files_that_came_up_while_a_person_was_asked_are_denied(guarded: Guarded) -> None:
    (guarded.out / "file").unlink()
    (guarded.root / "key").unlink()
    (guarded.out / "file").write_text("old\n")

    def answer(_: Ask) -> str | None:
        (guarded.root / "key").symlink_to("out/file")
        return None

    guarded.answer = answer
    text, is_error = await guarded.write(guarded.out / "file")
    assert is_error
    assert "denied" in text
    assert (guarded.out / "file").read_text() == "old\n"


async def test_a_mode_changed_while_a_person_was_asked_is_kept(guarded: Guarded) -> None:
    def answer(_: Ask) -> str | None:
        (guarded.ws / "file").chmod(0o750)
        return None

    guarded.answer = answer
    assert not (await guarded.write("file"))[1]
    assert (guarded.ws / "file").stat().st_mode & 0o777 == 0o750


# --- closer: between the look and the change, without anybody being asked ---------------------------------------------


@contextmanager
def just_before(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], None]) -> Iterator[None]:
    """``act`` once, before ``os.name`` is called the next time."""
    really = getattr(os, name)
    left = [act]

    def called(*arguments: Any, **more: Any) -> Any:
        if left:
            left.pop()()
        return really(*arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, name, called)
        yield
    assert not left


@swaps
async def test_what_is_swapped_while_the_new_content_is_written_is_left_alone(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch, existed: bool, swap: Swap
) -> None:
    guarded.permission = "workspace-write"
    if swap is file_edited:
        swap = file_made  # another size: nobody asked for a hash
    if existed:
        (guarded.ws / "sub/file").write_text("old\n")
    after: list[dict[str, str | None]] = []

    def act() -> None:
        swap(guarded)
        after.append({k: v for k, v in guarded.everything().items() if ".loopd-" not in k})

    path = guarded.ws / "sub/file"
    with just_before(monkeypatch, "fsync", act):
        assert await guarded.write(path) == (f"{path}: {CHANGED}", True)
    assert [guarded.everything()] == after


@pytest.mark.parametrize("swap", [file_edited, file_for_its_twin])
async def test_an_edit_is_of_the_file_and_the_content_that_were_read_however_the_times_look(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch, swap: Swap
) -> None:
    guarded.permission = "workspace-write"
    (guarded.ws / "sub/file").write_text("old\n")
    after: list[dict[str, str | None]] = []

    def act() -> None:
        swap(guarded)
        after.append({k: v for k, v in guarded.everything().items() if ".loopd-" not in k})

    path = guarded.ws / "sub/file"
    with just_before(monkeypatch, "fsync", act):
        assert await guarded.edit(path) == (f"{path}: {CHANGED}", True)
    assert [guarded.everything()] == after


@pytest.mark.parametrize("tool", ["edit", "read"])
async def test_another_name_of_the_daemons_file_put_there_right_after_the_look_is_not_opened(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    guarded.permission = "workspace-write"
    (guarded.ws / "sub/file").write_text("mine\n")

    def looked(place: pinned.Pinned, protected: Protected) -> None:
        pinned.require_allowed(place, protected)
        (guarded.ws / "sub/file").unlink()
        (guarded.ws / "sub/file").hardlink_to(guarded.root / "key")

    for module in ("changing", "read"):
        monkeypatch.setattr(f"loopd.agent.tools.{module}.require_allowed", looked)
    path = guarded.ws / "sub/file"
    assert await getattr(guarded, tool)(path) == (f"{path}: {CHANGED}", True)
    assert (guarded.root / "key").read_text() == "old\n"


@pytest.mark.parametrize("swap", [directory_for_a_link, file_for_a_link])
async def test_a_link_swapped_in_at_the_very_rename_is_not_followed(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch, swap: Swap
) -> None:
    guarded.permission = "workspace-write"
    (guarded.ws / "sub/file").write_text("old\n")
    # `rename` is what swaps too, so the last thing before it is hooked.
    with just_before(monkeypatch, "rename", lambda: None), monkeypatch.context() as patched:
        really = pinned.trio.from_thread.check_cancelled

        def check() -> None:
            swap(guarded)
            really()

        patched.setattr(pinned.trio.from_thread, "check_cancelled", check)
        assert not (await guarded.write("sub/file"))[1]
    assert (guarded.out / "file").read_text() == "old\n"
    assert sorted(os.listdir(guarded.out)) == ["file"]
    assert not [name for name in guarded.everything() if ".loopd-" in name]


@pytest.mark.parametrize("swap", [directory_for_a_link, file_for_a_link])
@pytest.mark.parametrize("tool", ["write", "edit", "read"])
async def test_a_link_swapped_in_right_after_the_path_was_resolved_is_not_followed(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch, swap: Swap, tool: str
) -> None:
    guarded.permission = "workspace-write"
    (guarded.ws / "sub/file").write_text("inside\n")
    really = os.path.realpath

    def resolved(path: str) -> str:
        found = really(path)
        swap(guarded)
        return found

    monkeypatch.setattr(pinned, "real_path", resolved)
    for module in ("changing", "read"):
        monkeypatch.setattr(f"loopd.agent.tools.{module}.real_path", resolved)
    text, is_error = await getattr(guarded, tool)("sub/file")
    assert is_error, text
    assert "old" not in text
    assert (guarded.asked, (guarded.out / "file").read_text()) == ([], "old\n")


@contextmanager
def swapping(guarded: Guarded, target: str) -> Iterator[None]:
    """``ws/sub`` is a directory, a link to ``target`` or nothing, as fast as a thread can change it."""
    (guarded.ws / "link").symlink_to(target)
    (guarded.ws / "sub").rename(guarded.ws / "real")
    done = threading.Event()

    def swap() -> None:
        number = 0
        while not done.is_set():
            for name in ("real", "link"):
                try:
                    os.rename(guarded.ws / name, guarded.ws / "sub")
                except OSError:  # a write has made the directory that it did not find
                    number += 1
                    os.rename(guarded.ws / "sub", guarded.ws / f"made{number}")
                else:
                    os.rename(guarded.ws / "sub", guarded.ws / name)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


async def test_a_directory_that_is_swapped_for_a_link_all_the_time_never_leads_out(guarded: Guarded) -> None:  # K-32
    guarded.permission = "workspace-write"
    (guarded.ws / "sub/file").write_text("old")
    (guarded.ws / "sub/there").write_text("old")

    def reject(_: Ask) -> str | None:
        return "no"

    guarded.answer = reject
    written = refused = 0
    with swapping(guarded, "../out"):
        for turn in range(300):
            written += not (await guarded.write("sub/file", f"{turn}"))[1]
            refused += (await guarded.edit("sub/file", "1", "2"))[1]
            await guarded.write("sub/new/er", f"{turn}")
    after = guarded.everything()
    assert {name: after[name] for name in after if name.startswith("out")} == {"out": None, "out/file": "old\n"}
    assert not [name for name in after if ".loopd-" in name]
    assert written
    assert refused
    assert guarded.asked
    print(f"{written} of 300 were written, {refused} edits refused, {len(guarded.asked)} led out and asked")


async def test_a_link_to_the_daemons_files_that_comes_and_goes_shows_none(guarded: Guarded) -> None:
    (guarded.ws / "sub/deep").mkdir()
    (guarded.ws / "sub/deep/file").write_text("mine\n")
    seen = set()
    with swapping(guarded, "../own"):
        for _ in range(600):
            seen.add((await guarded.read("sub/deep/file"))[0])
    assert "old\n" not in seen
    assert any("denied" in text for text in seen)
    assert "mine\n" in seen
