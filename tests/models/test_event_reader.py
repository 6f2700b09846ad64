"""Server-sent events: the same events, however the bytes come."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopd.models.sse import Event, EventReader, EventTooLarge

RECORDED = Path(__file__).parent.parent / "cases" / "sse"


def read(*pieces: bytes) -> list[Event]:
    reader = EventReader()
    return [event for piece in pieces for event in reader.feed(piece)] + reader.close()


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\n", [b"a"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
        (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b": thinking\n\n: still\n\ndata: a\n: within\n\n", [b"a"]),
        (b"data: a\ndata: b\ndata:\ndata: c\n\n", [b"a\nb\n\nc"]),
        (b"data:a\ndata:  b\n\n", [b"a\n b"]),
        (b"data: a", [b"a"]),
        (b"data: a\n", [b"a"]),
        (b"data: \xe2\x80\xa8\n\n", [b"\xe2\x80\xa8"]),
        (b"id: 1\nretry: 5\nunknown: x\nnothing\ndata: a\n\n", [b"a"]),
        (b"event: ping\n\ndata: a\n\n", [b"a"]),
        (b"data\n\n", [b""]),
        (b"", []),
        (b"\n\n\r\n", []),
    ],
)
def test_every_form_that_the_standard_allows_is_read(stream: bytes, events: list[bytes]) -> None:
    assert [event.data for event in read(stream)] == events
    assert [event.data for event in read(*(bytes([byte]) for byte in stream))] == events


def test_only_an_event_at_the_end_without_its_empty_line_counts_as_cut() -> None:
    assert [event.cut for event in read(b"data: a\n\ndata: b\n\n")] == [False, False]
    assert [event.cut for event in read(b"data: a\n\ndata: b\n")] == [False, True]


def test_an_event_has_the_name_that_stands_before_its_end_and_no_other() -> None:
    stream = b"event: error\ndata: a\n\ndata: b\nevent: x\n\ndata: c\n\n"
    assert read(stream) == [Event(b"error", b"a"), Event(b"x", b"b"), Event(b"", b"c")]


LINES = st.lists(
    st.sampled_from(
        [b"data: x", b"data:y", b": c", b"event: e", b"", b"", b"data: \xc3\xa4\xe2\x80\xa8", b"id: 1", b"\xef\xbb\xbf"]
    ),
    max_size=30,
)


@given(lines=LINES, ends=st.lists(st.sampled_from([b"\n", b"\r\n", b"\r"]), min_size=30, max_size=30), data=st.data())
def test_any_split_of_the_bytes_gives_the_same_events(
    lines: list[bytes], ends: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(line + end for line, end in zip(lines, ends, strict=False))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert read(*pieces) == read(stream)


@given(texts=st.lists(st.binary(max_size=20).filter(lambda text: not set(text) & {10, 13}), max_size=10))
def test_what_was_sent_is_what_arrives(texts: list[bytes]) -> None:
    assert [event.data for event in read(b"".join(b"data: %b\n\n" % text for text in texts))] == texts


@pytest.mark.parametrize("stream", [b"data: " + b"x" * 200, b"x" * 200, b"data: x\n" * 200, b": " + b"c" * 200])
def test_an_event_without_an_end_is_refused_before_it_fills_the_memory(stream: bytes) -> None:
    reader = EventReader(100)
    pieces = (bytes([byte]) for byte in stream)
    with pytest.raises(EventTooLarge):
        any(map(reader.feed, pieces))


def test_many_events_together_may_be_longer_than_one_may_be() -> None:
    reader = EventReader(100)
    assert len(reader.feed(b": comment\ndata: x\n\n" * 100)) == 100


@pytest.mark.parametrize("name", ["chat_text", "chat_tool"])
def test_recorded_streams_are_read_to_their_end(name: str) -> None:
    raw = (RECORDED / f"{name}.raw").read_bytes().partition(b"\r\n\r\n")[2]
    body = b"".join(piece for piece in re.split(rb"(?:\r\n|^)[0-9a-f]+\r\n", raw) if piece)
    assert read(body)[-1].data.startswith(b"[DONE]")
