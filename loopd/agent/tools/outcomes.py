"""What a model is told when a tool is done: plain text, and a refusal that says who can lift it."""

from __future__ import annotations

from loop_protocol.v1.types import TextBlock
from loopd.agent import Ask, ToolOutcome, ToolScope


def told(text: str, *, is_error: bool = False) -> ToolOutcome:
    return ToolOutcome([TextBlock(text)], is_error)


async def refused(scope: ToolScope, ask: Ask) -> ToolOutcome | None:
    """None where the preset allows everything, or a person allows this."""
    if scope.permission == "danger-full-access":
        return None
    answer = await scope.ask(ask)
    return None if answer is None else told(answer, is_error=True)
