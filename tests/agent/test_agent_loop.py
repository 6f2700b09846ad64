"""The loop over its ports: turns, order, pairing, and what becomes of calls that cannot be run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from agent_recording import Recording

from loop_protocol.v1.types import AssistantBlock, StopReason, TextBlock, ThinkingBlock, ToolCallBlock, Usage
from loopd.agent import (
    MALFORMED_KEY,
    ModelError,
    Reply,
    Tool,
    ToolEnded,
    ToolEnvironment,
    ToolOutcome,
    ToolOutput,
    ToolScope,
    ToolStarted,
)
from loopd.agent.context import ConversationInput
from loopd.agent.loop import Agent, declare
from loopd.agent.scripted import ScriptedModel
from loopd.agent.tools import session_tools

ANSWER = Reply([TextBlock("done")], Usage(1, 1), "stop")


class Count(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    number: int
    word: str | None = None


class Counter:
    """Remembers what it was called with, and does with it what the test says."""

    name = "count"
    description = "Count."
    parameters: type[msgspec.Struct] = Count

    def __init__(self, act: Callable[[ToolScope], ToolOutcome] | None = None, *, hang: bool = False) -> None:
        self.numbers: list[int] = []
        self._act = act
        self._hang = hang

    async def run(self, arguments: Any, scope: ToolScope) -> ToolOutcome:
        await trio.lowlevel.checkpoint()
        if self._hang:
            await trio.sleep_forever()
        self.numbers.append(arguments.number)
        return self._act(scope) if self._act else ToolOutcome([TextBlock(f"counted {arguments.number}")])


def calling(*calls: ToolCallBlock, stop_reason: StopReason = "toolUse") -> Reply:
    content: list[AssistantBlock] = [TextBlock("let me see"), *calls]
    return Reply(content, Usage(1, 1), stop_reason)


def count(number: Any, id: str = "c1") -> ToolCallBlock:
    return ToolCallBlock(id, "count", {"number": number})


async def drive(script: list[Reply | ModelError], *tools: Tool) -> tuple[Recording, ScriptedModel]:
    model = ScriptedModel(script)
    context = Recording(ConversationInput(model), "go")
    agent = Agent(
        model=model,
        tools=tools,
        input=context.input,
        system="be good",
        cwd="/",
        env=ToolEnvironment({}),
        permission="read-only",
    )
    await agent.run(context)
    context.history.require_paired()
    return context, model


def result(context: Recording, place: int = 2) -> tuple[str, bool]:
    message = msgspec.json.decode(context.history.line(place))
    assert message["role"] == "toolResult"
    return message["content"][0]["text"], message["isError"]


async def test_a_reply_without_calls_ends_the_run() -> None:
    context, model = await drive([ANSWER], Counter())
    assert context.order == ["TextDelta", "AssistantMessage"]
    assert model.declared == ["count"]


async def test_calls_run_one_after_the_other_and_each_is_followed_by_its_result() -> None:
    tool = Counter()
    context, _ = await drive([calling(count(1, "a"), count(2, "b")), ANSWER], tool)
    assert tool.numbers == [1, 2]
    call = ["ToolStarted", "ToolEnded", "ToolResultMessage"]
    assert context.order == ["TextDelta", "AssistantMessage", *call, *call, "TextDelta", "AssistantMessage"]
    assert [said.call.id for said in context.said if isinstance(said, ToolStarted)] == ["a", "b"]


async def test_the_next_request_sees_the_call_with_all_its_results() -> None:
    _, model = await drive([calling(count(1, "a"), count(2, "b")), ANSWER], Counter())
    assert [len(msgspec.json.decode(b"[" + asked + b"]")) for asked in model.asked] == [1, 4]


async def test_an_unknown_tool_is_an_error_result_that_names_the_known_ones() -> None:
    context, _ = await drive([calling(ToolCallBlock("x", "cuont", {})), ANSWER], Counter())
    text, is_error = result(context)
    assert is_error
    assert "'cuont'" in text
    assert "count" in text
    assert context.order[2:5] == ["ToolStarted", "ToolEnded", "ToolResultMessage"]


@pytest.mark.parametrize("arguments", [{}, {"number": "1"}, {"number": 1, "nmuber": 2}, {"__malformed__": '{"numb'}])
async def test_arguments_that_do_not_fit_are_an_error_result_that_says_what_fits(arguments: dict[str, Any]) -> None:
    tool = Counter()
    context, _ = await drive([calling(ToolCallBlock("x", "count", arguments)), ANSWER], tool)
    text, is_error = result(context)
    assert is_error
    assert tool.numbers == []
    assert '"number":{"type":"integer"}' in text
    assert "nmber" in text or "numb" in text or "nmuber" in text or "__malformed__" in text


async def test_no_call_of_an_answer_that_was_cut_off_is_run() -> None:
    tool = Counter()
    context, _ = await drive([calling(count(1, "a"), count(2, "b"), stop_reason="length"), ANSWER], tool)
    assert tool.numbers == []
    assert [result(context, place)[1] for place in (2, 3)] == [True, True]


async def test_a_bug_in_a_tool_is_its_result_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: ToolScope) -> ToolOutcome:
        raise KeyError("lost")

    context, _ = await drive([calling(count(1)), ANSWER], Counter(fail))
    assert "KeyError: 'lost'" in result(context)[0]
    assert "Traceback" in caplog.text
    assert [said.is_error for said in context.said if isinstance(said, ToolEnded)] == [True]


async def test_a_lone_surrogate_of_a_tool_is_replaced_where_it_enters() -> None:  # K-27
    def surrogate(scope: ToolScope) -> ToolOutcome:
        scope.output("live \udcff")
        return ToolOutcome([TextBlock("a\ud800b")])

    context, _ = await drive([calling(count(1)), ANSWER], Counter(surrogate))
    assert result(context) == ("a\ufffdb", False)
    assert ToolOutput("c1", "live \ufffd") in context.said
    reread = ScriptedModel([])
    await ConversationInput(reread).rebuild(reread, map(context.history.line, range(context.history.messages)))


@pytest.mark.parametrize("content", [[], [TextBlock("")], [ThinkingBlock("hm")]])
async def test_an_answer_without_anything_to_see_is_an_error_not_a_success(
    content: list[AssistantBlock],
) -> None:  # K-30
    with pytest.raises(ModelError) as caught:
        await drive([Reply(content, Usage(1, 1), "length")])
    assert caught.value.kind == "incomplete"


async def test_a_failing_model_ends_the_run_with_its_error() -> None:
    with pytest.raises(ModelError, match="no such key"):
        await drive([ModelError("auth", "no such key")])


@pytest.mark.usefixtures("autojump_clock")
async def test_a_stop_inside_a_tool_travels_and_leaves_no_result() -> None:
    model = ScriptedModel([calling(count(1))])
    context = Recording(ConversationInput(model), "go")
    agent = Agent(
        model=model,
        tools=[Counter(hang=True)],
        input=context.input,
        system="",
        cwd="/",
        env=ToolEnvironment({}),
        permission="read-only",
    )
    with trio.move_on_after(1) as scope:
        await agent.run(context)
    assert scope.cancelled_caught
    assert context.order[-1] == "ToolStarted"


def test_the_tools_of_a_session_are_declared_as_plain_object_schemas() -> None:
    for tool in session_tools(bash_timeout_s=600):
        spec = declare(tool)
        assert spec.parameters["type"] == "object"
        assert "$" not in msgspec.json.encode(spec.parameters).decode()
    # Small models have to read it every time.
    assert len(msgspec.json.encode([declare(tool) for tool in session_tools(bash_timeout_s=600)])) < 2800


BAD_ARGUMENTS: list[tuple[str, dict[str, Any], str]] = [
    ("read", {}, "missing required field `path`"),
    ("read", {"path": "a", "offset": 0}, ">= 1 - at `$.offset`"),
    ("read", {"path": "a", "limit": "ten"}, "got `str` - at `$.limit`"),
    ("read", {"file": "a"}, "unknown field `file`"),
    ("write", {"path": "made"}, "missing required field `content`"),
    ("write", {"path": "made", "content": None}, "got `null` - at `$.content`"),
    ("write", {"path": "made", "content": "x", "mode": "0644"}, "unknown field `mode`"),
    ("edit", {"path": "a", "oldText": "x"}, "missing required field `newText`"),
    ("edit", {"path": "a", "oldText": "", "newText": "y"}, "length >= 1 - at `$.oldText`"),
    ("edit", {"path": "a", "old_text": "x", "newText": "y"}, "unknown field `old_text`"),
    ("edit", {"path": "a", "oldText": "x", "newText": "y", "all": "yes"}, "got `str` - at `$.all`"),
    ("bash", {"command": ["touch", "made"]}, "got `array` - at `$.command`"),
    ("bash", {"command": "touch made", "timeoutMs": 0}, ">= 1 - at `$.timeoutMs`"),
    ("bash", {"command": "touch made", "timeout": 5}, "unknown field `timeout`"),
    ("write", {MALFORMED_KEY: '{"path": "made", "content": "'}, 'are no JSON object: {"path": "made", "content": "'),
    ("bash", {MALFORMED_KEY: "touch made"}, "are no JSON object: touch made"),
]


@pytest.mark.parametrize(("name", "arguments", "said"), BAD_ARGUMENTS)
async def test_arguments_that_do_not_fit_a_tool_say_what_is_wrong_and_touch_nothing(
    name: str, arguments: dict[str, Any], said: str, tmp_path: Path
) -> None:
    model = ScriptedModel([calling(ToolCallBlock("x", name, arguments)), ANSWER])
    context = Recording(ConversationInput(model), "go")
    agent = Agent(
        model=model,
        tools=session_tools(bash_timeout_s=5),
        input=context.input,
        system="",
        cwd=str(tmp_path),
        env=ToolEnvironment({}),
        permission="danger-full-access",
    )
    await agent.run(context)
    text, is_error = result(context)
    assert is_error
    assert said in text
    assert '"type":"object"' in text
    assert list(tmp_path.iterdir()) == []


async def test_a_tool_is_told_what_its_model_takes() -> None:
    seen: list[frozenset[str]] = []

    def look(scope: ToolScope) -> ToolOutcome:
        seen.append(scope.accepts)
        return ToolOutcome([TextBlock("seen")])

    await drive([calling(count(1)), ANSWER], Counter(look))
    assert seen == [frozenset({"text", "image"})]
