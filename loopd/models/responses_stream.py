"""An OpenAI Responses stream, event by event, into deltas while it comes and one reply at its end.

Events name their item by its place in the output, by its id, by both or, on some servers, by neither. What an item's
last event repeats is taken where its pieces did not come. A stream without a final status is never an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from loop_protocol.v1.types import Usage

from ..agent import Delta, ModelError, Reply
from .answer import Answer, CallPart, Part, TextPart, ThinkingPart, joined, json_text, mapping, read, tokens, unfinished
from .forms import seal
from .refusal import stream_error
from .sse import Event

API = "openai-responses"
CUT = ("max_output_tokens", "max_tokens")

P = TypeVar("P", TextPart, ThinkingPart, CallPart)


class _Event(Struct):
    """Loosely typed: of the many kinds of events, an unknown one may have anything under these names."""

    type: str | None = None
    delta: Any = None
    output_index: Any = None
    item_id: Any = None
    item: Any = None
    response: Any = None
    error: Any = None


_event = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class ResponsesStream:
    """Give it every event; ``reply`` when the stream is over."""

    say: Callable[[Delta], None]
    _answer: Answer = field(init=False)
    _parts: dict[str | int, Part] = field(default_factory=dict)
    _current: Part | None = None  # what an event without an item's name is about
    _finish: str | None = None
    _usage: Usage = field(default_factory=lambda: Usage(0, 0))

    def __post_init__(self) -> None:
        self._answer = Answer(self.say)

    def take(self, event: Event) -> bool:
        """Whether this was the last event. Raises :class:`ModelError`."""
        data = event.data.strip()
        if data == b"[DONE]":
            return True
        if not data:
            return False
        given = read(event, _event)
        match given.type or event.name.decode("ascii", "replace"):
            case "response.output_text.delta" | "response.refusal.delta":
                self._add(self._text(given), given)
            case "response.reasoning_summary_text.delta" | "response.reasoning_text.delta":
                self._add(self._thinking(given), given)
            case "response.reasoning_summary_part.added":
                self._separate(self._thinking(given))
            case "response.function_call_arguments.delta":
                self._add(self._call(given), given)
            case "response.output_item.added":
                self._begin(given)
            case "response.output_item.done":
                self._complete(given)
            case "response.completed" | "response.incomplete" | "response.done" | "response.failed":
                self._end(mapping(given.response))
                return True
            case "error":
                raise stream_error(given.error or msgspec.json.decode(data))
            case None | "" if given.error:
                raise stream_error(given.error)
        return False

    def reply(self) -> Reply:
        """The finished answer. Raises :class:`ModelError` where there is none."""
        match self._finish:
            case None:
                raise unfinished("final status")
            case "content_filter":
                raise ModelError("content_filter", "stopped its answer with its content filter")
            case "completed":
                return self._answer.reply(self._usage, cut=False)
            case reason if reason in CUT:
                return self._answer.reply(self._usage, cut=True)
            case reason:
                raise ModelError("incomplete", f"did not complete its answer: {reason}")

    # --- which block an event is about --------------------------------------------------------------------------------

    def _text(self, given: _Event) -> TextPart:
        return self._known(TextPart, given) or self._named(self._answer.open_text(), given)

    def _thinking(self, given: _Event) -> ThinkingPart:
        return self._known(ThinkingPart, given) or self._named(self._answer.open_thinking(), given)

    def _call(self, given: _Event) -> CallPart:
        item = mapping(given.item)
        id = item.get("call_id")
        call = self._known(CallPart, given)
        # There are servers that give every item the same place.
        if call is None or (id and call.given_id and id != call.given_id):
            return self._named(self._answer.open_call(id=id, name=item.get("name")), given)
        return call

    def _known(self, kind: type[P], given: _Event) -> P | None:
        for key in _keys(given):
            if isinstance(part := self._parts.get(key), kind):
                return part
        # A call under another name is another call; text under another name is still what is being said.
        stray = kind is not CallPart or not _keys(given)
        return self._current if stray and isinstance(self._current, kind) else None

    def _named(self, part: P, given: _Event) -> P:
        self._parts.update(dict.fromkeys(_keys(given), part))
        self._current = part
        return part

    # --- what it says about it ----------------------------------------------------------------------------------------

    def _add(self, part: Part, given: _Event) -> None:
        if isinstance(given.delta, str):
            self._answer.add(part, given.delta)

    def _separate(self, part: ThinkingPart) -> None:
        if part.pieces:
            self._answer.add(part, "\n\n")

    def _begin(self, given: _Event) -> None:
        self._current = None
        for key in _keys(given):
            self._parts.pop(key, None)
        part = self._part(given)
        if isinstance(part, CallPart):
            self._answer.add(part, json_text(mapping(given.item).get("arguments")))

    def _complete(self, given: _Event) -> None:
        item, part = mapping(given.item), self._part(given)
        match part:
            case TextPart():
                self._answer.complete(part, joined(item.get("content"), "text", "refusal"))
            case ThinkingPart():
                summary = joined(item.get("summary"), "text", by="\n\n")
                self._answer.complete(part, summary or joined(item.get("content"), "text"))
                if secret := item.get("encrypted_content"):
                    part.signature = seal(API, str(secret))
            case CallPart():
                part.name = part.name or str(item.get("name") or "")
                self._answer.complete(part, json_text(item.get("arguments")))
        self._current = None

    def _part(self, given: _Event) -> Part | None:
        """The block of an item; None for items that are none of ours."""
        match mapping(given.item).get("type"):
            case "message":
                return self._text(given)
            case "reasoning":
                return self._thinking(given)
            case "function_call":
                return self._call(given)
        return None

    def _end(self, response: dict[str, Any]) -> None:
        self._usage = _usage(mapping(response.get("usage")))
        status = response.get("status")
        if status == "failed" or response.get("error"):
            raise stream_error(response.get("error") or response)
        if not any(part.pieces for part in self._answer.parts):
            # There are servers that send the whole answer with this event alone.
            output = response.get("output")
            for index, item in enumerate(output if isinstance(output, list) else []):
                self._complete(_Event(output_index=index, item=item))
        reason = mapping(response.get("incomplete_details")).get("reason")
        self._finish = str(reason or status or "completed")


def _keys(given: _Event) -> list[str | int]:
    keys = (given.output_index, given.item_id, mapping(given.item).get("id"))
    return [key for key in keys if isinstance(key, str | int) and key != ""]


def _usage(given: dict[str, Any]) -> Usage:
    cached = mapping(given.get("input_tokens_details")).get("cached_tokens")
    return Usage(tokens(given.get("input_tokens")), tokens(given.get("output_tokens")), tokens(cached))
