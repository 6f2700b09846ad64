"""The promises of the Model port, kept by every model: practice and Chat Completions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import model_bench as bench
import pytest
import scripted_provider as scripted
import trio
from hypothesis import given
from hypothesis import strategies as st

from loop_protocol.v1.types import (
    AssistantBlock,
    ImageBlock,
    Message,
    ModelRef,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from loopd.agent import Delta, Model, ModelError, ToolCallDelta
from loopd.models import ECHO, Catalogue


@dataclass
class Subject:
    """A model, and how it is brought to do something; each answers the user message that brings it about."""

    model: Model
    text: Callable[[str], str]
    call: Callable[[str], str]
    fail: Callable[[], str]
    slow: Callable[[], str]


@pytest.fixture(params=["practice", "chat"])
def subject(request: pytest.FixtureRequest, provider: scripted.ScriptedProvider, models: Catalogue) -> Subject:
    if request.param == "practice":
        return Subject(
            models.resolve(ECHO), lambda text: text, lambda command: f"shell: {command}", lambda: "fail", lambda: "slow"
        )
    return chat(provider, models)


def chat(provider: scripted.ScriptedProvider, models: Catalogue) -> Subject:
    def scripts(script: scripted.Script) -> str:
        provider.script = script
        return "go"

    def text(said: str) -> str:
        pieces = [said[at : at + 3] for at in range(0, len(said), 3)]
        return scripts(
            scripted.sends(*(scripted.delta(content=piece) for piece in pieces), scripted.delta("stop"), scripted.USAGE)
        )

    def call(command: str) -> str:
        fragments = ['{"comm', 'and":', f'"{command}"', "}"]
        first = scripted.call(0, "", id="call_a", name="bash")
        rest = [scripted.call(0, piece) for piece in fragments]
        return scripts(scripted.sends(first, *rest, scripted.delta("tool_calls"), scripted.USAGE))

    return Subject(
        models.resolve(bench.M),
        text,
        call,
        lambda: scripts(scripted.answers(500, b'{"error":{"message":"boom"}}')),
        lambda: scripts(scripted.hangs(scripted.STREAM + scripted.chunked(scripted.delta(content="word1 ")))),
    )


async def test_what_is_said_adds_up_to_the_reply(subject: Subject) -> None:
    said = bench.Said()
    reply = await bench.ask(subject.model, [bench.user(0, subject.text("Grüße,\n  wide  world \U0001f600!"))], said)
    assert reply.content == [TextBlock("Grüße,\n  wide  world \U0001f600!")]
    assert said.text == "Grüße,\n  wide  world \U0001f600!"
    assert len(said.deltas) > 1
    assert reply.stop_reason == "stop"


async def test_usage_is_counted(subject: Subject) -> None:
    reply = await bench.ask(subject.model, [bench.user(0, subject.text("hello there"))], bench.Said())
    assert reply.usage.input_tokens > 0
    assert reply.usage.output_tokens > 0


async def test_a_tool_call_comes_with_its_arguments_in_fragments_and_whole(subject: Subject) -> None:
    said = bench.Said()
    reply = await bench.ask(subject.model, [bench.user(0, subject.call("echo hi"))], said, tools=(bench.BASH,))
    [call] = reply.content
    assert isinstance(call, ToolCallBlock)
    assert (call.name, call.arguments) == ("bash", {"command": "echo hi"})
    assert call.id
    assert reply.stop_reason == "toolUse"
    fragments = [delta for delta in said.deltas if isinstance(delta, ToolCallDelta)]
    assert {fragment.id for fragment in fragments} == {call.id}
    assert "".join(fragment.arguments for fragment in fragments).replace(" ", "") == '{"command":"echohi"}'


async def test_a_failure_is_a_model_error_with_kind_and_text(subject: Subject) -> None:
    with pytest.raises(ModelError) as caught:
        await bench.ask(subject.model, [bench.user(0, subject.fail())], bench.Said())
    assert caught.value.kind == "provider"
    assert str(caught.value)


async def test_a_cancelled_answer_ends_at_once_with_what_was_said(subject: Subject) -> None:  # K-29
    said, first = bench.Said(), trio.Event()
    messages: list[Message] = [bench.user(0, subject.slow())]

    def say(delta: Delta) -> None:
        said(delta)
        first.set()

    with trio.fail_after(2):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.ask, subject.model, messages, say)
            await first.wait()
            nursery.cancel_scope.cancel()
    assert said.text == "word1 "


async def test_two_requests_at_once_do_not_mix(subject: Subject) -> None:
    texts: list[str] = []

    async def answer() -> None:
        said = bench.Said()
        reply = await bench.ask(subject.model, [bench.user(0, prompt)], said)
        assert reply.content == [TextBlock(said.text)]
        texts.append(said.text)

    prompt = subject.text("one and the same answer")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer)
        nursery.start_soon(answer)
    assert texts == ["one and the same answer"] * 2


# --- encoding ---------------------------------------------------------------------------------------------------------

STOPS: list[StopReason] = ["stop", "length", "error", "aborted"]
TEXT = st.text(max_size=20)
BLOCKS = st.lists(
    st.builds(TextBlock, TEXT) | st.just(ImageBlock(mime_type="image/png", data="AAAA")), min_size=1, max_size=3
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """As the history allows them: calls paired, partial text without calls."""
    messages: list[Message] = []
    for _ in range(draw(st.integers(0, 4))):
        messages.append(bench.user(len(messages), *draw(BLOCKS)))
        for turn in range(draw(st.integers(0, 3))):
            stop: StopReason = draw(st.sampled_from(STOPS))
            thinking = st.builds(ThinkingBlock, TEXT)
            content: list[AssistantBlock] = draw(st.lists(st.builds(TextBlock, TEXT) | thinking, max_size=2))
            names = st.text(max_size=70)
            calls = [] if stop in ("error", "aborted") else draw(st.lists(names, max_size=2))
            blocks = [
                ToolCallBlock(f"{'x' * draw(st.integers(0, 60))}{len(messages)}.{turn}.{at}", name, {"a": draw(TEXT)})
                for at, name in enumerate(calls)
            ]
            messages.append(bench.assistant(len(messages), *content, *blocks, stop_reason=stop))
            for block in blocks:
                messages.append(bench.result(len(messages), block, *draw(BLOCKS)))
    return messages


MODELS = [bench.catalogue("http://127.0.0.1:1/v1").resolve(ref) for ref in (ECHO, bench.M, bench.EYES)]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: str(model.ref))
@given(messages=conversations())
def test_input_kept_per_group_equals_the_one_from_scratch_and_is_valid(
    model: Model, messages: list[Message]
) -> None:  # I-8
    kept = bytearray()
    for group in bench.groups(messages):
        if encoded := model.encode(group):
            assert not encoded.startswith(b",")
            assert not encoded.endswith(b",")
            kept += b"," + encoded if kept else encoded
    assert bytes(kept) == bench.from_scratch(model, messages)
    require_valid(bytes(kept), vendor=model.ref != ECHO)


def require_valid(encoded: bytes, *, vendor: bool) -> None:
    """The rules of the API, as strictly as its vendor checks them."""
    import json
    import re

    waiting: list[str] = []
    for form in json.loads(b"[%b]" % encoded):
        if form["role"] == "tool":
            assert not vendor or form["tool_call_id"] == waiting.pop(0)
            continue
        assert not waiting
        if not vendor:
            continue
        assert form["role"] in ("user", "assistant")
        calls = form.get("tool_calls", [])
        assert form["content"] is not None or calls
        for made in calls:
            assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", made["function"]["name"])
            assert 0 < len(made["id"]) <= 40
            json.loads(made["function"]["arguments"])
            waiting.append(made["id"])
    assert not waiting


def test_a_model_knows_its_name_and_what_it_takes() -> None:
    assert [model.ref for model in MODELS] == [ECHO, bench.M, bench.EYES]
    assert [sorted(model.input) for model in MODELS] == [["image", "text"], ["text"], ["image", "text"]]
    assert MODELS[0].ref == ModelRef("practice", "echo")
