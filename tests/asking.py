"""A tool that asks before it does anything, and people who answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import trio
from inprocess import Wire, World, call, text

from loop_protocol.v1.events import ApprovalRequested, ApprovalResolved
from loop_protocol.v1.types import TextBlock
from loopd.agent import Ask, Reply, ToolOutcome, ToolScope

RULE = "ask: touch"
REASON = "it changes things"
PATIENCE_S = 5.0
UNPARSED = "it cannot be parsed"


class AskArguments(msgspec.Struct):
    what: str = "it"
    rules: list[str] = []


@dataclass(slots=True)
class Asking:
    """Asks for what it is called with. ``done``: what was allowed and begun; ``told``: what it was answered."""

    name: str = "ask"
    description: str = "for tests"
    parameters: type = AskArguments
    done: list[str] = field(default_factory=list)
    told: list[str | None] = field(default_factory=list)
    diff: str | None = None

    async def run(self, arguments: AskArguments, scope: ToolScope) -> ToolOutcome:
        ask = Ask(
            operation="command",
            reason=REASON,
            sandbox="nothing",
            rules=arguments.rules,
            rules_refused=None if arguments.rules else UNPARSED,
            diff=self.diff,
        )
        answer = await scope.ask(ask)
        self.told.append(answer)
        if answer is not None:
            return ToolOutcome([TextBlock(answer)], is_error=True)
        self.done.append(arguments.what)
        await trio.lowlevel.checkpoint()
        return ToolOutcome([TextBlock("did " + arguments.what)])


def asks(what: str = "it", *, id: str = "c1", rules: list[str] | None = None) -> Reply:
    return call("ask", id=id, what=what, rules=rules or [])


def twice(*, rules: list[str]) -> Reply:
    """Two calls of one answer."""
    first, second = asks("one", rules=rules), asks("two", id="c2", rules=rules)
    return Reply([*first.content, *second.content], text("").usage, "toolUse")


async def person(world: World, name: str = "nvim", *, attach: str | None = None, **options: Any) -> Wire:
    """A client that can approve, attached to that runtime if one is given."""
    wire = await world.connect(handshake=False)
    hello = {"versions": [1], "client": {"name": name}, "capabilities": {"approvals": True}}
    await wire.call("initialize", hello)
    if attach is not None:
        await wire.call("runtime/attach", {"runtimeId": attach, **options})
    return wire


async def requested(wire: Wire) -> str:
    """The id of the next request."""
    with trio.fail_after(PATIENCE_S):
        event = (await wire.event("approval_requested")).event
    assert isinstance(event, ApprovalRequested)
    return event.request.approval_id


async def resolved(wire: Wire) -> ApprovalResolved:
    with trio.fail_after(PATIENCE_S):
        event = (await wire.event("approval_resolved")).event
    assert isinstance(event, ApprovalResolved)
    return event


async def answer(wire: Wire, approval_id: str, decision: str = "allowed-once", **options: Any) -> Any:
    return await wire.call("approval/resolve", {"approvalId": approval_id, "decision": decision, **options})


async def pending(wire: Wire, **options: Any) -> list[Any]:
    found: list[Any] = (await wire.call("approval/list", options))["approvals"]
    return found
