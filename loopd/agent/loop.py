"""One prompt's work: ask the model, run the tools that it calls, one after the other, until it answers without a call.

Whatever a tool does becomes its call's result, so that the model can go on; a model's failure travels. There is no
limit on turns: people leave it working overnight, and stop is the remedy.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import msgspec
import trio

from loop_protocol.v1.types import ImageBlock, Permission, TextBlock, ToolCallBlock, UserBlock
from loopd.agent import (
    MALFORMED_KEY,
    Ask,
    Model,
    ModelError,
    ModelInput,
    ModelRequest,
    Reply,
    RunContext,
    Tool,
    ToolEnded,
    ToolEnvironment,
    ToolOutcome,
    ToolOutput,
    ToolScope,
    ToolSpec,
    ToolStarted,
)
from loopd.agent.retry import respond

log = logging.getLogger(__name__)

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(slots=True, frozen=True, kw_only=True)
class Agent:
    """Made afresh for every prompt (S-1). ``input`` grows while it runs: the session adds what ``append`` finished."""

    model: Model
    tools: Sequence[Tool]
    input: ModelInput
    system: str
    cwd: str
    env: ToolEnvironment
    permission: Permission
    max_output_tokens: int | None = None

    async def run(self, context: RunContext) -> None:
        """Returns when the model has answered. Raises :class:`ModelError`; cancelling it ends the running tool."""
        request = ModelRequest(
            system=self.system,
            input=self.input,
            tools=[declare(tool) for tool in self.tools],
            max_output_tokens=self.max_output_tokens,
        )
        while True:
            reply = await respond(self.model, request, context)
            _require_answer(reply)
            await context.append(reply)
            calls = [block for block in reply.content if isinstance(block, ToolCallBlock)]
            for call in calls:
                # A stop between two calls counts, however little the first one waited.
                await trio.lowlevel.checkpoint()
                await self._perform(call, context, cut=reply.stop_reason == "length")
            if not await context.take_inputs() and not calls:
                return

    async def _perform(self, call: ToolCallBlock, context: RunContext, *, cut: bool) -> None:
        def show(text: str) -> None:
            context.say(ToolOutput(call.id, _valid(text)))

        async def ask(wanted: Ask) -> str | None:
            return await context.approve(call, _valid_ask(wanted))

        scope = ToolScope(call.id, self.cwd, self.env, self.permission, ask, show, self.model.input)
        context.say(ToolStarted(call))
        outcome = _cut_off() if cut else await self._outcome(call, scope)
        context.say(ToolEnded(call.id, outcome.is_error))
        await context.append(ToolOutcome([_valid_block(block) for block in outcome.content], outcome.is_error), call)

    async def _outcome(self, call: ToolCallBlock, scope: ToolScope) -> ToolOutcome:
        tool = next((tool for tool in self.tools if tool.name == call.name), None)
        if tool is None:
            known = ", ".join(tool.name for tool in self.tools) or "none"
            return _failure(f"There is no tool {call.name!r}. The tools are: {known}.")
        try:
            arguments = msgspec.convert(call.arguments, tool.parameters)
        except msgspec.ValidationError as error:
            expected = msgspec.json.encode(declare(tool).parameters).decode()
            return _failure(f"The arguments of {tool.name} {_fault(call, error)}. They must match {expected}")
        try:
            return await tool.run(arguments, scope)
        except Exception as error:  # boundary: a bug in a tool is that call's result; the run and the session go on
            log.exception("tool %s failed", tool.name)
            return _failure(f"The tool {tool.name} failed, which is a fault of it: {type(error).__name__}: {error}")


def declare(tool: Tool) -> ToolSpec:
    """A tool as a model is told of it; its parameters are one object schema without references."""
    return ToolSpec(tool.name, tool.description, _schema(tool.parameters))


@cache
def _schema(parameters: type[msgspec.Struct]) -> dict[str, Any]:
    """Built once per type: for three tools it costs 1 ms, a fifth of what a prompt costs in all."""
    (reference,), schemas = msgspec.json.schema_components([parameters], ref_template="{name}")
    return {key: value for key, value in schemas[reference["$ref"]].items() if key != "title"}


def _require_answer(reply: Reply) -> None:
    """Only thoughts, or nothing at all, is never a success (K-30)."""
    if any(
        isinstance(block, ToolCallBlock) or (isinstance(block, TextBlock) and block.text) for block in reply.content
    ):
        return
    reason = "reached its output limit before it said anything" if reply.stop_reason == "length" else "answered nothing"
    raise ModelError("incomplete", f"the model {reason}")


def _fault(call: ToolCallBlock, error: msgspec.ValidationError) -> str:
    malformed = call.arguments.get(MALFORMED_KEY)
    return f"do not fit: {error}" if malformed is None else f"are no JSON object: {malformed}"


def _cut_off() -> ToolOutcome:
    # Which call of the answer was cut cannot be told from its arguments, which may be valid all the same.
    return _failure("Not run: your answer reached the output limit. Make the call again, alone and with less text.")


def _failure(text: str) -> ToolOutcome:
    return ToolOutcome([TextBlock(text)], is_error=True)


def _valid_block(block: UserBlock) -> UserBlock:
    return block if isinstance(block, ImageBlock) else TextBlock(_valid(block.text))


def _valid_ask(ask: Ask) -> Ask:
    texts: dict[str, Any] = {
        one.name: _valid(value) for one in fields(ask) if isinstance(value := getattr(ask, one.name), str)
    }
    if any(_SURROGATE.search(rule) for rule in ask.rules):  # two names would be shown as the same
        texts |= {"rules": (), "rules_refused": "its name cannot be shown"}
    return replace(ask, **texts)


def _valid(text: str) -> str:
    """A lone surrogate, as in an undecodable file name, cannot be stored: it ends where the text enters (K-27)."""
    return _SURROGATE.sub("\ufffd", text)
