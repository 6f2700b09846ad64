"""The history: what is read back is what was appended, byte for byte, and what does not pair is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loop_protocol.v1.types import (
    AssistantMessage,
    ImageBlock,
    Message,
    PromptTiming,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolResultMessage,
    Usage,
    UserMessage,
)
from loopd.core.history import History, Malformed, RunRecord, decode_message, encode

_text = st.text(st.characters(codec="utf-8"), max_size=20)
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def _conversation(draw: st.DrawFn) -> list[Message]:
    """Prompts, each with some tool rounds; ids may repeat from round to round."""
    messages: list[Message] = []

    def at() -> int:
        return len(messages)

    for _ in range(draw(st.integers(0, 3))):
        image = draw(st.booleans())
        content = [TextBlock(draw(_text)), *([ImageBlock(mime_type="image/png", data="AAAA")] if image else [])]
        messages.append(UserMessage(index=at(), content=content, timestamp=1))
        for _ in range(draw(st.integers(0, 2))):
            ids = draw(st.lists(st.sampled_from("abc"), max_size=3))
            calls = [ToolCallBlock(id, "t", draw(st.dictionaries(_text, _json, max_size=2))) for id in ids]
            messages.append(_assistant(at(), [ThinkingBlock(draw(_text), "sig"), TextBlock("x"), *calls]))
            for id in draw(st.permutations(ids)):
                messages.append(_result(at(), id))
    return messages


def _assistant(index: int, content: list[object]) -> AssistantMessage:
    return AssistantMessage(
        index=index,
        content=content,  # type: ignore[arg-type]
        timestamp=2,
        provider="p",
        model="m",
        usage=Usage(1, 2, 3),
        stop_reason="stop",
    )


def _result(index: int, id: str) -> ToolResultMessage:
    return ToolResultMessage(
        index=index, content=[TextBlock("r")], timestamp=3, tool_call_id=id, tool_name="t", is_error=False
    )


@given(_conversation())
def test_what_is_stored_reads_back_the_same(messages: list[Message]) -> None:  # S-11
    written, read = History(), History()
    for message in messages:
        line = written.append(message)
        assert line.count(b"\n") == 1
        assert line.endswith(b"\n")
        read.read(line)
    read.require_paired()
    assert read == written
    assert [decode_message(read.line(index)) for index in range(read.messages)] == messages
    assert read.user_messages == sum(isinstance(message, UserMessage) for message in messages)


@given(_conversation(), st.data())
def test_a_conversation_with_a_hole_is_refused(messages: list[Message], data: st.DataObject) -> None:  # S-5
    if len(messages) < 2:
        return
    gone = data.draw(st.integers(0, len(messages) - 2))
    with pytest.raises(Malformed):
        _read(messages[:gone] + messages[gone + 1 :])


def _read(messages: list[Message]) -> None:
    history = History()
    for message in messages:
        history.read(encode(message))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{}", "neither role nor type"),
        (b"[]", "Expected `object`"),
        (b'{"role":"system","index":0,"content":[],"timestamp":1}', "Invalid value 'system'"),
        (b'{"role":"user","index":1,"content":[],"timestamp":1}', "index 1 where 0 was due"),
        (b'{"role":"user","index":0,"content":[{"type":"image","mimeType":"a/b"}],"timestamp":1}', "without data"),
        (b'{"role":"user","index":0,"content":"x","timestamp":1}', "Expected `array`"),
        (
            b'{"role":"toolResult","index":0,"content":[],"timestamp":1,'
            b'"toolCallId":"a","toolName":"t","isError":false}',
            "no call",
        ),
        (b'{"type":"run"}', "missing required field"),
        (b'{"type":"run"', "truncated"),
    ],
)
def test_a_malformed_record_is_refused_with_its_reason(line: bytes, reason: str) -> None:  # S-5
    history = History()
    with pytest.raises(Malformed, match=reason):
        history.read(line)
    assert history == History()


def test_records_and_keys_of_a_newer_writer_stay_as_they_are() -> None:  # S-27
    history = History()
    lines = [
        b'{"type":"weather","sun":true}\n',
        b'{"role":"user","index":0,"content":[{"type":"text","text":"x","mood":"fine"}],"timestamp":1,"tone":2}\n',
    ]
    for line in lines:
        history.read(line)
    assert history.lines == lines
    assert history.messages == 1
    assert history.line(0) == lines[1][:-1]


def test_a_run_is_found_by_its_request_and_keeps_its_timing() -> None:  # P-1
    timing = PromptTiming(id="r", user_message_index=0, message_start_index=0, started_at=5, finished_at=9)
    record = RunRecord(run_id="r", outcome="success", timing=timing, request_id="q", digest="d")
    written, read = History(), History()
    written.append(UserMessage(index=0, content=[], timestamp=1))
    written.append_run(record)
    for line in written.lines:
        read.read(line)
    assert read.runs["r"] == record
    assert read.requests["q"] == ("r", "d")
    assert read.timings == [timing]
    assert b"stopped" not in written.lines[1]
    assert msgspec.json.decode(written.lines[1])["type"] == "run"


def test_timings_without_id_and_ranges_stay_valid() -> None:  # P-6
    history = History()
    history.append(UserMessage(index=0, content=[], timestamp=1))
    history.read(
        b'{"type":"run","runId":"r","outcome":"success","timing":{"userMessageIndex":0,"startedAt":1,"finishedAt":2}}\n'
    )
    assert history.timings == [PromptTiming(user_message_index=0, started_at=1, finished_at=2)]
