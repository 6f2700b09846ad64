"""OpenAI Chat Completions, as the vendor and the many servers that imitate it speak it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from loop_protocol.v1.types import (
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
from .chat_stream import API, THOUGHTS, ChatStream
from .forms import encode, left_out, output_limit, replayed, text_of, tool_name, visible
from .http import Endpoint

# The vendor refuses longer ids, in a history that another model may have made.
ID = 40


@dataclass(slots=True, frozen=True)
class OpenAIChat:
    """The Model port over one endpoint."""

    ref: ModelRef
    config: ModelConfig
    endpoint: Endpoint

    @property
    def input(self) -> frozenset[str]:
        return frozenset(self.config.input)

    def encode(self, group: Sequence[Message]) -> bytes:
        if left_out(group):
            return b""
        return b",".join([encode(form) for message in group if (form := self._form(message)) is not None])

    async def respond(self, request: ModelRequest, say: Callable[[Delta], None]) -> Reply:
        stream = ChatStream(say)
        body = self._body(request)
        return await self.endpoint.post("/chat/completions", body=body, take=stream.take, end=stream.reply)

    def _form(self, message: Message) -> dict[str, Any] | None:
        match message:
            case UserMessage():
                return {"role": "user", "content": self._content(message.content)}
            case AssistantMessage():
                return self._assistant(message)
            case ToolResultMessage():
                # A tool's content is text only in this API.
                return {"role": "tool", "tool_call_id": _id(message.tool_call_id), "content": text_of(message.content)}

    def _content(self, content: Sequence[UserBlock]) -> str | list[dict[str, Any]]:
        if "image" not in self.input or not any(isinstance(block, ImageBlock) for block in content):
            return text_of(content)
        return [_part(block) for block in visible(content, images=True)]

    def _assistant(self, message: AssistantMessage) -> dict[str, Any] | None:
        """No content is allowed only beside calls; a message with neither is not sent."""
        blocks = replayed(message, self.ref, API)
        text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
        calls = [_call(block) for block in blocks if isinstance(block, ToolCallBlock)]
        if not (text or calls):
            return None
        form: dict[str, Any] = {"role": "assistant", "content": text or None}
        for block in blocks:
            # Some servers refuse calls without the thoughts that led to them.
            if isinstance(block, ThinkingBlock) and block.signature in THOUGHTS:
                form[block.signature] = block.thinking
        return {**form, "tool_calls": calls} if calls else form

    def _body(self, request: ModelRequest) -> bytes:
        """The history goes in as the bytes that it is kept as: what is encoded here does not grow with it."""
        system = encode({"role": "system", "content": request.system}) if request.system else b""
        messages = b",".join(part for part in (system, request.input.encoded) if part)
        rest: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        if request.tools:
            rest["tools"] = [_tool(tool) for tool in request.tools]
        if (limit := output_limit(request, self.config)) is not None:
            rest[self._limit_name()] = limit
        if self.ref.effort is not None:
            rest["reasoning_effort"] = self.ref.effort
        return b'{"model":%b,"messages":[%b],%b' % (encode(self.ref.id), messages, encode(rest)[1:])

    def _limit_name(self) -> str:
        # The vendor's newer models refuse the old name; other servers silently ignore the new one.
        host = urlsplit(self.endpoint.provider.base_url).hostname or ""
        return "max_completion_tokens" if host.endswith((".openai.com", ".openai.azure.com")) else "max_tokens"


def _call(block: ToolCallBlock) -> dict[str, Any]:
    function = {"name": tool_name(block.name), "arguments": encode(block.arguments).decode()}
    return {"id": _id(block.id), "type": "function", "function": function}


def _id(id: str) -> str:
    return id if len(id) <= ID else hashlib.sha256(id.encode()).hexdigest()[:ID]


def _part(block: UserBlock) -> dict[str, Any]:
    match block:
        case TextBlock(text=text):
            return {"type": "text", "text": text}
        case ImageBlock():
            return {"type": "image_url", "image_url": {"url": f"data:{block.mime_type};base64,{block.data}"}}


def _tool(tool: ToolSpec) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}
