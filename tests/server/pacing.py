"""A model whose pace the test decides, and a client that only looks at bytes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import trio
from inprocess import REF, World, text

from loop_protocol.v1.types import ModelRef, Usage
from loopd.agent import Reply, TextDelta

MakeWorld = Callable[..., Awaitable[World]]
Say = Callable[[Any], None]


@dataclass(slots=True)
class Paced:
    """Says ``words`` words, each in an event of its own, then waits for ``go`` and ends its turn."""

    words: int = 1
    length: int = 8
    ref: ModelRef = REF
    input: frozenset[str] = frozenset({"text"})
    said: trio.Event = field(default_factory=trio.Event)
    go: trio.Event = field(default_factory=trio.Event)

    def encode(self, _group: Any) -> bytes:
        return b"{}"

    async def respond(self, _request: Any, say: Say) -> Reply:
        for number in range(self.words):
            say(TextDelta(f"{number:0{self.length}d} "))
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
        self.said.set()
        await self.go.wait()
        return Reply(text("done").content, Usage(1, 1), "stop")


def tag(message: Any) -> str:
    """What a message is: the type of an event, else the id of an answer."""
    if message.get("method") == "event":
        return str(message["params"]["event"]["type"])
    return f"answer {message['id']}"
