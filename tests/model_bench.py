"""What the model tests share: conversations, their input as a model wants it, and asking."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from loop_protocol.v1.types import (
    AssistantMessage,
    Message,
    ModelRef,
    StopReason,
    TextBlock,
    ToolCallBlock,
    ToolResultMessage,
    Usage,
    UserMessage,
)
from loopd.agent import Delta, Model, ModelInput, ModelRequest, Reply, TextDelta, ToolSpec
from loopd.config import Config, Default, ModelConfig, Provider
from loopd.models import Catalogue

BASH = ToolSpec("bash", "Run it", {"type": "object", "properties": {"command": {"type": "string"}}})
KEY = "sk-test-0123456789abcdef"


@dataclass
class Input:
    encoded: bytes
    turn: Sequence[Message]


@dataclass
class Said:
    deltas: list[Delta] = field(default_factory=list)

    def __call__(self, delta: Delta) -> None:
        self.deltas.append(delta)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas if isinstance(delta, TextDelta))


def groups(messages: Sequence[Message]) -> list[list[Message]]:
    found: list[list[Message]] = []
    for message in messages:
        if isinstance(message, ToolResultMessage):
            found[-1].append(message)
        else:
            found.append([message])
    return found


def from_scratch(model: Model, messages: Sequence[Message]) -> bytes:
    return b",".join(part for group in groups(messages) if (part := model.encode(group)))


def request(model: Model, messages: Sequence[Message], **fields: Any) -> ModelRequest:
    last = max(place for place, message in enumerate(messages) if isinstance(message, UserMessage))
    return ModelRequest("Be brief.", Input(from_scratch(model, messages), messages[last:]), **fields)


async def ask(model: Model, messages: Sequence[Message], say: Callable[[Delta], None], **fields: Any) -> Reply:
    return await model.respond(request(model, messages, **fields), say)


def body(model: Any, messages: Sequence[Message], **fields: Any) -> bytes:
    """What a request for these messages would send."""
    made: bytes = model._body(request(model, messages, **fields))
    return made


def sent(model: Any, kept: ModelInput) -> bytes:
    """What a request would send of an input that is kept."""
    made: bytes = model._body(ModelRequest("Be brief.", kept, (BASH,)))
    return made


def decoded(body: bytes) -> Any:
    return json.loads(body)


def user(index: int, *content: Any) -> UserMessage:
    blocks = [TextBlock(block) if isinstance(block, str) else block for block in content]
    return UserMessage(index=index, content=blocks, timestamp=1)


def assistant(
    index: int, *content: Any, stop_reason: StopReason = "stop", provider: str = "p", model: str = "m"
) -> AssistantMessage:
    blocks = [TextBlock(block) if isinstance(block, str) else block for block in content]
    return AssistantMessage(
        index=index,
        content=blocks,
        timestamp=1,
        provider=provider,
        model=model,
        usage=Usage(1, 1),
        stop_reason=stop_reason,
    )


def result(index: int, call: ToolCallBlock, *content: Any, is_error: bool = False) -> ToolResultMessage:
    blocks = [TextBlock(block) if isinstance(block, str) else block for block in content]
    return ToolResultMessage(
        index=index, content=blocks, timestamp=1, tool_call_id=call.id, tool_name=call.name, is_error=is_error
    )


def catalogue(url: str, *, environ: dict[str, str] | None = None, **fields: Any) -> Catalogue:
    """One provider, ``local``, at ``url``, with the models ``m`` and ``eyes``."""
    if fields.get("api") == "anthropic-messages":
        url = url.removesuffix("/v1")
    fields = {"auth": "none", **fields} if not any(name.startswith("api_key") for name in fields) else fields
    models = (ModelConfig(id="m"), ModelConfig(id="eyes", input=("text", "image"), reasoning=True))
    provider = Provider(name="local", base_url=url, **{"api": "openai-chat", "models": models, **fields})
    return Catalogue(Config(default=Default(), providers={"local": provider}), environ or {})


M = ModelRef("local", "m")
EYES = ModelRef("local", "eyes")


def table(head: Sequence[str], rows: dict[str, list[str]]) -> str:
    """To be printed: outcomes beside each other."""
    lines = [head, *([name, *cells] for name, cells in rows.items())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
