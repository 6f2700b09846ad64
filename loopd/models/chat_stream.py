"""A Chat Completions stream, event by event, into deltas while it comes and one reply at its end.

It reads what servers really send: a first delta with ``content: null``, calls in fragments with or without index and
id, a last chunk without choices, thinking under two names. A stream without a finish reason is never an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from loop_protocol.v1.types import Usage

from ..agent import Delta, ModelError, Reply
from .answer import Answer, CallPart, TextPart, ThinkingPart, json_text, mapping, read, tokens, unfinished
from .forms import seal
from .refusal import stream_error
from .sse import Event

API = "openai-chat"
# The names that thinking has here; a block's signature says which one, since it goes back under the same.
THOUGHTS = ("reasoning_content", "reasoning")
# How an answer ends, in the words of the API and of servers that have their own for the same. Whether it ended with
# calls is seen by the calls.
ENDED = frozenset({"stop", "tool_calls", "function_call", "end_turn", "eos", "eos_token", "stop_sequence"})
CUT = frozenset({"length", "max_tokens", "model_length"})


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
class ChatStream:
    """Give it every event; ``reply`` when the stream is over."""

    say: Callable[[Delta], None]
    _answer: Answer = field(init=False)
    _text: TextPart | None = None
    _thinking: ThinkingPart | None = None
    _calls: list[tuple[int | None, CallPart]] = field(default_factory=list)
    _finish: str | None = None
    _usage: Usage = field(default_factory=lambda: Usage(0, 0))

    def __post_init__(self) -> None:
        self._answer = Answer(self.say)

    def take(self, event: Event) -> bool:
        """Whether this was the last event. Raises :class:`ModelError`."""
        data = event.data.strip()
        if data == b"[DONE]":
            return True
        if data:
            self._fold(read(event, _chunk))
        return False

    def reply(self) -> Reply:
        """The finished answer. Raises :class:`ModelError` where there is none."""
        if self._finish is None:
            raise unfinished("finish reason")
        if self._finish == "content_filter":
            raise ModelError("content_filter", "stopped its answer with its content filter")
        if self._finish not in ENDED | CUT:
            # "error", "abort", "insufficient_system_resource": whatever came, its end is missing.
            raise ModelError("provider", f"ended its answer with the finish reason {self._finish!r}")
        return self._answer.reply(self._usage, cut=self._finish in CUT)

    def _fold(self, chunk: _Chunk) -> None:
        if chunk.error:
            raise stream_error(chunk.error)
        if chunk.usage is not None:
            self._usage = _usage(mapping(chunk.usage))
        for choice in (chunk.choices or [])[:1]:
            if choice.delta is not None:
                self._fold_delta(choice.delta)
            # Some servers repeat an empty one in what follows the finish.
            self._finish = choice.finish_reason or self._finish

    def _fold_delta(self, delta: _Delta) -> None:
        # One of the two: there are servers that say the same under both.
        for name, thought in zip(THOUGHTS, (delta.reasoning_content, delta.reasoning), strict=True):
            if thought:
                self._think(thought, name)
                break
        for text in (delta.content, delta.refusal):
            if text:
                self._text = self._text or self._answer.open_text()
                self._answer.add(self._text, text)
        for fragment in delta.tool_calls or ():
            self._fold_fragment(fragment)

    def _think(self, thought: str, name: str) -> None:
        if self._thinking is None:
            self._thinking = self._answer.open_thinking()
            self._thinking.signature = seal(API, name)
        self._answer.add(self._thinking, thought)

    def _fold_fragment(self, fragment: _Fragment) -> None:
        function = fragment.function or _Function()
        call = self._continued(fragment) or self._started(fragment)
        call.name = call.name or function.name or ""
        self._answer.add(call, json_text(function.arguments))

    def _continued(self, fragment: _Fragment) -> CallPart | None:
        """The call that the fragment goes on with: the last one of its index, else the last one.

        Another id under the same index starts another call: there are servers that number every call 0.
        """
        same = [call for index, call in self._calls if fragment.index is None or index == fragment.index]
        if not same or (fragment.id and same[-1].given_id and fragment.id != same[-1].given_id):
            return None
        if fragment.index is None and not fragment.id and fragment.function and fragment.function.name:
            return None
        return same[-1]

    def _started(self, fragment: _Fragment) -> CallPart:
        call = self._answer.open_call(id=fragment.id)
        self._calls.append((fragment.index, call))
        return call


def _usage(given: dict[str, Any]) -> Usage:
    cached = mapping(given.get("prompt_tokens_details")).get("cached_tokens")
    return Usage(tokens(given.get("prompt_tokens")), tokens(given.get("completion_tokens")), tokens(cached))
