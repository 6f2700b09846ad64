"""The boundary of a run: what is kept, what is told, in which order, whatever ends it."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import trio
from inprocess import PlayedModel, Probe, call, running, text

from loopd.agent import TextDelta


async def test_a_prompt_is_answered_streamed_saved_and_settled_in_order(tmp_path: Path) -> None:  # I-3, D-2, P-5
    async with running(tmp_path, model=PlayedModel([call(), text("done")]), tools=[Probe()]) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        run_id = await wire.prompt(opened["sessionId"])
        await wire.event("run_settled")
        kinds = [params.event.__struct_config__.tag for params in wire.events]
        # How much arrives together is one event depends on the machine.
        assert [kind for kind, _ in groupby(kinds)] == [
            "run_started",
            "prompt_timing",
            "message_start",
            "session_title",
            "message_end",
            "message_start",
            "message_end",
            "tool_execution_start",
            "tool_execution_update",
            "tool_execution_end",
            "message_start",
            "message_end",
            "message_start",
            "message_update",
            "message_end",
            "prompt_timing",
            "session_saved",
            "run_settled",
        ]
        result = await wire.call("run/wait", {"runId": run_id})
        assert result == {"runId": run_id, "outcome": "success", "saved": True}
        await wire.aclose()


async def test_stop_keeps_the_partial_text(tmp_path: Path) -> None:  # S-12
    async def hang(_: object, say: object) -> None:
        say(TextDelta("half an "))  # type: ignore[operator]
        say(TextDelta("answer"))  # type: ignore[operator]
        await trio.sleep_forever()

    async with running(tmp_path, model=PlayedModel([hang])) as world:  # type: ignore[list-item]
        wire = await world.connect()
        opened = await wire.open(world)
        run_id = await wire.prompt(opened["sessionId"])
        await wire.event("message_update")
        assert await wire.call("session/stop", {"sessionId": opened["sessionId"], "runId": run_id}) == {"stopped": True}
        page = await wire.call("session/messages", {"sessionId": opened["sessionId"]})
        assert [message["role"] for message in page["messages"]] == ["user", "assistant"]
        assert page["messages"][1]["stopReason"] == "aborted"
        assert page["messages"][1]["content"] == [{"type": "text", "text": "half an answer"}]
        await wire.aclose()
