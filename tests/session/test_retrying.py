"""A run whose model could not be asked: the wait is an event, counts as the run's time, and ends with a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from inprocess import PlayedModel, running, text

from loopd.agent import ModelError, retry

SLOWLY = "p answered with status 429: slowly"


async def _refuses(*_: Any) -> Any:  # noqa: ASYNC124 async as its port is
    raise ModelError("rate_limit", SLOWLY)


async def test_a_wait_is_an_event_and_part_of_the_runs_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # P-2
    monkeypatch.setattr(retry, "PAUSE_S", 0.2)
    async with running(tmp_path, model=PlayedModel([_refuses, text("hi")])) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        result = await wire.prompt(opened["sessionId"], wait=True)
        types = [params.event.__struct_config__.tag for params in wire.events]
        assert types[5:7] == ["retry_wait", "message_start"]
        wait = wire.events[5]
        assert wait.event.reason == SLOWLY  # type: ignore[union-attr]
        assert 100 <= wait.event.until_at - wait.at <= 201  # type: ignore[union-attr]
        state = await wire.call("session/state", {"sessionId": opened["sessionId"]})
        assert state["lastRun"]["outcome"] == "success", result
        [timing] = state["timings"]
        assert timing["finishedAt"] - timing["startedAt"] >= 100


@pytest.mark.parametrize("method", ["session/stop", "session/abort"])
async def test_a_stop_ends_the_wait_at_once_and_keeps_the_prompt(method: str, tmp_path: Path) -> None:  # K-30
    async def refuses_for_long(*_: Any) -> Any:  # noqa: ASYNC124 async as its port is
        raise ModelError("rate_limit", SLOWLY, retry_after_s=60)

    model = PlayedModel([refuses_for_long])
    async with running(tmp_path, model=model) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        session = {"sessionId": opened["sessionId"]}
        run_id = await wire.prompt(opened["sessionId"])
        await wire.event("retry_wait")
        with trio.fail_after(5):
            assert (await wire.call(method, session | ({"runId": run_id} if method == "session/stop" else {})))[
                "stopped"
            ]
        state = await wire.call("session/state", session)
        assert state["lastRun"] | {"saved": True} == {"runId": run_id, "outcome": "cancelled", "saved": True}
        assert state["messageCount"] == 1
        assert model.turns == 1


async def test_the_last_refusal_is_the_runs_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "PAUSE_S", 0.01)
    async with running(tmp_path, model=PlayedModel([_refuses])) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        run_id = await wire.prompt(opened["sessionId"])
        result = await wire.call("run/wait", {"runId": run_id})
        assert result["error"] == {"kind": "rate_limit", "message": f"{SLOWLY} (asked 4 times)"}
        waits = [params for params in wire.events if params.event.__struct_config__.tag == "retry_wait"]
        assert len(waits) == retry.TRIES - 1
