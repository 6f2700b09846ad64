"""Frames out of bytes: the same ones, however the stream was cut, at a cost that does not depend on the cuts."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loop_protocol.jsonrpc import FrameReader, Framing, FramingError, frame

LINES = st.lists(
    st.sampled_from(
        [b"{}", b'{"a":"\xe2\x80\xa8"}', b"[1]", b"", b" \t", b"\r", b"\xef\xbb\xbf{}", b"{} \r", b"\xef\xbb\xbf"]
    ),
    max_size=8,
)
HEADED = st.lists(
    st.sampled_from(
        [
            b"Content-Length: 2\r\n\r\n{}",
            b"content-length:3\r\nX-Other: a:b\r\n\r\n{}\n",
            b"Content-Type: x\r\nCONTENT-LENGTH:   4  \r\n\r\n\n\n{}",
            b"Content-Length: 0\r\n\r\n",
            b"Content-Length: 5\r\n\r\n\xef\xbb\xbf{}",
            b"\r\n",
            b"\xef\xbb\xbf",
        ]
    ),
    max_size=8,
)
CUTS = st.lists(st.integers(0, 400), max_size=12)


def read(chunks: list[bytes], limit: int = 64) -> tuple[list[bytes], Framing | None, str | None]:
    reader, frames = FrameReader(limit), []
    try:
        for chunk in chunks:
            reader.feed(chunk)
            while (found := reader.next()) is not None:
                frames.append(found)
        if (last := reader.rest()) is not None:
            frames.append(last)
    except FramingError as error:
        with pytest.raises(FramingError):
            reader.next()
        return frames, reader.framing, error.error.kind
    return frames, reader.framing, None


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(at), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


def bytewise(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


@given(LINES.map(b"\n".join), CUTS)
def test_lines_are_the_same_frames_however_they_were_cut(data: bytes, at: list[int]) -> None:
    expected = [stripped for line in data.split(b"\n") if (stripped := line.replace(b"\xef\xbb\xbf", b"").strip())]
    assert read(cut(data, at))[::2] == (expected, None)
    assert read(bytewise(data)) == read([data])


@given(HEADED.map(b"".join), CUTS)
def test_headed_bodies_are_the_same_frames_however_they_were_cut(data: bytes, at: list[int]) -> None:
    expected = read([data])
    assert read(cut(data, at)) == expected
    assert read(bytewise(data)) == expected
    assert all(body.strip() in (b"{}", b"[1]") for body in expected[0])


@given(st.binary(max_size=300), CUTS)
def test_random_bytes_give_frames_or_one_error_whatever_the_cuts(data: bytes, at: list[int]) -> None:
    assert read(cut(data, at)) == read([data])


@given(st.text(alphabet="{}[]\r\n: aC0123456789Content-Length", max_size=200).map(str.encode), CUTS)
def test_bytes_that_look_like_frames_do_too(data: bytes, at: list[int]) -> None:
    assert read(cut(data, at)) == read([data])


@pytest.mark.parametrize("first", [b'{"a":1}\n', b"[]\n", b"\xef\xbb\xbf{}\n", b"\n\n \xef\xbb\xbf\r\n{}\n"])
def test_a_bracket_after_blanks_and_a_byte_order_mark_means_lines(first: bytes) -> None:
    reader = FrameReader()
    reader.feed(first)
    assert reader.next() is not None
    assert reader.framing is Framing.LINES


def test_a_letter_means_headers_and_any_other_byte_is_refused() -> None:
    assert read([b"Content-Length: 2\r\n\r\n{}"]) == ([b"{}"], Framing.HEADERS, None)
    for first in (b"42\n", b'"x"\n', b"\x00", b"\xff"):
        assert read([first]) == ([], None, "parse_error")


def test_a_last_line_without_a_newline_is_still_a_frame() -> None:
    assert read([b"{}\n[1]"]) == ([b"{}", b"[1]"], Framing.LINES, None)
    assert read([b"{}\n  \r"]) == ([b"{}"], Framing.LINES, None)


@pytest.mark.parametrize("stream", [b"{%b}\n", b"Content-Length: 64\r\n\r\n{%b}"], ids=["lines", "headers"])
def test_a_frame_of_exactly_the_limit_passes(stream: bytes) -> None:
    data = stream % (b" " * 62)
    assert read(bytewise(data)) == read([data])
    assert len(read([data])[0][0]) == 64


@pytest.mark.parametrize(
    "stream",
    [b"{%b}\n" % (b" " * 63), b"{" + b" " * 64, b"Content-Length: 65\r\n\r\n", b"Content-Length: 999999999999\r\n\r\n"],
    ids=["line", "line without end", "headers", "a length for ever"],
)
def test_a_larger_one_is_refused_before_it_is_whole(stream: bytes) -> None:
    for chunks in ([stream], bytewise(stream)):
        assert read(chunks) == ([], read([stream])[1], "limit_exceeded")


def test_a_raised_limit_holds_for_the_next_frame_of_the_same_chunk() -> None:
    reader = FrameReader(8)
    reader.feed(b"{}\n{" + b" " * 50 + b"}\n")
    assert reader.next() == b"{}"
    reader.limit = 64
    assert reader.next() == b"{" + b" " * 50 + b"}"


@pytest.mark.parametrize("fill", range(4091, 4101))
def test_a_header_may_have_4_kib_and_is_judged_alike_in_pieces(fill: int) -> None:
    head = b"Content-Length: 2\r\nX: " + b"x" * (fill - 22)
    data = head + b"\r\n\r\n{}"
    assert read(bytewise(data)) == read([data])
    assert read([data])[2] == ("parse_error" if len(head) > 4096 else None)


@pytest.mark.parametrize(
    "header", [b"Content-Length: -1", b"Content-Length: 2x", b"Content-Length:", b"Length: 2", b"GET / HTTP/1.1"]
)
def test_a_header_that_names_no_length_is_refused(header: bytes) -> None:
    assert read([header + b"\r\n\r\n{}"]) == ([], Framing.HEADERS, "parse_error")


def test_what_is_framed_is_read_again() -> None:
    body = '{"text":"\u2028é"}\n'.encode()
    for framing in Framing:
        assert read([frame(body, framing)] * 2, 100) == ([body.rstrip()] * 2, framing, None)


@pytest.mark.parametrize("stream", [b'{"%b"}\n', b'Content-Length: 1048580\r\n\r\n{"%b"}'], ids=["lines", "headers"])
def test_a_large_frame_in_small_pieces_is_scanned_once(stream: bytes) -> None:
    data = stream % (b"x" * 2**20)
    pieces = [data[at : at + 4] for at in range(0, len(data), 4)]
    started = time.process_time()
    frames, _, error = read(pieces, 2**21)
    assert error is None
    assert len(frames[0]) == 2**20 + 4
    # 260,000 pieces: a scan of everything for each would be 128 GiB.
    assert time.process_time() - started < 1.5


def test_many_small_frames_in_one_chunk_cost_no_copy_of_the_chunk_each() -> None:
    data = b"Content-Length: 2\r\n\r\n{}" * 50_000
    started = time.process_time()
    assert len(read([data])[0]) == 50_000
    assert time.process_time() - started < 2


def test_a_line_that_never_ends_is_not_kept_beyond_the_limit() -> None:  # K-56
    reader = FrameReader()
    for _ in range(reader.limit // 16_384):
        reader.feed(b"{" + b" " * 16_383)
        assert reader.next() is None
    reader.feed(b" ")
    with pytest.raises(FramingError):
        reader.next()
