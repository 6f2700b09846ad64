"""Whatever a model, a tool or a clean-up does, an accepted prompt is kept, timed, saved and settled (I-1, I-2)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from inprocess import PlayedModel, Probe, call, running, text

from loop_protocol.v1.errors import RpcError
from loopd.agent import ModelError, Reply, TextDelta
from loopd.storage import files


def _raising(error: Exception, *, after: int) -> Callable[..., Any]:
    async def play(_: Any, say: Callable[[Any], None]) -> Reply:
        for word in range(after):
            say(TextDelta(f"{word} "))
            await trio.lowlevel.checkpoint()
        raise error

    return play


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("error", [ModelError("auth", "no key"), ValueError("a bug"), OSError("a socket")])
async def test_a_model_that_raises_leaves_prompt_timing_and_partial_text(  # I-2, P-4
    error: Exception, after: int, tmp_path: Path
) -> None:
    async with running(tmp_path, model=PlayedModel([_raising(error, after=after)])) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        result = await wire.call("session/prompt", {"sessionId": opened["sessionId"], "content": "hi", "wait": True})
        assert (result["outcome"], result["saved"]) == ("error", True)
        assert result["error"]["kind"] == ("auth" if isinstance(error, ModelError) else "internal")
        page = await wire.call("session/messages", {"sessionId": opened["sessionId"]})
        roles = [message["role"] for message in page["messages"]]
        assert roles == (["user", "assistant"] if after else ["user"])
        if after:
            assert page["messages"][1]["stopReason"] == "error"
            assert page["messages"][1]["errorMessage"]
        state = await wire.call("session/state", {"sessionId": opened["sessionId"]})
        assert len(state["timings"]) == 1
        assert "finishedAt" in state["timings"][0]
        kinds = [params.event.__struct_config__.tag for params in wire.events]
        assert kinds.count("run_settled") == 1
        await wire.aclose()


@pytest.mark.parametrize("raised", [ValueError("clean-up failed"), None])
async def test_a_stop_counts_even_when_the_clean_up_raises_or_swallows_it(
    raised: Exception | None, tmp_path: Path
) -> None:
    async def stubborn(_: Any, say: Callable[[Any], None]) -> Reply:
        say(TextDelta("partial"))
        try:
            await trio.sleep_forever()
        except trio.Cancelled:  # noqa: ASYNC103 what a faulty clean-up does
            if raised is not None:
                raise raised from None  # noqa: ASYNC104
            with trio.CancelScope(shield=True):
                await trio.lowlevel.checkpoint()
            return text("partial")  # noqa: ASYNC104
        raise AssertionError

    async with running(tmp_path, model=PlayedModel([stubborn])) as world:  # I-1
        wire = await world.connect()
        opened = await wire.open(world)
        run_id = await wire.prompt(opened["sessionId"])
        await wire.event("message_update")
        stopped = await wire.call("session/stop", {"sessionId": opened["sessionId"], "runId": run_id})
        result = await wire.call("run/wait", {"runId": run_id})
        assert stopped == {"stopped": True}
        assert result == {"runId": run_id, "outcome": "cancelled", "saved": True}
        assert not world.session().core.closed
        await wire.aclose()


async def test_a_stop_in_the_tick_in_which_the_agent_ends_is_a_stop_or_was_too_late(tmp_path: Path) -> None:  # I-1
    ended: list[str] = []

    async def ends(_: Any, say: Callable[[Any], None]) -> Reply:  # noqa: ASYNC124 no await: that is the point
        say(TextDelta("x"))
        run = world.session().run
        assert run is not None
        ended.append("stopped" if run.stop() else "late")
        return text("x")

    async with running(tmp_path, model=PlayedModel([ends])) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        run_id = await wire.prompt(opened["sessionId"])
        result = await wire.call("run/wait", {"runId": run_id})
        assert ended == ["stopped"]
        assert result["outcome"] == "cancelled"
        again = await wire.call("session/stop", {"sessionId": opened["sessionId"], "runId": run_id})
        assert again == {"stopped": False}  # K-29
        await wire.aclose()


async def test_stop_then_prompt_pairs_the_interrupted_call(tmp_path: Path) -> None:  # S-12, K-20
    first = call(id="a")
    two = Reply([*first.content, *call(id="b").content], first.usage, "toolUse")
    async with running(tmp_path, model=PlayedModel([two, text("fine")]), tools=[Probe(hangs=True)]) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        run_id = await wire.prompt(opened["sessionId"])
        await wire.event("tool_execution_start")
        await wire.call("session/stop", {"sessionId": opened["sessionId"], "runId": run_id})
        second = await wire.call("session/prompt", {"sessionId": opened["sessionId"], "content": "go on", "wait": True})
        assert second["outcome"] == "success"
        page = await wire.call("session/messages", {"sessionId": opened["sessionId"]})
        shown = [(m["role"], m.get("toolCallId"), m.get("isError")) for m in page["messages"]]
        assert shown == [
            ("user", None, None),
            ("assistant", None, None),
            ("toolResult", "a", True),
            ("toolResult", "b", True),
            ("user", None, None),
            ("assistant", None, None),
        ]
        assert "Interrupted" in page["messages"][2]["content"][0]["text"]
        assert "Not run" in page["messages"][3]["content"][0]["text"]
        await wire.aclose()


async def test_a_bug_in_the_session_closes_it_with_a_rescue_copy_and_no_other(  # D-5, I-2, S-25
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, model=PlayedModel([text("fine")])) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        other = await wire.open(world, runtimeId="new", attach=False)

        def broken(*_: Any, **__: Any) -> Any:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(type(world.session_of(opened["sessionId"]).core), "settle_run", broken)
        monkeypatch.setattr(type(world.session_of(opened["sessionId"]).saving), "save", broken)
        await wire.prompt(opened["sessionId"])
        closed = await wire.event("session_closed")
        monkeypatch.undo()
        assert closed.event.reason == "fault"  # type: ignore[union-attr]
        rescue = closed.event.rescue  # type: ignore[union-attr]
        assert rescue
        assert (Path(rescue) / "history.jsonl").read_bytes().count(b"\n") == 4
        assert [p.event.__struct_config__.tag for p in wire.events].count("run_settled") == 1
        fine = await wire.call("session/prompt", {"sessionId": other["sessionId"], "content": "hi", "wait": True})
        assert fine["outcome"] == "success"
        assert (await wire.call("server/status"))["sessions"] == 1
        await wire.aclose()


async def test_a_bug_in_closing_after_a_bug_ends_that_session_only(  # D-5
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a bug")

    async with running(tmp_path, model=PlayedModel([text("fine")])) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        monkeypatch.setattr(type(world.session().saving), "save", broken)
        monkeypatch.setattr(type(world.session().core), "abandon_run", broken)
        with pytest.raises(RpcError) as ended:
            await wire.call("session/prompt", {"sessionId": opened["sessionId"], "content": "hi", "wait": True})
        assert ended.value.kind == "session_closed"
        monkeypatch.undo()
        assert (await wire.event("session_closed")).event.reason == "fault"  # type: ignore[union-attr]
        assert (await wire.call("server/status"))["sessions"] == 0


async def test_a_bug_whose_rescue_fails_too_keeps_the_session_and_its_messages(  # S-25
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a bug")

    nowhere = str(tmp_path / "file" / "x")
    (tmp_path / "file").write_text("no directory")
    async with running(tmp_path, model=PlayedModel([text("fine")]), rescue_roots=[nowhere]) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        monkeypatch.setattr(type(world.session().saving), "save", broken)
        result = await wire.call("session/prompt", {"sessionId": opened["sessionId"], "content": "hi", "wait": True})
        monkeypatch.undo()
        assert (result["outcome"], result["saved"]) == ("error", False)
        assert (await wire.call("session/state", {"sessionId": opened["sessionId"]}))["hasPendingSave"]
        assert await wire.call("session/flush", {"sessionId": opened["sessionId"]}) == {"flushed": True}
        again = await wire.call("session/prompt", {"sessionId": opened["sessionId"], "content": "hi", "wait": True})
        assert (again["outcome"], again["saved"]) == ("success", True)
        _, stored = files.read_session(world.services.fs, opened["path"])
        assert stored.messages == 4


async def test_an_end_without_a_drain_settles_the_run_once_saves_it_and_closes_last(tmp_path: Path) -> None:  # I-2
    async def hang(_: Any, say: Callable[[Any], None]) -> Reply:
        say(TextDelta("partial"))
        await trio.sleep_forever()
        raise AssertionError

    async with running(tmp_path, model=PlayedModel([hang])) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        await wire.prompt(opened["sessionId"])
        await wire.event("message_update")
        world.daemon.end()
        with pytest.raises(trio.EndOfChannel):
            await wire.event("never")
        kinds = [params.event.__struct_config__.tag for params in wire.events]
        assert kinds[-3:] == ["session_saved", "run_settled", "session_closed"]
        assert kinds.count("run_settled") == 1
        _, stored = files.read_session(world.services.fs, opened["path"])
        assert stored.messages == 2
