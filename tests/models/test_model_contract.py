"""The promises of the Model port, kept by every model: practice and the three APIs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import dialects
import model_bench as bench
import pytest
import scripted_provider as scripted
import trio

from loop_protocol.v1.types import Message, TextBlock, ToolCallBlock
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


@pytest.fixture(params=["practice", *dialects.DIALECTS], ids=lambda given: getattr(given, "api", given))
async def subject(request: pytest.FixtureRequest, provider: scripted.ScriptedProvider) -> AsyncIterator[Subject]:
    dialect = None if request.param == "practice" else request.param
    api = dialect.api if dialect else "openai-chat"
    models = bench.catalogue(provider.url, api=api, api_key_env="KEY", environ={"KEY": bench.KEY})
    yield scripted_subject(provider, models, dialect) if dialect else practice(models)
    await models.aclose()


def practice(models: Catalogue) -> Subject:
    return Subject(
        models.resolve(ECHO), lambda text: text, lambda command: f"shell: {command}", lambda: "fail", lambda: "slow"
    )


def scripted_subject(provider: scripted.ScriptedProvider, models: Catalogue, dialect: dialects.Dialect) -> Subject:
    def scripts(script: scripted.Script) -> str:
        provider.script = script
        return "go"

    def whole(*blocks: dialects.Block, end: dialects.End) -> str:
        return scripts(scripted.sends(*dialect.whole(*blocks, end=end), done=False))

    def text(said: str) -> str:
        return whole(dialects.Text([said[at : at + 3] for at in range(0, len(said), 3)]), end="stop")

    def call(command: str) -> str:
        return whole(dialects.Call("call_a", "bash", ['{"comm', 'and":', f'"{command}"', "}"]), end="calls")

    def slow() -> str:
        begun = dialect.whole(dialects.Text(["word1 "]))[: -dialect.closing]
        return scripts(scripted.hangs(scripted.STREAM + scripted.chunked(b"".join(begun))))

    fail = scripted.answers(500, b'{"error":{"message":"boom"}}')
    return Subject(models.resolve(bench.M), text, call, lambda: scripts(fail), slow)


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
