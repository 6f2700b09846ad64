"""Whatever supersedes a title, at every await of its work; and the title that is finished at every await of the other.

After each the title in memory, on disk, in the last event and after reopening is one and the same (I-7, T-10).
"""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import disks
import msgspec
import pytest
import trio
from inprocess import Wire, World, running, text
from stepping import Steps
from titling import (
    ALL,
    FIRST,
    Namer,
    agreed,
    by_hand,
    first_words,
    made,
    on_disk,
    say,
    state,
    stored,
    talks,
    title,
    told,
)

from loop_protocol.v1.methods import METHODS
from loopd import api
from loopd.agent import ModelError, Reply
from loopd.core.guards import Refused
from loopd.core.state import SessionCore
from loopd.session import Session
from loopd.storage.fs import FileSystem

FIRST_WORDS = first_words("first")
NAMED = made("A name", 0)
AGAIN = made("Later", 0, 2)
OTHER = {"provider": "scripted", "id": "other"}
JOB = "TitleWorker._perform_beside"


class Act:
    """What a client asks for at that very moment, decided at once, as the reader would. ``refused``: it was not now."""

    def __init__(self, world: World, opened: Any, nursery: trio.Nursery, method: str, **params: Any) -> None:
        self.world = world
        self.nursery = nursery
        self.method = method
        ids = {"sessionId": opened["sessionId"]} if not method.startswith(("runtime/", "server/")) else {}
        ids = {"runtimeId": opened["runtimeId"]} if method.startswith("runtime/") else ids
        self.params = ids | params
        self.answer: Any = None
        self.refused = False
        self.begun = False
        self.done = trio.Event()

    def __call__(self) -> None:
        self.begun = True
        typed = msgspec.convert(self.params, METHODS[self.method].params)
        try:
            outcome = api.TABLE[self.method](api.Call(self.world.daemon, None), typed)  # type: ignore[arg-type]
        except Refused:
            self.refused = True
            self.done.set()
            return
        if not callable(outcome):
            self.answer = outcome
            self.done.set()
            return
        self.nursery.start_soon(self._await, outcome)

    async def _await(self, outcome: Callable[[], Any]) -> None:
        self.answer = await outcome()
        self.done.set()


class Scene:
    """A session whose title work waits for ``gate`` after its text was said, and what is asked of it."""

    def __init__(self, world: World, wire: Wire, opened: Any, namer: Namer, act: Act) -> None:
        self.world = world
        self.wire = wire
        self.opened = opened
        self.namer = namer
        self.act = act
        self.session: Session = world.session_of(opened["sessionId"])

    async def over(self) -> None:
        """Nothing goes on any more, and nothing is open at the provider."""
        with trio.fail_after(10):
            await self.act.done.wait()
            if self.act.method in ("title/cancel", "session/abort", "runtime/dispose") and not self.act.refused:
                assert not self.session.titles.busy  # cancelled and drained, when it answers
            if self.session.run:
                await self.session.run.done.wait()
            await self.session.titles.settled()
        assert self.namer.open == 0
        assert self.namer.most <= 1

    async def shown(self) -> Any:
        """The title that everybody agrees on."""
        match self.act.method:
            case "runtime/dispose":
                assert self.session.ended.is_set()
                return await self._left_behind()
            case "runtime/newSession" | "runtime/switchSession" if not self.act.refused:
                return await self._replaced()
            case "server/drain":
                assert self.act.answer.quiet
                await self.wire.call("server/drain", {"cancel": True})
        return await agreed(self.world, self.wire, self.opened)

    async def _replaced(self) -> Any:
        now = self.world.session_of(self.act.answer.session_id)
        await self.wire.event("session_replaced")
        await self.wire.call("session/state", {"sessionId": now.core.id})
        ids = [params.session_id for params in self.wire.events]
        [place] = [
            at for at, params in enumerate(self.wire.events) if params.event.__struct_config__.tag == "session_replaced"
        ]
        assert set(ids[place + 1 :]) <= {now.core.id}
        assert now.core.titles.current == stored({"path": now.core.path})
        return await self._left_behind()

    async def _left_behind(self) -> Any:
        """Of the old session its file, and what was told of it."""
        await self.wire.call("server/status")
        events = told(self.wire, self.opened["sessionId"])
        shown = await on_disk(self.world, self.opened)
        assert [event["title"] for event in events if "title" in event][-1:] == [shown]
        assert msgspec.to_builtins(self.session.core.titles.current) == shown
        return shown


IDLE: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[Any]]] = {
    # what is asked, with what, under which policy, and what the title may be then
    "rename": ("title/rename", {"text": "Mine"}, FIRST, [by_hand("Mine")]),
    "refresh": ("title/refresh", {}, FIRST, [made("Later", 0)]),
    "model": ("session/setModel", {"model": OTHER}, FIRST, [FIRST_WORDS, NAMED]),
    "text": ("session/prompt", {"content": "second"}, FIRST, [FIRST_WORDS, NAMED]),
    "texts": ("session/prompt", {"content": "second"}, ALL, [AGAIN]),
    "queued": ("queue/add", {"content": "second"}, ALL, [AGAIN]),
    "cancel": ("title/cancel", {}, FIRST, [FIRST_WORDS, NAMED]),
    "abort": ("session/abort", {}, ALL, [FIRST_WORDS, NAMED]),
    "new": ("runtime/newSession", {}, FIRST, [FIRST_WORDS, NAMED]),
    "switch": ("runtime/switchSession", {}, ALL, [FIRST_WORDS, NAMED]),
    "dispose": ("runtime/dispose", {}, FIRST, [FIRST_WORDS, NAMED]),
    "drain": ("server/drain", {"deadlineMs": 0}, FIRST, [FIRST_WORDS, NAMED]),
}


# What makes older work stale with the answer that it is accepted; the others do so in the course of their work.
AT_ONCE = ("rename", "refresh", "model", "text", "texts", "queued")


@asynccontextmanager
async def _idle(root: Path, name: str, fs: FileSystem | None = None) -> AsyncIterator[tuple[Scene, trio.Event]]:
    """One session after its run, whose title work waits for an event. What is right afterwards is seen at the end."""
    method, params, policy, titles = IDLE[name]
    gate = trio.Event()

    async def named(*_: Any) -> Reply:
        await gate.wait()
        await trio.lowlevel.checkpoint()
        return text("A name")

    namer = Namer([named, text("Later")])
    async with running(root, model=talks(), titles=namer, fs=fs) as world, trio.open_nursery() as nursery:
        wire = await world.connect()
        other = await wire.open(world, runtimeId="new", attach=False)
        await title(wire, other, "rename", text="The other")
        await wire.call("runtime/dispose", {"runtimeId": other["runtimeId"]})
        opened = await wire.open(world, title=policy)
        await say(wire, opened, "first")
        await namer.requests(1)
        more = {"path": other["path"]} if name == "switch" else {}
        act = Act(world, opened, nursery, method, **params, **more)
        scene = Scene(world, wire, opened, namer, act)
        yield scene, gate
        await scene.over()
        shown = await scene.shown()
        assert not act.refused
        assert shown in titles, (name, shown)
        if name == "refresh":
            assert msgspec.to_builtins(act.answer.title) == shown
        await wire.aclose()


async def _stepped(root: Path, name: str, steps: Callable[[Act, trio.Event], tuple[Steps, bool]]) -> bool:
    """Answers whether the step was there."""
    async with _idle(root, name) as (scene, gate):
        act = scene.act
        watched, acts_itself = steps(act, gate)
        trio.lowlevel.add_instrument(watched)
        (act if acts_itself else gate.set)()
        with trio.fail_after(10):
            if acts_itself:
                await act.done.wait()
                if scene.session.run:
                    await scene.session.run.done.wait()
                gate.set()
            else:
                await scene.session.titles.settled()
        trio.lowlevel.remove_instrument(watched)
        hit = watched.hit
        if not act.begun:
            act()
    if acts_itself and name in AT_ONCE:
        assert not [event for event in told(scene.wire) if event.get("title") == NAMED]
    return hit


async def _at_each(root: Path, one: Callable[[Path, int], Any], *, least: int) -> None:
    at = 1
    while await one(root / str(at), at):
        at += 1
    print(f"{at - 1} steps")
    assert at > least


@pytest.mark.parametrize("name", IDLE)
async def test_what_supersedes_a_title_comes_at_every_await_of_its_work(name: str, tmp_path: Path) -> None:
    """T-10, I-7, R-4"""

    async def one(root: Path, at: int) -> bool:
        return await _stepped(root, name, lambda act, _: (Steps(at=at, act=act, of=JOB), False))

    await _at_each(tmp_path, one, least=5)


TASKS = {"text": "Runs._perform", "texts": "Runs._perform", "queued": "Runs._perform"}


@pytest.mark.parametrize("name", [name for name in IDLE if name not in ("cancel", "abort")])
async def test_a_title_is_finished_at_every_await_of_what_supersedes_it(name: str, tmp_path: Path) -> None:
    """T-10, I-7, R-4"""

    async def one(root: Path, at: int) -> bool:
        of = TASKS.get(name, "Jobs._perform")
        return await _stepped(root, name, lambda _, gate: (Steps(at=at, act=gate.set, of=of), True))

    await _at_each(tmp_path, one, least=2)


class Slow(FileSystem):
    """Its next fsync waits for ``go``, and then may fail."""

    def __init__(self, *, fails: bool) -> None:
        self.waits = False
        self.fails = fails
        self.reached = threading.Event()
        self.go = threading.Event()

    def fsync(self, fd: int) -> None:
        if self.waits:
            self.waits = False
            self.reached.set()
            self.go.wait(10)
            if self.fails:
                raise OSError(errno.EIO, "it is broken")
        super().fsync(fd)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", IDLE)
async def test_what_comes_while_a_title_is_written_is_written_after_it(
    name: str, fails: bool, tmp_path: Path
) -> None:  # T-10, T-11, I-7
    fs = Slow(fails=fails)
    async with _idle(tmp_path, name, fs) as (scene, gate):
        fs.waits = True
        gate.set()
        assert await trio.to_thread.run_sync(fs.reached.wait, 10)
        scene.act()
        await trio.testing.wait_all_tasks_blocked()
        fs.go.set()
        await scene.over()
    titles = [event["title"] for event in told(scene.wire, scene.opened["sessionId"]) if "title" in event]
    assert (NAMED in titles) == (not fails)


class Killed(disks.Steps):
    """What a kill right before each call would leave of the session of ``core``, and which title was told by then."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.core: SessionCore | None = None
        self.left: list[tuple[Path, Any]] = []

    def step(self, name: str, args: tuple[Any, ...], go: Callable[[], Any]) -> Any:  # noqa: ARG002 see Steps
        if self.core is not None:
            path = Path(self.core.path or "")
            told = msgspec.to_builtins(self.core.titles.current)
            left = self.root / str(len(self.left)) / path.parent.name
            shutil.copytree(path.parent, left)
            self.left.append((left / path.name, told))
        return go()


async def test_wherever_a_kill_comes_the_title_that_was_told_or_the_next_one_is_there(tmp_path: Path) -> None:  # I-7
    fs, gate = Killed(tmp_path / "left"), trio.Event()

    async def waits(*_: Any) -> Reply:
        await gate.wait()
        return text("A name")

    titles = [FIRST_WORDS, NAMED, by_hand("Mine"), made("Later", 0)]
    async with running(tmp_path, model=talks(), titles=Namer([waits, text("Later")]), fs=fs) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=FIRST)
        await say(wire, opened, "first")
        fs.core = world.session().core
        gate.set()
        await title(wire, opened, "wait")
        await title(wire, opened, "rename", text="Mine")
        await title(wire, opened, "refresh")
        await wire.call("session/setModel", {"sessionId": opened["sessionId"], "model": OTHER})
        fs.core = None
        assert await agreed(world, wire, opened) == titles[-1]
    seen = []
    async with running(tmp_path) as world:
        wire = await world.connect()
        for path, told in fs.left:
            session = {"kind": "open", "path": str(path)}
            again = await wire.call("runtime/open", {"cwd": world.cwd, "session": session, "runtimeId": "new"})
            seen.append(again["state"]["title"])
            place = titles.index(told)
            assert seen[-1] in titles[place : place + 2], path
            await wire.call("runtime/dispose", {"runtimeId": again["runtimeId"]})
    assert [one for at, one in enumerate(seen) if one != seen[at - 1] or not at] == titles


# --- in the middle of the run that its text began

RUNNING: dict[str, tuple[str, dict[str, Any], list[Any]]] = {
    "cancel": ("title/cancel", {}, [FIRST_WORDS, NAMED]),
    "abort": ("session/abort", {}, [FIRST_WORDS, NAMED]),
    "dispose": ("runtime/dispose", {}, [FIRST_WORDS, NAMED]),
    "drain": ("server/drain", {"deadlineMs": 0}, [FIRST_WORDS, NAMED]),
    "rename": ("title/rename", {"text": "Mine"}, [NAMED, by_hand("Mine")]),
    "steer": ("queue/add", {"content": "second", "steer": True}, [AGAIN, made("Later", 0, 1), made("A name", 0, 1)]),
}


@pytest.mark.parametrize("name", RUNNING)
async def test_during_the_run_of_its_text_the_same_holds_at_every_await_of_the_title(
    name: str, tmp_path: Path
) -> None:  # T-9, T-10, I-7
    method, params, titles = RUNNING[name]

    async def one(root: Path, at: int) -> bool:
        async def named(*_: Any) -> Reply:
            await trio.lowlevel.checkpoint()
            return text("A name")

        namer = Namer([named, text("Later")])
        async with running(root, model=talks(), titles=namer) as world, trio.open_nursery() as nursery:
            wire = await world.connect()
            opened = await wire.open(world, title=ALL)
            act = Act(world, opened, nursery, method, **params)
            scene = Scene(world, wire, opened, namer, act)
            watched = Steps(at=at, act=act, of=JOB)
            trio.lowlevel.add_instrument(watched)
            run_id = await wire.prompt(opened["sessionId"], "first")
            run = world.daemon.runtimes.runs[run_id]
            with trio.fail_after(10):
                await run.done.wait()
                await scene.session.titles.settled()
            trio.lowlevel.remove_instrument(watched)
            hit = watched.hit
            if not hit:
                act()
            await scene.over()
            shown = await scene.shown()
            assert shown in titles, (name, at, shown)
            assert not act.refused or name == "rename"
            if not hit and name in ("cancel", "abort", "dispose", "drain"):
                assert shown == NAMED
            await wire.aclose()
        return hit

    await _at_each(tmp_path, one, least=5)


async def test_an_abort_right_after_a_prompt_leaves_no_title_work_behind(tmp_path: Path) -> None:  # T-9
    """Both arrive in one piece: the run has told nothing yet, and neither has the title begun."""
    namer = Namer()
    async with running(tmp_path, model=talks(), titles=namer) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=FIRST)
        session = {"sessionId": opened["sessionId"]}
        lines = [
            {"jsonrpc": "2.0", "id": 101, "method": "session/prompt", "params": session | {"content": "first"}},
            {"jsonrpc": "2.0", "id": 102, "method": "session/abort", "params": session},
        ]
        await wire.send(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        await wire.answer(101)
        assert await wire.answer(102) == {"stopped": True}
        await title(wire, opened, "wait")
        assert not namer.asked
        assert await agreed(world, wire, opened) == FIRST_WORDS


async def test_a_cancel_right_after_a_refresh_cancels_it(tmp_path: Path) -> None:  # T-9
    namer = Namer([text("One"), text("Two")])
    async with running(tmp_path, model=talks(), titles=namer) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=FIRST)
        await say(wire, opened, "first")
        await title(wire, opened, "wait")
        session = {"sessionId": opened["sessionId"]}
        methods = {101: "title/refresh", 102: "title/cancel"}
        lines = [{"jsonrpc": "2.0", "id": id, "method": name, "params": session} for id, name in methods.items()]
        await wire.send(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        with pytest.raises(Exception, match="cancelled"):
            await wire.answer(101)
        assert await wire.answer(102) == {"cancelled": True}
        assert "operation" not in await state(wire, opened)
        assert await agreed(world, wire, opened) == made("One", 0)


async def test_a_rename_while_a_generation_hangs_stays_when_that_answers(tmp_path: Path) -> None:  # K-40
    gate, namer = trio.Event(), Namer()

    async def hangs_on(*_: Any) -> Reply:
        with trio.CancelScope(shield=True):  # a provider's client that takes its time to let go
            await gate.wait()
        return text("Too late")

    namer.answers = [hangs_on]
    async with running(tmp_path, model=talks(), titles=namer) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=FIRST)
        await say(wire, opened)
        await namer.requests(1)
        assert await title(wire, opened, "rename", text="Mine") == {"title": by_hand("Mine")}
        gate.set()
        assert await title(wire, opened, "wait") == {"title": by_hand("Mine")}
        assert (await state(wire, opened))["titleUsage"] == {"inputTokens": 3, "outputTokens": 1}
        assert await agreed(world, wire, opened) == by_hand("Mine")


@pytest.mark.parametrize("method", ["newSession", "switchSession"])
async def test_no_session_takes_the_place_of_one_whose_title_is_still_asked_for(
    method: str, tmp_path: Path
) -> None:  # T-10, R-4
    gate = trio.Event()

    async def hangs_on(*_: Any) -> Reply:
        with trio.CancelScope(shield=True):
            await gate.wait()
        return text("Too late")

    namer = Namer([hangs_on])
    async with running(tmp_path, model=talks(), titles=namer) as world:
        wire, watching = await world.connect(), await world.connect()
        there = await watching.open(world, runtimeId="new", attach=False)
        await watching.call("runtime/dispose", {"runtimeId": there["runtimeId"]})
        opened = await wire.open(world, title=FIRST)
        await say(wire, opened)
        await namer.requests(1)
        saved = len((await watching.call("session/list", {"cwd": world.cwd}))["sessions"])
        more = {"path": there["path"]} if method == "switchSession" else {}
        replacing = await wire.request(f"runtime/{method}", {"runtimeId": opened["runtimeId"], **more})
        await trio.testing.wait_all_tasks_blocked(0.02)
        rows = (await watching.call("session/list", {"cwd": world.cwd}))["sessions"]
        gate.set()
        assert len(rows) == saved
        assert [row["path"] for row in rows if row["live"]] == [opened["path"]]
        assert (await wire.answer(replacing))["sessionId"] != opened["sessionId"]
        assert namer.open == 0
        assert await on_disk(world, opened) == first_words("Explain the project")


async def test_what_goes_wrong_with_a_stale_title_is_not_told(tmp_path: Path) -> None:  # T-10, T-11
    async def breaks_when_cancelled(*_: Any) -> Reply:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            raise ModelError("provider", "it did not like that") from None  # noqa: ASYNC104 what a faulty client does
        raise AssertionError

    namer = Namer([breaks_when_cancelled])
    async with running(tmp_path, model=talks(), titles=namer) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=FIRST)
        await say(wire, opened)
        await namer.requests(1)
        assert await title(wire, opened, "cancel") == {"cancelled": True}
        assert "titleError" not in await title(wire, opened, "wait")
        assert not [event for event in told(wire) if "error" in event]


async def test_a_wait_right_after_a_rename_waits_for_its_write(tmp_path: Path) -> None:  # T-9
    async with running(tmp_path, model=talks()) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        await say(wire, opened)
        session = {"sessionId": opened["sessionId"]}
        requests = [("title/rename", session | {"text": "Mine"}), ("title/wait", session)]
        lines = [
            {"jsonrpc": "2.0", "id": 101 + place, "method": method, "params": params}
            for place, (method, params) in enumerate(requests)
        ]
        await wire.send(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        assert await wire.answer(102) == {"title": by_hand("Mine")}
        assert await wire.answer(101) == {"title": by_hand("Mine")}


async def test_a_client_that_goes_away_cancels_no_refresh(tmp_path: Path) -> None:  # I-10, R-7
    gate = trio.Event()

    async def waits(*_: Any) -> Reply:
        await gate.wait()
        return text("A name")

    namer = Namer([waits])
    async with running(tmp_path, model=talks(), titles=namer) as world:
        wire, leaver = await world.connect(), await world.connect()
        opened = await wire.open(world, title=FIRST)
        await title(wire, opened, "rename", text="Mine")
        await say(wire, opened, "first")
        await leaver.request("title/refresh", {"sessionId": opened["sessionId"]})
        await namer.requests(1)
        await leaver.aclose()
        while len(world.daemon.clients) > 1:  # noqa: ASYNC110 nothing tells
            await trio.lowlevel.checkpoint()
        gate.set()
        assert await title(wire, opened, "wait") == {"title": NAMED}
        assert await agreed(world, wire, opened) == NAMED
