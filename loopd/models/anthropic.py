"""Anthropic Messages, as the vendor and the servers that imitate it speak it.

The history is spliced as bytes. White space where the encoder never puts any marks where messages begin and end, so
that neighbours of one role become one message and the last block can be marked for the cache, whatever is in them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from loop_protocol.v1.types import (
    AssistantBlock,
    AssistantMessage,
    ImageBlock,
    Message,
    ModelRef,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolResultMessage,
    UserBlock,
    UserMessage,
)

from ..agent import Delta, ModelRequest, Reply, ToolSpec
from ..config import ModelConfig
from .anthropic_stream import API, HIDDEN, AnthropicStream
from .forms import encode, left_out, output_limit, renamed, replayed, tool_name, visible
from .http import Endpoint

VERSION = "2023-06-01"
# The API requires a limit; the smallest one that models of the last years have.
MAX_TOKENS = 8192

# Models up to 4.5, and other vendors' ones, think within a budget; later ones by effort, and refuse budgets.
BY_EFFORT = re.compile(r"claude-(?!instant|[0-3]|(?:opus|sonnet|haiku)-(?:3|4(?!\d)(?![-.](?:[6-9]|\d\d)(?!\d))))")
BUDGETS = {"minimal": 1024, "low": 4096, "medium": 8192, "high": 16384}
LARGEST_BUDGET = 32768
SMALLEST_BUDGET = 1024

# Nothing between them can look like them: the encoder puts no white space between tokens, and escapes quotes in text.
USER, USER_END = b'{ "role":"user","content":[', b"] }"
ASSISTANT, ASSISTANT_END = b'{ "role":"assistant","content":[', b"]}"
CACHE = b',"cache_control":{"type":"ephemeral"}'


@dataclass(slots=True, frozen=True)
class AnthropicMessages:
    """The Model port over one endpoint."""

    ref: ModelRef
    config: ModelConfig
    endpoint: Endpoint

    @property
    def input(self) -> frozenset[str]:
        return frozenset(self.config.input)

    def encode(self, group: Sequence[Message]) -> bytes:
        """An answer is followed by one user message with the results of all its calls."""
        if left_out(group):
            return b""
        first, *rest = renamed(group)
        results = [self._result(message) for message in rest if isinstance(message, ToolResultMessage)]
        messages = (self._message(first), _joined(USER, results, USER_END))
        return b",".join([message for message in messages if message])

    async def respond(self, request: ModelRequest, say: Callable[[Delta], None]) -> Reply:
        stream = AnthropicStream(say)
        return await self.endpoint.post(
            "/v1/messages", body=self._body(request), take=stream.take, end=stream.reply, headers=self._headers
        )

    def _headers(self, key: str | None) -> Mapping[str, str]:
        """Other vendors look for the key in either place; this one takes it for something else in the second."""
        headers = {"anthropic-version": VERSION}
        if key is None:
            return headers
        host = urlsplit(self.endpoint.provider.base_url).hostname or ""
        vendor = host == "anthropic.com" or host.endswith(".anthropic.com")
        return {**headers, "x-api-key": key, **({} if vendor else {"authorization": f"Bearer {key}"})}

    # --- the history --------------------------------------------------------------------------------------------------

    def _message(self, message: Message) -> bytes:
        match message:
            case UserMessage():
                return _joined(USER, self._content(message.content), USER_END)
            case AssistantMessage():
                return _joined(ASSISTANT, [_block(block) for block in self._answer(message)], ASSISTANT_END)
            case ToolResultMessage():
                return b""

    def _answer(self, message: AssistantMessage) -> list[AssistantBlock]:
        """Calls come last: what a result must follow is the message that ends with its call."""
        blocks = replayed(message, self.ref, API)
        return sorted(blocks, key=lambda block: isinstance(block, ToolCallBlock))

    def _content(self, content: Sequence[UserBlock], *, images: bool = True) -> list[dict[str, Any]]:
        return [_part(block) for block in visible(content, images=images and "image" in self.input)]

    def _result(self, message: ToolResultMessage) -> dict[str, Any]:
        # An error's content is text only.
        content = self._content(message.content, images=not message.is_error)
        form = {"type": "tool_result", "tool_use_id": message.tool_call_id, "content": content}
        return {**form, "is_error": True} if message.is_error else form

    # --- the request --------------------------------------------------------------------------------------------------

    def _body(self, request: ModelRequest) -> bytes:
        """What is encoded here does not grow with the history."""
        limit = output_limit(request, self.config) or MAX_TOKENS
        rest: dict[str, Any] = {"max_tokens": limit, "stream": True, **self._thinking(request.input.turn, limit)}
        if request.system:
            rest["system"] = [_cached({"type": "text", "text": request.system})]
        if request.tools:
            *tools, last = [_tool(tool) for tool in request.tools]
            # The system prompt's mark covers the tools, which come before it.
            rest["tools"] = [*tools, last if request.system else _cached(last)]
        messages = _marked(_merged(bytes(request.input.encoded)))
        return b'{"model":%b,"messages":[%b],%b' % (encode(self.ref.id), messages, encode(rest)[1:])

    def _thinking(self, turn: Sequence[Message], limit: int) -> dict[str, Any]:
        effort = self.ref.effort
        if effort is None:
            return {}
        if BY_EFFORT.search(self.ref.id):
            # Their thoughts are left out of the answer unless one asks for them.
            return {"thinking": {"type": "adaptive", "display": "summarized"}, "output_config": {"effort": effort}}
        budget = min(BUDGETS.get(effort, LARGEST_BUDGET), limit // 2)
        if budget < SMALLEST_BUDGET or not self._may_think(turn):
            return {}
        return {"thinking": {"type": "enabled", "budget_tokens": budget}}

    def _may_think(self, turn: Sequence[Message]) -> bool:
        """Within a budget, an answer whose calls were just answered must begin with a thought: a turn that another
        model began, or this one without thinking, goes on without."""
        last = next((message for message in reversed(turn) if isinstance(message, AssistantMessage)), None)
        blocks = self._answer(last) if last is not None and not left_out([last]) else []
        return not any(isinstance(block, ToolCallBlock) for block in blocks) or isinstance(blocks[0], ThinkingBlock)


def _merged(history: bytes) -> bytes:
    """Roles take turns: what a failed or stopped answer leaves are neighbours of one role."""
    merged = history.replace(USER_END + b"," + USER, b",")
    return merged.replace(ASSISTANT_END + b"," + ASSISTANT, b",")


def _marked(history: bytes) -> bytes:
    """Cached up to the last user block, and up to the one before the last answer, where the last request ended.

    The provider looks for what it has cached at a mark and a few blocks before it, not all the way back.
    """
    end = history.rfind(b"}" + USER_END)
    before = history.rfind(b"}" + USER_END + b"," + ASSISTANT, 0, max(end, 0))
    cuts = [at for at in (before, end) if at >= 0]
    whole = memoryview(history)
    return CACHE.join([whole[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(history)], strict=True)])


def _joined(begin: bytes, blocks: Sequence[dict[str, Any]], end: bytes) -> bytes:
    return begin + b",".join([encode(block) for block in blocks]) + end if blocks else b""


def _block(block: AssistantBlock) -> dict[str, Any]:
    match block:
        case TextBlock(text=text):
            return {"type": "text", "text": text}
        case ThinkingBlock(signature=str(signature)) if signature.startswith(HIDDEN):
            return {"type": "redacted_thinking", "data": signature.removeprefix(HIDDEN)}
        case ThinkingBlock():
            return {"type": "thinking", "thinking": block.thinking, "signature": block.signature}
        case ToolCallBlock():
            return {"type": "tool_use", "id": block.id, "name": tool_name(block.name), "input": block.arguments}


def _part(block: UserBlock) -> dict[str, Any]:
    match block:
        case TextBlock(text=text):
            return {"type": "text", "text": text}
        case ImageBlock():
            source = {"type": "base64", "media_type": block.mime_type, "data": block.data}
            return {"type": "image", "source": source}


def _tool(tool: ToolSpec) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "input_schema": tool.parameters}


def _cached(form: dict[str, Any]) -> dict[str, Any]:
    return {**form, "cache_control": {"type": "ephemeral"}}
