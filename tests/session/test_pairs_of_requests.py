"""Every two requests that start, end or queue something, at one moment of a session with a queue: decided one after the
other, with no more of an effect than the two have in that order. What became of each pair is printed.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, product
from pathlib import Path
from typing import Any

import disks
import model_bench as bench
import pytest
import trio
from inprocess import PlayedModel, Wire, World, running, text

from loop_protocol import jsonrpc
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.types import TextBlock, UserMessage
from loopd import api
from loopd.agent import Reply, TextDelta
from loopd.core.history import History, decode_message
from loopd.core.queue import Item
from loopd.session import Session
from loopd.storage import files

ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "stop": ("session/stop", {}),
    "abort": ("session/abort", {}),
    "resume": ("session/resume", {}),
    "add": ("queue/add", {}),
    "steer": ("queue/add", {"steer": True}),
    "remove": ("queue/remove", {}),
    "prompt": ("session/prompt", {}),
    "flush": ("session/flush", {}),
    "dispose": ("runtime/dispose", {"discardQueue": True}),
    "new": ("runtime/newSession", {"discardQueue": True}),
    "model": ("session/setModel", {"model": {"provider": "other", "id": "m"}}),
    "drain": ("server/drain", {"deadlineMs": 0}),
    "undrain": ("server/drain", {"cancel": True}),
}
MOMENTS = ["in mid-run", "in the save", "at the settling", "paused", "idle", "unsaved"]
SHORT = {"session_busy": "busy", "nothing_to_resume": "none", "queue_item_not_found": "gone", "pending_save": "unsaved"}
SHORT |= {
    "queue_item_started": "started",
    "session_not_found": "gone",
    "runtime_not_found": "gone",
    "draining": "drain",
}
SHORT |= {"session_closed": "closed", "conflict": "conflict", "replacing": "replacing"}


class Disk(disks.Steps):
    """Its next commit waits for ``gate``, and fails where it is ``broken``."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()
        self.broken = False

    def step(self, name: str, args: tuple[Any, ...], go: Callable[[], Any]) -> Any:
        if name == "rename" and "meta.json" in args:
            self.reached.set()
            self.gate.wait(10)
            if self.broken:
                raise OSError(5, os.strerror(5))
        return super().step(name, args, go)


@dataclass
class Accepted:
    """A request as it was decided; ``runs`` had begun by then, ``head`` is what it removed."""

    name: str
    content: str | None = None
    refused: str | None = None
    starts: bool = False
    stops: bool = False
    head: str | None = None
    runs: int = 0


@dataclass
class Pair:
    world: World
    disk: Disk
    first: str
    second: str
    connections: int
    decided: list[Accepted]
    hold: trio.Event = field(default_factory=trio.Event)

    async def at(self, moment: str, model: PlayedModel) -> str:
        """The outcomes of both, after everything that must hold was checked."""
        self.decided.clear()
        wire, other = await self.world.connect(), await self.world.connect()
        opened = await wire.open(self.world)
        self.session, self.path = self.world.session(), opened["path"]
        self.runtime_id = opened["runtimeId"]
        model.plays, model.turns = [text("fine")], 0
        run_id = await getattr(self, "_" + moment.replace(" ", "_").replace("-", "_"))(wire, model)
        self.before = inputs_of(self.session.core.history)
        self.waiting = waiting_in(self.session)
        self.steering = [text_of(item) for item in self.session.core.queue.items if item.shown.steer]
        self.decided.clear()
        outcomes = await self._both(wire, other, run_id)
        await self._quiet()
        await wire.call("server/status")  # behind it everything was told
        self._check(wire)
        self._check_liveness()
        await wire.call("server/drain", {"cancel": True})
        await self._quiet()
        self._check_liveness()
        await self._emptied(wire)
        if self.runtime_id in self.world.daemon.runtimes.by_id:
            await wire.call("runtime/dispose", {"runtimeId": self.runtime_id})
        for one in (wire, other):
            await one.aclose()
        return "/".join(outcomes)

    # --- the moments --------------------------------------------------------------------------------------------------

    @property
    def _id(self) -> dict[str, str]:
        return {"sessionId": self.session.core.id}

    async def _in_mid_run(self, wire: Wire, model: PlayedModel) -> str:
        async def held(_: Any, say: Callable[[Any], None]) -> Reply:
            say(TextDelta("half "))
            await self.hold.wait()
            return text("half ")

        model.plays.insert(0, held)
        run_id = await wire.prompt(self.session.core.id, "go")
        await wire.event("message_update")
        await wire.call("queue/add", self._id | {"content": "q1"})
        await wire.call("queue/add", self._id | {"content": "s1", "steer": True})
        return run_id

    async def _in_the_save(self, wire: Wire, _: PlayedModel) -> str:
        self.disk.reached.clear()
        self.disk.gate.clear()
        run_id = await wire.prompt(self.session.core.id, "go")
        await trio.to_thread.run_sync(self.disk.reached.wait)
        await wire.call("queue/add", self._id | {"content": "q1"})
        await wire.call("queue/add", self._id | {"content": "s1", "steer": True})
        return run_id

    async def _at_the_settling(self, wire: Wire, _: PlayedModel) -> str:
        run_id = await wire.prompt(self.session.core.id, "go")
        for content in ("q1", "q2"):
            await wire.call("queue/add", self._id | {"content": content})
        await self.world.daemon.runtimes.runs[run_id].done.wait()
        return run_id

    async def _paused(self, wire: Wire, model: PlayedModel) -> str:
        run_id = await self._in_mid_run(wire, model)
        await wire.call("session/stop", self._id | {"runId": run_id})
        self.hold.set()
        return run_id

    async def _idle(self, wire: Wire, _: PlayedModel) -> str:
        await wire.prompt(self.session.core.id, "go", wait=True)
        assert self.session.core.last_run is not None
        return self.session.core.last_run.run_id

    async def _unsaved(self, wire: Wire, model: PlayedModel) -> str:
        run_id = await self._in_mid_run(wire, model)
        self.disk.broken = True
        self.hold.set()
        await wire.event("run_settled")
        self.disk.broken = False
        return run_id

    # --- the two ------------------------------------------------------------------------------------------------------

    async def _both(self, wire: Wire, other: Wire, run_id: str) -> list[str]:
        head = self.session.core.queue.items[0].id if self.session.core.queue.items else "nothing"
        bodies, wires = [], [wire, wire if self.connections == 1 else other]
        for one, name, content in zip(wires, (self.first, self.second), ("x1", "x2"), strict=True):
            method, params = ASKED[name]
            params = dict(params)
            if method.startswith(("session/", "queue/")):
                params |= self._id
            if method.startswith("runtime/"):
                params["runtimeId"] = self.runtime_id
            if name in ("add", "steer", "prompt"):
                params["content"] = content
            if name == "stop":
                params["runId"] = run_id
            if name == "remove":
                params["itemId"] = head
            one._next_id += 1
            bodies.append((one, one._next_id, jsonrpc.request_body(one._next_id, method, params)))
        if self.connections == 1:
            await wire.send(b"".join(body for _, _, body in bodies))
        else:
            for one, _, body in bodies:
                await one.send(body)
        with trio.fail_after(10):
            while len(self.decided) < 2:  # noqa: ASYNC110 decided by the very loop that this one lets run
                await trio.lowlevel.checkpoint()
            self.hold.set()
            self.disk.gate.set()
            outcomes = []
            for one, id, _ in bodies:
                try:
                    await one.answer(id)
                    outcomes.append("ok")
                except RpcError as error:
                    outcomes.append(SHORT[error.kind])
        return outcomes

    async def _quiet(self) -> None:
        core = self.session.core
        with trio.fail_after(10):
            while core.run or ((core.slot or core.disposing) and not core.closed):  # noqa: ASYNC110 no event tells
                await trio.lowlevel.checkpoint()
            if core.closed:
                await self.session.ended.wait()

    # --- what holds ---------------------------------------------------------------------------------------------------

    def _check_liveness(self) -> None:
        """An open session that is idle and not paused has nothing that waits."""
        for runtime in self.world.daemon.runtimes.by_id.values():
            queue = runtime.session.core.queue
            assert (queue.paused is None) is (not queue.items)

    def _check(self, wire: Wire) -> None:
        core = self.session.core
        taken = {one.name for one in self.decided if one.refused is None}
        assert core.closed is bool(taken & {"dispose", "new"})
        # Every run that began has settled once.
        assert all(run.done.is_set() for run in self.world.daemon.runtimes.runs.values())
        tags = [params.event for params in wire.events]
        settled = Counter(event.run_id for event in tags if event.__struct_config__.tag == "run_settled")  # type: ignore[union-attr]
        begun = Counter(event.run_id for event in tags if event.__struct_config__.tag == "run_started")  # type: ignore[union-attr]
        assert settled == begun == Counter(set(begun))
        # Nothing lost, nothing doubled.
        had = self.before + self.waiting
        given = [one.content for one in self.decided if one.content and one.refused is None]
        gone = [one.head for one in self.decided if one.head and one.refused is None]
        now = inputs_of(core.history) + waiting_in(self.session)
        assert Counter(now) == Counter(had + given) - Counter(gone), (now, had, given, gone)
        self._check_stopped()
        with suppress(FileNotFoundError):
            if core.unsaved is None:
                _, stored = files.read_session(self.world.services.fs, self.path)
                assert stored.lines == core.history.lines

    def _check_stopped(self) -> None:
        """After a stop nothing begins but what somebody asked for later (Q-3)."""
        for at, one in enumerate(self.decided):
            asked = [later for later in self.decided[at + 1 :] if later.starts]
            if one.stops and not asked:
                assert one.runs == self.world.services.counters["runs"]

    async def _emptied(self, wire: Wire) -> None:
        """It goes on, in the order of acceptance: those that steer before what waited with them."""
        core = self.session.core
        if core.closed:
            return
        if core.unsaved is not None:
            await wire.call("session/flush", self._id)
            await self._quiet()
        if core.queue.items:
            await wire.call("session/resume", self._id)
            await self._quiet()
        assert waiting_in(self.session) == []
        found = inputs_of(core.history)
        gone = {one.head for one in self.decided if one.name == "remove" and one.refused is None}
        for name, kept in (
            ("steer", self.steering),
            ("add", [one for one in self.waiting if one not in self.steering]),
        ):
            added = [one.content for one in self.decided if one.refused is None and one.name == name]
            expected = [text for text in kept + added if text not in gone]
            assert [text for text in found if text in expected] == expected


def inputs_of(history: History) -> list[str]:
    messages = [decode_message(history.line(index)) for index in range(history.messages)]
    users = [message for message in messages if isinstance(message, UserMessage)]
    return [block.text for message in users for block in message.content if isinstance(block, TextBlock)]


def waiting_in(session: Session) -> list[str]:
    queue = session.core.queue
    left = [item for item in queue.items if item.id not in queue._started]
    return [text_of(item) for item in left]


def text_of(item: Item) -> str:
    (block,) = item.content
    assert isinstance(block, TextBlock)
    return block.text


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[Accepted]:
    """The requests in the order in which the daemon decides them."""
    made: list[Accepted] = []
    names = {method: name for name, (method, _) in ASKED.items()}

    def recording(method: str, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def decide(call: Any, params: Any) -> Any:
            name = names[method]
            if method == "queue/add":
                name = "steer" if params.steer else "add"
            if method == "server/drain":
                name = "undrain" if params.cancel else "drain"
            one = Accepted(name, getattr(params, "content", None))
            if name == "remove" and (runtime := next(iter(call.runtimes.by_id.values()), None)):
                waiting = runtime.session.core.queue.items
                one.head = next(
                    (block.text for item in waiting if item.id == params.item_id for block in item.content), None
                )
            try:
                outcome = function(call, params)
                one.starts = getattr(outcome, "run_id", None) is not None
                one.stops = name == "abort" or (name == "stop" and callable(outcome))
                return outcome
            except Exception as error:
                one.refused = getattr(error, "kind", type(error).__name__)
                raise
            finally:
                one.runs = call.daemon.services.counters["runs"]
                made.append(one)

        return decide

    for method in names:
        monkeypatch.setitem(api.TABLE, method, recording(method, api.TABLE[method]))
    return made


@pytest.mark.parametrize(("moment", "connections"), [*product(MOMENTS, [1]), *product(MOMENTS[:3], [2])])
async def test_every_two_requests_at_one_moment(
    moment: str, connections: int, decided: list[Accepted], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows: dict[str, list[str]] = {name: [] for name in ASKED}
    disk, model = Disk(), PlayedModel([text("fine")])
    async with running(tmp_path, model=model, fs=disk) as world:
        # Of two connections the daemon chooses which it reads first.
        for first, second in product(ASKED, ASKED) if connections == 1 else combinations_with_replacement(ASKED, 2):
            pair = Pair(world, disk, first, second, connections, decided)
            try:
                rows[first].append(await pair.at(moment, model))
            except BaseException:
                print(f"{moment}: {first}, then {second}; decided: {decided}")
                raise
    rows = {name: [""] * (len(ASKED) - len(row)) + row for name, row in rows.items()}
    print("\n" + bench.table([moment, *ASKED], rows))
    faults = [record.getMessage() for record in caplog.records if "a fault" in record.getMessage()]
    assert not faults
