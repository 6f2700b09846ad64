"""Inputs that are queued at every moment of a run and of its end: each is done exactly once, and nothing is stuck."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import disks
import msgspec
import pytest
import trio
from checked_model import CheckedModel, asked
from inprocess import PlayedModel, Probe, Wire, World, call, running, text
from stepping import Steps

from loop_protocol.replica import fold
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.events import MessageStart, RunSettled, RunStarted
from loop_protocol.v1.methods import METHODS
from loop_protocol.v1.types import SessionState, UserMessage
from loopd import api
from loopd.agent import Reply
from loopd.core.history import decode_message
from loopd.session import Session


class NeverIdle(trio.abc.Instrument):
    """After every step of every task: nothing waits in a session that could go on."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.steps = 0
        self.stuck: list[int] = []

    def after_task_step(self, _: trio.lowlevel.Task) -> None:
        self.steps += 1
        for session in self._world.daemon.sessions():
            core = session.core
            idle = core.slot is None and not core.disposing and not core.closed
            if idle and core.queue.items and core.queue.paused is None:
                self.stuck.append(self.steps)


class Disk(disks.Steps):
    """Full while ``full``; never really synced."""

    full = False

    def step(self, name: str, args: tuple[Any, ...], go: Callable[[], Any]) -> Any:  # noqa: ARG002 as above
        if self.full and name == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return go()


async def _one_tool_round(request: Any, _: Callable[[Any], None]) -> Reply:
    said, stops = asked(request)
    await trio.lowlevel.checkpoint()
    return text(f"re: {said}") if "toolUse" in stops else call()


@asynccontextmanager
async def living(root: Path, model: PlayedModel, disk: Disk | None = None) -> AsyncIterator[tuple[World, Wire]]:
    """A daemon with one session, attached to; nothing in it is ever stuck."""
    async with running(root, model=model, tools=[Probe()], fs=disk or Disk(), rescue_roots=[]) as world:
        wire = await world.connect()
        await wire.open(world)
        if isinstance(model, CheckedModel):
            model.history = lambda: world.session().core.history
        watching = NeverIdle(world)
        trio.lowlevel.add_instrument(watching)
        try:
            yield world, wire
        finally:
            trio.lowlevel.remove_instrument(watching)
            for client in world.wires:
                await client.aclose()
    assert watching.steps > 0
    assert not watching.stuck
    if isinstance(model, CheckedModel):
        assert model.requests
        assert not model.faults


def now(world: World, method: str, **params: Any) -> Any:
    """What the reader of a connection would do with that request at this very moment; a refusal is its kind."""
    try:
        return api.TABLE[method](api.Call(world.daemon, None), msgspec.convert(params, METHODS[method].params))  # type: ignore[arg-type]
    except Exception as error:
        return api.translate(error).kind


def texts(session: Session) -> list[str]:
    """What people said, as the history has it."""
    messages = [decode_message(session.core.history.line(index)) for index in range(session.core.history.messages)]
    return ["".join(getattr(b, "text", "") for b in one.content) for one in messages if isinstance(one, UserMessage)]


async def quiet(session: Session) -> None:
    with trio.fail_after(20):
        while session.run or session.core.slot:
            await session.quiet()


def named(wire: Wire, since: int = 0) -> tuple[list[str], list[str]]:
    """The items that started a run, and those that entered one."""
    events = [params.event for params in wire.events[since:]]
    starting = [event.item_id for event in events if isinstance(event, RunStarted) and event.item_id]
    entering = [event.item_id for event in events if isinstance(event, MessageStart) and event.item_id]
    return starting, [item for item in entering if item not in starting]


async def reads(wire: Wire, reading: trio.CancelScope) -> None:
    """Follows without a pause: who does not loses events, since each change of a long queue tells all of it."""
    with reading:
        while True:
            await wire.receive()


# --- one input, at every await ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steer", [False, True])
async def test_an_input_added_at_every_await_of_a_run_and_its_end_is_done_once(
    steer: bool, tmp_path: Path
) -> None:  # Q-1 Q-2 I-2 I-8
    own_run = steered = at = 0
    async with living(tmp_path, CheckedModel([_one_tool_round])) as (world, wire):
        hit = True
        while hit:
            at += 1
            await wire.call("runtime/newSession", {"runtimeId": world.runtime().id})
            session, added = world.session(), list[Any]()
            session_id = session.core.id

            def add(added: list[Any] = added, session_id: str = session_id) -> None:
                added.append(now(world, "queue/add", sessionId=session_id, content="more", steer=steer))

            since, steps = len(wire.events), Steps(at=at, act=add)
            trio.lowlevel.add_instrument(steps)
            await wire.prompt(session_id, "first")
            await quiet(session)
            trio.lowlevel.remove_instrument(steps)
            hit = bool(added)
            if not hit:
                add()
                assert added[0].run_id
                await quiet(session)
            await wire.call("session/state", {"sessionId": session_id})
            assert texts(session) == ["first", "more"]
            starting, entering = named(wire, since)
            assert [*starting, *entering] == [added[0].item_id]
            own_run, steered = own_run + len(starting), steered + len(entering)
            assert not session.core.queue.items
            session.core.history.require_paired()
    print(f"{at - 1} moments: {own_run} own runs, {steered} steered")
    assert at > 15
    assert (steered > 5) == steer
    assert own_run > 3


@pytest.mark.parametrize("steer", [False, True])
async def test_a_stop_at_every_await_keeps_what_waits_and_a_resume_does_it_once(
    steer: bool, tmp_path: Path
) -> None:  # Q-3 Q-4 I-1 I-8
    outcomes: Counter[str] = Counter()
    at = 0
    async with living(tmp_path, CheckedModel([_one_tool_round])) as (world, wire):
        hit = True
        while hit:
            at += 1
            await wire.call("runtime/newSession", {"runtimeId": world.runtime().id})
            session, stopped = world.session(), list[Any]()
            ask = {"sessionId": session.core.id}

            def stop(stopped: list[Any] = stopped, session: Session = session) -> None:
                assert session.run is not None
                queue = session.core.queue
                stopped.append([item.id for item in queue.items if item.id not in queue._started])
                stopped.append(now(world, "session/stop", sessionId=session.core.id, runId=session.run.state.id))
                stopped.append(session.run)

            steps = Steps(at=at, act=stop)
            trio.lowlevel.add_instrument(steps)
            run_id = await wire.prompt(ask["sessionId"], "a")
            now(world, "queue/add", **ask, content="b", steer=steer)
            now(world, "queue/add", **ask, content="c")
            await quiet(session)
            trio.lowlevel.remove_instrument(steps)
            hit = bool(stopped)
            if hit:
                waited, answer, run = stopped[0], await stopped[1](), stopped[2]
                assert answer.stopped == (run.state.result.outcome == "cancelled")  # I-1
                outcomes[run.state.result.outcome] += 1
                waiting, paused = session.core.queue.items, session.core.queue.paused
                assert set(waited) <= {item.id for item in waiting}, "after a stop nothing starts by itself"
                assert (paused == "stopped") == bool(waiting)
                assert [*texts(session), *(item.shown.content[0].text for item in waiting)] == ["a", "b", "c"]
            assert (await wire.call("run/wait", {"runId": run_id}))["saved"]
            while not isinstance(resumed := now(world, "session/resume", **ask), str):
                await quiet(session)
            assert resumed == "nothing_to_resume"
            assert texts(session) == ["a", "b", "c"]
            assert not session.core.queue.items
    print(f"{at - 1} moments: {dict(outcomes)}")
    assert outcomes["cancelled"] > 10
    assert outcomes["success"] > 2


# --- bursts -----------------------------------------------------------------------------------------------------------


async def test_two_hundred_inputs_in_bursts_from_three_clients_are_done_once_and_in_order(
    tmp_path: Path,
) -> None:  # Q-1 Q-2 I-2
    dice = random.Random(7)
    async with living(tmp_path, PlayedModel([text("fine")])) as (world, wire):
        session, wires = world.session(), [await world.connect() for _ in range(3)]
        bursts = [[dice.randint(1, 6) for _ in range(30)] for _ in wires]
        sent: list[list[str]] = [[], [], []]

        async def types(me: int) -> None:
            for burst in bursts[me]:
                ids = []
                for _ in range(burst):
                    if sum(map(len, sent)) == 200:
                        break
                    said = f"{me}.{len(sent[me])}"
                    sent[me].append(said)
                    ids.append(await wires[me].request("queue/add", {"sessionId": session.core.id, "content": said}))
                for id in ids:
                    await wires[me].answer(id)
                # As long as two or three runs take, so that some bursts meet the end of the last one.
                for _ in range(burst % 4):
                    if session.run:
                        await session.run.done.wait()

        async with trio.open_nursery() as following:
            following.start_soon(reads, wire, reading := trio.CancelScope())
            async with trio.open_nursery() as nursery:
                for me in range(3):
                    nursery.start_soon(types, me)
            await quiet(session)
            reading.cancel()
        heard = texts(session)
        assert len(heard) == len(set(heard)) == sum(map(len, sent)) == 200
        for me, said in enumerate(sent):
            assert [one for one in heard if one.startswith(f"{me}.")] == said
        assert not session.core.queue.items
        await wire.call("session/state", {"sessionId": session.core.id})
        starting, entering = named(wire)
        assert len(starting) == len(set(starting)) == 200
        assert not entering
        settled = [params.event for params in wire.events if isinstance(params.event, RunSettled)]
        assert len({one.run_id for one in settled}) == len(settled) == 200
        assert len(session.core.history.runs) == 200


# --- two people at one queue ------------------------------------------------------------------------------------------


@dataclass
class Told:
    """What the clients know of all items together, whoever changed them."""

    said: dict[str, dict[int, str]] = field(default_factory=dict)  # by item and revision
    removed: set[str] = field(default_factory=set)
    started: list[tuple[str, str]] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    missing: list[str] = field(default_factory=list)


class Person:
    """Changes the queue as it last saw it."""

    def __init__(self, wire: Wire, state: Any, told: Told, dice: random.Random) -> None:
        self.wire, self.told, self.dice = wire, told, dice
        self.replica = msgspec.convert(state, SessionState)
        self.folded = 0
        self.ask = {"sessionId": self.replica.session_id}

    def look(self) -> None:
        for params in self.wire.events[self.folded :]:
            self.replica = fold(self.replica, params)
        self.folded = len(self.wire.events)

    async def act(self, number: int) -> None:
        if self.dice.random() < 0.6:
            self.look()
        items, how = self.replica.queue.items, self.dice.random()
        if not items or how < 0.3:
            steer = self.dice.random() < 0.3
            added = await self.wire.call("queue/add", {**self.ask, "content": f"new {number}", "steer": steer})
            self.told.said[added["itemId"]] = {1: f"new {number}"}
            return
        item = self.dice.choice(items)
        named = {**self.ask, "itemId": item.item_id}
        try:
            if how < 0.65:
                said = f"edit {number}"
                change = {"revision": item.revision, "content": said, "steer": self.dice.random() < 0.3}
                edited = await self.wire.call("queue/edit", named | change)
                self.told.said[item.item_id][edited["revision"]] = said
            elif how < 0.85:
                await self.wire.call("queue/move", named | {"to": self.dice.randint(0, 5)})
            else:
                self.told.removed.add(item.item_id)
                await self.wire.call("queue/remove", named)
        except RpcError as refused:
            self._refused(refused, item.item_id, item.revision, removing=how >= 0.85)

    def _refused(self, refused: RpcError, item_id: str, revision: int, *, removing: bool) -> None:
        """Each refusal must have been true; what only the end can tell is checked there."""
        self.told.refusals[refused.kind] += 1
        match refused.kind:
            case "queue_item_started":
                self.told.started.append((item_id, refused.data["runId"]))
                if removing:
                    self.told.removed.discard(item_id)
            case "conflict":
                assert refused.data["revision"] > revision
            case "queue_item_not_found":
                self.told.missing.append(item_id)
            case kind:
                raise AssertionError(kind)


@pytest.mark.parametrize("seed", range(4))
async def test_two_people_who_change_one_queue_agree_at_the_end(seed: int, tmp_path: Path) -> None:  # Q-1 Q-2 I-9
    dice, told = random.Random(seed), Told()

    async def takes_its_time(request: Any, _: Callable[[Any], None]) -> Reply:
        said, stops = asked(request)
        for _ in range(dice.randint(0, 40)):
            await trio.lowlevel.checkpoint()
        return call() if not stops and dice.random() < 0.3 else text(f"re: {said}")

    async with living(tmp_path, CheckedModel([takes_its_time])) as (world, wire):
        session = world.session()
        people = []
        for _ in range(2):
            other = await world.connect()
            attached = await other.call("runtime/attach", {"runtimeId": world.runtime().id})
            people.append(Person(other, attached["state"], told, dice))

        async def lives(person: Person, first: int) -> None:
            for number in range(first, first + 150):
                await person.act(number)

        async with trio.open_nursery() as following:
            following.start_soon(reads, wire, reading := trio.CancelScope())
            async with trio.open_nursery() as nursery:
                for place, person in enumerate(people):
                    nursery.start_soon(lives, person, place * 1000)
            await quiet(session)
            reading.cancel()
        ask = {"sessionId": session.core.id}
        for person in people:
            state = await person.wire.call("session/state", ask)
            person.look()
            assert person.replica == msgspec.convert(state, SessionState)
        assert not session.core.queue.items
        last = {item: said[max(said)] for item, said in told.said.items() if item not in told.removed}
        assert Counter(texts(session)) == Counter(last.values())
        await wire.call("session/state", ask)
        runs: dict[str, str] = {}
        current = ""
        for params in wire.events:
            match params.event:
                case RunStarted(run_id=run_id):
                    current = run_id
                case MessageStart(item_id=str(item_id)):
                    assert item_id not in runs, "an item that entered twice"
                    runs[item_id] = current
        assert set(runs) == set(last)
        assert all(runs[item] == run_id for item, run_id in told.started)
        assert set(told.missing) <= told.removed
    print(f"{len(told.said)} items, {len(told.removed)} removed, refusals: {dict(told.refusals)}")
    assert told.refusals["queue_item_started"]


# --- what else holds the slot -----------------------------------------------------------------------------------------

FIRST = {"content": "first", "wait": True}


@pytest.mark.parametrize(
    ("holder", "full", "refusals"),
    [
        ("setModel", False, set()),
        ("setModel", True, set()),
        ("rename", False, set()),
        ("flush", False, set()),
        ("flush what is unsaved", False, set()),
        ("flush what is unsaved", True, set()),
        ("replace", False, {"replacing"}),
        ("replace by nothing", False, {"replacing"}),
        ("dispose", False, {"session_closed"}),
        ("dispose a run", False, {"session_closed"}),
        ("dispose a run", True, {"session_closed"}),
    ],
)
async def test_an_input_added_at_every_await_of_what_holds_the_slot_is_done_or_refused(
    holder: str, full: bool, refusals: set[str], tmp_path: Path
) -> None:  # Q-2 Q-3 I-10
    at, hit, seen = 0, True, Counter[str]()
    while hit:
        at += 1
        hit = await _added_beside(tmp_path / str(at), holder, at, seen, full=full)
    print(f"{holder}: {at - 1} moments, {dict(seen)}")
    assert at > 1
    assert set(seen) == (refusals or {"waited"})


async def _added_beside(root: Path, holder: str, at: int, seen: Counter[str], *, full: bool) -> bool:
    disk = Disk()

    async def obeys(request: Any, _: Callable[[Any], None]) -> Reply:
        if asked(request)[0] == "hang":
            await trio.sleep_forever()
        return text("fine")

    async with living(root, CheckedModel([obeys]), disk) as (world, wire):
        session, runtime_id = world.session(), world.runtime().id
        ask = {"sessionId": session.core.id}
        disk.full = holder == "flush what is unsaved"
        await wire.call("session/prompt", ask | FIRST)
        if holder == "dispose a run":
            await wire.prompt(ask["sessionId"], "hang")
        disk.full = full
        method, params = {
            "setModel": ("session/setModel", ask | {"model": {"provider": "local", "id": "m"}}),
            "rename": ("title/rename", ask | {"text": "by hand"}),
            "flush": ("session/flush", ask),
            "flush what is unsaved": ("session/flush", ask),
            "replace": ("runtime/newSession", {"runtimeId": runtime_id}),
            "replace by nothing": ("runtime/switchSession", {"runtimeId": runtime_id, "path": f"{root}/x/meta.json"}),
            "dispose": ("runtime/dispose", {"runtimeId": runtime_id}),
            "dispose a run": ("runtime/dispose", {"runtimeId": runtime_id}),
        }[holder]
        added: list[Any] = []
        steps = Steps(
            at=at, act=lambda: added.append(now(world, "queue/add", **ask, content="more")), of="Jobs._perform"
        )
        trio.lowlevel.add_instrument(steps)
        failed = None
        with trio.fail_after(10):
            try:
                await wire.call(method, params)
            except RpcError as error:
                failed = error.kind
        trio.lowlevel.remove_instrument(steps)
        await quiet(session)
        assert (failed == "save_failed") == (full and bool(failed))
        if not added:
            return False
        accepted = not isinstance(added[0], str)
        seen[added[0] if not accepted else "started" if added[0].run_id else "waited"] += 1
        waiting = [item.content[0].text for item in session.core.queue.items]  # type: ignore[union-attr]
        said = texts(session)[1:]
        if holder == "dispose a run":
            assert said.pop(0) == "hang"
        assert said + waiting == ["more"] * accepted
        assert bool(waiting) == (accepted and holder == "flush what is unsaved" and full)
        if waiting:  # a flush that works lets it go on
            assert session.core.queue.paused == "save_failed"
            disk.full = False
            await wire.call("session/flush", ask)
            await quiet(session)
            assert texts(session) == ["first", "more"]
        return True
