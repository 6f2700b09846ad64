"""What the forms of all providers have in common: what is left out of them, what stands in its place, whose thinking.

Thinking is kept with a signature that its API alone can read. It goes back only to the model that thought it, over the
same API: the signature's first word is the API's name, so another one's is never mistaken for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

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
)

from ..agent import ModelRequest
from ..config import ModelConfig

# The vendors refuse other names, in a history that another model may have made.
NAME = 64
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")
IMAGE_LEFT_OUT = "[an image, which this model cannot see here]"
# The vendors refuse empty text, and text that is only white.
NOTHING = "[nothing]"

encode = msgspec.json.Encoder().encode


def output_limit(request: ModelRequest, config: ModelConfig) -> int | None:
    """The smaller one of what is asked for and what the model can."""
    return min((limit for limit in (request.max_output_tokens, config.max_output) if limit is not None), default=None)


def left_out(group: Sequence[Message]) -> bool:
    """Partial text is left out of model input, and with it whatever hangs on it."""
    match group:
        case [AssistantMessage(stop_reason="error" | "aborted"), *_]:
            return True
    return False


def tool_name(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name)[:NAME] or "_"


def visible(content: Sequence[UserBlock], *, images: bool) -> list[UserBlock]:
    """What can be sent of a user's or a tool's content: at least one block, none of them empty."""
    seen = [TextBlock(IMAGE_LEFT_OUT) if isinstance(block, ImageBlock) and not images else block for block in content]
    return [block for block in seen if isinstance(block, ImageBlock) or block.text.strip()] or [TextBlock(NOTHING)]


def text_of(content: Sequence[UserBlock]) -> str:
    return "\n".join(block.text for block in visible(content, images=False) if isinstance(block, TextBlock))


def replayed(message: AssistantMessage, ref: ModelRef, api: str) -> list[AssistantBlock]:
    """What goes back to ``ref`` of an earlier answer: no empty text, no thinking but its own, none at the end.

    A vendor refuses thoughts that nothing follows. Thinking that is left has its ``signature`` without the seal.
    """
    blocks = list(_replayed(message, ref, api))
    while blocks and isinstance(blocks[-1], ThinkingBlock):
        blocks.pop()
    return blocks


def _replayed(message: AssistantMessage, ref: ModelRef, api: str) -> Iterator[AssistantBlock]:
    own = (message.provider, message.model) == (ref.provider, ref.id)
    for block in message.content:
        match block:
            case TextBlock(text=text) if text.strip():
                yield block
            case ThinkingBlock(signature=str(sealed)) if own and (signature := opened(api, sealed)):
                yield ThinkingBlock(block.thinking, signature)
            case ToolCallBlock():
                yield block


def seal(api: str, signature: str) -> str:
    return f"{api} {signature}"


def opened(api: str, sealed: str) -> str | None:
    """The signature as the API gave it; None where it is another's."""
    name, _, signature = sealed.partition(" ")
    return signature if name == api else None


def renamed(group: Sequence[Message]) -> Sequence[Message]:
    """The group with call ids that are made of each call's place in the conversation.

    So they are unique in it also where a provider repeats its own, have a form that every vendor takes, and are the
    same each time. The first result of an id belongs to the first call of that id.
    """
    match group:
        case [AssistantMessage() as answer, *results]:
            pass
        case _:
            return group
    waiting: dict[str, list[str]] = {}
    content: list[AssistantBlock] = []
    for block in answer.content:
        if isinstance(block, ToolCallBlock):
            own = f"call_{answer.index}_{sum(map(len, waiting.values()))}"
            waiting.setdefault(block.id, []).append(own)
            content.append(replace(block, id=own))
        else:
            content.append(block)
    answered = [
        replace(result, tool_call_id=waiting[result.tool_call_id].pop(0))
        for result in results
        if isinstance(result, ToolResultMessage)
    ]
    return [replace(answer, content=content), *answered]
