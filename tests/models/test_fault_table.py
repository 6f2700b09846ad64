"""Fault by fault and API by API: what becomes of it. The table is printed; no row is an empty success or a hang."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import dialects
import model_bench as bench
import pytest
import scripted_provider as scripted
import trio
from dialects import Call, Dialect, Text, Thinking
from trio.testing import MockClock

from loop_protocol.v1.types import Message, TextBlock, ThinkingBlock, ToolCallBlock
from loopd.agent import ModelError, Reply
from loopd.models import Catalogue

HELLO: list[Message] = [bench.user(0, "hello")]
PAGE = b"<html><body><h1>Gateway trouble</h1></body></html>"
STATUS = b'{"error":{"message":"no"}}'
# A fault that is no answer after this long is a hang; the clock is virtual.
HANG_S = 3600


@dataclass(frozen=True)
class Row:
    """``outcome`` is the error's kind, or what is answered."""

    fault: str
    outcome: str
    script: Callable[[Dialect], scripted.Script]


def body(data: bytes, *, at_once: int | None = None) -> scripted.Script:
    return scripted.says(scripted.STREAM + scripted.chunked(data) + scripted.END, at_once=at_once)


def whole(dialect: Dialect, *blocks: dialects.Block, end: dialects.End = "stop") -> bytes:
    return b"".join(dialect.whole(*blocks, end=end))


def begun(dialect: Dialect) -> bytes:
    """An answer whose end is missing."""
    return b"".join(dialect.whole(Text(["half an ", "answer"]))[: -dialect.closing])


def sent(dialect: Dialect) -> bytes:
    return scripted.STREAM + scripted.chunked(begun(dialect))


def text(dialect: Dialect, end: dialects.End = "stop") -> bytes:
    return whole(dialect, Text(["an ", "äns\u2028wer"]), end=end)


CALL = Call("c", "bash", ['{"command"', ':"ls"}'])
TABLE = [
    # Answers that say no.
    Row("401", "auth", lambda _: scripted.answers(401, STATUS)),
    Row("403", "auth", lambda _: scripted.answers(403, STATUS)),
    Row("400", "refused", lambda _: scripted.answers(400, STATUS)),
    Row("429", "rate_limit", lambda _: scripted.answers(429, STATUS)),
    Row("500", "provider", lambda _: scripted.answers(500, STATUS)),
    Row("503", "overloaded", lambda _: scripted.answers(503, STATUS)),
    Row("529", "overloaded", lambda _: scripted.answers(529, STATUS)),
    Row("HTML with 200", "provider", lambda _: scripted.answers(200, PAGE, "text/html")),
    Row("JSON with 200", "provider", lambda _: scripted.answers(200, STATUS)),
    Row("empty body", "incomplete", lambda _: scripted.answers(200, b"", "text/event-stream")),
    Row("empty body, no type", "incomplete", lambda _: scripted.says(b"HTTP/1.1 200 X\r\ncontent-length: 0\r\n\r\n")),
    # Connections that break.
    Row("closed before", "unreachable", lambda _: scripted.says(b"", close=True)),
    Row("reset before", "unreachable", lambda _: scripted.resets()),
    Row("cut", "incomplete", lambda dialect: scripted.says(sent(dialect), close=True)),
    Row("reset", "incomplete", lambda dialect: scripted.resets(sent(dialect))),
    Row("ended early", "incomplete", lambda dialect: body(begun(dialect))),
    Row("ended early, [DONE]", "incomplete", lambda dialect: body(begun(dialect) + scripted.DONE)),
    Row("ended in an event", "incomplete", lambda dialect: body(begun(dialect) + b'data: {"type":"resp')),
    Row("silent before", "unreachable", lambda _: scripted.hangs()),
    Row("silent in mid-answer", "incomplete", lambda dialect: scripted.hangs(sent(dialect))),
    # Streams that say no, or what cannot be read.
    Row("error in mid-stream", "overloaded", lambda dialect: body(begun(dialect) + dialect.error("overloaded", "no"))),
    Row("error event", "provider", lambda dialect: body(begun(dialect) + b'event: error\ndata: {"message":"no"}\n\n')),
    Row("malformed JSON", "provider", lambda dialect: body(begun(dialect) + b"data: {oops\n\n")),
    Row("content filter", "content_filter", lambda dialect: body(text(dialect, "filter"))),
    Row("nothing said", "incomplete", lambda dialect: body(whole(dialect))),
    Row("only white space", "incomplete", lambda dialect: body(whole(dialect, Text([" \n"])))),
    Row("only thinking", "incomplete", lambda dialect: body(whole(dialect, Thinking(["hm"]), end="length"))),
    # Answers, however they come.
    Row("byte by byte", "text, stop", lambda dialect: body(text(dialect), at_once=1)),
    Row("CRLF", "text, stop", lambda dialect: body(text(dialect).replace(b"\n", b"\r\n"), at_once=7)),
    Row("CR", "text, stop", lambda dialect: body(text(dialect).replace(b"\n", b"\r"))),
    Row(
        "comments", "text, stop", lambda dialect: body(b": hi\n\n" + text(dialect).replace(b"\n\n", b"\n\n: ping\n\n"))
    ),
    Row("byte order mark", "text, stop", lambda dialect: body(b"\xef\xbb\xbf" + text(dialect))),
    Row("lone surrogates", "text, stop", lambda dialect: body(whole(dialect, Text(["x\ud83d", "\udc00"])))),  # K-27
    Row("length", "text, length", lambda dialect: body(text(dialect, "length"))),
    Row("thinking", "thinking, text, stop", lambda dialect: body(whole(dialect, Thinking(["hm"], "S"), Text(["x"])))),
    Row("call", "call, toolUse", lambda dialect: body(whole(dialect, CALL, end="calls"))),
    Row("call that is cut", "call, length", lambda dialect: body(whole(dialect, CALL, end="length"))),
    Row(
        "malformed arguments",
        "malformed call, toolUse",
        lambda dialect: body(whole(dialect, Call("c", "bash", ['{"comm']), end="calls")),
    ),
]


def told(reply: Reply) -> str:
    kinds = []
    for block in reply.content:
        match block:
            case TextBlock():
                assert block.text in ("an äns\u2028wer", "x", "x\ufffd\ufffd")
                kinds.append("text")
            case ThinkingBlock():
                assert block.thinking == "hm"
                kinds.append("thinking")
            case ToolCallBlock():
                kinds.append("malformed call" if "__malformed__" in block.arguments else "call")
    return ", ".join([*kinds, reply.stop_reason])


async def outcome(provider: scripted.ScriptedProvider, models: Catalogue, script: scripted.Script) -> str:
    provider.script = script
    said = bench.Said()
    with trio.move_on_after(HANG_S):
        try:
            reply = await bench.ask(models.resolve(bench.M), HELLO, said)
        except ModelError as error:
            return error.kind if str(error).startswith("local ") else f"unnamed: {error}"
        assert said.text == "".join(block.text for block in reply.content if isinstance(block, TextBlock))
        return told(reply)
    return "hang"


async def test_every_fault_has_one_outcome_on_every_api(  # K-30
    provider: scripted.ScriptedProvider, autojump_clock: MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    found: dict[str, list[str]] = {row.fault: [] for row in TABLE}
    for dialect in dialects.DIALECTS:
        models = bench.catalogue(provider.url, api=dialect.api)
        await models.warm()  # a thread: the clock must not jump meanwhile
        for row in TABLE:
            found[row.fault].append(await outcome(provider, models, row.script(dialect)))
        await models.aclose()
    assert autojump_clock.current_time() >= 300 * 2 * len(dialects.DIALECTS)  # the silent ones, and nobody else waits
    with capsys.disabled():
        print("\n" + bench.table(["fault", *(dialect.api for dialect in dialects.DIALECTS)], found))
    assert found == {row.fault: [row.outcome] * len(dialects.DIALECTS) for row in TABLE}
