"""At every await of a run once: stop, abort, disconnect, drain, dispose. What must hold then, holds at each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from inprocess import PlayedModel, Probe, Wire, World, call, running, text
from stepping import Steps

from loop_protocol.v1.methods import METHODS
from loop_protocol.v1.types import AssistantMessage, ToolCallBlock, ToolResultMessage, UserMessage
from loopd import api
from loopd.agent import Reply, TextDelta
from loopd.core.history import History, decode_message
from loopd.storage import files


async def _streamed(_: Any, say: Callable[[Any], None]) -> Reply:
    for word in ("a ", "few ", "words"):
        say(TextDelta(word))
        await trio.lowlevel.checkpoint()
    return text("a ", "few ", "words")


def _model() -> PlayedModel:
    """A turn with text and a tool round, then a streamed answer."""
    return PlayedModel([call(), _streamed])


class Action:
    """What a client asks for at that very moment, decided at once, as the reader would; ``answer`` is what it got."""

    def __init__(self, world: World, name: str, nursery: trio.Nursery) -> None:
        self.world = world
        self.name = name
        self.nursery = nursery
        self.answer: Any = None
        self.done = trio.Event()

    def __call__(self) -> None:
        session = self.world.session()
        ids = {"sessionId": session.core.id, "runtimeId": self.world.runtime().id}
        match self.name:
            case "stop":
                assert session.run is not None
                self._ask("session/stop", sessionId=ids["sessionId"], runId=session.run.state.id)
            case "abort":
                self._ask("session/abort", sessionId=ids["sessionId"])
            case "drain":
                self._ask("server/drain", deadlineMs=0)
            case "dispose":
                self._ask("runtime/dispose", runtimeId=ids["runtimeId"])
            case "disconnect":
                for connection in self.world.daemon.clients:
                    connection._scope.cancel()
                self.done.set()

    def _ask(self, method: str, **params: Any) -> None:
        typed = msgspec.convert(params, METHODS[method].params)
        outcome = api.TABLE[method](api.Call(self.world.daemon, None), typed)  # type: ignore[arg-type]
        if not callable(outcome):
            self.answer = outcome
            self.done.set()
            return
        self.nursery.start_soon(self._await, outcome)

    async def _await(self, outcome: Callable[[], Any]) -> None:
        self.answer = await outcome()
        self.done.set()


async def _undisturbed(root: Path) -> int:
    async with running(root, model=_model(), tools=[Probe(waits=4)]) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        steps = Steps()
        trio.lowlevel.add_instrument(steps)
        await wire.prompt(opened["sessionId"])
        await wire.event("run_settled")
        trio.lowlevel.remove_instrument(steps)
        await wire.aclose()
    return steps.count


async def _disturbed(root: Path, action: str, at: int) -> bool:
    """One run with ``action`` at step ``at``; answers whether that point was hit."""
    async with running(root, model=_model(), tools=[Probe(waits=4)]) as world, trio.open_nursery() as nursery:
        watcher, asker = await world.connect(), await world.connect()
        opened = await asker.open(world, attach=False)
        await watcher.call("runtime/attach", {"runtimeId": opened["runtimeId"]})
        session, acted = world.session(), Action(world, action, nursery)
        steps = Steps(at=at, act=acted)
        trio.lowlevel.add_instrument(steps)
        await asker.prompt(opened["sessionId"])
        run = world.daemon.runtimes.runs[next(iter(world.daemon.runtimes.runs))]
        with trio.fail_after(10):
            await run.done.wait()
            if steps.count >= at:
                await acted.done.wait()
        trio.lowlevel.remove_instrument(steps)
        hit = steps.count >= at
        _check_kept(session.core.history)
        result = run.state.result
        assert result is not None
        assert result.saved
        if hit and action in ("stop", "abort"):  # I-1
            assert acted.answer.stopped is (result.outcome == "cancelled")
        if not hit or action == "disconnect":
            assert result.outcome == "success"
            assert session.core.history.messages == 4
        if hit and action == "dispose":
            assert session.ended.is_set()
            assert not world.daemon.runtimes.by_id
        if hit and action == "drain":
            assert acted.answer.quiet
        if action != "disconnect":
            await _check_told(watcher, result.outcome)
        assert opened["path"] is not None
        _, stored = files.read_session(world.services.fs, opened["path"])
        assert stored.lines == session.core.history.lines
        for wire in (watcher, asker):
            await wire.aclose()
    return hit


def _check_kept(history: History) -> None:
    """I-2, I-8: the user's message, one finished timing, and every call with exactly one result."""
    messages = [decode_message(history.line(index)) for index in range(history.messages)]
    assert isinstance(messages[0], UserMessage)
    calls: Counter[str] = Counter()
    for message in messages:
        if isinstance(message, AssistantMessage):
            calls.update(block.id for block in message.content if isinstance(block, ToolCallBlock))
        if isinstance(message, ToolResultMessage):
            calls[message.tool_call_id] -= 1
    assert not +calls
    assert not -calls
    (timing,) = history.timings
    assert timing.finished_at is not None
    assert timing.message_end_index == len(messages)
    assert len(history.runs) == 1


async def _check_told(watcher: Wire, outcome: str) -> None:
    """I-3: the order at the end, and exactly one ``run_settled``."""
    with trio.fail_after(5):
        settled = await watcher.event("run_settled")
    assert settled.event.outcome == outcome  # type: ignore[union-attr]
    kinds = [params.event.__struct_config__.tag for params in watcher.events]
    assert kinds.count("run_settled") == 1
    assert kinds.count("run_started") == 1
    assert kinds.count("message_start") == kinds.count("message_end")
    assert kinds.count("tool_execution_start") == kinds.count("tool_execution_end")
    assert [kind for kind in kinds if kind in ("prompt_timing", "session_saved", "run_settled")] == [
        "prompt_timing",
        "prompt_timing",
        "session_saved",
        "run_settled",
    ]
    seqs = [params.seq for params in watcher.events]
    assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))


@pytest.mark.parametrize("action", ["stop", "abort", "disconnect", "drain", "dispose"])
async def test_at_every_await_of_a_run(action: str, tmp_path: Path) -> None:  # I-1 I-2 I-3 I-8 I-10 D-4 R-6
    points = await _undisturbed(tmp_path / "undisturbed")
    hits = [at for at in range(1, points + 1) if await _disturbed(tmp_path / str(at), action, at)]
    print(f"{action}: {len(hits)} of {points} points hit")
    assert points >= 15
    assert hits == list(range(1, points + 1))
