"""``edit``: what is named is changed, once or everywhere, and every other byte stays."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from pathlib import Path

import pytest
import trio
from agent_recording import MakeScope, call
from hypothesis import given
from hypothesis import strategies as st

from loopd.agent.tools.difference import difference
from loopd.agent.tools.edit import MOST, Edit, EditArguments, find, substitute


async def edit(
    make_scope: MakeScope,
    path: Path,
    old: str,
    new: str,
    *,
    all: bool = False,
) -> tuple[str, bool]:
    with trio.fail_after(5):
        return await call(Edit(), EditArguments(path.name, old, new, all), make_scope())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


KEPT = {
    "a line": (b"one\ntwo\nthree\n", "two", "2", b"one\n2\nthree\n"),
    "crlf": (b"one\r\ntwo\r\nthree\r\n", "one\ntwo\n", "1\n1.5\n2\n", b"1\r\n1.5\r\n2\r\nthree\r\n"),
    "crlf, new lines in one line": (b"one\r\ntwo\r\n", "two", "2\n3", b"one\r\n2\r\n3\r\n"),
    "crlf at the last line": (b"one\r\ntwo", "two", "2\n3", b"one\r\n2\r\n3"),
    "crlf, named as such": (b"one\r\ntwo\r\n", "one\r\ntwo", "1\r\n2", b"1\r\n2\r\n"),
    "crlf to lf, named as such": (b"one\r\ntwo\r\n", "one\r\n", "one\n", b"one\ntwo\r\n"),
    "lf to crlf, named as such": (b"one\ntwo\n", "one\n", "one\r\n", b"one\r\ntwo\n"),
    "mixed endings": (b"a\nb\r\nc\nd\r\n", "b\nc\nd", "B\nC\nD", b"a\nB\r\nC\r\nD\r\n"),
    "mixed endings elsewhere": (b"a\r\nb\nc\nd\r\n", "b\nc", "B\nB\nC", b"a\r\nB\nB\nC\nd\r\n"),
    "old mac": (b"one\rtwo\rthree", "two", "2", b"one\r2\rthree"),
    "no final newline": (b"one\ntwo", "two", "2", b"one\n2"),
    "a final newline goes": (b"one\ntwo\n", "two\n", "two", b"one\ntwo"),
    "byte order mark": (b"\xef\xbb\xbfone\ntwo\n", "one", "1", b"\xef\xbb\xbf1\ntwo\n"),
    "a mark that is named": (b"\xef\xbb\xbfone\n", "\ufeffone", "1", b"1\n"),
    "other line ends are text": ("a\u2028b\x0cc\x85d\n".encode(), "c\x85d", "x", "a\u2028b\x0cx\n".encode()),
    "nul and control characters": (b"a\0b\x1b[0m\n", "b", "c", b"a\0c\x1b[0m\n"),
    "white space at the end": (b"a  \n\tb \n", "\tb", "    b", b"a  \n    b \n"),
    "special to regular expressions": (b"f(a.*) \\1 $\n", "f(a.*) \\1", "\\g<0>", b"\\g<0> $\n"),
    "deleted": (b"one\ntwo\nthree\n", "two\n", "", b"one\nthree\n"),
    "all of it": (b"one", "one", "two", b"two"),
}


@pytest.mark.parametrize(("before", "old", "new", "after"), KEPT.values(), ids=KEPT.keys())
async def test_only_what_is_named_changes(
    make_scope: MakeScope, path: Path, before: bytes, old: str, new: str, after: bytes
) -> None:
    path.write_bytes(before)
    path.chmod(0o751)
    text, is_error = await edit(make_scope, path, old, new)
    assert not is_error, text
    assert path.read_bytes() == after
    assert stat.S_IMODE(path.stat().st_mode) == 0o751
    assert os.listdir(path.parent) == ["file"]


async def test_the_result_is_a_short_difference(make_scope: MakeScope, path: Path) -> None:
    path.write_text("".join(f"{number}\n" for number in range(1, 101)))
    text, _ = await edit(make_scope, path, "49\n50\n51\n", "49\nfifty\n50.5\n51\n")
    body = " 47\n 48\n 49\n-50\n+fifty\n+50.5\n 51\n 52\n 53"
    assert text == f"changed {path}\n@@ -47,7 +47,8 @@\n{body}"


async def test_all_changes_every_occurrence_and_says_how_many(make_scope: MakeScope, path: Path) -> None:
    path.write_text("a\nb\na\naa\n")
    text, is_error = await edit(make_scope, path, "a", "c", all=True)
    assert not is_error
    assert text.startswith(f"changed {path} in 4 places\n@@ ")
    assert path.read_text() == "c\nb\nc\ncc\n"


REFUSED = {
    "none": (
        b"one\n",
        "two",
        "oldText is not in the file; it must match exactly, white space too: read the file again",
    ),
    "other white space": (
        b"def f():\n\treturn 1\n",
        "    return 1\n",
        "oldText is not in the file; it must match exactly, white space too. "
        "Its first line is, but for white space, at line 2",
    ),
    "three": (
        b"x\ny\nx x\n",
        "x",
        "oldText is there 3 times, at lines 1, 3, 3: give more of what stands around it, or set all",
    ),
    "overlapping": (b"aaa\n", "aa", "oldText is there 2 times, at lines 1, 1: give more"),
    "many": (b"x\n" * 20, "x", "oldText is there 20 times, at lines 1, 2, 3, 4, 5, 6, 7, 8, …: give more"),
    "crlf in an lf file": (b"one\ntwo\n", "one\r\ntwo", "oldText is not in the file"),
    "latin-1": (b"gr\xfcn new\n", "new", "not UTF-8 text (byte 2 is 0xfc): use a command"),
    "utf-16": ("\ufeffnew".encode("utf-16-le"), "new", "not UTF-8 text (byte 0 is 0xff): use a command"),
    "empty": (b"", "x", "oldText is not in the file"),
    "large": (b"x" * (MOST + 1), "x", f"it has {MOST + 1} bytes, and edit takes at most {MOST}: use a command"),
}


@pytest.mark.parametrize(("before", "old", "reason"), REFUSED.values(), ids=REFUSED.keys())
async def test_what_cannot_be_done_says_why_and_changes_nothing(
    make_scope: MakeScope, path: Path, before: bytes, old: str, reason: str
) -> None:
    path.write_bytes(before)
    known = path.stat()
    text, is_error = await edit(make_scope, path, old, "new")
    assert is_error
    assert text.startswith(f"{path}: {reason}")
    assert path.read_bytes() == before
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (known.st_ino, known.st_mtime_ns)


@pytest.mark.parametrize(("before", "old", "new"), [(b"a\n", "a", "a"), (b"a\r\nb", "a\nb", "a\r\nb")])
async def test_an_edit_that_changes_nothing_is_an_error(
    make_scope: MakeScope, path: Path, before: bytes, old: str, new: str
) -> None:
    path.write_bytes(before)
    assert await edit(make_scope, path, old, new) == (
        f"{path}: nothing changes: oldText and newText are the same",
        True,
    )


@pytest.mark.parametrize("kind", ["missing", "directory", "fifo", "/proc"])
async def test_what_is_no_file_is_refused_at_once(make_scope: MakeScope, path: Path, kind: str) -> None:
    match kind:
        case "directory":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "/proc":
            path.symlink_to("/proc/self/comm")
    text, is_error = await edit(make_scope, path, "a", "b")
    assert is_error
    assert text.startswith(f"{path}: ")


async def test_a_link_stays_and_its_file_is_changed(make_scope: MakeScope, path: Path) -> None:
    (path.parent / "real").write_text("a")
    path.symlink_to("real")
    await edit(make_scope, path, "a", "b")
    assert path.is_symlink()
    assert (path.parent / "real").read_text() == "b"


texts = st.text(alphabet="ab\r\n", max_size=30) | st.lists(st.sampled_from(["a", "b", "\r\n", "\n"])).map("".join)


@given(texts, st.text(alphabet="ab\r\n", min_size=1, max_size=4))
def test_a_line_feed_that_is_looked_for_stands_for_crlf_too(text: str, wanted: str) -> None:
    pattern = re.escape(wanted) if "\r" in wanted else "\r?\n".join(map(re.escape, wanted.split("\n")))
    found = [(match.start(), match.end(1)) for match in re.finditer(f"(?=({pattern}))", text)]
    # A line end is one thing: no match begins inside it.
    inside = re.compile("\r\n")
    expected = [
        (start, stop)
        for start, stop in found
        if "\r" in wanted or not wanted.startswith("\n") or not inside.match(text, max(0, start - 1)) or start == 0
    ]
    assert find(text, wanted, overlapping=True) == expected


@given(texts, st.text(alphabet="ab\n", min_size=1, max_size=4), st.text(alphabet="ab\n", max_size=4))
def test_everything_around_the_places_stays_and_line_ends_stay_of_one_kind(text: str, old: str, new: str) -> None:
    arguments = EditArguments("f", old, new, True)
    spans = find(text, old, overlapping=False)
    changed = substitute(text, spans, arguments)
    plain = text.replace("\r\n", "\n").replace(old, new)
    assert changed.replace("\r\n", "\n") == plain or "\r" in re.sub("\r\n", "", text)
    if text.count("\n") == text.count("\r\n") == text.count("\r") > 0:
        assert changed.count("\n") == changed.count("\r\n")
    if "\r" not in text:
        assert "\r" not in changed


lines = st.lists(st.sampled_from(["a", "b", "c", "d", ""]), max_size=40).map("\n".join)


@given(lines, lines)
def test_the_difference_is_what_patch_makes_the_new_text_of(before: str, after: str) -> None:
    assert _patched(before, difference(before, after)) == after


def _patched(before: str, hunks: str) -> str:
    """What ``patch`` does, strictly."""
    old = re.findall(r"[^\n]*\n|[^\n]+", before)
    new: list[str] = []
    at = 0
    for row in re.findall(r"[^\n]+(?:\n\\ .*)?", hunks):
        if found := re.fullmatch(r"@@ -(\d+),(\d+) \+(\d+),(\d+) @@", row):
            start = int(found[1]) - (found[2] != "0")
            new += old[at:start]
            at = start
            assert int(found[3]) - (found[4] != "0") == len(new)
            continue
        line = row[1:].removesuffix("\n\\ No newline at end of file")
        line += "" if row != row[0] + line else "\n"
        if row[0] in " -":
            assert old[at] == line
            at += 1
        if row[0] in " +":
            new.append(line)
    return "".join(new + old[at:])


def test_a_large_difference_is_cut_and_one_spread_widely_is_named() -> None:
    before = "".join(f"{number}\n" for number in range(400))
    text = difference(before, before.replace("\n", "!\n"))
    assert len(text.splitlines()) < 130
    assert text.endswith("[the rest of the difference is left out]")
    long = "start\n" + "x\n" * 2000 + "end\n"
    assert difference(long, long.replace("start", "a").replace("end", "b")) == "[changed within the lines 1 to 2002]"


def test_gnu_patch_takes_the_difference(tmp_path: Path) -> None:
    before, after = "a\nb\nc\n" * 10 + "end", "a\nb\n" + "a\nb\nc\n" * 9 + "\nthe end\n"
    (tmp_path / "f").write_text(before)
    patch = f"--- f\n+++ f\n{difference(before, after)}\n"
    try:
        subprocess.run(["patch", "-s", "f"], input=patch, cwd=tmp_path, text=True, check=True, timeout=10)
    except FileNotFoundError:
        pytest.skip("there is no patch here")
    assert (tmp_path / "f").read_text() == after
