"""An Anthropic Messages stream, event by event, into deltas while it comes and one reply at its end.

Blocks are numbered; servers may leave out the number, a block's start or its input, and never ping. A stream without a
stop reason is never an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from loop_protocol.v1.types import Usage

from ..agent import Delta, ModelError, Reply
from .answer import Answer, CallPart, Part, TextPart, ThinkingPart, json_text, mapping, read, tokens, unfinished
from .forms import seal
from .refusal import error_event
from .sse import Event

API = "anthropic-messages"
# Before the data of thinking that the provider hides, where else a signature stands: none has a blank.
HIDDEN = "redacted "
CUT = ("max_tokens", "model_context_window_exceeded")


class _Event(Struct):
    """Loosely typed: of the many kinds of events, an unknown one may have anything under these names."""

    type: str | None = None
    index: Any = None
    content_block: Any = None
    delta: Any = None
    message: Any = None
    usage: Any = None
    error: Any = None


_event = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class AnthropicStream:
    """Give it every event; ``reply`` when the stream is over."""

    say: Callable[[Delta], None]
    _answer: Answer = field(init=False)
    _parts: dict[Any, Part | None] = field(default_factory=dict)  # None: a block that is none of ours
    _finish: str | None = None
    _counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._answer = Answer(self.say)

    def take(self, event: Event) -> bool:
        """Whether this was the last event. Raises :class:`ModelError`."""
        data = event.data.strip()
        if not data or data == b"[DONE]":
            return bool(data)
        given = read(event, _event)
        match given.type or event.name.decode("ascii", "replace"):
            case "message_start":
                self._count(mapping(given.message).get("usage"))
            case "content_block_start":
                self._begin(_index(given), mapping(given.content_block))
            case "content_block_delta":
                self._go_on(_index(given), mapping(given.delta))
            case "message_delta":
                self._count(given.usage)
                self._finish = mapping(given.delta).get("stop_reason") or self._finish
            case "message_stop":
                return True
            case "error":
                raise error_event(data)
            case None | "" if given.error:
                raise error_event(data)
        return False

    def reply(self) -> Reply:
        """The finished answer. Raises :class:`ModelError` where there is none."""
        match self._finish:
            case None:
                raise unfinished("stop reason")
            case "refusal":
                raise ModelError("content_filter", "refused to answer, or to go on with its answer")
        return self._answer.reply(self._usage(), cut=self._finish in CUT)

    def _begin(self, index: int | None, block: dict[str, Any]) -> None:
        """Most blocks begin empty; what one begins with is part of it."""
        match block.get("type"):
            case "text":
                self._parts[index] = text = self._answer.open_text()
                self._answer.add(text, _text(block, "text"))
            case "thinking":
                self._parts[index] = thinking = self._answer.open_thinking()
                self._answer.add(thinking, _text(block, "thinking"))
                self._sign(thinking, _text(block, "signature"))
            case "redacted_thinking":
                self._parts[index] = hidden = self._answer.open_thinking()
                self._sign(hidden, HIDDEN + _text(block, "data"))
            case "tool_use":
                self._parts[index] = call = self._answer.open_call(id=block.get("id"), name=block.get("name"))
                self._answer.add(call, json_text(block.get("input")))
            case _:
                self._parts[index] = None

    def _go_on(self, index: int | None, delta: dict[str, Any]) -> None:
        part = self._parts[index] if index in self._parts else self._unannounced(index, delta)
        match part, delta.get("type"):
            case TextPart(), "text_delta":
                self._answer.add(part, _text(delta, "text"))
            case ThinkingPart(), "thinking_delta":
                self._answer.add(part, _text(delta, "thinking"))
            case ThinkingPart(), "signature_delta":
                self._sign(part, _text(delta, "signature"))
            case CallPart(), "input_json_delta":
                self._answer.add(part, _text(delta, "partial_json"))

    def _unannounced(self, index: int | None, delta: dict[str, Any]) -> Part | None:
        """Text and thinking tell themselves what they are; a call without its name is nothing."""
        kind = {"text_delta": "text", "thinking_delta": "thinking"}.get(delta.get("type", ""))
        self._begin(index, {"type": kind})
        return self._parts[index]

    def _sign(self, part: ThinkingPart, signature: str) -> None:
        if signature:
            part.signature = (part.signature or seal(API, "")) + signature

    def _count(self, usage: Any) -> None:
        """Counts are of all so far, and may come early, late or both, then as zero."""
        for name, given in mapping(usage).items():
            self._counts[name] = max(self._counts.get(name, 0), tokens(given))

    def _usage(self) -> Usage:
        """Here cached tokens are not among the input tokens; in ours they are."""
        cached, written = (self._counts.get(f"cache_{name}_input_tokens", 0) for name in ("read", "creation"))
        fresh, said = (self._counts.get(name, 0) for name in ("input_tokens", "output_tokens"))
        return Usage(fresh + cached + written, said, cached, written)


def _index(given: _Event) -> int | None:
    return given.index if isinstance(given.index, int) else None


def _text(block: dict[str, Any], key: str) -> str:
    return text if isinstance(text := block.get(key), str) else ""
