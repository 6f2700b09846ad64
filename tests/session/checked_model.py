"""A played model that examines the conversation at every request, as each of the real adapters would send it (I-8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import model_bench as bench
import msgspec
import strict_checkers
from inprocess import PlayedModel

from loop_protocol.v1.types import AssistantMessage, Message, ModelRef, UserMessage
from loopd.agent import Model, Reply
from loopd.core.history import History, decode_message

ADAPTERS: dict[tuple[str, ModelRef], Model] = {
    (api, ref): bench.catalogue("http://127.0.0.1:1/v1", api=api).resolve(ref)
    for api in strict_checkers.CHECKERS
    for ref in (bench.M, bench.EYES)
}


@dataclass(slots=True)
class CheckedModel(PlayedModel):
    """``history`` answers the conversation of the session that asks. What was wrong is in ``faults``: an assertion that
    is raised here would be the outcome of a run."""

    ref: ModelRef = bench.M
    history: Callable[[], History] | None = None
    requests: int = 0
    faults: list[str] = field(default_factory=list)

    def encode(self, group: Sequence[Any]) -> bytes:
        """What each adapter makes of it, side by side."""
        parts = {api: msgspec.Raw(b"[%b]" % self._adapter(api).encode(group)) for api in strict_checkers.CHECKERS}
        return msgspec.json.encode(parts)

    async def respond(self, request: Any, say: Callable[[Any], None]) -> Reply:
        self.requests += 1
        try:
            self._examine(request)
        except Exception as error:
            self.faults.append(repr(error))
            raise
        return await super(CheckedModel, self).respond(request, say)

    def _examine(self, request: Any) -> None:
        assert self.history is not None
        history = self.history()
        history.require_paired()
        messages = [decode_message(history.line(index)) for index in range(history.messages)]
        users = [place for place, message in enumerate(messages) if isinstance(message, UserMessage)]
        assert list(request.input.turn) == messages[users[-1] :]
        groups = msgspec.json.decode(b"[%b]" % request.input.encoded, type=list[dict[str, msgspec.Raw]])
        for api, accepted in strict_checkers.CHECKERS.items():
            adapter = self._adapter(api)
            kept = b",".join(part for group in groups if (part := bytes(group[api])[1:-1]))
            assert kept == bench.from_scratch(adapter, messages), api
            accepted(bench.sent(adapter, bench.Input(kept, request.input.turn)))

    def _adapter(self, api: str) -> Model:
        return ADAPTERS[api, self.ref]


def asked(request: Any) -> tuple[str, list[str]]:
    """The text that a model has to answer now, and how each answer to it ended so far."""
    turn: Sequence[Message] = request.input.turn
    text = "".join(getattr(block, "text", "") for block in turn[0].content)
    return text, [message.stop_reason for message in turn if isinstance(message, AssistantMessage)]
