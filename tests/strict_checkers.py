"""The rules of each API for a request, as strictly as any of its servers checks them; a broken one is an assertion."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
CALL_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def text(value: Any) -> None:
    assert isinstance(value, str)
    assert value.strip()


def picture(url: str) -> None:
    assert re.fullmatch(r"data:image/[a-z]+;base64,[A-Za-z0-9+/]+=*", url)


def only(form: dict[str, Any], *keys: str) -> None:
    assert set(form) <= set(keys), form


# --- Chat Completions -------------------------------------------------------------------------------------------------


def chat(body: bytes) -> None:
    request = json.loads(body)
    first, *messages = request["messages"]
    assert first["role"] == "system"
    text(first["content"])
    assert messages[0]["role"] == "user"
    waiting: list[str] = []
    for message in messages:
        # Every result of an assistant message stands right behind it, in the order of its calls.
        assert (message["role"] == "tool") == bool(waiting)
        match message["role"]:
            case "user":
                only(message, "role", "content")
                _chat_content(message["content"])
            case "assistant":
                waiting = _chat_calls(message)
            case "tool":
                only(message, "role", "tool_call_id", "content")
                assert message["tool_call_id"] == waiting.pop(0)
                text(message["content"])
            case role:
                raise AssertionError(role)
    assert not waiting
    assert messages[-1]["role"] in ("user", "tool")


def _chat_content(content: Any) -> None:
    if isinstance(content, str):
        text(content)
        return
    assert content
    for part in content:
        if part["type"] == "image_url":
            picture(part["image_url"]["url"])
        else:
            assert part["type"] == "text"
            text(part["text"])


def _chat_calls(message: dict[str, Any]) -> list[str]:
    only(message, "role", "content", "tool_calls", "reasoning_content", "reasoning")
    calls = message.get("tool_calls", [])
    assert calls or "tool_calls" not in message
    if message["content"] is not None or not calls:
        text(message["content"])
    for call in calls:
        only(call, "id", "type", "function")
        assert NAME.fullmatch(call["function"]["name"])
        assert 0 < len(call["id"]) <= 40
        assert isinstance(json.loads(call["function"]["arguments"]), dict)
    ids = [call["id"] for call in calls]
    assert len(set(ids)) == len(ids)
    return ids


# --- Responses --------------------------------------------------------------------------------------------------------


def responses(body: bytes) -> None:
    request = json.loads(body)
    text(request["instructions"])
    assert request["store"] is False
    items = request["input"]
    assert items[0]["role"] == "user"
    made: list[str] = []
    answered: list[str] = []
    for item, following in zip(items, [*items[1:], None], strict=True):
        match item.get("type", "message"):
            case "message":
                only(item, "type", "role", "content")
                assert item["role"] == "assistant" or made == answered
                # llama.cpp tells an answer by its type and takes it in parts only.
                assert item["role"] == "user" or (item["type"] == "message" and isinstance(item["content"], list))
                _responses_content(item["content"], "input_text" if item["role"] == "user" else "output_text")
            case "reasoning":
                only(item, "type", "summary", "encrypted_content")
                text(item["encrypted_content"])
                # A thought without what it led to is refused.
                assert following is not None
                assert following.get("role") == "assistant" or following["type"] in ("reasoning", "function_call")
            case "function_call":
                only(item, "type", "call_id", "name", "arguments")
                assert CALL_ID.fullmatch(item["call_id"])
                assert item["call_id"] not in made
                assert NAME.fullmatch(item["name"])
                assert isinstance(json.loads(item["arguments"]), dict)
                made.append(item["call_id"])
            case "function_call_output":
                only(item, "type", "call_id", "output")
                answered.append(item["call_id"])
                assert made[: len(answered)] == answered
                _responses_content(item["output"], "input_text")
            case type:
                raise AssertionError(type)
    assert made == answered
    assert items[-1].get("role") == "user" or items[-1]["type"] == "function_call_output"


def _responses_content(content: Any, kind: str) -> None:
    if isinstance(content, str):
        text(content)
        return
    assert content
    for part in content:
        if part["type"] == "input_image":
            picture(part["image_url"])
        else:
            assert part["type"] == kind
            text(part["text"])


# --- Anthropic Messages -----------------------------------------------------------------------------------------------


def anthropic(body: bytes) -> None:
    request = json.loads(body)
    assert request["max_tokens"] > 0
    assert body.count(b'"cache_control":{"type":"ephemeral"}') <= 4
    for block in request["system"]:
        text(block["text"])
    messages = request["messages"]
    # Roles take turns, a user begins and a user has the last word.
    assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2) + ["user"]
    waiting: list[str] = []
    seen: set[str] = set()
    for message in messages:
        only(message, "role", "content")
        assert message["content"]
        if message["role"] == "user":
            _anthropic_user(message["content"], waiting)
            continue
        waiting = _anthropic_assistant(message["content"])
        # Unique in the whole conversation.
        assert len({*seen, *waiting}) == len(seen) + len(waiting)
        seen.update(waiting)
    assert "cache_control" in messages[-1]["content"][-1]


def _anthropic_user(content: list[dict[str, Any]], waiting: list[str]) -> None:
    results = [block for block in content if block["type"] == "tool_result"]
    # Results come first, and all of them in one message.
    assert content[: len(results)] == results
    assert [result["tool_use_id"] for result in results] == waiting
    for result in results:
        only(result, "type", "tool_use_id", "content", "is_error", "cache_control")
        assert result["content"]
        for block in result["content"]:
            _anthropic_shown(block)
            # An error is told in text.
            assert block["type"] == "text" or not result.get("is_error")
    for block in content[len(results) :]:
        _anthropic_shown(block)


def _anthropic_shown(block: dict[str, Any]) -> None:
    match block["type"]:
        case "text":
            only(block, "type", "text", "cache_control")
            text(block["text"])
        case "image":
            only(block, "type", "source", "cache_control")
            source = block["source"]
            picture(f"data:{source['media_type']};{source['type']},{source['data']}")
        case type:
            raise AssertionError(type)


def _anthropic_assistant(content: list[dict[str, Any]]) -> list[str]:
    assert content[-1]["type"] not in ("thinking", "redacted_thinking")
    for block in content:
        match block["type"]:
            case "text":
                only(block, "type", "text")
                text(block["text"])
            case "thinking":
                only(block, "type", "thinking", "signature")
                assert isinstance(block["thinking"], str)
                text(block["signature"])
            case "redacted_thinking":
                only(block, "type", "data")
                text(block["data"])
            case "tool_use":
                only(block, "type", "id", "name", "input")
                assert CALL_ID.fullmatch(block["id"])
                assert NAME.fullmatch(block["name"])
                assert isinstance(block["input"], dict)
            case type:
                raise AssertionError(type)
    calls = [block for block in content if block["type"] == "tool_use"]
    # Behind its calls a message says no more.
    assert content[len(content) - len(calls) :] == calls
    return [call["id"] for call in calls]


CHECKERS: dict[str, Callable[[bytes], None]] = {
    "openai-chat": chat,
    "openai-responses": responses,
    "anthropic-messages": anthropic,
}
