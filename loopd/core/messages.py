"""What streams, what it becomes, and how events show it: the draft, a running tool's output, images by reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from loop_protocol.v1.types import (
    OUTPUT_TAIL,
    AssistantBlock,
    AssistantMessage,
    ErrorInfo,
    ImageBlock,
    Message,
    RunningTool,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolResultMessage,
)

from .history import LINE, encode

INTERRUPTED = "Interrupted: the person stopped the run before this call was done. What it had done stays done."
NOT_STARTED = "Not run: the run ended before this call started."
NOT_ALLOWED = "Not run: the run ended before a person had allowed this call."
CRASHED = (
    "Interrupted: the daemon ended in the middle of the run. Whether this call was started, and how far it came, "
    "is not known: look before you repeat it."
)
CUT = "\n[cut: the message was too large to be kept whole]"


@dataclass(slots=True)
class Streaming:
    """The draft: text and thinking in the order in which they came."""

    message_id: str
    _kinds: list[str] = field(default_factory=list)
    _texts: list[list[str]] = field(default_factory=list)

    def add(self, kind: str, text: str) -> None:
        """``kind`` is ``text`` or ``thinking``. A list append per delta: joining is for those who look."""
        if not self._kinds or self._kinds[-1] != kind:
            self._kinds.append(kind)
            self._texts.append([])
        self._texts[-1].append(text)

    def blocks(self) -> list[AssistantBlock]:
        joined = [(kind, "".join(parts)) for kind, parts in zip(self._kinds, self._texts, strict=True)]
        return [TextBlock(text) if kind == "text" else ThinkingBlock(text) for kind, text in joined]

    def visible(self) -> list[AssistantBlock]:
        """What a stop keeps: text that somebody could read, no thinking (S-12)."""
        return [block for block in self.blocks() if isinstance(block, TextBlock) and block.text.strip()]


@dataclass(slots=True)
class RunningOutput:
    """A tool call under way, with the tail of what it printed. ``allowed``: it does not wait for a
    person who would have to allow it."""

    call: ToolCallBlock
    tail: str = ""
    allowed: bool = True

    def add(self, text: str) -> None:
        self.tail = (self.tail + text)[-OUTPUT_TAIL:]

    def shown(self) -> RunningTool:
        call = self.call
        return RunningTool(tool_call_id=call.id, tool_name=call.name, arguments=call.arguments, output=self.tail)


def as_shown(message: Message, line: bytes) -> Raw:
    """The message as events carry it: the stored line itself, but for images, which travel by reference."""
    if not any(isinstance(block, ImageBlock) for block in message.content):
        return Raw(line)
    blocks: list[Any] = [
        ImageBlock(mime_type=block.mime_type, bytes=len(block.data or "") * 3 // 4, index=message.index, block=place)
        if isinstance(block, ImageBlock)
        else block
        for place, block in enumerate(message.content)
    ]
    return Raw(msgspec.json.encode(replace(message, content=blocks)))


M = TypeVar("M", AssistantMessage, ToolResultMessage)


def fitting(message: M) -> M:
    """The message, its texts cut with a marker where it is too large for a page (storage rule 12)."""
    size = sum(len(block.text) for block in message.content if isinstance(block, TextBlock))
    if size < LINE // 8 and not isinstance(message, AssistantMessage):
        return message
    if len(encode(message)) <= LINE:
        return message
    # Six bytes at most per character in JSON, so that what is kept fits however it is escaped.
    room = LINE // 8
    blocks: list[Any] = []
    for block in message.content:
        if isinstance(block, TextBlock) and len(block.text) > room:
            block = TextBlock(block.text[:room] + CUT)
        if isinstance(block, ThinkingBlock) and len(block.thinking) > room:
            continue
        if isinstance(block, TextBlock):
            room = max(0, room - len(block.text))
        blocks.append(block)
    return replace(message, content=blocks)


def with_save_error(error: ErrorInfo | None, reason: str) -> ErrorInfo:
    """One error that holds both failures (S-17)."""
    save = ErrorInfo("save_failed", reason)
    if error is None:
        return save
    return ErrorInfo("run_and_save_failed", f"{error.message}; and the save failed: {reason}", [error, save])
