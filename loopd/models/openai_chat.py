"""OpenAI Chat Completions, as the vendor and the many servers that imitate it speak it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from loop_protocol.v1.types import (
    AssistantMessage,
    ImageBlock,
    Message,
    ModelRef,
    TextBlock,
    ToolCallBlock,
    ToolResultMessage,
    UserMessage,
)

from ..agent import Delta, ModelRequest, Reply, ToolSpec
from ..config import ModelConfig
from .chat_stream import ChatStream
from .http import Endpoint

# The vendor refuses longer ids and other names, in a history that another model may have made.
ID = 40
NAME = 64
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")
IMAGE_LEFT_OUT = "[an image, which this model cannot see here]"

_encode = msgspec.json.Encoder().encode


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
        match group:
            # Partial text is left out of model input, and with it whatever hangs on it.
            case [AssistantMessage(stop_reason="error" | "aborted"), *_]:
                return b""
        forms = [form for message in group if (form := self._form(message)) is not None]
        return b",".join(map(_encode, forms))

    async def respond(self, request: ModelRequest, say: Callable[[Delta], None]) -> Reply:
        stream = ChatStream(say)
        body = self._body(request)
        return await self.endpoint.post("/chat/completions", body=body, take=stream.take, end=stream.reply)

    def _form(self, message: Message) -> dict[str, Any] | None:
        match message:
            case UserMessage():
                return {"role": "user", "content": self._content(message.content)}
            case AssistantMessage():
                return _assistant(message)
            case ToolResultMessage():
                # A tool's content is text only in this API.
                return {"role": "tool", "tool_call_id": _id(message.tool_call_id), "content": _text(message.content)}

    def _content(self, content: Sequence[TextBlock | ImageBlock]) -> str | list[dict[str, Any]]:
        if "image" not in self.config.input or not any(isinstance(block, ImageBlock) for block in content):
            return _text(content)
        return [_part(block) for block in content]

    def _body(self, request: ModelRequest) -> bytes:
        """The history goes in as the bytes that it is kept as: what is encoded here does not grow with it."""
        system = _encode({"role": "system", "content": request.system}) if request.system else b""
        messages = b",".join(part for part in (system, bytes(request.input.encoded)) if part)
        rest: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        if request.tools:
            rest["tools"] = [_tool(tool) for tool in request.tools]
        if limits := [limit for limit in (request.max_output_tokens, self.config.max_output) if limit is not None]:
            rest[self._limit_name()] = min(limits)
        if self.ref.effort is not None:
            rest["reasoning_effort"] = self.ref.effort
        return b'{"model":%b,"messages":[%b],%b' % (_encode(self.ref.id), messages, _encode(rest)[1:])

    def _limit_name(self) -> str:
        # The vendor's newer models refuse the old name; other servers silently ignore the new one.
        host = urlsplit(self.endpoint.provider.base_url).hostname or ""
        return "max_completion_tokens" if host.endswith((".openai.com", ".openai.azure.com")) else "max_tokens"


def _assistant(message: AssistantMessage) -> dict[str, Any] | None:
    """Thinking is left out. No content is allowed only beside calls; a message with neither is not sent."""
    text = "".join(block.text for block in message.content if isinstance(block, TextBlock))
    calls = [_call(block) for block in message.content if isinstance(block, ToolCallBlock)]
    if calls:
        return {"role": "assistant", "content": text or None, "tool_calls": calls}
    return {"role": "assistant", "content": text} if text else None


def _call(block: ToolCallBlock) -> dict[str, Any]:
    name = _NOT_IN_NAMES.sub("_", block.name)[:NAME] or "_"
    function = {"name": name, "arguments": _encode(block.arguments).decode()}
    return {"id": _id(block.id), "type": "function", "function": function}


def _id(id: str) -> str:
    return id if len(id) <= ID else hashlib.sha256(id.encode()).hexdigest()[:ID]


def _text(content: Sequence[TextBlock | ImageBlock]) -> str:
    return "\n".join(block.text if isinstance(block, TextBlock) else IMAGE_LEFT_OUT for block in content)


def _part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    match block:
        case TextBlock(text=text):
            return {"type": "text", "text": text}
        case ImageBlock():
            return {"type": "image_url", "image_url": {"url": f"data:{block.mime_type};base64,{block.data}"}}


def _tool(tool: ToolSpec) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}
