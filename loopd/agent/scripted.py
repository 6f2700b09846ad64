"""A model that answers what it was told to, for tests of whatever drives models; it keeps what it was asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import trio

from loop_protocol.v1.types import Message, ModelRef, TextBlock, ThinkingBlock
from loopd.agent import Delta, ModelError, ModelRequest, Reply, TextDelta, ThinkingDelta


@dataclass(slots=True)
class ScriptedModel:
    """``script`` is used up reply by reply; at its end it waits until it is cancelled, like a provider that hangs."""

    script: list[Reply | ModelError]
    ref: ModelRef = field(default_factory=lambda: ModelRef("scripted", "model"))
    input: frozenset[str] = frozenset({"text", "image"})
    asked: list[bytes] = field(default_factory=list)
    declared: list[str] = field(default_factory=list)
    encoded: int = 0

    def encode(self, group: Sequence[Message]) -> bytes:
        self.encoded += 1
        return b",".join(msgspec.json.encode(message) for message in group)

    async def respond(self, request: ModelRequest, say: Callable[[Delta], None]) -> Reply:
        self.asked.append(bytes(request.input.encoded))
        self.declared = [tool.name for tool in request.tools]
        if not self.script:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        reply = self.script.pop(0)
        if isinstance(reply, ModelError):
            raise reply
        for block in reply.content:
            if isinstance(block, TextBlock):
                say(TextDelta(block.text))
            elif isinstance(block, ThinkingBlock):
                say(ThinkingDelta(block.thinking))
        return reply
