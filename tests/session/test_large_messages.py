"""A message too large to be kept whole is refused or cut where it enters, never discovered when it is read (K-15)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from inprocess import PlayedModel, Probe, ProbeArguments, World, call, running, text

from loop_protocol.jsonrpc import FRAME, RpcError
from loop_protocol.v1.types import TextBlock, Usage
from loopd.agent import Reply, ToolOutcome, ToolScope
from loopd.core.history import LINE
from loopd.core.messages import CUT
from loopd.storage.files import read_session
from loopd.storage.fs import FileSystem

HUGE = 50_000_000


class Flood(Probe):
    """A tool that answers with 50 MB."""

    async def run(self, arguments: ProbeArguments, scope: ToolScope) -> ToolOutcome:  # noqa: ARG002, ASYNC124 its port
        return ToolOutcome([TextBlock("y" * HUGE)])


async def _read_again(world: World, opened: Any) -> list[Any]:
    """All messages as the daemon pages them out after it has opened the session anew."""
    wire = await world.connect()
    await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
    again = await wire.open(world, kind="continue", attach=False)
    messages: list[Any] = []
    while len(messages) < again["state"]["messageCount"]:
        page = {"sessionId": again["sessionId"], "start": len(messages)}
        messages += (await wire.call("session/messages", page))["messages"]
    return messages


async def test_answers_and_tool_output_of_50_mb_are_cut_with_a_marker_and_open_again(tmp_path: Path) -> None:
    one = Reply([TextBlock("x" * HUGE)], Usage(1, 1), "stop")
    # Control characters have six bytes each in JSON.
    many = Reply([TextBlock("\x01" * 4_000_000) for _ in range(2)], Usage(1, 1), "stop")
    model = PlayedModel([call(), one, many])
    async with running(tmp_path, model=model, tools=[Flood()]) as world:
        wire = await world.connect()
        opened = await wire.open(world, attach=False)
        for _ in range(2):
            ask = {"sessionId": opened["sessionId"], "content": "hi", "wait": True}
            assert (await wire.call("session/prompt", ask))["saved"]
        _, stored = read_session(FileSystem(), opened["path"])
        assert max(map(len, stored.lines)) <= LINE < FRAME
        messages = await _read_again(world, opened)
    assert [one["role"] for one in messages] == ["user", "assistant", "toolResult", "assistant", "user", "assistant"]
    for place, said in ((2, "y"), (3, "x"), (5, "\x01")):
        first = messages[place]["content"][0]["text"]
        assert first.startswith(said * 1_000_000)
        assert first.endswith(CUT)


async def test_a_prompt_that_no_page_could_hold_is_refused_and_the_largest_that_one_can_is_kept(tmp_path: Path) -> None:
    async with running(tmp_path, model=PlayedModel([text("seen")])) as world:
        wire = await world.connect()
        opened = await wire.open(world, attach=False)
        before = Path(opened["path"]).read_bytes()
        with pytest.raises(RpcError) as refused:
            await wire.prompt(opened["sessionId"], "x" * LINE)
        assert (refused.value.kind, refused.value.data["limit"]) == ("limit_exceeded", "message")
        assert Path(opened["path"]).read_bytes() == before
        assert (await wire.call("session/state", {"sessionId": opened["sessionId"]}))["liveCount"] == 0
        largest = "x" * (LINE - 200)
        assert await wire.prompt(opened["sessionId"], largest, wait=True)
        messages = await _read_again(world, opened)
        assert [one["content"][0]["text"] for one in messages] == [largest, "seen"]
        assert len(msgspec.json.encode(messages[0])) < LINE
