"""Incremental model input equals the one built from scratch, and costs one encoding per group."""

from __future__ import annotations

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from loop_protocol.v1.types import (
    AssistantMessage,
    Message,
    TextBlock,
    ToolCallBlock,
    ToolResultMessage,
    Usage,
    UserMessage,
)
from loopd.agent.context import ConversationInput
from loopd.agent.scripted import ScriptedModel
from loopd.core.history import History

# A conversation as steps: -1 is a user message, n ≥ 0 an assistant message with n calls and their results.
steps = st.lists(st.integers(-1, 3), max_size=25)


def conversation(plan: list[int]) -> list[Message]:
    messages: list[Message] = []
    for step in plan:
        messages.append(_user(len(messages)) if step < 0 else _assistant(len(messages), step))
        messages += [_result(len(messages) + at, at) for at in range(max(step, 0))]
    return messages


def _user(index: int) -> Message:
    return UserMessage(index=index, content=[TextBlock(f"user {index}")], timestamp=1)


def _assistant(index: int, calls: int) -> Message:
    return AssistantMessage(
        index=index,
        content=[TextBlock("well"), *(ToolCallBlock(f"c{at}", "bash", {}) for at in range(calls))],
        timestamp=1,
        provider="p",
        model="m",
        usage=Usage(1, 1),
        stop_reason="toolUse" if calls else "stop",
    )


def _result(index: int, at: int) -> Message:
    return ToolResultMessage(
        index=index, content=[TextBlock("ok")], timestamp=1, tool_call_id=f"c{at}", tool_name="bash", is_error=False
    )


class Forgetful(ScriptedModel):
    """Shows the provider only every second group, as adapters do with aborted text."""

    def encode(self, group: list[Message]) -> bytes:  # type: ignore[override]
        return super().encode(group) if group[0].index % 2 else b""


@pytest.mark.parametrize("kind", [ScriptedModel, Forgetful])
@given(plan=steps)
def test_incremental_input_equals_the_one_built_from_scratch(kind: type[ScriptedModel], plan: list[int]) -> None:  # I-8
    history, kept = History(), ConversationInput(kind([]))
    for message in conversation(plan):
        history.append(message)
        kept.add(message)
    scratch = ConversationInput(ScriptedModel([]))
    trio.run(scratch.rebuild, kind([]), list(map(history.line, range(history.messages))))
    assert scratch.encoded == kept.encoded
    assert list(scratch.turn) == list(kept.turn)
    msgspec.json.decode(b"[" + kept.encoded + b"]")


@given(plan=steps)
def test_every_complete_group_is_encoded_once(plan: list[int]) -> None:
    model = ScriptedModel([])
    kept = ConversationInput(model)
    for message in conversation(plan):
        kept.add(message)
    assert model.encoded == len(plan)
    assert msgspec.json.decode(b"[" + kept.encoded + b"]", type=list[Message]) == conversation(plan)


@given(plan=steps)
def test_the_turn_begins_at_the_last_user_message(plan: list[int]) -> None:
    kept = ConversationInput(ScriptedModel([]))
    messages = conversation(plan)
    for message in messages:
        kept.add(message)
    users = [at for at, message in enumerate(messages) if isinstance(message, UserMessage)]
    assert list(kept.turn) == messages[users[-1] if users else 0 :]


def test_an_open_call_is_not_shown_and_refuses_anything_but_its_result() -> None:
    kept = ConversationInput(ScriptedModel([]))
    kept.add(_user(0))
    before = bytes(kept.encoded)
    kept.add(_assistant(1, 2))
    kept.add(_result(2, 0))
    assert kept.encoded == before
    with pytest.raises(ValueError, match="message 3 does not pair"):
        kept.add(_user(3))
    kept.add(_result(3, 1))
    with pytest.raises(ValueError, match="message 4 does not pair"):
        kept.add(_result(4, 2))


async def test_a_long_rebuild_lets_others_run_and_a_cancelled_one_changes_nothing() -> None:
    model = ScriptedModel([])
    history, kept = History(), ConversationInput(model)
    for message in conversation([-1, 2, 0] * 2000):
        history.append(message)
    kept.add(_user(0))
    before = bytes(kept.encoded)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1
            if turns == 3:
                rebuilding.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        with trio.CancelScope() as rebuilding:
            await kept.rebuild(model, map(history.line, range(history.messages)))
        assert rebuilding.cancelled_caught
        assert kept.encoded == before
        turns = 4
        await kept.rebuild(model, map(history.line, range(history.messages)))
        nursery.cancel_scope.cancel()
    assert turns > 6
    assert len(kept.encoded) > len(before)
