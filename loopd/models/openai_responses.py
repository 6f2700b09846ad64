"""OpenAI Responses, without state at the provider: every request has the whole conversation, thoughts sealed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
from .forms import encode, left_out, output_limit, renamed, replayed, text_of, tool_name, visible
from .http import Endpoint
from .responses_stream import API, ResponsesStream


@dataclass(slots=True, frozen=True)
class OpenAIResponses:
    """The Model port over one endpoint."""

    ref: ModelRef
    config: ModelConfig
    endpoint: Endpoint

    @property
    def input(self) -> frozenset[str]:
        return frozenset(self.config.input)

    def encode(self, group: Sequence[Message]) -> bytes:
        """Items in a flat list, where a call and its result find each other by id alone."""
        if left_out(group):
            return b""
        return b",".join([encode(item) for message in renamed(group) for item in self._items(message)])

    async def respond(self, request: ModelRequest, say: Callable[[Delta], None]) -> Reply:
        stream = ResponsesStream(say)
        return await self.endpoint.post("/responses", body=self._body(request), take=stream.take, end=stream.reply)

    def _items(self, message: Message) -> list[dict[str, Any]]:
        match message:
            case UserMessage():
                return [{"role": "user", "content": self._content(message.content)}]
            case AssistantMessage():
                return [_item(block) for block in replayed(message, self.ref, API)]
            case ToolResultMessage():
                output = self._content(message.content)
                return [{"type": "function_call_output", "call_id": message.tool_call_id, "output": output}]

    def _content(self, content: Sequence[UserBlock]) -> str | list[dict[str, Any]]:
        """Plain text wherever it is only text: not every server takes a list of parts in every place."""
        if "image" not in self.input or not any(isinstance(block, ImageBlock) for block in content):
            return text_of(content)
        return [_part(block) for block in visible(content, images=True)]

    def _body(self, request: ModelRequest) -> bytes:
        """The history goes in as the bytes that it is kept as: what is encoded here does not grow with it."""
        tools = encode([_tool(tool) for tool in request.tools])
        rest: dict[str, Any] = {
            "stream": True,
            "store": False,
            # Sends what begins alike to where it is cached.
            "prompt_cache_key": hashlib.sha256(request.system.encode() + tools).hexdigest()[:32],
        }
        if request.system:
            rest["instructions"] = request.system
        if (limit := output_limit(request, self.config)) is not None:
            rest["max_output_tokens"] = limit
        if self.config.reasoning:
            # Models that cannot think refuse it.
            rest["include"] = ["reasoning.encrypted_content"]
        if self.ref.effort is not None:
            # The vendor gives summaries to verified organisations only, so they come with what was asked for.
            rest["reasoning"] = {"effort": self.ref.effort, "summary": "auto"}
        offered = b',"tools":%b' % tools if request.tools else b""
        form = b'{"model":%b,"input":[%b]%b,%b'
        return form % (encode(self.ref.id), request.input.encoded, offered, encode(rest)[1:])


def _item(block: AssistantBlock) -> dict[str, Any]:
    match block:
        case TextBlock(text=text):
            # In full: llama.cpp does not take an answer's text without type and parts.
            return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
        case ThinkingBlock(thinking=text, signature=secret):
            # Without the id of the item, which the provider does not keep and would look for.
            summary = [{"type": "summary_text", "text": text}] if text else []
            return {"type": "reasoning", "summary": summary, "encrypted_content": secret}
        case ToolCallBlock():
            arguments = encode(block.arguments).decode()
            return {"type": "function_call", "call_id": block.id, "name": tool_name(block.name), "arguments": arguments}


def _part(block: UserBlock) -> dict[str, Any]:
    match block:
        case TextBlock(text=text):
            return {"type": "input_text", "text": text}
        case ImageBlock():
            return {"type": "input_image", "image_url": f"data:{block.mime_type};base64,{block.data}", "detail": "auto"}


def _tool(tool: ToolSpec) -> dict[str, Any]:
    """Not strict: strict schemas must require every property, and ours have optional ones."""
    form = {"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {**form, "strict": False}
