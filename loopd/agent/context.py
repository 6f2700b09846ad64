"""The conversation as one provider wants it: a group is encoded once, when it is complete, then left alone.

A group is a user message, or an assistant message with all its tool results. The result is a pure function of the
messages and the model, so what was built message by message equals what is rebuilt from the stored lines (I-8).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import assert_never

import trio

from loop_protocol.v1.types import AssistantMessage, Message, ToolCallBlock, ToolResultMessage, UserMessage
from loopd.agent import Model
from loopd.core.history import decode_message

# How long a rebuild holds the loop before it lets others run.
BLOCK_S = 0.002


class ConversationInput:
    """Grows with :meth:`add`; a request made at any time sees the groups that are complete."""

    __slots__ = ("_due", "_encoded", "_group", "_model", "_turn")

    def __init__(self, model: Model) -> None:
        self._clear(model)

    def _clear(self, model: Model) -> None:
        self._model = model
        self._encoded = bytearray()
        self._turn: list[Message] = []
        self._group: list[Message] = []
        self._due = 0  # results that the open group still waits for

    @property
    def encoded(self) -> bytearray:
        """Valid until the next :meth:`add`; a view of it that is still held then makes ``add`` fail."""
        return self._encoded

    @property
    def turn(self) -> Sequence[Message]:
        return self._turn

    def add(self, message: Message) -> None:
        """The next message of the history. Raises ValueError where calls and results do not pair."""
        due = self._due + _results_due(message)
        if due < 0 or (self._due and not isinstance(message, ToolResultMessage)):
            raise ValueError(f"message {message.index} does not pair: {self._due} results were due")
        if isinstance(message, UserMessage):
            self._turn = []
        self._turn.append(message)
        self._group.append(message)
        self._due = due
        if not due:
            self._close_group()

    def _close_group(self) -> None:
        encoded = self._model.encode(self._group)
        if encoded and self._encoded:
            self._encoded += b","
        self._encoded += encoded
        self._group = []

    async def rebuild(self, model: Model, lines: Iterable[bytes]) -> None:
        """Start again for ``model`` from stored message lines. Cancelled or failed, it leaves all as it was."""
        fresh = ConversationInput(model)
        block = time.perf_counter()
        for line in lines:
            fresh.add(decode_message(line))
            if time.perf_counter() - block > BLOCK_S:
                await trio.lowlevel.checkpoint()
                block = time.perf_counter()
        for name in self.__slots__:
            setattr(self, name, getattr(fresh, name))


def _results_due(message: Message) -> int:
    match message:
        case UserMessage():
            return 0
        case AssistantMessage():
            return sum(isinstance(block, ToolCallBlock) for block in message.content)
        case ToolResultMessage():
            return -1
    assert_never(message)
