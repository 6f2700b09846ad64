"""Every two things that may settle a request for approval, or that may not, at one moment, in both orders.

Right before it is asked, while it waits and once it is allowed; each alone and with a stop at the other sides of the
awaits around the asking. It is settled exactly once, before the save, and the call begins only if it was allowed and
nobody had stopped the run. What became of each pair is printed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import model_bench as bench
import msgspec
import pytest
import trio
import trio.testing
from asking import RULE, Asking, asks, person
from inprocess import PlayedModel, World, running, text
from stepping import Moments

from loop_protocol.v1.methods import METHODS
from loop_protocol.v1.types import ToolResultMessage
from loopd import api
from loopd.agent import Ask, ToolOutcome, ToolScope
from loopd.config import Config, DaemonSettings
from loopd.connection import Connection
from loopd.core.guards import Declined
from loopd.core.history import decode_message
from loopd.core.messages import INTERRUPTED, NOT_ALLOWED
from loopd.event_log import EventLog
from loopd.run import Run
from loopd.session import Session
from loopd.storage import files

ANSWERS = ["allowed-once", "allowed-session", "rejected"]
STOPS = ["stop", "abort"]
ENDS = ["dispose", "drain", "exit", "TERM"]
LEAVING = ["requester goes", "approver goes", "detach"]
ACTS = [*ANSWERS, "timeout", *STOPS, *ENDS, "bug", *LEAVING, "add"]
# Both sides of each await, in their order: before it is asked, while it waits, and after it was allowed.
UNASKED, WAITING, ALLOWED = [1, 2], [3], [4, 5, 6]
ALL_PAIRS = [2, 3, 4]
PATIENCE_S = 20.0
MINUTE = 60.0


@dataclass(slots=True)
class Fragile(Asking):
    """Its ``scope`` cancelled is a bug in it."""

    scope: trio.CancelScope | None = None

    async def run(self, arguments: Any, scope: ToolScope) -> ToolOutcome:
        with trio.CancelScope() as self.scope:
            answer = await scope.ask(Ask(operation="command", reason="r", sandbox="s", rules=[RULE]))
        if self.scope.cancelled_caught:
            raise LookupError("a bug in the tool")
        self.told.append(answer)
        if answer is None:
            self.done.append(arguments.what)
            await trio.lowlevel.checkpoint()
        return ToolOutcome([])


@dataclass(slots=True)
class Decided:
    """One of the two: what it was refused with, or its reply. ``pending``: it found the request waiting."""

    name: str
    pending: bool
    refused: dict[str, Any] | None = None
    reply: Any = None


@dataclass
class Life:
    world: World
    tool: Fragile
    nursery: trio.Nursery
    clock: trio.testing.MockClock
    acts: tuple[str, ...]
    at: int
    decided: list[Decided] = field(default_factory=list)
    done_at_stop: int | None = None
    answered: int = 0
    session: Session = field(init=False)
    events: EventLog = field(init=False)
    requester: Connection = field(init=False)
    approver: Connection = field(init=False)

    async def live(self) -> str:
        """What became of the request: its outcome, or that nobody was asked."""
        world, self.tool.scope = self.world, None
        self.tool.done.clear()
        self.tool.told.clear()
        known = set(world.daemon.clients)
        wire = await world.connect()
        [self.requester] = set(world.daemon.clients) - known
        opened = await wire.open(world)
        approver = await person(world, attach=opened["runtimeId"])
        [self.approver] = set(world.daemon.clients) - known - {self.requester}
        self.session, self.events = world.session(), world.runtime().events
        moments = Moments(lambda: True, at=self.at, act=self._act, begin=lambda: None, within="Fragile.run")
        first = Moments(lambda: True, at=3, act=self._allow, begin=lambda: None, within="Fragile.run")
        if self.at in ALLOWED:
            trio.lowlevel.add_instrument(first)
        trio.lowlevel.add_instrument(moments)
        run_id = await wire.prompt(opened["sessionId"], "go", approvals="reject", approvalTimeoutMs=60_000)
        run = world.daemon.runtimes.runs[run_id]
        await self._until(lambda: moments.hit is not None)
        trio.lowlevel.remove_instrument(moments)
        if self.at in ALLOWED:
            trio.lowlevel.remove_instrument(first)
        assert moments.hit is not None
        waits = "Context.approve" in moments.hit
        assert waits is (self.at <= 4)
        await self._until(lambda: run.done.is_set() or self._waits())
        if not run.done.is_set():
            # Nothing of the two settles it: then an answer still does.
            self._ask_for("approval/resolve", approvalId=next(iter(self._pending)), decision="allowed-once")
        await self._until(lambda: run.done.is_set() and self.session.run is None)
        await self._until(lambda: len(self.decided) == self.answered or world.ended.is_set())
        outcome = self._check(run)
        if {*self.acts} & {"exit", "TERM"}:
            await self._until(world.ended.is_set)
        else:
            await wire.aclose()
            await approver.aclose()
            await self._leave()
        return outcome

    @property
    def _pending(self) -> dict[str, Any]:
        return self.session.core.approvals.pending

    def _waits(self) -> bool:
        """Nothing more comes by itself."""
        core = self.session.core
        stops = self.world.services.draining or core.disposing or core.closed
        left = self.tool.scope is not None and self.tool.scope.cancel_called
        late = "timeout" in self.acts
        return bool(self._pending) and self._turns > 30 and not (stops or left or (late and self.at > 2))

    async def _until(self, over: Callable[[], bool]) -> None:
        self._turns, began = 0, time.monotonic()
        while not over():  # noqa: ASYNC110 time stands still, and threads work
            self._turns += 1
            assert time.monotonic() - began < PATIENCE_S, (self.acts, self.at, self.decided)
            await trio.lowlevel.checkpoint()

    async def _leave(self) -> None:
        if self.world.services.draining:
            self.world.services.draining = False
            for drain in tuple(self.world.daemon._drains):
                drain.cancel()
        for runtime in tuple(self.world.daemon.runtimes.by_id.values()):
            await self._until(lambda: self.session.run is None)
            job = self.world.daemon.runtimes.dispose(runtime)
            await job.wait()
        await self._until(lambda: not self.world.daemon.clients)

    # --- the moment ---------------------------------------------------------------------------------------------------

    def _allow(self) -> None:
        [approval_id] = self._pending
        self._ask_for("approval/resolve", approvalId=approval_id, decision="allowed-once")

    def _act(self) -> None:
        for name in self.acts:
            one = Decided(name, bool(self._pending))
            try:
                reply = self._do(name)
            except Declined as declined:
                one.refused = {"kind": declined.kind, **declined.data}
                reply = None
            except Exception as refused:
                one.refused = {"kind": getattr(refused, "kind", repr(refused))}
                reply = None
            if one.refused is None and name in STOPS and self.done_at_stop is None:
                self.done_at_stop = len(self.tool.done)
            self.answered += 1
            if callable(reply):
                self.nursery.start_soon(self._await, one, reply)
            else:
                one.reply = reply
                self.decided.append(one)

    def _do(self, name: str) -> Any:
        core = self.session.core
        match name:
            case "stop":
                assert core.run is not None
                return self._ask_for("session/stop", sessionId=core.id, runId=core.run.id)
            case "abort":
                return self._ask_for("session/abort", sessionId=core.id)
            case "dispose":
                return self._ask_for("runtime/dispose", runtimeId=core.runtime_id, discardQueue=True)
            case "drain":
                return self._ask_for("server/drain", deadlineMs=0)
            case "exit":
                return self._ask_for("server/drain", deadlineMs=0, exit=True)
            case "TERM":
                self.nursery.start_soon(self.world.daemon._terminate)
            case "timeout":
                self.clock.jump(MINUTE)
            case "bug":
                if self.tool.scope is not None:
                    self.tool.scope.cancel()
            case "requester goes":
                self.requester._scope.cancel()
            case "approver goes":
                self.approver._scope.cancel()
            case "detach":
                return self._ask_for("runtime/detach", runtimeId=core.runtime_id)
            case "add":
                return self._ask_for("queue/add", sessionId=core.id, content="later")
            case _:
                settled = self._known_id()
                return self._ask_for("approval/resolve", approvalId=settled or "none", decision=name)
        return None

    def _known_id(self) -> str | None:
        """Of the request, also where it is settled already."""
        for event in self._told():
            if event["type"] == "approval_requested":
                found: str = event["request"]["approvalId"]
                return found
        return None

    def _ask_for(self, method: str, **params: Any) -> Any:
        typed: Any = msgspec.convert(params, METHODS[method].params)
        return api.TABLE[method](api.Call(self.world.daemon, self.approver), typed)

    async def _await(self, one: Decided, reply: Callable[[], Awaitable[Any]]) -> None:
        one.reply = await reply()
        self.decided.append(one)

    # --- what holds then ----------------------------------------------------------------------------------------------

    def _told(self) -> list[dict[str, Any]]:
        self.events.flush()
        bodies = (self.events.entry(seq) for seq in range(self.events.first, self.events.head + 1))
        return [msgspec.json.decode(body)["params"]["event"] for body in bodies]

    def _check(self, run: Run) -> str:
        core, tool, names = self.session.core, self.tool, set(self.acts)
        result = run.state.result
        assert result is not None
        assert result.saved
        # I-1: cancelled if and only if a stop was accepted.
        assert (result.outcome == "cancelled") is run.state.stop_requested
        for one in self.decided:
            if one.name in STOPS and one.refused is None:
                assert one.reply.stopped is (result.outcome == "cancelled")
        if names & {*STOPS, *ENDS}:
            assert result.outcome == "cancelled" or (self.at in ALLOWED and not names & set(STOPS))
        else:
            assert result.outcome == "success"
        outcome = self._check_told()
        # It begins only if it was allowed, and never after a stop.
        if tool.done:
            assert outcome in ("allowed-once", "allowed-session")
            assert self.done_at_stop is None or self.done_at_stop == len(tool.done)
        if outcome in ("allowed-once", "allowed-session") and result.outcome == "success" and "bug" not in names:
            assert tool.done == ["it"]
        assert core.approvals.pending == {}
        accepted = {one.name for one in self.decided if one.refused is None}
        assert list(core.approvals.grants) == ([RULE] if "allowed-session" in accepted else [])
        self._check_answers(outcome)
        core.history.require_paired()
        kept = [decode_message(core.history.line(index)) for index in range(core.history.messages)]
        [answer] = [message for message in kept if isinstance(message, ToolResultMessage)]
        if result.outcome == "cancelled" and not tool.told and "bug" not in names:
            # What was asked and not allowed did not begin; what was allowed may have, when the stop came.
            said = answer.content[0].text  # type: ignore[union-attr]
            begun = outcome == "not asked" or bool(tool.done)
            assert said in (INTERRUPTED, NOT_ALLOWED)
            assert (said == INTERRUPTED) is begun or outcome in ("allowed-once", "allowed-session")
        _, stored = files.read_session(self.world.services.fs, core.path or "")
        assert stored.lines == core.history.lines
        return outcome

    def _check_told(self) -> str:
        """I-3, and that it is settled once."""
        mine = [event for event in self._told() if event["type"] != "queue_changed"]
        upto = next(place for place, event in enumerate(mine) if event["type"] == "run_settled")
        mine = mine[: upto + 1]
        tags = Counter(event["type"] for event in mine)
        assert tags["approval_requested"] == tags["approval_resolved"] <= 1
        assert tags["run_settled"] == 1
        places = [place for place, event in enumerate(mine) if event["type"] == "approval_resolved"]
        finish = max(place for place, event in enumerate(mine) if event["type"] == "prompt_timing")
        saved = next(place for place, event in enumerate(mine) if event["type"] == "session_saved")
        assert "finishedAt" in mine[finish]["timing"]
        assert all(place < finish < saved < upto for place in places)
        found: str = mine[places[0]]["outcome"] if places else "not asked"
        return found

    def _check_answers(self, outcome: str) -> None:
        if self.at in ALLOWED:
            assert outcome == "allowed-once"
        elif self.at in WAITING:
            # Of what decides at once, the first; else of what decides a little later, any.
            at_once = [name if name in ANSWERS else "cancelled" for name in self.acts if name in {*ANSWERS, *STOPS}]
            later = {"timed-out"} if "timeout" in self.acts else set()
            later |= {"cancelled"} if {*self.acts} & {*ENDS, "bug"} else set()
            assert outcome in (at_once[:1] or later or {"allowed-once"})
        else:
            gone = {*self.acts} & {"approver goes", "detach"}
            stopped = {*self.acts} & {*STOPS, *ENDS, "bug"}
            possible = {"not asked", "cancelled"} if stopped else {"allowed-once"}
            assert outcome in possible | ({"unavailable"} if gone else set())
        for one in self.decided:
            if one.name in ANSWERS and one.pending:
                assert one.refused is None
                assert outcome == one.name
            elif one.name in ANSWERS:
                assert one.refused is not None
                assert one.refused["kind"] in ("approval_not_pending", "session_closed")
                assert one.refused.get("outcome") in (None if self.at in UNASKED else outcome, None)


async def _lives(root: Path, clock: trio.testing.MockClock, at: int) -> dict[tuple[str, ...], str]:
    found: dict[tuple[str, ...], str] = {}
    pairs = [pair for pair in product(ACTS, ACTS) if at in ALL_PAIRS or "stop" in pair]
    waiting = [(act,) for act in ACTS] + pairs
    config = Config(daemon=DaemonSettings(drain_deadline_s=2))  # a TERM stops at once
    while waiting:
        tool = Fragile()
        model = PlayedModel([asks(), text("fine")])
        async with AsyncExitStack() as stack:
            world = await stack.enter_async_context(
                running(root / str(len(waiting)), model=model, tools=[tool], config=config)
            )
            nursery = await stack.enter_async_context(trio.open_nursery())
            while waiting and not world.ended.is_set():
                acts, model.turns = waiting.pop(0), 0
                life = Life(world, tool, nursery, clock, acts, at)
                try:
                    found[acts] = await life.live()
                except BaseException:
                    print(f"moment {at}: {acts}, decided: {life.decided}")
                    raise
    return found


@pytest.mark.parametrize("at", [*UNASKED, *WAITING, *ALLOWED])
async def test_every_two_at_one_moment(  # A-1 A-2 A-4 I-1 I-3
    at: int, tmp_path: Path, mock_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    found = await _lives(tmp_path, mock_clock, at)
    assert len(found) == len(ACTS) + (len(ACTS) ** 2 if at in ALL_PAIRS else 2 * len(ACTS) - 1)
    rows = {first: [found[(first,)], *(found.get((first, second), "") for second in ACTS)] for first in ACTS}
    print("\n" + bench.table([f"moment {at}", "alone", *ACTS], rows))
    faults = [record.getMessage() for record in caplog.records if "a fault in the daemon" in record.getMessage()]
    assert not faults
