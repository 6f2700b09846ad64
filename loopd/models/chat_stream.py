"""A Chat Completions stream, event by event, into deltas while it comes and one reply at its end.

It reads what servers really send: a first delta with ``content: null``, calls in fragments with or without index and
id, a last chunk without choices, thinking under two names. A stream without a finish reason is never an answer.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from loop_protocol.v1.types import AssistantBlock, TextBlock, ThinkingBlock, ToolCallBlock, Usage

from ..agent import Delta, ModelError, Reply, TextDelta, ThinkingDelta, ToolCallDelta
from .lenient_json import NotJson, arguments, decode
from .refusal import quote, stream_error
from .sse import Event

# One message must fit a line of the history, where escapes can make it several times longer.
ANSWER = 8 * 1024 * 1024
CALLS = 128


class _Function(Struct):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _Fragment(Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Delta(Struct):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Fragment] | None = None


class _Choice(Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(Struct):
    choices: list[_Choice] | None = None
    usage: Any = None
    error: Any = None


_chunk = msgspec.json.Decoder(_Chunk)


@dataclass(slots=True)
class _Call:
    index: int | None
    id: str
    given_id: str
    name: str
    pieces: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ChatStream:
    """Give it every event; ``reply`` when the stream is over."""

    say: Callable[[Delta], None]
    _text: list[str] = field(default_factory=list)
    _thinking: list[str] = field(default_factory=list)
    _calls: list[_Call] = field(default_factory=list)
    _size: int = 0
    _finish: str | None = None
    _usage: Usage = field(default_factory=lambda: Usage(0, 0))

    def take(self, event: Event) -> bool:
        """Whether this was the last event. Raises :class:`ModelError`."""
        data = event.data.strip()
        if data == b"[DONE]":
            return True
        if not data:
            return False
        if event.name == b"error":
            raise ModelError("provider", f"failed in the middle of its answer: {quote(data)}")
        self._fold(self._decode(data, cut=event.cut))
        return False

    def reply(self) -> Reply:
        """The finished answer. Raises :class:`ModelError` where there is none."""
        if self._finish is None:
            text = "ended its answer without a finish reason, so some of it is missing"
            raise ModelError("incomplete", text, retryable=True)
        if self._finish == "content_filter":
            raise ModelError("content_filter", "stopped its answer with its content filter")
        blocks = self._blocks()
        if not any(isinstance(block, TextBlock | ToolCallBlock) for block in blocks):
            how = "used all its tokens before it said" if self._finish == "length" else "ended its turn without saying"
            raise ModelError("incomplete", f"{how} anything")
        if self._calls:
            return Reply(blocks, self._usage, "toolUse")
        return Reply(blocks, self._usage, "length" if self._finish == "length" else "stop")

    def _decode(self, data: bytes, *, cut: bool) -> _Chunk:
        try:
            return decode(data, _chunk)
        except NotJson as error:
            if cut:
                raise ModelError("incomplete", "ended in the middle of an event", retryable=True) from None
            raise ModelError("provider", f"sent a chunk that cannot be read ({error}): {quote(data)}") from None

    def _fold(self, chunk: _Chunk) -> None:
        if chunk.error:
            raise stream_error(chunk.error)
        if chunk.usage is not None:
            self._usage = _usage(chunk.usage)
        for choice in (chunk.choices or [])[:1]:
            if choice.delta is not None:
                self._fold_delta(choice.delta)
            # Some servers repeat an empty one in what follows the finish.
            self._finish = choice.finish_reason or self._finish

    def _fold_delta(self, delta: _Delta) -> None:
        thought = delta.reasoning_content or delta.reasoning
        if thought:
            self._count(thought)
            self._thinking.append(thought)
            self.say(ThinkingDelta(thought))
        for text in (delta.content, delta.refusal):
            if text:
                self._count(text)
                self._text.append(text)
                self.say(TextDelta(text))
        for fragment in delta.tool_calls or ():
            self._fold_fragment(fragment)

    def _fold_fragment(self, fragment: _Fragment) -> None:
        function = fragment.function or _Function()
        call = self._continued(fragment) or self._started(fragment)
        call.name = call.name or function.name or ""
        given = function.arguments
        piece = given if isinstance(given, str) else msgspec.json.encode(given).decode() if given else ""
        self._count(piece)
        call.pieces.append(piece)
        self.say(ToolCallDelta(call.id, call.name, piece))

    def _continued(self, fragment: _Fragment) -> _Call | None:
        """The call that the fragment goes on with: the last one of its index, else the last one.

        Another id under the same index starts another call: there are servers that number every call 0.
        """
        same = [call for call in self._calls if fragment.index is None or call.index == fragment.index]
        if not same or (fragment.id and same[-1].given_id and fragment.id != same[-1].given_id):
            return None
        if fragment.index is None and not fragment.id and fragment.function and fragment.function.name:
            return None
        return same[-1]

    def _started(self, fragment: _Fragment) -> _Call:
        if len(self._calls) == CALLS:
            raise ModelError("provider", f"made more than {CALLS} tool calls at once")
        given = fragment.id or ""
        taken = any(call.id == given for call in self._calls)
        id = given if given and not taken else f"call_{secrets.token_hex(12)}"
        self._calls.append(_Call(fragment.index, id, given, ""))
        return self._calls[-1]

    def _blocks(self) -> list[AssistantBlock]:
        blocks: list[AssistantBlock] = []
        if self._thinking:
            blocks.append(ThinkingBlock("".join(self._thinking)))
        if self._text:
            blocks.append(TextBlock("".join(self._text)))
        blocks += [ToolCallBlock(call.id, call.name, arguments("".join(call.pieces))) for call in self._calls]
        return blocks

    def _count(self, text: str) -> None:
        self._size += len(text)
        if self._size > ANSWER:
            raise ModelError("provider", f"answered with more than {ANSWER} characters")


def _usage(given: Any) -> Usage:
    match given:
        case {"prompt_tokens_details": {"cached_tokens": cached}}:
            pass
        case _:
            cached = 0
    counts = given if isinstance(given, dict) else {}
    return Usage(_tokens(counts.get("prompt_tokens")), _tokens(counts.get("completion_tokens")), _tokens(cached))


def _tokens(given: Any) -> int:
    return int(given) if isinstance(given, int | float) and 0 <= given < 2**53 else 0
