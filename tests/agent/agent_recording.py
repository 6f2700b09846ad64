"""A recording session for agents, and the check that no process of a tool is left."""

from __future__ import annotations

import os
from collections.abc import Callable

from loop_protocol.v1.types import (
    AssistantMessage,
    Message,
    TextBlock,
    ToolCallBlock,
    ToolResultMessage,
    UserMessage,
)
from loopd.agent import Ask, Reply, Said, Tool, ToolOutcome, ToolScope
from loopd.agent.context import ConversationInput
from loopd.agent.tools.process import MARK
from loopd.agent.tools.procfs import below, mark_of, process_table
from loopd.core.history import History

MakeScope = Callable[..., ToolScope]


async def call(tool: Tool, arguments: object, scope: ToolScope) -> tuple[str, bool]:
    """The text of the outcome, and whether it is an error."""
    outcome = await tool.run(arguments, scope)
    (block,) = outcome.content
    assert isinstance(block, TextBlock)
    return block.text, outcome.is_error


class Recording:
    """A ``RunContext`` that makes history of what is appended, with its pairing rules, and keeps the order."""

    def __init__(self, input: ConversationInput, prompt: str) -> None:
        self.input = input
        self.history = History()
        self.said: list[Said] = []
        self.order: list[str] = []
        self._keep(UserMessage(index=0, content=[TextBlock(prompt)], timestamp=1))

    def say(self, said: Said) -> None:
        self.said.append(said)
        self.order.append(type(said).__name__)

    async def approve(self, _: ToolCallBlock, __: Ask) -> str | None:
        return "nobody is there"

    async def take_inputs(self) -> bool:
        return False

    async def append(self, finished: Reply | ToolOutcome, call: ToolCallBlock | None = None) -> Message:
        index = self.history.messages
        message: Message
        if isinstance(finished, Reply):
            message = AssistantMessage(
                index=index,
                content=finished.content,
                timestamp=1,
                provider="scripted",
                model="model",
                usage=finished.usage,
                stop_reason=finished.stop_reason,
            )
        else:
            assert call is not None
            message = ToolResultMessage(
                index=index,
                content=finished.content,
                timestamp=1,
                tool_call_id=call.id,
                tool_name=call.name,
                is_error=finished.is_error,
            )
        self.order.append(type(message).__name__)
        return self._keep(message)

    def _keep(self, message: Message) -> Message:
        self.history.append(message)
        self.input.add(message)
        return message


def left_over() -> list[str]:
    """Orphans of tool calls below this process, dead ones too, and marked processes anywhere below it."""
    table = process_table()
    orphans = [child for child in table[os.getpid()] if child.session != os.getsid(0)]
    # Not anywhere on the machine: another daemon's tools are none of ours.
    marked = [p for p in below(table, os.getpid()) if mark_of(p.pid, MARK) not in (None, os.environ.get(MARK))]
    return [str(process) for process in orphans + marked]
