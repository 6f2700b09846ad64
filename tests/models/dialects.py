"""The three APIs as the vendors document their streams, spoken by a scripted provider: the same answer in each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import scripted_provider as scripted

End = Literal["stop", "calls", "length", "filter"]


@dataclass(frozen=True)
class Text:
    pieces: Sequence[str]


@dataclass(frozen=True)
class Thinking:
    pieces: Sequence[str]
    secret: str = ""


@dataclass(frozen=True)
class Call:
    id: str
    name: str
    pieces: Sequence[str]


Block = Text | Thinking | Call


class Dialect(Protocol):
    """``whole`` is a stream's events, each as bytes; the last ``closing`` of them say that it is over. 12 tokens came
    in, 5 of them cached, and 7 went out."""

    api: str
    path: str
    closing: int

    def whole(self, *blocks: Block, end: End = "stop") -> list[bytes]: ...

    def error(self, type: str, message: str) -> bytes:
        """What comes instead of the rest when it fails in mid-stream."""


def named(type: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (type.encode(), json.dumps({"type": type, **fields}).encode())


class Chat:
    api = "openai-chat"
    path = "/chat/completions"
    closing = 3  # finish reason, usage, [DONE]

    def whole(self, *blocks: Block, end: End = "stop") -> list[bytes]:
        events = [scripted.delta(role="assistant", content=None)]
        calls = 0
        for block in blocks:
            match block:
                case Text():
                    events += [scripted.delta(content=piece) for piece in block.pieces]
                case Thinking():
                    events += [scripted.delta(reasoning_content=piece) for piece in block.pieces]
                case Call():
                    events.append(scripted.call(calls, "", id=block.id, name=block.name))
                    events += [scripted.call(calls, piece) for piece in block.pieces]
                    calls += 1
        reasons = {"stop": "stop", "calls": "tool_calls", "length": "length", "filter": "content_filter"}
        return [*events, scripted.delta(reasons[end]), scripted.USAGE, scripted.DONE]

    def error(self, type: str, message: str) -> bytes:
        return scripted.event({"error": {"type": type, "message": message}})


class Responses:
    api = "openai-responses"
    path = "/responses"
    closing = 1

    def whole(self, *blocks: Block, end: End = "stop") -> list[bytes]:
        events = [named("response.created", response={"status": "in_progress"}), named("response.in_progress")]
        for index, block in enumerate(blocks):
            at: dict[str, Any] = {"output_index": index, "item_id": f"item_{index}"}
            match block:
                case Text():
                    item: dict[str, Any] = {"type": "message", "role": "assistant", "content": []}
                    deltas = [named("response.output_text.delta", **at, delta=piece) for piece in block.pieces]
                    done = {**item, "content": [{"type": "output_text", "text": "".join(block.pieces)}]}
                case Thinking():
                    item = {"type": "reasoning", "summary": []}
                    deltas = [
                        named("response.reasoning_summary_part.added", **at, summary_index=0),
                        *(named("response.reasoning_summary_text.delta", **at, delta=piece) for piece in block.pieces),
                    ]
                    summary = [{"type": "summary_text", "text": "".join(block.pieces)}]
                    done = {**item, "summary": summary, "encrypted_content": block.secret}
                case Call():
                    item = {"type": "function_call", "call_id": block.id, "name": block.name, "arguments": ""}
                    deltas = [
                        named("response.function_call_arguments.delta", **at, delta=piece) for piece in block.pieces
                    ]
                    done = {**item, "arguments": "".join(block.pieces)}
            events.append(named("response.output_item.added", output_index=index, item={**item, "id": at["item_id"]}))
            events += deltas
            events.append(named("response.output_item.done", output_index=index, item={**done, "id": at["item_id"]}))
        return [*events, self._end(end)]

    def _end(self, end: End) -> bytes:
        usage = {"input_tokens": 12, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 5}}
        match end:
            case "length" | "filter":
                reason = "max_output_tokens" if end == "length" else "content_filter"
                response = {"status": "incomplete", "incomplete_details": {"reason": reason}, "usage": usage}
                return named("response.incomplete", response=response)
        return named("response.completed", response={"status": "completed", "error": None, "usage": usage})

    def error(self, type: str, message: str) -> bytes:
        return named("response.failed", response={"status": "failed", "error": {"code": type, "message": message}})


class Anthropic:
    api = "anthropic-messages"
    path = "/v1/messages"
    closing = 2

    def whole(self, *blocks: Block, end: End = "stop") -> list[bytes]:
        usage = {"input_tokens": 4, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 3, "output_tokens": 1}
        events = [named("message_start", message={"content": [], "usage": usage}), named("ping")]
        for index, block in enumerate(blocks):
            match block:
                case Text():
                    start: dict[str, Any] = {"type": "text", "text": ""}
                    deltas = [{"type": "text_delta", "text": piece} for piece in block.pieces]
                case Thinking():
                    start = {"type": "thinking", "thinking": "", "signature": ""}
                    deltas = [{"type": "thinking_delta", "thinking": piece} for piece in block.pieces]
                    deltas += [{"type": "signature_delta", "signature": block.secret}] if block.secret else []
                case Call():
                    start = {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
                    deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in block.pieces]
            events.append(named("content_block_start", index=index, content_block=start))
            events += [named("content_block_delta", index=index, delta=delta) for delta in deltas]
            events.append(named("content_block_stop", index=index))
        reasons = {"stop": "end_turn", "calls": "tool_use", "length": "max_tokens", "filter": "refusal"}
        delta = {"stop_reason": reasons[end], "stop_sequence": None}
        return [*events, named("message_delta", delta=delta, usage={"output_tokens": 7}), named("message_stop")]

    def error(self, type: str, message: str) -> bytes:
        return named("error", error={"type": type, "message": message})


DIALECTS: tuple[Dialect, ...] = (Chat(), Responses(), Anthropic())
