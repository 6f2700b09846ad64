"""practice/echo: each thing that a newcomer can ask it for."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import model_bench as bench
import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from loop_protocol.v1.types import ImageBlock, Message, TextBlock, ToolCallBlock
from loopd.agent import ModelError, Reply, TextDelta
from loopd.agent.tools import session_tools
from loopd.models import ECHO

ECHOES = bench.catalogue("http://127.0.0.1:1/v1").resolve(ECHO)
IMAGE = ImageBlock(mime_type="image/png", data="AAAA")


async def ask(*messages: Message, said: bench.Said | None = None) -> Reply:
    return await bench.ask(ECHOES, messages, said or bench.Said())


async def text_of(*content: object) -> str:
    [block] = (await ask(bench.user(0, *content))).content
    assert isinstance(block, TextBlock)
    return block.text


@given(text=st.text(min_size=1))
def test_any_other_text_is_echoed_verbatim(text: str) -> None:
    said = bench.Said()
    reply = trio.run(lambda: ask(bench.user(0, "> " + text), said=said))
    assert reply.content == [TextBlock("> " + text)]
    assert said.text == "> " + text


async def test_blocks_are_lines_and_images_are_counted() -> None:
    assert await text_of("a", "b") == "a\nb"
    assert await text_of("a", IMAGE, IMAGE) == "a\n[2 images]"
    assert await text_of(IMAGE) == "[1 image]"
    assert await text_of("") == "(no text)"


async def test_stream_gives_that_many_words() -> None:
    assert await text_of("stream 3") == "word1 word2 word3"
    assert await text_of("stream 1") == "word1"
    assert await text_of("stream three") == "stream three"


@pytest.mark.parametrize("count", ["0", "1000001", "999999999999"])
async def test_more_words_than_there_are_is_an_error_that_says_how_many(count: str) -> None:
    with pytest.raises(ModelError, match="1 to 1000000"):
        await text_of(f"stream {count}")


async def test_many_words_are_fast_and_let_others_in() -> None:
    said, turns = bench.Said(), 0

    async def other() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    started = time.process_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        await ask(bench.user(0, "stream 20000"), said=said)
        nursery.cancel_scope.cancel()
    assert len(said.deltas) == 20000
    assert 20 <= turns <= 200
    assert time.process_time() - started < 1


async def test_slow_takes_ten_seconds_a_word_at_a_time(autojump_clock: MockClock) -> None:
    times: list[float] = []
    reply = await bench.ask(ECHOES, [bench.user(0, "slow")], lambda _: times.append(autojump_clock.current_time()))
    assert len(times) == 50
    assert all(later - earlier == pytest.approx(0.2) for earlier, later in pairwise(times))
    assert isinstance(reply.content[0], TextBlock)
    assert len(reply.content[0].text.split()) == 50


@pytest.mark.parametrize(
    ("asked", "name", "arguments"),
    [
        ("shell: echo hi", "bash", {"command": "echo hi"}),
        ("shell:for i in 1 2; do\n  echo $i\ndone", "bash", {"command": "for i in 1 2; do\n  echo $i\ndone"}),
        ("read src/a b.py", "read", {"path": "src/a b.py"}),
        ("escalate: id", "bash", {"command": "id", "escalate": True, "justification": "practice/echo was asked to"}),
        ("write a.txt: hello", "write", {"path": "a.txt", "content": "hello"}),
        ("write my notes.txt:\n one\n\ntwo: 2", "write", {"path": "my notes.txt", "content": " one\n\ntwo: 2"}),
        ("write /x/y:z", "write", {"path": "/x/y", "content": "z"}),
        ("edit a b.txt: old => new", "edit", {"path": "a b.txt", "oldText": "old", "newText": "new"}),
        ("edit a: x => y => z", "edit", {"path": "a", "oldText": "x", "newText": "y => z"}),
        ("edit a: gone =>", "edit", {"path": "a", "oldText": "gone", "newText": ""}),
        ("edit a: b\nc => d\ne", "edit", {"path": "a", "oldText": "b\nc", "newText": "d\ne"}),
    ],
)
async def test_a_tool_is_called_even_where_it_is_not_offered(asked: str, name: str, arguments: dict[str, Any]) -> None:
    assert (await ask(bench.user(7, asked))).content == [ToolCallBlock("practice_7", name, arguments)]


@pytest.mark.parametrize(
    "asked", ["write a: x", "edit a: x => y", "read a", "shell: true"], ids=lambda asked: asked.split()[0]
)
async def test_its_arguments_are_those_of_the_tool(asked: str) -> None:
    [call] = (await ask(bench.user(7, asked))).content
    assert isinstance(call, ToolCallBlock)
    [tool] = [tool for tool in session_tools(bash_timeout_s=1) if tool.name == call.name]
    msgspec.convert(call.arguments, tool.parameters)


async def test_what_only_looks_like_a_command_is_echoed() -> None:
    for text in ("shell:", "read ", "read a\nb", "fail now", "slowly", "please shell: ls"):
        assert await text_of(text) == text
    for text in (
        "write",
        "write a.txt",
        "write a.txt:",
        "write : x",
        "write a\nb: x",
        "edit a: b",
        "edit a: => x",
        "escalate:",
    ):
        assert await text_of(text) == text


async def test_the_last_tools_text_is_the_answer() -> None:
    first, second = (ToolCallBlock(id, "bash", {}) for id in "ab")
    turn: list[Message] = [
        bench.user(0, "shell: ls"),
        bench.assistant(1, first, stop_reason="toolUse"),
        bench.result(2, first, "one"),
        bench.assistant(3, second, stop_reason="toolUse"),
        bench.result(4, second, "two\n", "three", is_error=True),
    ]
    once = await ask(*turn)
    assert once.content == [TextBlock("two\n\nthree")]
    # A resumed turn does not run the tool again, and counts nothing of what was not said to its end.
    assert await ask(*turn, bench.assistant(5, "tw", stop_reason="aborted")) == once
    # The next prompt is not about that result any more.
    assert (await ask(*turn, bench.assistant(5, "x"), bench.user(6, "and now"))).content == [TextBlock("and now")]


async def test_the_same_is_answered_with_the_same_usage() -> None:
    one, other = [await ask(bench.user(0, "hello")) for _ in range(2)]
    assert one == other
    longer = await ask(bench.user(0, "hello " * 50))
    assert longer.usage.input_tokens > one.usage.input_tokens
    assert longer.usage.output_tokens > one.usage.output_tokens


async def test_a_word_is_a_delta() -> None:
    said = bench.Said()
    await ask(bench.user(0, "two  words\n"), said=said)
    assert said.deltas == [TextDelta("two  "), TextDelta("words\n")]
