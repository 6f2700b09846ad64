"""What each API is sent of a conversation: kept group by group it equals the one from scratch, and breaks no rule."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import model_bench as bench
import pytest
import strict_checkers
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
    ToolResultMessage,
    UserMessage,
)
from loopd.agent import Model
from loopd.agent.context import ConversationInput
from loopd.core.history import encode
from loopd.models import ECHO

APIS = tuple(strict_checkers.CHECKERS)
STOPS: list[StopReason] = ["stop", "length", "error", "aborted"]
# Also what the splicing of bytes might mistake for its marks.
MARKS = ["", " ", "\n", '"', '] },{ "role":"user","content":[', ']},{ "role":"assistant","content":[', "}] }"]
TEXT = st.sampled_from(MARKS) | st.text(max_size=20)
IMAGE = st.just(ImageBlock(mime_type="image/png", data="AAAA"))
BLOCKS = st.lists(st.builds(TextBlock, TEXT) | IMAGE, min_size=1, max_size=3)
# Nothing, what no API knows, and what each of them gave.
SEALS = ["openai-chat reasoning", "openai-chat content", *(f"{api} {rest}" for api in APIS for rest in ("", "AAAA"))]
SIGNATURES = st.sampled_from([None, "", "x", *SEALS, "anthropic-messages redacted AAAA"])
THINKING = st.builds(ThinkingBlock, TEXT, SIGNATURES)
# Providers repeat their ids from round to round, and some make long ones.
IDS = st.sampled_from(["call_0", "functions.bash:0", "x" * 60, "é|ü"]) | st.text(min_size=1, max_size=50)
ARGUMENTS = st.dictionaries(
    TEXT, TEXT | st.just([{"a": []}, {"role": "user", "content": [{}]}, {"role": "assistant", "content": []}])
)
CALLS = st.lists(st.tuples(IDS, st.text(max_size=70), ARGUMENTS), max_size=3, unique_by=lambda call: call[0])


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """As the history allows them: calls paired, partial text without calls, answers of any provider."""
    messages: list[Message] = []
    for _ in range(draw(st.integers(1, 4))):
        messages.append(bench.user(len(messages), *draw(BLOCKS)))
        for _ in range(draw(st.integers(0, 3))):
            stop: StopReason = draw(st.sampled_from(STOPS))
            calls = [] if stop in ("error", "aborted") else [ToolCallBlock(*call) for call in draw(CALLS)]
            said: list[AssistantBlock] = draw(st.lists(st.builds(TextBlock, TEXT) | THINKING, max_size=3))
            content = draw(st.permutations([*said, *calls]))
            calls = [block for block in content if isinstance(block, ToolCallBlock)]
            answered_by: Any = draw(st.sampled_from([{"provider": "local", "model": "eyes"}, {"provider": "p"}]))
            messages.append(bench.assistant(len(messages), *content, stop_reason=stop, **answered_by))
            for call in calls:
                messages.append(bench.result(len(messages), call, *draw(BLOCKS), is_error=draw(st.booleans())))
    return messages


def model(api: str, ref: ModelRef = bench.EYES) -> Any:
    return bench.catalogue("http://127.0.0.1:1/v1", api=api).resolve(ref)


def kept(model: Model, messages: Sequence[Message]) -> bytes:
    grown = ConversationInput(model)
    for message in messages:
        grown.add(message)
    return bytes(grown.encoded)


@pytest.mark.parametrize("api", APIS)
@given(messages=conversations(), ref=st.sampled_from([bench.M, bench.EYES, ModelRef("local", "eyes", "high")]))
def test_input_kept_per_group_equals_the_one_from_scratch_and_is_valid(
    api: str, messages: list[Message], ref: ModelRef
) -> None:  # I-8
    asked = model(api, ref)
    assert kept(asked, messages) == bench.from_scratch(asked, messages)
    # Every prefix at which a request can be made: after a user message, and after all results of an answer.
    ends = [place + 1 for place, message in enumerate(messages) if isinstance(message, UserMessage)]
    ends += [len(messages)] if isinstance(messages[-1], ToolResultMessage) else []
    for end in ends:
        strict_checkers.CHECKERS[api](bench.body(asked, messages[:end], tools=(bench.BASH,)))


@given(messages=conversations())
def test_the_practice_model_keeps_its_input_too(messages: list[Message]) -> None:  # I-8
    practice = bench.catalogue("http://127.0.0.1:1/v1").resolve(ECHO)
    assert kept(practice, messages) == bench.from_scratch(practice, messages)


@pytest.mark.parametrize("api", APIS)
async def test_what_a_reopened_session_sends_is_what_it_would_have_sent(api: str) -> None:  # I-8
    asked, messages = model(api), conversation(api)
    reopened = ConversationInput(asked)
    await reopened.rebuild(asked, [encode(message) for message in messages])
    assert bytes(reopened.encoded) == kept(asked, messages)


def conversation(api: str) -> list[Message]:
    """Two rounds whose calls have the same ids, thoughts of this model and of others, a failed answer."""
    own: Any = {"provider": "local", "model": "eyes"}
    calls = [ToolCallBlock("0", "bash", {"command": "a"}), ToolCallBlock("1", "bash", {"command": "b"})]
    sealed = ThinkingBlock("own", f"{api} {'reasoning_content' if api == 'openai-chat' else 'SEALED'}")
    return [
        bench.user(0, "one"),
        bench.assistant(1, sealed, "I look", *calls, **own),
        bench.result(2, calls[0], "A"),
        bench.result(3, calls[1], "B", is_error=True),
        bench.assistant(4, ThinkingBlock("of another", sealed.signature), *calls),
        bench.result(5, calls[0], "C"),
        bench.result(6, calls[1], "D"),
        bench.assistant(7, "half an ans", stop_reason="error", **own),
        bench.user(8, "two"),
    ]


@pytest.mark.parametrize("api", APIS)
def test_only_the_model_that_thought_it_sees_it_again(api: str) -> None:
    sent = bench.body(model(api), conversation(api))
    assert b"own" in sent
    assert b"of another" not in sent
    for other in APIS:
        if other != api:
            assert b"SEALED" not in bench.body(model(other), conversation(api))
            assert b'"own"' not in bench.body(model(other), conversation(api))
    assert b'"own"' not in bench.body(model(api, bench.M), conversation(api))
    assert b"half an ans" not in sent


@pytest.mark.parametrize("api", ["openai-responses", "anthropic-messages"])
def test_ids_that_a_provider_repeats_are_unique_and_paired(api: str) -> None:
    sent = bench.body(model(api), conversation(api)).decode()
    for index in (1, 4):
        for position in (0, 1):
            assert sent.count(f'"call_{index}_{position}"') == 2


# --- what each API makes of one and the same conversation -------------------------------------------------------------


def test_the_responses_form() -> None:
    call = '{"type":"function_call","call_id":"call_%d_%d","name":"bash","arguments":"{\\"command\\":\\"%s\\"}"}'
    result = '{"type":"function_call_output","call_id":"call_%d_%d","output":"%s"}'
    thought = '{"type":"reasoning","summary":[{"type":"summary_text","text":"own"}],"encrypted_content":"SEALED"}'
    assert kept(model("openai-responses"), conversation("openai-responses")).decode() == ",".join(
        [
            '{"role":"user","content":"one"}',
            thought,
            '{"type":"message","role":"assistant","content":[{"type":"output_text","text":"I look"}]}',
            call % (1, 0, "a"),
            call % (1, 1, "b"),
            result % (1, 0, "A"),
            result % (1, 1, "B"),
            call % (4, 0, "a"),
            call % (4, 1, "b"),
            result % (4, 0, "C"),
            result % (4, 1, "D"),
            '{"role":"user","content":"two"}',
        ]
    )


def test_the_anthropic_form_has_turns_and_marks_for_the_cache() -> None:
    def use(index: int, position: int, command: str) -> dict[str, Any]:
        return {"type": "tool_use", "id": f"call_{index}_{position}", "name": "bash", "input": {"command": command}}

    def result(index: int, position: int, text: str, **more: Any) -> dict[str, Any]:
        content = [{"type": "text", "text": text}]
        return {"type": "tool_result", "tool_use_id": f"call_{index}_{position}", "content": content, **more}

    cached = {"cache_control": {"type": "ephemeral"}}
    thought = {"type": "thinking", "thinking": "own", "signature": "SEALED"}
    look = {"type": "text", "text": "I look"}
    two = {"type": "text", "text": "two", **cached}
    assert json.loads(bench.body(model("anthropic-messages"), conversation("anthropic-messages")))["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "one"}]},
        {"role": "assistant", "content": [thought, look, use(1, 0, "a"), use(1, 1, "b")]},
        {"role": "user", "content": [result(1, 0, "A"), result(1, 1, "B", is_error=True, **cached)]},
        {"role": "assistant", "content": [use(4, 0, "a"), use(4, 1, "b")]},
        # The failed answer left two neighbours, which are one message now.
        {"role": "user", "content": [result(4, 0, "C"), result(4, 1, "D"), two]},
    ]


def test_thoughts_that_are_hidden_or_empty_go_back_as_they_came() -> None:
    thoughts = [ThinkingBlock("", "anthropic-messages redacted HID"), ThinkingBlock("", "anthropic-messages SIG")]
    answer = bench.assistant(1, *thoughts, "so", provider="local", model="eyes")
    [message] = json.loads(b"[%b]" % model("anthropic-messages").encode([answer]))
    assert message["content"] == [
        {"type": "redacted_thinking", "data": "HID"},
        {"type": "thinking", "thinking": "", "signature": "SIG"},
        {"type": "text", "text": "so"},
    ]


def test_thoughts_of_chat_go_back_under_their_own_name() -> None:
    own: Any = {"provider": "local", "model": "eyes"}
    answer = bench.assistant(1, ThinkingBlock("hm", "openai-chat reasoning"), "so", **own)
    [message] = json.loads(b"[%b]" % model("openai-chat").encode([answer]))
    assert message == {"role": "assistant", "content": "so", "reasoning": "hm"}
    odd = bench.assistant(1, ThinkingBlock("hm", "openai-chat content"), "so", **own)
    assert json.loads(model("openai-chat").encode([odd])) == {"role": "assistant", "content": "so"}


@pytest.mark.parametrize("api", APIS)
def test_images_go_to_models_that_see_and_are_named_to_those_that_do_not(api: str) -> None:
    call = ToolCallBlock("0", "read", {})
    image = ImageBlock(mime_type="image/png", data="QUJD")
    messages: list[Message] = [
        bench.user(0, "what?", image),
        bench.assistant(1, call),
        bench.result(2, call, "seen", image),
    ]
    seen, unseen = (bench.body(model(api, ref), messages) for ref in (bench.EYES, bench.M))
    # Chat Completions takes none from a tool.
    assert seen.count(b"QUJD") == (1 if api == "openai-chat" else 2)
    assert unseen.count(b"QUJD") == 0
    assert unseen.count(b"cannot see") == 2


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("stop", ["aborted", "error"])
def test_partial_text_is_left_out_of_the_input(api: str, stop: StopReason) -> None:
    assert model(api).encode([bench.assistant(1, "half a", stop_reason=stop)]) == b""
    assert model(api).encode([bench.assistant(1, ThinkingBlock("only thought"))]) == b""


@pytest.mark.parametrize("api", APIS)
def test_the_history_goes_out_as_the_bytes_that_were_kept(api: str) -> None:
    asked = model(api)
    long = kept(asked, [bench.user(0, "x" * 100_000)])
    assert long[:-4] in bench.body(asked, [bench.user(0, "x" * 100_000)])
