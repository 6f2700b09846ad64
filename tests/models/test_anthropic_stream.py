"""Anthropic Messages: what is sent beside the history, and what real, documented and odd streams become."""

from __future__ import annotations

from typing import Any

import dialects
import model_bench as bench
import pytest
import scripted_provider as scripted
from dialects import named
from msgspec.structs import replace
from scripted_provider import sends

from loop_protocol.v1.types import Message, ModelRef, TextBlock, ThinkingBlock, ToolCallBlock, Usage
from loopd.agent import ModelError, Reply, TextDelta, ThinkingDelta
from loopd.config import ModelConfig
from loopd.models import Catalogue
from loopd.models.anthropic import BY_EFFORT

HELLO: list[Message] = [bench.user(0, "hello")]
Provider = scripted.ScriptedProvider
DIALECT = dialects.Anthropic()
CACHED = {"cache_control": {"type": "ephemeral"}}
STOP = named("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 1})


def delta(type: str, index: int | None = 0, **fields: Any) -> bytes:
    at = {} if index is None else {"index": index}
    return named("content_block_delta", **at, delta={"type": type, **fields})


SAYS = delta("text_delta", text="x")


@pytest.fixture
def api() -> str:
    return "anthropic-messages"


async def answer(models: Catalogue, say: bench.Said | None = None) -> Reply:
    return await bench.ask(models.resolve(bench.M), HELLO, say or bench.Said())


async def test_a_request_has_its_key_its_limit_and_marks_for_the_cache(provider: Provider, models: Catalogue) -> None:
    provider.script = sends(SAYS, STOP, done=False)
    await bench.ask(models.resolve(bench.M), HELLO, bench.Said(), tools=(bench.BASH,))
    [asked] = provider.asked
    assert asked.path == "/v1/messages"
    assert asked.headers["x-api-key"] == bench.KEY
    assert asked.headers["authorization"] == f"Bearer {bench.KEY}"
    assert asked.headers["anthropic-version"] == "2023-06-01"
    assert asked.json == {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello", **CACHED}]}],
        "system": [{"type": "text", "text": "Be brief.", **CACHED}],
        "tools": [{"name": "bash", "description": "Run it", "input_schema": bench.BASH.parameters}],
        "max_tokens": 8192,
        "stream": True,
    }


def test_the_vendor_gets_the_key_in_one_place_only() -> None:
    model: Any = bench.catalogue("https://api.anthropic.com", api="anthropic-messages").resolve(bench.M)
    assert model._headers("k") == {"anthropic-version": "2023-06-01", "x-api-key": "k"}
    assert model._headers(None) == {"anthropic-version": "2023-06-01"}


def test_without_a_system_prompt_the_last_tool_is_marked() -> None:
    model: Any = bench.catalogue("http://127.0.0.1:1", api="anthropic-messages").resolve(bench.M)
    request = bench.request(model, HELLO, tools=(bench.BASH, bench.BASH))
    sent = bench.decoded(model._body(replace(request, system="")))
    assert [CACHED["cache_control"] == tool.get("cache_control") for tool in sent["tools"]] == [False, True]


# --- thinking ---------------------------------------------------------------------------------------------------------


def thinking(
    id: str, effort: str | None, *, limit: int | None = None, messages: list[Message] = HELLO
) -> tuple[Any, Any]:
    listed = (ModelConfig(id=id, reasoning=True, max_output=limit),)
    catalogue = bench.catalogue("http://127.0.0.1:1", api="anthropic-messages", models=listed)
    sent = bench.decoded(bench.body(catalogue.resolve(ModelRef("local", id, effort)), messages))
    return sent.get("thinking"), sent.get("output_config")


def test_later_models_think_by_effort() -> None:
    shown = {"type": "adaptive", "display": "summarized"}
    assert thinking("claude-opus-4-6", "high") == (shown, {"effort": "high"})
    assert thinking("claude-opus-4-6", None) == (None, None)


def test_earlier_models_think_within_a_budget_that_leaves_room_to_answer() -> None:
    def budget(tokens: int) -> tuple[Any, Any]:
        return {"type": "enabled", "budget_tokens": tokens}, None

    assert thinking("claude-haiku-4-5", "low") == budget(4096)
    assert thinking("claude-haiku-4-5", "high", limit=64_000) == budget(16_384)
    assert thinking("other-vendor", "high") == budget(4096)
    assert thinking("other-vendor", "high", limit=2000) == (None, None)


@pytest.mark.parametrize(
    ("id", "by_effort"),
    [
        ("claude-opus-4-6", True),
        ("claude-sonnet-4-6-20260217", True),
        ("anthropic/claude-opus-4.7", True),
        ("claude-opus-4-10", True),
        ("claude-sonnet-5", True),
        ("claude-fable-5", True),
        ("claude-mythos-preview", True),
        ("claude-opus-4-5-20251101", False),
        ("anthropic/claude-opus-4.5", False),
        ("claude-opus-4-20250514", False),
        ("claude-sonnet-4@20250514", False),
        ("claude-opus-4-1", False),
        ("claude-haiku-4-5-20251001-v1:0", False),
        ("claude-3-7-sonnet-latest", False),
        ("claude-2.1", False),
        ("smollm2", False),
    ],
)
def test_which_models_think_by_effort(id: str, by_effort: bool) -> None:
    assert bool(BY_EFFORT.search(id)) == by_effort


def test_a_turn_that_was_begun_without_thoughts_goes_on_without() -> None:
    call = ToolCallBlock("a", "bash", {})
    own: Any = {"provider": "local", "model": "other-vendor"}
    thought = ThinkingBlock("hm", "anthropic-messages S")

    def begun(*content: Any) -> list[Message]:
        return [bench.user(0, "go"), bench.assistant(1, *content, call, **own), bench.result(2, call, "out")]

    assert thinking("other-vendor", "low", messages=begun(thought, "text"))[0] is not None
    assert thinking("other-vendor", "low", messages=begun("text"))[0] is None
    assert thinking("other-vendor", "low", messages=[*begun("text"), bench.assistant(3, "done", **own)])[0] is not None
    assert thinking("other-vendor", "low", messages=[*begun("text"), bench.user(3, "more")])[0] is not None


# --- what is answered -------------------------------------------------------------------------------------------------


async def test_a_recorded_text_stream(provider: Provider, models: Catalogue) -> None:
    provider.script = scripted.says(scripted.recorded("anth_text"), close=True)
    said = bench.Said()
    reply = await answer(models, said)
    assert reply.content == [TextBlock(said.text)]
    assert said.text.startswith("Hello! I'm here to help")
    assert (reply.stop_reason, reply.usage) == ("length", Usage(23, 24, cache_read_tokens=22))


async def test_a_recorded_tool_call(provider: Provider, models: Catalogue) -> None:
    provider.script = scripted.says(scripted.recorded("anth_tool"), at_once=100, close=True)
    reply = await answer(models)
    assert reply.content == [ToolCallBlock("gqo4n47TeTynDJAE9mofhmIJ1iVE8gRj", "read_file", {"path": "src/main.py"})]
    assert (reply.stop_reason, reply.usage) == ("toolUse", Usage(242, 35, cache_read_tokens=241))


async def test_the_documented_form_with_thinking_text_and_two_calls(provider: Provider, models: Catalogue) -> None:
    blocks: list[dialects.Block] = [
        dialects.Thinking(["let ", "me"], secret="SIGNED"),
        dialects.Text(["I ", "look"]),
        dialects.Call("a", "read", ['{"p":', "1}"]),
        dialects.Call("b", "bash", []),
    ]
    provider.script = sends(*DIALECT.whole(*blocks, end="calls"), done=False)
    said = bench.Said()
    reply = await answer(models, said)
    assert reply.content == [
        ThinkingBlock("let me", "anthropic-messages SIGNED"),
        TextBlock("I look"),
        ToolCallBlock("a", "read", {"p": 1}),
        ToolCallBlock("b", "bash", {}),
    ]
    assert said.deltas[:4] == [ThinkingDelta("let "), ThinkingDelta("me"), TextDelta("I "), TextDelta("look")]
    # Cached tokens are part of the input here, while the provider counts them apart.
    assert (reply.stop_reason, reply.usage) == ("toolUse", Usage(12, 7, cache_read_tokens=5, cache_write_tokens=3))


async def test_hidden_and_silent_thoughts_are_kept(provider: Provider, models: Catalogue) -> None:
    hidden = named("content_block_start", index=0, content_block={"type": "redacted_thinking", "data": "HID"})
    silent = named("content_block_start", index=1, content_block={"type": "thinking", "thinking": ""})
    signed = [delta("signature_delta", 1, signature=piece) for piece in ("SI", "G")]
    text = delta("text_delta", 2, text="x")
    provider.script = sends(hidden, silent, *signed, text, STOP, done=False)
    assert (await answer(models)).content == [
        ThinkingBlock("", "anthropic-messages redacted HID"),
        ThinkingBlock("", "anthropic-messages SIG"),
        TextBlock("x"),
    ]


async def test_odd_but_whole_streams_are_answers(provider: Provider, models: Catalogue) -> None:
    async def read(*events: bytes) -> Reply:
        provider.script = sends(*events, done=False)
        return await answer(models)

    def start(index: int | None = 0, **block: Any) -> bytes:
        return named("content_block_start", **({} if index is None else {"index": index}), content_block=block)

    # No start, no index, no stop; a start that has it all; the type only in the event's name.
    assert (await read(SAYS, STOP)).content == [TextBlock("x")]
    assert (await read(delta("text_delta", None, text="x"), STOP)).content == [TextBlock("x")]
    assert (await read(start(type="text", text="x"), STOP)).content == [TextBlock("x")]
    whole = start(type="tool_use", id="a", name="f", input={"k": 1})
    assert (await read(whole, STOP)).content == [ToolCallBlock("a", "f", {"k": 1})]
    bare = b'event: content_block_delta\ndata: {"index":0,"delta":{"type":"text_delta","text":"x"}}\n\n'
    assert (await read(bare, STOP, scripted.DONE, b"data: rubbish\n\n")).content == [TextBlock("x")]
    # Two calls under one id, and none.
    twice = [start(at, type="tool_use", id=id, name="f") for at, id in enumerate(("a", "a", None))]
    ids = [block.id for block in (await read(*twice, STOP)).content if isinstance(block, ToolCallBlock)]
    assert ids[0] == "a"
    assert len(set(ids)) == 3
    # What is none of ours is passed over, with all that belongs to it.
    search = start(1, type="server_tool_use", id="s", name="web_search")
    assert (await read(SAYS, search, delta("input_json_delta", 1, partial_json="{"), STOP)).content == [TextBlock("x")]
    assert (await read(SAYS, delta("citations_delta", citation={}), named("new_event"), STOP)).content == [
        TextBlock("x")
    ]
    # A context that is full is a limit too; a reason that nobody knows is an end.
    full = named("message_delta", delta={"stop_reason": "model_context_window_exceeded"})
    assert (await read(SAYS, full)).stop_reason == "length"
    assert (await read(SAYS, named("message_delta", delta={"stop_reason": "new"}))).stop_reason == "stop"
    # Counts come early, late, or as zero.
    early = named("message_start", message={"usage": {"input_tokens": 9, "output_tokens": None}})
    late = named("message_delta", delta={"stop_reason": "end_turn"}, usage={"input_tokens": 0, "output_tokens": 3})
    assert (await read(early, SAYS, late)).usage == Usage(9, 3)


FAULTS = [
    ("overloaded", [SAYS, DIALECT.error("overloaded_error", "busy")], "overloaded", "answer: busy"),
    ("bad request", [DIALECT.error("invalid_request_error", "bad")], "refused", "answer: bad"),
    ("bad key", [DIALECT.error("authentication_error", "who?")], "auth", "answer: who?"),
    ("error unnamed", [b'data: {"type":"error","error":{"type":"api_error","message":"m"}}\n\n'], "provider", ": m"),
    ("error without a type", [b'data: {"error":{"message":"m"}}\n\n'], "provider", ": m"),
    ("refused", [SAYS, named("message_delta", delta={"stop_reason": "refusal"})], "content_filter", "refused"),
    ("stopped without a reason", [SAYS, named("message_stop")], "incomplete", "without a stop reason"),
    ("white text", [delta("text_delta", text=" \n"), STOP], "incomplete", "without saying anything"),
    ("a call that nobody announced", [delta("input_json_delta", partial_json="{}"), STOP], "incomplete", "anything"),
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


async def test_the_key_is_in_no_error(provider: Provider, models: Catalogue) -> None:  # K-31
    provider.script = sends(DIALECT.error("api_error", f"wrong: {bench.KEY}"), done=False)
    with pytest.raises(ModelError, match="secret") as caught:
        await answer(models)
    assert bench.KEY not in str(caught.value)
