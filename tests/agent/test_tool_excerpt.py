"""Cutting: short text is whole, long text keeps both ends in whole lines, within the limits, however it arrived."""

from __future__ import annotations

import re
from itertools import pairwise

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from loopd.agent.tools.excerpt import BYTES, LINES, Excerpt, head_of, tail_of

text = st.text(alphabet="ab\nä€😀", max_size=60)


def excerpt_of(*pieces: bytes) -> str:
    excerpt = Excerpt()
    for piece in pieces:
        excerpt.feed(piece)
    return excerpt.text()


@given(text, st.integers(1, 6), st.integers(1, 40))
def test_a_head_is_a_beginning_within_its_limits(whole: str, lines: int, size: int) -> None:
    head = head_of(whole, lines=lines, size=size)
    assert whole.startswith(head)
    assert len(head.encode()) <= size
    assert head.count("\n") < lines
    assert "\n" not in head or whole[len(head) : len(head) + 1] in ("", "\n")


@given(text, st.integers(1, 6), st.integers(1, 40))
def test_a_tail_is_an_end_within_its_limits(whole: str, lines: int, size: int) -> None:
    tail = tail_of(whole, lines=lines, size=size)
    assert whole.endswith(tail)
    assert len(tail.encode()) <= size
    assert tail.count("\n") < lines
    start = len(whole) - len(tail)
    assert "\n" not in tail[:-1] or start == 0 or whole[start - 1] == "\n"


@given(st.binary(max_size=300))
def test_short_output_is_whole_with_bad_bytes_replaced(data: bytes) -> None:  # K-25
    assert excerpt_of(data) == data.decode(errors="replace")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.binary(min_size=1, max_size=50), st.integers(1, 9000)), max_size=4), st.data())
def test_any_output_is_within_the_limits_however_it_was_split(
    parts: list[tuple[bytes, int]], data: st.DataObject
) -> None:
    whole = b"".join(piece * times for piece, times in parts)
    kept = excerpt_of(whole)
    assert len(kept.encode()) <= BYTES
    assert kept.count("\n") <= LINES
    cuts = sorted({0, len(whole), *data.draw(st.lists(st.integers(0, len(whole)), max_size=5))})
    assert excerpt_of(*(whole[a:b] for a, b in pairwise(cuts))) == kept


def test_the_limits_themselves_are_whole_and_one_more_is_cut() -> None:
    lines = b"x\n" * LINES
    assert excerpt_of(lines) == lines.decode()
    assert excerpt_of(b"x" * BYTES) == "x" * BYTES
    assert f": lines 401 to 411 of 2001, {len(lines) + 1} bytes in all; to see them" in excerpt_of(lines, b"y")
    assert f": lines 1 to 1 of 1, {BYTES + 1} bytes in all; to see them" in excerpt_of(b"x" * (BYTES + 1))


def test_a_cut_keeps_the_beginning_and_more_of_the_end_in_whole_lines() -> None:
    kept = excerpt_of(b"".join(b"line %d\n" % number for number in range(100_000)))
    rows = kept.split("\n")
    assert rows[:3] == ["line 0", "line 1", "line 2"]
    assert rows[-2:] == ["line 99999", ""]
    marker = next(at for at, row in enumerate(rows) if row.startswith("[left out here"))
    assert 300 < marker <= 400
    assert len(rows) - marker > 1500
    assert all(row.startswith("line ") and row[5:].isdigit() for row in rows[:marker] + rows[marker + 1 : -1])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 4000), min_size=30, max_size=200), st.booleans())
def test_the_lines_that_are_named_are_the_ones_that_are_not_there(lengths: list[int], ended: bool) -> None:
    rows = [f"{number}:".ljust(length, "x") for number, length in enumerate(lengths, 1)]
    kept = excerpt_of(("\n".join(rows) + "\n" * ended).encode())
    assume("[left out here" in kept)
    head, found, tail = re.split(r"\n\[left out here and not kept: lines (\d+ to \d+) of .*\]\n", kept)
    start, stop = map(int, found.split(" to "))
    assert head == "\n".join(rows[: start - 1])
    assert tail == "\n".join(rows[stop:]) + "\n" * ended


def test_one_endless_line_takes_bounded_memory() -> None:  # K-26
    excerpt = Excerpt()
    for _ in range(800):
        excerpt.feed(b"x" * 65536)
    assert len(excerpt._first) + len(excerpt._last) < 4 * BYTES
    assert len(excerpt.text()) <= BYTES
