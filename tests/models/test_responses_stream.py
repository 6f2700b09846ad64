"""OpenAI Responses: what is sent beside the history, and what real, documented and odd streams become."""

from __future__ import annotations

from typing import Any

import dialects
import model_bench as bench
import pytest
import scripted_provider as scripted
from dialects import named
from scripted_provider import sends

from loop_protocol.v1.types import Message, ModelRef, TextBlock, ThinkingBlock, ToolCallBlock, Usage
from loopd.agent import ModelError, Reply, TextDelta, ThinkingDelta
from loopd.config import ModelConfig
from loopd.models import Catalogue

HELLO: list[Message] = [bench.user(0, "hello")]
Provider = scripted.ScriptedProvider
DIALECT = dialects.Responses()
DONE = named("response.completed", response={"status": "completed"})
SAYS = named("response.output_text.delta", delta="x")


@pytest.fixture
def api() -> str:
    return "openai-responses"


async def answer(models: Catalogue, say: bench.Said | None = None) -> Reply:
    return await bench.ask(models.resolve(bench.M), HELLO, say or bench.Said())


async def test_a_request_has_all_that_the_provider_does_not_keep(provider: Provider, models: Catalogue) -> None:
    provider.script = sends(SAYS, DONE, done=False)
    ref = ModelRef("local", "eyes", "high")
    await bench.ask(models.resolve(ref), HELLO, bench.Said(), tools=(bench.BASH,), max_output_tokens=9)
    [asked] = provider.asked
    assert asked.path == "/v1/responses"
    assert asked.headers["authorization"] == f"Bearer {bench.KEY}"
    key = asked.json["prompt_cache_key"]
    assert len(key) == 32
    tool = {"type": "function", "name": "bash", "description": "Run it", "parameters": bench.BASH.parameters}
    assert asked.json == {
        "model": "eyes",
        "input": [{"role": "user", "content": "hello"}],
        "instructions": "Be brief.",
        "tools": [{**tool, "strict": False}],
        "stream": True,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "high", "summary": "auto"},
        "max_output_tokens": 9,
        "prompt_cache_key": key,
    }


async def test_what_a_plain_model_would_refuse_is_not_sent(provider: Provider, models: Catalogue) -> None:
    provider.script = sends(SAYS, DONE, done=False)
    await answer(models)
    assert not {"include", "reasoning", "tools", "max_output_tokens"} & set(provider.asked[0].json)


def test_the_cache_key_stays_with_the_conversation_and_its_tools() -> None:
    model: Any = bench.catalogue("http://127.0.0.1:1/v1", api="openai-responses").resolve(bench.M)
    more = [*HELLO, bench.assistant(1, "hi"), bench.user(2, "again")]
    keys = [
        bench.body(model, messages, tools=tools).partition(b'"prompt_cache_key":')[2][:34]
        for messages, tools in ((HELLO, ()), (more, ()), (more, (bench.BASH,)))
    ]
    assert keys[0] == keys[1] != keys[2]


def test_the_limit_of_the_model_holds_where_none_is_asked_for() -> None:
    listed = (ModelConfig(id="m", max_output=100),)
    model = bench.catalogue("http://127.0.0.1:1/v1", api="openai-responses", models=listed).resolve(bench.M)
    assert b'"max_output_tokens":100' in bench.body(model, HELLO)


# --- what is answered -------------------------------------------------------------------------------------------------


async def test_a_recorded_text_stream(provider: Provider, models: Catalogue) -> None:
    provider.script = scripted.says(scripted.recorded("resp_text"), close=True)
    said = bench.Said()
    reply = await answer(models, said)
    assert reply.content == [TextBlock(said.text)]
    assert (
        said.text == "Hello! I'm here to help with any math or science-related tasks. What can I help you with today?"
    )
    assert (reply.stop_reason, reply.usage) == ("stop", Usage(23, 24, cache_read_tokens=22))


async def test_a_recorded_tool_call(provider: Provider, models: Catalogue) -> None:
    provider.script = scripted.says(scripted.recorded("resp_tool"), at_once=100, close=True)
    reply = await answer(models)
    assert reply.content == [
        ToolCallBlock("call_aZxUmclD04aPtl7wFJDLlVGukSpqsCL3", "read_file", {"path": "src/main.py"})
    ]
    assert (reply.stop_reason, reply.usage) == ("toolUse", Usage(242, 35, cache_read_tokens=241))


async def test_the_documented_form_with_thinking_text_and_two_calls(provider: Provider, models: Catalogue) -> None:
    blocks: list[dialects.Block] = [
        dialects.Thinking(["let ", "me"], secret="SEALED"),
        dialects.Text(["I ", "look"]),
        dialects.Call("a", "read", ['{"p":', "1}"]),
        dialects.Call("b", "bash", ["{}"]),
    ]
    provider.script = sends(*DIALECT.whole(*blocks, end="calls"), done=False)
    said = bench.Said()
    reply = await answer(models, said)
    assert reply.content == [
        ThinkingBlock("let me", "openai-responses SEALED"),
        TextBlock("I look"),
        ToolCallBlock("a", "read", {"p": 1}),
        ToolCallBlock("b", "bash", {}),
    ]
    assert said.deltas[:4] == [ThinkingDelta("let "), ThinkingDelta("me"), TextDelta("I "), TextDelta("look")]
    assert (reply.stop_reason, reply.usage) == ("toolUse", Usage(12, 7, cache_read_tokens=5))


async def test_parts_of_a_summary_are_paragraphs(provider: Provider, models: Catalogue) -> None:
    part = named("response.reasoning_summary_part.added", output_index=0)

    def thought(text: str) -> bytes:
        return named("response.reasoning_summary_text.delta", output_index=0, delta=text)

    summary = [{"type": "summary_text", "text": text} for text in ("a", "b")]
    item = {"type": "reasoning", "summary": summary, "encrypted_content": "S"}
    done = named("response.output_item.done", output_index=0, item=item)
    provider.script = sends(part, thought("a"), part, thought("b"), done, SAYS, DONE, done=False)
    assert (await answer(models)).content == [ThinkingBlock("a\n\nb", "openai-responses S"), TextBlock("x")]


async def test_odd_but_whole_streams_are_answers(provider: Provider, models: Catalogue) -> None:
    async def read(*events: bytes) -> list[Any]:
        provider.script = sends(*events, done=False)
        return (await answer(models)).content

    def item(kind: str, **fields: Any) -> bytes:
        return named(f"response.output_item.{kind}", **fields)

    text = {
        "type": "message",
        "content": [{"type": "output_text", "text": "whole"}, {"type": "refusal", "refusal": "!"}],
    }
    call = {"type": "function_call", "id": "fc", "call_id": "c", "name": "f", "arguments": '{"a":1}'}
    made = ToolCallBlock("c", "f", {"a": 1})
    # Only the last event of an item, only the whole answer, the same twice, arguments as an object.
    assert await read(item("done", item=text), DONE) == [TextBlock("whole!")]
    completed = named("response.completed", response={"status": "completed", "output": [text, call]})
    assert await read(completed) == [TextBlock("whole!"), made]
    assert await read(SAYS, completed) == [TextBlock("x")]
    assert await read(item("added", item=call), item("done", item=call), DONE) == [made]
    assert await read(item("done", item={**call, "arguments": {"a": 1}}), DONE) == [made]
    # Ids that change from event to event, and none at all.
    assert await read(
        item("added", item={"type": "message", "id": "m1"}),
        named("response.output_text.delta", item_id="m2", delta="wh"),
        named("response.output_text.delta", item_id="m3", delta="ole"),
        item("done", item={**text, "id": "m4"}),
        DONE,
    ) == [TextBlock("whole!")]
    assert await read(
        item("added", item={**call, "arguments": "", "id": None}),
        named("response.function_call_arguments.delta", delta='{"a"'),
        named("response.function_call_arguments.delta", delta=":1}"),
        DONE,
    ) == [made]
    # What other models say under other names, and what none of ours is.
    raw = named("response.reasoning_text.delta", delta="hm")
    assert await read(raw, SAYS, DONE) == [ThinkingBlock("hm"), TextBlock("x")]
    search = item("added", output_index=0, item={"type": "web_search_call", "content": 7})
    assert await read(search, named("response.web_search_call.searching", delta={"a": 1}), SAYS, DONE) == [
        TextBlock("x")
    ]
    assert await read(named("response.refusal.delta", delta="no"), DONE) == [TextBlock("no")]
    # The type only in the event's name; a final status only in its name.
    bare = b'event: response.output_text.delta\ndata: {"delta":"x"}\n\n'
    assert await read(bare, b"event: response.completed\ndata: {}\n\n", b"data: rubbish\n\n") == [TextBlock("x")]
    # Servers that count every output 0.
    assert await read(
        item("done", output_index=0, item=call), item("done", output_index=0, item={**call, "call_id": "d"}), DONE
    ) == [made, ToolCallBlock("d", "f", {"a": 1})]


FAILED = {"status": "failed", "error": {"code": "rate_limit_exceeded", "message": "slow down"}}
FAULTS = [
    ("failed", [SAYS, named("response.failed", response=FAILED)], "rate_limit", "slow down"),
    ("failed, completed", [SAYS, named("response.completed", response=FAILED)], "rate_limit", "slow down"),
    ("failed bare", [named("response.failed", response={"status": "failed"})], "provider", "failed"),
    ("error", [SAYS, named("error", code="server_error", message="boom")], "provider", "answer: boom"),
    ("error inside", [SAYS, named("error", error={"type": "overloaded_error", "message": "m"})], "overloaded", ": m"),
    ("error unnamed", [b'data: {"error":{"message":"m","code":401}}\n\n'], "auth", ": m"),
    ("error as a type", [b'data: {"type":"error","message":"m"}\n\n'], "provider", ": m"),
    ("error as text", [b"event: error\ndata: out of memory\n\n"], "provider", ": out of memory"),
    ("cancelled", [SAYS, named("response.done", response={"status": "cancelled"})], "incomplete", "cancelled"),
    (
        "other reason",
        [SAYS, named("response.incomplete", response={"incomplete_details": {"reason": "r"}})],
        "incomplete",
        "complete its answer: r",
    ),
    ("[DONE] alone", [SAYS, scripted.DONE], "incomplete", "without a final status"),
    (
        "a delta of a call that nobody announced",
        [named("response.function_call_arguments.delta", delta="{}"), SAYS],
        "incomplete",
        "without a final status",
    ),
]


@pytest.mark.parametrize(
    ("events", "kind", "text"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS]
)
async def test_a_fault_is_a_typed_error_that_quotes_it(
    provider: Provider, models: Catalogue, events: list[bytes], kind: str, text: str
) -> None:
    provider.script = sends(*events, done=False)
    with pytest.raises(ModelError) as caught:
        await answer(models)
    assert caught.value.kind == kind
    assert text in str(caught.value)
