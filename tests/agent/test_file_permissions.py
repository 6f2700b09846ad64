"""What each preset lets ``write``, ``edit`` and ``read`` do, through every way to spell a path (A-7, A-8, K-32)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from agent_recording import MakeScope
from guarded_files import Guarded, sha256
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loop_protocol.v1.types import Permission
from loopd.agent import Ask
from loopd.agent.protected import Protected, fold
from loopd.agent.tools.changing import MOST
from loopd.agent.tools.pinned import real_path

RESTRICTED: list[Permission] = ["read-only", "workspace-write"]


@pytest.fixture
def guarded(tmp_path: Path, make_scope: MakeScope) -> Guarded:
    return Guarded(tmp_path, make_scope)


def nothing(_: Guarded) -> None:
    """There is enough already."""


def link(name: str, target: str) -> Callable[[Guarded], None]:
    """``{}`` in the target is the root."""
    return lambda guarded: (guarded.ws / name).symlink_to(target.format(guarded.root))


def chain(guarded: Guarded) -> None:
    (guarded.ws / "second").symlink_to("../out")
    (guarded.ws / "first").symlink_to("second")


def cross(guarded: Guarded) -> None:
    (guarded.out / "back").symlink_to(guarded.ws)


def hard(source: str) -> Callable[[Guarded], None]:
    return lambda guarded: (guarded.ws / "hard").hardlink_to(guarded.root / source)


# What is made first, the path ({} is the root), where it really leads, and what workspace-write does with it.
WRITES: dict[str, tuple[Callable[[Guarded], None], str, str, str]] = {
    "inside": (nothing, "file", "ws/file", "done"),
    "inside, absolute": (nothing, "{}/ws/file", "ws/file", "done"),
    "inside, with dots": (nothing, "sub/../sub/.././file", "ws/file", "done"),
    "inside, two slashes": (nothing, "/{}//ws//new", "ws/new", "done"),
    "inside, new directories": (nothing, "a/b/c", "ws/a/b/c", "done"),
    "a link within": (link("here", "sub"), "here/new", "ws/sub/new", "done"),
    "a link from outside in": (cross, "{}/out/back/new", "ws/new", "done"),
    "the root of this process, inside": (nothing, "/proc/self/root{}/ws/file", "ws/file", "done"),
    "a hard link of somebody's file": (hard("out/file"), "hard", "ws/hard", "done"),  # it comes apart
    "outside": (nothing, "{}/out/file", "out/file", "outside"),
    "outside, new": (nothing, "{}/out/a/b", "out/a/b", "outside"),
    "a name that begins like it": (nothing, "{}/ws2/file", "ws2/file", "outside"),
    "out with dots": (nothing, "../out/file", "out/file", "outside"),
    "out with dots and back": (nothing, "sub/../../out/../ws/../out/file", "out/file", "outside"),
    "a directory link out": (link("esc", "/"), "esc{}/out/file", "out/file", "outside"),
    "a file link out": (link("esc", "../out/file"), "esc", "out/file", "outside"),
    "a dangling link out": (link("esc", "../out/new"), "esc", "out/new", "outside"),
    "a dangling link far out": (link("esc", "{}/not/yet/there"), "esc", "not/yet/there", "outside"),
    "links to links": (chain, "first/file", "out/file", "outside"),
    "dots behind a link": (link("esc", "../out"), "esc/../out/file", "out/file", "outside"),
    "the root of this process": (nothing, "/proc/self/root{}/out/file", "out/file", "outside"),
    "the root of a thread": (nothing, "/proc/thread-self/root{}/out/file", "out/file", "outside"),
    "a link to the root of this process": (link("esc", "/proc/self/root"), "esc{}/out/file", "out/file", "outside"),
    "another case of the workspace": (nothing, "{}/WS/new", "WS/new", "outside"),
    "a hook": (nothing, ".git/hooks/pre-commit", "ws/.git/hooks/pre-commit", ".git"),
    "git's settings": (nothing, ".git/config", "ws/.git/config", ".git"),
    "a hook by dots": (nothing, "sub/../.git/hooks/x", "ws/.git/hooks/x", ".git"),
    "a hook by a link": (link("hooks", ".git/hooks"), "hooks/pre-commit", "ws/.git/hooks/pre-commit", ".git"),
    "a repository below": (nothing, "sub/.git/hooks/x", "ws/sub/.git/hooks/x", ".git"),
    "a file that names the repository": (nothing, "sub/.git", "ws/sub/.git", ".git"),
    "git in capitals": (nothing, ".GIT/hooks/x", "ws/.GIT/hooks/x", ".git"),
    "git with what cannot be seen": (nothing, ".g\u200cit/hooks/x", "ws/.g\u200cit/hooks/x", ".git"),
    "git in wide letters": (nothing, ".\uff47it/x", "ws/.\uff47it/x", ".git"),
    "git as FAT has it": (nothing, "GIT~1/hooks/x", "ws/GIT~1/hooks/x", ".git"),
    "no git": (nothing, ".github/x", "ws/.github/x", "done"),
    "the daemon's file": (nothing, "{}/own/deep/file", "own/deep/file", "denied"),
    "new among the daemon's": (nothing, "{}/own/new/x", "own/new/x", "denied"),
    "the daemon's directory itself": (nothing, "{}/own", "own", "denied"),
    "the daemon's by dots": (nothing, "../own/deep/../deep/file", "own/deep/file", "denied"),
    "the daemon's by a directory link": (link("esc", "../own"), "esc/deep/file", "own/deep/file", "denied"),
    "the daemon's by a file link": (link("esc", "../own/deep/file"), "esc", "own/deep/file", "denied"),
    "the daemon's by a dangling link": (link("esc", "../own/new"), "esc", "own/new", "denied"),
    "the daemon's by /proc": (nothing, "/proc/self/root{}/own/deep/file", "own/deep/file", "denied"),
    "a single key": (nothing, "{}/key", "key", "denied"),
    "a single key by a link": (link("esc", "../key"), "esc", "key", "denied"),
    "a single key by a hard link": (hard("key"), "hard", "ws/hard", "denied"),
    "a file of the daemon's by a hard link": (hard("own/deep/file"), "hard", "ws/hard", "denied"),
    "the daemon's, still to be made": (nothing, "{}/absent/data", "absent/data", "denied"),
    "below what is still to be made": (nothing, "{}/absent/data/x/y", "absent/data/x/y", "denied"),
    "by a link to what is not made": (link("esc", "../absent"), "esc/data/x", "absent/data/x", "denied"),
    "another case of what is not made": (nothing, "{}/ABSENT/Data/x", "ABSENT/Data/x", "denied"),
    "beside what is not made": (nothing, "{}/absent/other", "absent/other", "outside"),
}


def expected(permission: Permission, workspace_write: str) -> str:
    if permission == "danger-full-access":
        return "done"
    return workspace_write if permission == "workspace-write" or workspace_write == "denied" else "preset read-only"


def table(*permissions: Permission) -> Any:
    rows = [(permission, case) for permission in permissions for case in WRITES]
    return pytest.mark.parametrize(("permission", "case"), rows, ids=[f"{p}: {c}" for p, c in rows])


@table("read-only", "workspace-write", "danger-full-access")
async def test_a_write_is_done_asked_or_denied_by_where_it_really_leads(
    guarded: Guarded, permission: Permission, case: str
) -> None:
    make, path, real, outcome = WRITES[case]
    make(guarded)
    path, target, guarded.permission = path.format(guarded.root), guarded.root / real, permission
    before = guarded.everything()
    outcome = expected(permission, outcome)

    def look(_: Ask) -> str | None:
        assert guarded.everything() == before
        return None

    guarded.answer = look
    text, is_error = await guarded.write(path)
    if outcome == "denied":
        assert is_error
        assert "denied: the daemon's own" in text
        assert "loopctl permission danger-full-access" in text
        assert (guarded.everything(), guarded.asked) == (before, [])
    elif target.is_dir():
        assert is_error
    else:
        assert not is_error, text
        assert target.read_text() == "new\n"
        assert str(target) == real_path(str(target))
    if outcome in ("done", "denied"):
        assert guarded.asked == []
    else:
        [asked] = guarded.asked
        known = before.get(real)
        assert (asked.operation, asked.path, asked.rules) == ("write", str(target), (f"write {target}",))
        assert outcome in asked.reason
        assert asked.sha256_before == (None if known is None else sha256(known))
    assert not [name for name in guarded.everything() if ".loopd-" in name]


@table(*RESTRICTED)
async def test_what_a_person_rejects_leaves_no_trace(guarded: Guarded, permission: Permission, case: str) -> None:
    make, path, _, outcome = WRITES[case]
    make(guarded)
    guarded.permission = permission
    before = guarded.everything()

    def reject(_: Ask) -> str | None:
        return "Not done: the person rejected this. They said: no"

    guarded.answer = reject
    told = await guarded.write(path.format(guarded.root))
    if guarded.asked:
        assert told == ("Not done: the person rejected this. They said: no", True)
    if guarded.asked or expected(permission, outcome) != "done":
        assert guarded.everything() == before


READS = {
    case: row for case, row in WRITES.items() if row[2] in ("ws/file", "out/file", "ws/hard", "key", "own/deep/file")
}


@pytest.mark.parametrize("permission", ["read-only", "workspace-write", "danger-full-access"])
@pytest.mark.parametrize("case", READS)
async def test_everything_but_the_daemons_own_is_read_without_asking(
    guarded: Guarded, permission: Permission, case: str
) -> None:
    make, path, _, outcome = READS[case]
    make(guarded)
    guarded.permission = permission
    text, is_error = await guarded.read(path.format(guarded.root))
    if outcome == "denied" and permission != "danger-full-access":
        assert is_error
        assert "denied: the daemon's own" in text
    else:
        assert (text, is_error) == ("old\n", False)
    assert guarded.asked == []


async def test_whether_the_daemon_has_a_file_is_not_told(guarded: Guarded) -> None:
    there, is_error = await guarded.read(guarded.own / "deep/file")
    assert is_error
    missing, _ = await guarded.read(guarded.own / "missing/file")
    assert there.partition(": ")[2] == missing.partition(": ")[2]


async def test_a_new_file_in_the_place_of_a_key_is_denied_too(guarded: Guarded) -> None:
    (guarded.root / "key.new").write_text("rotated")
    (guarded.root / "key.new").rename(guarded.root / "key")
    assert "denied" in (await guarded.read(guarded.root / "key"))[0]


async def test_a_key_that_is_a_link_is_denied_by_all_its_names(guarded: Guarded) -> None:
    (guarded.root / "alias").symlink_to("key")
    guarded.protected = Protected([str(guarded.root / "alias")])
    for name in ("alias", "key"):
        assert "denied" in (await guarded.read(guarded.root / name))[0]


@pytest.mark.parametrize("permission", RESTRICTED)
async def test_an_edit_asks_with_the_difference_and_the_hash(guarded: Guarded, permission: Permission) -> None:
    guarded.permission = permission
    text, is_error = await guarded.edit(guarded.out / "file")
    assert not is_error, text
    [asked] = guarded.asked
    assert (asked.operation, asked.path) == ("edit", f"{guarded.out}/file")
    assert (asked.rules, asked.rules_refused) == ((f"edit {guarded.out}/file",), None)
    assert (asked.diff, asked.sha256_before) == ("@@ -1,1 +1,1 @@\n-old\n+new", sha256("old\n"))
    assert (guarded.out / "file").read_text() == "new\n"


@pytest.mark.parametrize("permission", RESTRICTED)
async def test_nobody_is_asked_for_an_edit_that_cannot_be_done(guarded: Guarded, permission: Permission) -> None:
    guarded.permission = permission
    (guarded.out / "large").write_bytes(b"old" + bytes(4 * 1024 * 1024))
    for path, old in (
        (guarded.out / "file", "other"),
        (guarded.out / "missing", "old"),
        (guarded.out / "large", "old"),
    ):
        assert (await guarded.edit(path, old))[1]
    assert (await guarded.write(guarded.out / "file/below"))[1]
    assert (await guarded.write(guarded.out))[1]
    assert guarded.asked == []


async def test_one_approval_is_one_write(guarded: Guarded) -> None:
    for content in ("one", "two", "two"):
        assert not (await guarded.write(guarded.out / "file", content))[1]
    assert [asked.sha256_before for asked in guarded.asked] == [sha256("old\n"), sha256("one"), sha256("two")]


DIFFS = {
    "new": (None, "a\nb", "@@ -0,0 +1,2 @@\n+a\n+b\n\\ No newline at end of file"),
    "new and empty": (None, "", "[an empty file]"),
    "emptied": (b"a\n", "", "@@ -1,1 +0,0 @@\n-a"),
    "the same": (b"a\n", "a\n", "[the content stays the same]"),
    "no text": (b"\xff\xfe", "a\n", "[2 bytes that are no UTF-8 text are replaced by:]\n@@ -0,0 +1,1 @@\n+a"),
    "large": (
        b"x" * (4 * 1024 * 1024 + 1),
        "a\n",
        "[4194305 bytes, too many to compare, are replaced by the content in the arguments]",
    ),
}


@pytest.mark.parametrize(("before", "content", "diff"), DIFFS.values(), ids=DIFFS.keys())
async def test_a_write_asks_with_what_changes(guarded: Guarded, before: bytes | None, content: str, diff: str) -> None:
    path = guarded.out / "new"
    if before is not None:
        path.write_bytes(before)
    assert not (await guarded.write(path, content))[1]
    assert guarded.asked[0].diff == diff
    assert path.read_text() == content


async def test_a_person_sees_all_lines_of_a_long_change_and_is_told_where_the_rest_is(guarded: Guarded) -> None:
    (guarded.out / "file").write_text("old\n" * 800)
    await guarded.write(guarded.out / "file", "".join(f"{n}\n" for n in range(900)))
    diff = guarded.asked[0].diff or ""
    assert [row for row in diff.split("\n") if row.startswith("+")] == [f"+{n}" for n in range(900)]
    await guarded.write(guarded.out / "huge", "x\n" * 3000)
    assert (guarded.asked[1].diff or "").endswith(
        "\n[the rest of the difference is left out here; the arguments say what is new]"
    )


async def test_what_is_too_long_to_compare_is_said_to_be(guarded: Guarded) -> None:
    content = "\n" * (MOST + 1)  # as lines it would take a gigabyte
    assert not (await guarded.write(guarded.out / "file", content))[1]
    said = f"[4 bytes before, {MOST + 1} bytes afterwards: too many to compare; the arguments say what is new]"
    assert guarded.asked[0].diff == said
    assert (guarded.out / "file").read_text() == content


async def test_a_name_that_is_no_text_can_be_allowed_once_only(guarded: Guarded) -> None:
    bad = os.fsdecode(b"a\xff")
    (guarded.ws / "link").symlink_to(f"../out/{bad}")
    assert not (await guarded.write("link"))[1]
    [asked] = guarded.asked
    assert (asked.path, asked.rules) == (f"{guarded.out}/a\ufffd", ())
    assert asked.rules_refused
    assert (guarded.out / bad).read_text() == "new\n"


pieces = st.sampled_from(
    ["ws", "out", "own", "sub", "esc", "up", "deep", "..", ".", "", "file", "key", "Own", "proc/self/root"]
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(pieces, min_size=1, max_size=7), st.booleans())
def test_however_a_path_is_spelled_nothing_but_the_workspace_changes_unasked(
    tmp_path_factory: pytest.TempPathFactory, make_scope: MakeScope, parts: list[str], absolute: bool
) -> None:
    guarded = Guarded(tmp_path_factory.mktemp("spelled"), make_scope)
    (guarded.ws / "esc").symlink_to("../own")
    (guarded.ws / "up").symlink_to("..")

    def reject(_: Ask) -> str | None:
        return "no"

    guarded.answer = reject
    before = guarded.everything()
    path = "/".join(parts)
    trio.run(guarded.write, f"{guarded.root}/{path}" if absolute else path)
    after = guarded.everything()
    assert {name for name in {*before, *after} if before.get(name, 0) != after.get(name, 0)} <= {
        name for name in after if name.startswith("ws/")
    }
    assert all(not (asked.path or "").startswith(f"{guarded.own}") for asked in guarded.asked)


@pytest.mark.parametrize("name", ["loopd", "LoopD", "loo\u200bpd", "\uff4coopd", "l\u00f6opd"])
def test_spellings_of_one_name_fold_alike(name: str) -> None:
    assert fold(name) == "loopd"
