"""What a stream has said so far: blocks in the order in which they began, told as they grow, one reply at the end.

The three APIs differ in how their events name a block; what a block is, how much of it is taken and when there is no
answer at all is the same for all of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, assert_never

import msgspec

from loop_protocol.v1.types import AssistantBlock, TextBlock, ThinkingBlock, ToolCallBlock, Usage

from ..agent import Delta, ModelError, Reply, TextDelta, ThinkingDelta, ToolCallDelta
from .lenient_json import NotJson, arguments, decode
from .refusal import error_event, quote
from .sse import Event

# One message must fit a line of the history, where escapes can make it several times longer.
ANSWER = 8 * 1024 * 1024
CALLS = 128

T = TypeVar("T")


@dataclass(slots=True)
class TextPart:
    pieces: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ThinkingPart:
    pieces: list[str] = field(default_factory=list)
    signature: str | None = None


@dataclass(slots=True)
class CallPart:
    """``given_id`` is the server's, ``id`` the same where it is one that tells this call from the others."""

    id: str
    given_id: str
    name: str
    pieces: list[str] = field(default_factory=list)


Part = TextPart | ThinkingPart | CallPart


@dataclass(slots=True)
class Answer:
    """``add`` says each piece; the reply's text is exactly their sum."""

    say: Callable[[Delta], None]
    parts: list[Part] = field(default_factory=list)
    _size: int = 0

    def open_text(self) -> TextPart:
        return self._opened(TextPart())

    def open_thinking(self) -> ThinkingPart:
        return self._opened(ThinkingPart())

    def open_call(self, *, id: object, name: object = "") -> CallPart:
        """``id`` and ``name`` as the server gave them, if it did."""
        calls = [part for part in self.parts if isinstance(part, CallPart)]
        if len(calls) == CALLS:
            raise ModelError("provider", f"made more than {CALLS} tool calls at once")
        given = id if isinstance(id, str) else ""
        taken = any(call.id == given for call in calls)
        own = given if given and not taken else f"call_{secrets.token_hex(12)}"
        return self._opened(CallPart(own, given, name if isinstance(name, str) else ""))

    def add(self, part: Part, piece: str) -> None:
        """The next piece of a block. An empty one only announces a call."""
        if not piece and not isinstance(part, CallPart):
            return
        self._size += len(piece)
        if self._size > ANSWER:
            raise ModelError("provider", f"answered with more than {ANSWER} characters")
        part.pieces.append(piece)
        self.say(_delta(part, piece))

    def complete(self, part: Part, whole: str) -> None:
        """A block once more and whole: what of it was not said yet is said now."""
        said = "".join(part.pieces)
        if len(whole) > len(said) and whole.startswith(said):
            self.add(part, whole[len(said) :])

    def reply(self, usage: Usage, *, cut: bool) -> Reply:
        """The finished answer; ``cut`` by the output limit. Raises :class:`ModelError` where nothing was said."""
        blocks = [block for part in self.parts if (block := _block(part)) is not None]
        if not any(_says_something(block) for block in blocks):
            how = "used all its tokens before it said" if cut else "ended its turn without saying"
            raise ModelError("incomplete", f"{how} anything")
        calls = any(isinstance(block, ToolCallBlock) for block in blocks)
        # Cut comes first: whether a call of a cut answer is whole, its arguments cannot tell.
        return Reply(blocks, usage, "length" if cut else "toolUse" if calls else "stop")

    def _opened(self, part: T) -> T:
        assert isinstance(part, Part)
        self.parts.append(part)
        return part


def _delta(part: Part, piece: str) -> Delta:
    match part:
        case TextPart():
            return TextDelta(piece)
        case ThinkingPart():
            return ThinkingDelta(piece)
        case CallPart():
            return ToolCallDelta(part.id, part.name, piece)
    assert_never(part)


def _block(part: Part) -> AssistantBlock | None:
    """None for a block that was opened and never filled. Thinking may be its signature alone."""
    whole = "".join(part.pieces)
    match part:
        case TextPart():
            return TextBlock(whole) if whole else None
        case ThinkingPart():
            return ThinkingBlock(whole, part.signature) if whole or part.signature else None
        case CallPart():
            return ToolCallBlock(part.id, part.name, arguments(whole))
    assert_never(part)


def _says_something(block: AssistantBlock) -> bool:
    return isinstance(block, ToolCallBlock) or (isinstance(block, TextBlock) and bool(block.text.strip()))


# --- what every stream's events have in common ------------------------------------------------------------------------


def read(event: Event, decoder: msgspec.json.Decoder[T]) -> T:
    """The data of an event. Raises :class:`ModelError` where it is an error, or cannot be read."""
    if event.name == b"error":
        raise error_event(event.data)
    try:
        return decode(event.data, decoder)
    except NotJson as error:
        if event.cut:
            raise ModelError("incomplete", "ended in the middle of an event", retryable=True) from None
        raise ModelError("provider", f"sent a chunk that cannot be read ({error}): {quote(event.data)}") from None


def unfinished(lacking: str) -> ModelError:
    """A stream that ended without what ends an answer: however much came, it is none."""
    return ModelError("incomplete", f"ended its answer without a {lacking}, so some of it is missing", retryable=True)


def mapping(given: Any) -> dict[str, Any]:
    """An object that an event should have; an empty one where it has something else or nothing."""
    return given if isinstance(given, dict) else {}


def joined(parts: Any, *keys: str, by: str = "") -> str:
    """The texts of a list of content parts, each under one of ``keys``."""
    found: Sequence[Any] = parts if isinstance(parts, list) else ()
    texts = [text for part in found for key in keys if isinstance(text := mapping(part).get(key), str)]
    return by.join(texts)


def json_text(given: Any) -> str:
    """A call's arguments as the text that they should be; some servers send them as an object."""
    return given if isinstance(given, str) else msgspec.json.encode(given).decode() if given else ""


def tokens(given: Any) -> int:
    return int(given) if isinstance(given, int | float) and 0 <= given < 2**53 else 0
