"""Random lives of a session whose people type ahead, steer, stop, resume and are asked, against a plain model of the
rules.

What an input makes the model do is said in its text, so a queue can be followed by thought alone. After each step the
daemon, its files, the replica of every client and the plain model must agree (Q-1…Q-5, A-1…A-6, I-1, I-2, I-8, I-9).
``LOOPD_TEST_LIVES`` says how many.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import model_bench as bench
import msgspec
import outcome
import pytest
import trio
from asking import RULE, Asking
from checked_model import CheckedModel, asked
from guest import Guest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from inprocess import Probe, ProbeArguments, Wire, call, running, text
from test_saving import Breaking

from loop_protocol.replica import fold
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.events import ApprovalRequested, Event, MessageStart, QueueChanged, RunSettled, RunStarted
from loop_protocol.v1.types import SessionState, ThinkingBlock
from loopd.agent import ModelError, Reply, TextDelta, ThinkingDelta, ToolOutcome, ToolScope
from loopd.core.history import History
from loopd.session import Session
from loopd.storage import files
from loopd.storage.fs import FileSystem

LIVES = int(os.environ.get("LOOPD_TEST_LIVES", "40"))
STRENGTH = [None, "draining", "save_failed", "error", "stopped"]
ASKS = "asks in a tool"
HANGS = ["hangs in text", "hangs in thinking", "hangs in a tool", ASKS, "hangs in a retry"]
PLAYS = [
    "answers",
    "answers",
    "uses a tool",
    "uses three",
    "fails",
    "fails partly",
    *HANGS,
    "uses a tool, then hangs in text",
    "uses a tool, then fails partly",
]
CALLS = {"uses a tool": ["probe"], "uses three": ["probe"] * 3, "hangs in a tool": ["probe", "hang", "probe"]}
CALLS[ASKS] = ["probe", "ask", "probe"]
WAYS = st.sampled_from(["allowed-once", "allowed-once", "allowed-session", "rejected"])
POLICIES = st.sampled_from(["wait", "wait", "reject"])
PICTURE = {"type": "image", "mimeType": "image/png", "data": "AAAA"}


def next_act(said: str, stops: list[str]) -> str:
    """What the model does now, with the answers so far: the same for the played model and for the plain one."""
    play = said.partition("#")[2]
    first, _, then = play.partition(", then ")
    if not stops:
        return first
    return then if then and stops == ["toolUse"] else "answers"


# --- what the rules say -----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Waiting:
    said: str
    steer: bool
    picture: bool
    request: str
    approvals: str = "wait"
    id: str = ""
    revision: int = 1


Entry = tuple[str, str, str]  # role, text or who was called, how it ended


@dataclass
class Rules:
    """One session in its daemon, as Q-1…Q-5 have it."""

    history: list[Entry] = field(default_factory=list)
    saved: int = 0
    queue: list[Waiting] = field(default_factory=list)
    paused: str | None = None
    why: bool = False  # the head was not acceptable
    hangs: str | None = None
    unsaved: bool = False
    broken: bool = False
    draining: bool = False
    recoverable: list[Entry] = field(default_factory=list)
    settled: list[tuple[str, bool]] = field(default_factory=list)
    runs: int = 0
    gone: list[str] = field(default_factory=list)  # items that have started
    requests: dict[str, str] = field(default_factory=dict)  # what was sent under which id, of all that has started
    begun: int = 0  # where the run's messages begin
    steered: int = 0
    approvals: str = "wait"  # what the run that goes on says of them
    granted: bool = False

    def refusal(self, *, unsaved: bool = True, draining: bool = True) -> str | None:
        if self.draining and draining:
            return "draining"
        if self.hangs:
            return "approvals_pending" if self.hangs == ASKS else "session_busy"
        return "pending_save" if self.unsaved and unsaved else None

    def pause(self, reason: str, *, why: bool = False) -> None:
        if self.queue and STRENGTH.index(reason) >= STRENGTH.index(self.paused):
            self.paused, self.why = reason, why

    def lift(self, *reasons: str) -> None:
        if not reasons or self.paused in reasons:
            self.paused, self.why = None, False

    def take(self, item: Waiting) -> None:
        self.queue.remove(item)
        if not self.queue:
            self.lift()

    def start_queued(self) -> None:
        if not self.queue or self.paused:
            return
        match self.refusal():
            case "draining":
                self.pause("draining")
            case "pending_save":
                self.pause("save_failed")
            case None:
                if self.queue[0].picture:
                    self.pause("error", why=True)
                else:
                    self.enter(self.queue[0])

    def enter(self, item: Waiting) -> None:
        if item in self.queue:
            self.take(item)
        self.gone.append(item.id)
        self.begin(item.said, item.request, item.approvals)

    def begin(self, said: str, request: str | None, approvals: str) -> None:
        self.begun, self.approvals = len(self.history), approvals
        self._hear(said, request)
        self.go_on()

    def _hear(self, said: str, request: str | None) -> None:
        self.recoverable = []
        self.history.append(("user", said, ""))
        if request:
            self.requests[request] = said

    def stops(self) -> tuple[str, list[str]]:
        last = max(place for place, entry in enumerate(self.history) if entry[0] == "user")
        return self.history[last][1], [entry[2] for entry in self.history[last:] if entry[0] == "assistant"]

    def go_on(self, *, resumed: bool = False) -> None:
        if resumed:
            self.begun, self.approvals = len(self.history), "wait"
        self.runs += 1
        self._turns()

    def _turns(self) -> None:
        """Until it hangs or ends."""
        while True:
            said, stops = self.stops()
            act = next_act(said, stops)
            if act in CALLS:
                self.history.append(("assistant", "", "toolUse"))
                self._results(CALLS[act])
            if act == ASKS and (self.granted or self.approvals == "reject"):
                self._answered("" if self.granted else "error")
            elif act in HANGS:
                self.hangs = act
                return
            if act == "fails partly":
                self.history.append(("assistant", "half", "error"))
            if act.startswith("fails"):
                self._end("error")
                return
            if act == "answers":
                self.history.append(("assistant", f"re: {said}", "stop"))
            if not self._steer() and act == "answers":
                self._end("success")
                return

    def _results(self, names: list[str], ending: str = "") -> None:
        for name in names:
            if name in ("hang", "ask") and not ending:
                return
            self.history.append(("toolResult", "error" if ending == "stopped" else "", ""))

    def _answered(self, result: str) -> None:
        self.history += [("toolResult", result, ""), ("toolResult", "", "")]

    def _steer(self) -> bool:
        entered = False
        while item := next((item for item in self.queue if item.steer), None):
            if item.picture:
                self.queue.remove(item)
                item.steer = False
                self.queue.insert(0, item)
                self.pause("error", why=True)
                continue
            self.take(item)
            self.gone.append(item.id)
            self._hear(item.said, item.request)
            self.steered += 1
            entered = True
        return entered

    def let_go(self, answer: str) -> None:
        """What hung goes on. ``answer``: if it asked."""
        said, _ = self.stops()
        act, self.hangs = self.hangs, None
        if act == ASKS:
            self.granted |= answer == "allowed-session"
            self._answered("error" if answer == "rejected" else "")
        elif act == "hangs in a tool":
            self._results(["hang", "probe"], "done")
        else:
            self.history.append(("assistant", f"half re: {said}" if act == "hangs in text" else f"re: {said}", "stop"))
        if not self._steer() and act not in CALLS:
            self._end("success")
        else:
            self._turns()

    def stop(self) -> None:
        act, self.hangs = self.hangs, None
        if act == "hangs in text":
            self.history.append(("assistant", "half", "aborted"))
        if act in CALLS:
            self._results(["hang", "probe"], "stopped")
        self._end("cancelled")

    def _end(self, outcome: str) -> None:
        self._save()
        self.settled.append((outcome, not self.unsaved))
        steering = [item for item in self.queue if item.steer]
        self.queue = steering + [item for item in self.queue if not item.steer]
        for item in steering:
            item.steer = False
        if outcome != "success" or self.unsaved:
            self.pause({"cancelled": "stopped", "error": "error", "success": "save_failed"}[outcome])
        self.start_queued()

    def _save(self) -> None:
        self.unsaved = self.broken
        if not self.unsaved:
            self.saved = len(self.history)
            self.lift("save_failed")

    def flush(self) -> None:
        if self.unsaved:
            self._save()
        self.start_queued()

    @property
    def resumable(self) -> bool:
        return bool(self.history) and self.history[-1][2] not in ("stop", "toolUse", "length")

    def recover(self) -> None:
        """Finished messages of the run that was cut off, its open calls answered."""
        self.history += self.recoverable
        for entry in self.recoverable:
            if entry[0] == "user":
                request = next((one for one, said in self.lost.items() if said == entry[1]), None)
                if request:
                    self.requests[request] = entry[1]
        self.recoverable = []
        said, _ = self.stops()
        calls = [place for place, entry in enumerate(self.history) if entry[2] == "toolUse"]
        if calls and all(entry[0] == "toolResult" for entry in self.history[calls[-1] + 1 :]):
            names = CALLS[said.partition("#")[2].partition(",")[0]]
            self._results(names[len(self.history) - calls[-1] - 1 :], "stopped")
        self._save()
        self.settled.append(("error", not self.unsaved))

    lost: dict[str, str] = field(default_factory=dict)  # what was sent in the run that a crash cut off

    def reopened(self) -> None:
        self.queue, self.paused, self.why, self.hangs = [], None, False, None
        self.settled, self.runs, self.gone, self.granted = [], 0, [], False

    def crash(self) -> None:
        """Only what is saved is there, and what the journal has of the run."""
        left = self.history[self.saved :]
        self.history = self.history[: self.saved]
        texts = [entry[1] for entry in self.history]
        known = {request: said for request, said in self.requests.items() if said in texts}
        if left:
            self.recoverable = left
            self.lost = {request: said for request, said in self.requests.items() if request not in known}
        self.requests = known
        self.unsaved = False
        self.reopened()


# --- what is played ---------------------------------------------------------------------------------------------------


class Stage:
    """Where a run hangs until it is let go; ``at`` is that run."""

    def __init__(self) -> None:
        self.at: str | None = None
        self.arrived = trio.Event()
        self._gate = trio.Event()
        self.session: Session

    def show(self) -> None:
        assert self.session.run is not None
        self.at = self.session.run.state.id
        self.arrived.set()
        self.arrived = trio.Event()

    async def hang(self) -> None:
        self._gate = trio.Event()
        self.show()
        await self._gate.wait()

    def let_go(self) -> None:
        self.at = None
        self._gate.set()

    def is_told(self, event: Event) -> None:
        """A run that asks hangs."""
        if isinstance(event, ApprovalRequested):
            self.show()
        else:
            self.at = None

    async def respond(self, request: Any, say: Callable[[Any], None]) -> Reply:
        said, stops = asked(request)
        act = next_act(said, stops)
        if act in CALLS:
            rules = {"ask": {"rules": [RULE]}}
            calls = [
                block
                for n, name in enumerate(CALLS[act])
                for block in call(name, id=f"c{n}", **rules.get(name, {})).content
            ]
            return Reply([ThinkingBlock("hm", "sealed"), *calls], call().usage, "toolUse")
        match act:
            case "answers":
                return text(f"re: {said}")
            case "hangs in thinking":
                say(ThinkingDelta("hm"))
                await self.hang()
                return text(f"re: {said}")
            case "hangs in a retry":
                self.show()
                raise ModelError("rate_limit", "later", retry_after_s=50)
            case "fails":
                raise ModelError("bad_request", "the provider refuses")
        say(TextDelta("half"))
        if act == "fails partly":
            raise ModelError("incomplete", "cut")
        await self.hang()
        return text(f"half re: {said}")


class Hanging(Probe):
    def __init__(self, stage: Stage) -> None:
        super().__init__(name="hang")
        self._stage = stage

    async def run(self, arguments: ProbeArguments, scope: ToolScope) -> ToolOutcome:
        scope.output("…")
        await self._stage.hang()
        return await super().run(arguments, scope)


@dataclass(eq=False)
class Client:
    wire: Wire
    replica: SessionState | None = None
    folded: int = 0


# --- the lives --------------------------------------------------------------------------------------------------------


class TypedAhead(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.guest = Guest()
        self.base = Path(tempfile.mkdtemp(prefix="loopd-typed-"))
        self.root = self.base / "0"
        self.disk = Breaking()
        self.rules = Rules()
        self.counter = 0
        self.clones = 0
        self.sent: list[tuple[str, Any, str, bool]] = []
        self.path: str | None = None
        self.last_run = ""
        self.met_a_broken_disk = False
        self.done: dict[str, int] = {}

    # --- the daemon ---------------------------------------------------------------------------------------------------

    @initialize()
    def start(self) -> None:
        self.stage = Stage()
        self.model = CheckedModel([self.stage.respond], history=self._history)
        self.world, self._leave = self.guest.enter(
            running(
                self.root,
                model=self.model,
                tools=[Probe(), Hanging(self.stage), Asking()],
                fs=self.disk,
                rescue_roots=[],
            )
        )
        self.drain: int | None = None
        self._open()

    def _history(self) -> History:
        return self.session.core.history

    def _open(self) -> None:
        self.wire: Wire = self.guest.call(self.world.connect)
        kind = {"kind": "open", "path": self.path} if self.path else {"kind": "new"}
        opened = self.guest.call(self.wire.call, "runtime/open", {"cwd": self.world.cwd, "session": kind})
        self.runtime_id, self.session_id, self.path = opened["runtimeId"], opened["sessionId"], opened["path"]
        self.session = self.stage.session = self.world.session_of(self.session_id)
        self.session.core.approvals.observe = self.stage.is_told
        self.clients: list[Client] = []
        self._attach(self.wire)
        self.seen = 0
        self.started: list[str] = []
        self.settled: list[RunSettled] = []
        self.named: set[str] = set()
        self.queued: list[str] = []
        self.recovered = 0

    def _attach(self, wire: Wire) -> None:
        attached = self.guest.call(wire.call, "runtime/attach", {"runtimeId": self.runtime_id})
        self.clients.append(Client(wire, msgspec.convert(attached["state"], SessionState)))

    async def _answered(self, method: str, params: Any) -> Any:
        request = await self.wire.request(method, params)
        answer = await outcome.acapture(self.wire.answer, request)
        await self._quiet()
        return answer.unwrap()

    async def _quiet(self) -> None:
        """Until nothing goes on, or what goes on hangs."""
        while True:
            arrived, run = self.stage.arrived, self.session.run
            if run is None:
                break
            if self.stage.at == run.state.id:
                return
            async with trio.open_nursery() as nursery:
                for event in (arrived, run.done):
                    nursery.start_soon(self._any_of, event, nursery)
        if self.drain is not None and self.drain >= 0:  # it retries a save that is pending
            await self.wire.answer(self.drain)
            self.drain = -1

    async def _any_of(self, event: trio.Event, nursery: trio.Nursery) -> None:
        await event.wait()
        nursery.cancel_scope.cancel()

    def _ask(self, method: str, **params: Any) -> Any:
        name = method.partition("/")[0]
        who = {"runtimeId": self.runtime_id} if name == "runtime" else {"sessionId": self.session_id}
        return self.guest.call(self._answered, method, params if name == "server" else who | params)

    def _refused(self, method: str, **params: Any) -> str | None:
        try:
            self._ask(method, **params)
        except RpcError as error:
            return error.kind
        return None

    def _did(self, what: str) -> None:
        self.done[what] = self.done.get(what, 0) + 1

    def teardown(self) -> None:
        for what, times in self.done.items():
            hypothesis.event(what, payload=min(times, 5))
        hypothesis.event("inputs that steered", payload=min(self.rules.steered, 5))
        self.disk.error = None
        self._leave()
        self.guest.close()
        shutil.rmtree(self.base)

    # --- what people send ---------------------------------------------------------------------------------------------

    def _text(self, play: str) -> str:
        self.counter += 1
        return f"{self.counter}#{play}"

    @rule(play=st.sampled_from(PLAYS), approvals=POLICIES)
    def prompts(self, play: str, approvals: str = "wait") -> None:
        said, expected = self._text(play), self.rules.refusal()
        assert self._refused("session/prompt", content=said, approvals=approvals) == expected
        if expected is None:
            self._did("prompt")
            self._begins()
            self.rules.begin(said, None, approvals)

    def _begins(self) -> None:
        self.met_a_broken_disk = self.rules.broken

    @rule(
        play=st.sampled_from(PLAYS),
        steer=st.booleans(),
        picture=st.sampled_from([False] * 5 + [True]),
        approvals=POLICIES,
    )
    def adds(self, play: str, steer: bool, picture: bool, approvals: str = "wait") -> None:
        said = self._text(play)
        content = [{"type": "text", "text": said}, PICTURE] if picture else said
        self.sent.append((f"r{self.counter}", content, said, picture))
        self._add(*self.sent[-1], steer=steer, approvals=approvals)

    def _add(
        self, request: str, content: Any, said: str, picture: bool, *, steer: bool, approvals: str = "wait"
    ) -> None:
        rules, params = self.rules, {"content": content, "steer": steer, "requestId": request, "approvals": approvals}
        item = Waiting(said, steer, picture, request, approvals)
        if rules.queue or rules.refusal():
            added = self._ask("queue/add", **params)
            assert "runId" not in added
            item.id = added["itemId"]
            rules.queue.append(item)
            rules.start_queued()
            self._did(f"add{' that steers' * steer}")
        elif picture:
            assert self._refused("queue/add", **params) == "unsupported_input"
        else:
            added = self._ask("queue/add", **params)
            assert added["runId"]
            item.id = added["itemId"]
            self._begins()
            rules.enter(item)
            self._did("add that starts")

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def repeats(self, data: st.DataObject) -> None:
        """What was sent once is not sent twice by the same id."""
        place = data.draw(st.integers(0, len(self.sent) - 1), label="which")
        request, content, said, picture = self.sent[place]
        waiting = [item for item in self.rules.queue if item.request == request]
        if request in self.rules.requests:
            assert self._refused("queue/add", content=content, requestId=request) == "queue_item_started"
        elif waiting:
            assert self._ask("queue/add", content=content, requestId=request)["itemId"] == waiting[0].id
        else:  # it was removed, refused or lost
            self._add(request, content, said, picture, steer=False)
        self._did("repeat")

    @precondition(lambda self: self.rules.queue)
    @rule(data=st.data(), play=st.sampled_from([None, *PLAYS]), steer=st.sampled_from([None, True, False]))
    def edits(self, data: st.DataObject, play: str | None, steer: bool | None) -> None:
        item = self._draw(data)
        changes: dict[str, Any] = {} if steer is None else {"steer": steer}
        if play is not None:
            changes["content"] = self._text(play)
        edited = self._ask("queue/edit", itemId=item.id, revision=item.revision, **changes)
        if play is not None and item is self.rules.queue[0]:
            self.rules.why = False  # what it says now was not tried yet
        # What changes nothing is no edit.
        item.revision += play is not None or changes.get("steer", item.steer) != item.steer
        item.said, item.steer = changes.get("content", item.said), changes.get("steer", item.steer)
        assert (edited["revision"], edited["steer"]) == (item.revision, item.steer)
        stale = self._refused("queue/edit", itemId=item.id, revision=item.revision - 1, content="never")
        assert stale == "conflict"
        self._did("edit")

    @precondition(lambda self: self.rules.refusal() is None)
    @rule(
        hang=st.sampled_from([*HANGS[:4], "uses a tool, then hangs in text"]),
        more=st.lists(st.tuples(st.sampled_from(PLAYS), st.booleans()), min_size=1, max_size=4),
        then=st.sampled_from(["goes on", "goes on", "is stopped", "is resumed", "hangs", "crash", "crash and recover"]),
    )
    def types_ahead(self, hang: str, more: list[tuple[str, bool]], then: str) -> None:
        """Several inputs while a run goes on: what most lives are about."""
        self.prompts(hang)
        for play, steer in more:
            self.adds(play, steer, picture=False)
        self.all_agree()
        match then:
            case "goes on":
                self.goes_on()
            case "is stopped":
                self.stops(all_of_it=False)
            case "is resumed":
                self.stops(all_of_it=True)
                self.all_agree()
                self.resumes()
            case "crash" | "crash and recover":
                self.ends_and_is_opened_again(then)

    @precondition(lambda self: self.rules.paused and not self.rules.hangs)
    @rule(
        what=st.lists(
            st.sampled_from(["fails", "uses a tool", "hangs in text", "breaks", "stop", "abort", "flush", "add"]),
            min_size=1,
            max_size=4,
        )
    )
    def goes_on_beside_a_paused_queue(self, what: list[str]) -> None:
        """Reasons to pause meet, and the stronger one stays."""
        for one in what:
            before = self.rules.paused
            match one:
                case "breaks":
                    self.breaks_or_is_repaired()
                case "stop" | "abort":
                    self.stops(all_of_it=one == "abort")
                case "flush":
                    self.flushes(repaired=True)
                case "add":
                    self.adds("answers", True, picture=False)
                case play:
                    self.prompts(play)
            self.all_agree()
            if (after := self.rules.paused) != before:
                self._did(f"paused: {before}, then {after}")

    def _draw(self, data: st.DataObject) -> Waiting:
        return self.rules.queue[data.draw(st.integers(0, len(self.rules.queue) - 1), label="place")]

    @precondition(lambda self: self.rules.queue)
    @rule(data=st.data(), to=st.sampled_from([None, 0, 1, 2, 9]))
    def moves_or_removes(self, data: st.DataObject, to: int | None) -> None:
        item = self._draw(data)
        if to is None:
            self.named.add(item.id)
            assert self._ask("queue/remove", itemId=item.id)["steer"] == item.steer
            self.rules.take(item)
            self._did("remove")
            return
        self._ask("queue/move", itemId=item.id, to=to)
        self.rules.queue.remove(item)
        self.rules.queue.insert(to, item)
        self._did("move")

    @precondition(lambda self: self.rules.gone)
    @rule(data=st.data(), how=st.sampled_from(["edit", "move", "remove"]))
    def changes_what_has_started(self, data: st.DataObject, how: str) -> None:
        gone = self.rules.gone
        item_id = gone[data.draw(st.integers(0, len(gone) - 1), label="which")]
        more = {"edit": {"revision": 1, "content": "never"}, "move": {"to": 0}, "remove": {}}[how]
        assert self._refused(f"queue/{how}", itemId=item_id, **more) == "queue_item_started"
        assert self._refused(f"queue/{how}", itemId="none", **more) == "queue_item_not_found"

    # --- stop and resume ----------------------------------------------------------------------------------------------

    @rule(all_of_it=st.booleans())
    def stops(self, all_of_it: bool) -> None:
        """A run that is over is not stopped, and nothing else with it."""
        if not all_of_it and not self.last_run:
            return
        stopped = self._ask("session/abort") if all_of_it else self._ask("session/stop", runId=self.last_run)
        assert stopped["stopped"] == (self.rules.hangs is not None)
        if all_of_it:
            self.rules.pause("stopped")
        self._stopped()

    def _stopped(self) -> None:
        if self.rules.hangs:
            self._did(f"stopped: {self.rules.hangs}")
            self.rules.stop()

    @precondition(lambda self: self.rules.refusal() is None)
    @rule(
        approvals=POLICIES, then=st.lists(st.sampled_from(["answer", "stop", "hang"]), min_size=1, max_size=3), way=WAYS
    )
    def is_asked(self, approvals: str, then: list[str], way: str) -> None:
        """Again and again, which what was allowed for the session makes an end of."""
        for one in then:
            if self.rules.refusal() is not None:
                return
            self.prompts(ASKS, approvals)
            self.all_agree()
            if one == "answer":
                self.goes_on(way)
            elif one == "stop":
                self.stops(all_of_it=False)
            self.all_agree()

    @rule(answer=WAYS)
    def goes_on(self, answer: str = "allowed-once") -> None:
        if self.rules.hangs in (None, "hangs in a retry"):
            return

        async def let_go() -> None:
            self.stage.let_go()
            await self._quiet()

        if self.rules.hangs == ASKS:
            self._answers(answer)
        else:
            self.guest.call(let_go)
        self.rules.let_go(answer)
        self._did("hung run that went on")

    def _answers(self, decision: str) -> None:
        """By whoever comes, of what is listed; once."""
        [request] = self.guest.call(self.wire.call, "approval/list", {})["approvals"]
        params = {"approvalId": request["approvalId"], "decision": decision}
        self.guest.call(self._answered, "approval/resolve", params)
        with pytest.raises(RpcError) as late:
            self.guest.call(self.clients[-1].wire.call, "approval/resolve", params)
        assert (late.value.kind, late.value.data["outcome"]) == ("approval_not_pending", decision)
        self._did(f"asked: {decision}")

    @rule()
    def resumes(self) -> None:
        rules = self.rules
        expected = rules.refusal()
        if expected is None and rules.recoverable:
            expected = "conflict"
        elif expected is None and not rules.resumable:
            expected = "nothing_to_resume" if not rules.queue else "unsupported_input" * rules.queue[0].picture or None
        assert self._refused("session/resume") == expected
        if expected is not None:
            return
        self._begins()
        rules.lift()
        if rules.resumable:
            self._did("resume of a run")
            rules.go_on(resumed=True)
        else:
            self._did("resume of a queue")
            rules.enter(rules.queue[0])

    @precondition(lambda self: self.rules.refusal() is None and not self.rules.broken)
    @rule()
    def switches_model(self) -> None:
        ref = bench.EYES if self.model.ref == bench.M else bench.M
        self._ask("session/setModel", model={"provider": ref.provider, "id": ref.id})
        self.model.ref = ref

    # --- the disk, and ends -------------------------------------------------------------------------------------------

    @rule()
    def breaks_or_is_repaired(self) -> None:
        self.rules.broken = not self.rules.broken
        self.disk.error = errno.ENOSPC if self.rules.broken else None
        self.met_a_broken_disk |= self.rules.broken

    @precondition(lambda self: self.rules.unsaved or self.rules.hangs)
    @rule(repaired=st.sampled_from([True, True, False]))
    def flushes(self, repaired: bool) -> None:
        rules = self.rules
        if repaired and rules.broken:
            self.breaks_or_is_repaired()
        if rules.hangs:
            assert self._refused("session/flush") == ("approvals_pending" if rules.hangs == ASKS else "session_busy")
        elif rules.unsaved and rules.broken:
            assert self._refused("session/flush") == "save_failed"
        else:
            assert self._ask("session/flush")["flushed"] == rules.unsaved
            self._did(f"flush{' that wrote' * rules.unsaved}")
            self._begins()
            rules.flush()

    @rule(
        at_once=st.booleans(),
        meanwhile=st.lists(st.sampled_from(["add", "goes on", "abort", "prompt", "resume", "breaks"]), max_size=3),
    )
    def drains_and_takes_work_again(self, at_once: bool, meanwhile: list[str]) -> None:
        self._drains(at_once=at_once)
        for one in meanwhile:
            self.all_agree()
            match one:
                case "add":
                    self.adds("uses a tool", False, picture=False)
                case "goes on":
                    self.goes_on()
                case "abort":
                    self.stops(all_of_it=True)
                case "prompt":
                    self.prompts("answers")
                case "resume":
                    self.resumes()
                case _:
                    self.breaks_or_is_repaired()
        self.all_agree()
        self._takes_work_again()

    def _drains(self, *, at_once: bool) -> None:
        rules = self.rules
        rules.draining = True
        if at_once:
            self._ask("server/drain", deadlineMs=0)
            self._stopped()
        else:
            self.drain = self.guest.call(self.wire.request, "server/drain", {"deadlineMs": 600_000})
            self._ask("server/status")
        if rules.unsaved and not rules.hangs:
            rules.flush()
        self._did("drain")

    def _takes_work_again(self) -> None:
        self._begins()
        self.drain = None
        self._ask("server/drain", cancel=True)
        self.rules.draining = False
        self.rules.lift("draining")
        self.rules.start_queued()

    @rule(how=st.sampled_from(["restart", "dispose", "discard", "crash", "crash and recover"]))
    def ends_and_is_opened_again(self, how: str) -> None:
        match how:
            case "restart":
                if not self.rules.broken:
                    self._restarts()
            case "dispose" | "discard":
                self._is_disposed(discards=how == "discard")
            case _:
                self._crashes(recovers=how != "crash")

    def _restarts(self) -> None:
        self.rules.draining = True
        drained = self._ask("server/drain", deadlineMs=0)
        self.named |= set(self.queued)
        assert not drained["pendingSaves"]
        self._stopped()
        assert drained.get("queued", 0) == len(self.rules.queue)
        self._leave()
        self.rules.saved = len(self.rules.history)
        self.rules.unsaved = False
        self._reopened()
        self.start()
        self._did("restart")

    def _reopened(self) -> None:
        self.rules.reopened()
        self.rules.draining = False
        self.last_run = ""

    def _is_disposed(self, *, discards: bool) -> None:
        rules = self.rules
        if rules.unsaved:
            expected: str | None = "pending_save"
        elif rules.queue and not discards:
            expected = "conflict"
        else:
            expected = "save_failed" if rules.hangs and rules.broken else None
        if expected is None and (rules.broken or rules.draining):
            return  # nothing could be opened
        self.named |= set(self.queued) if expected is None else set()
        assert self._refused("runtime/dispose", discardQueue=discards) == expected
        if expected == "save_failed":
            self._stopped()
        elif expected is None:
            self._stopped()
            self._reopened()
            self._open()
            self._did("dispose")

    def _crashes(self, *, recovers: bool) -> None:
        """The files as they are at this moment, and a new daemon on them."""
        rules, hung = self.rules, self.rules.hangs
        before, self.root = self.root, self.base / str(self.clones + 1)
        self.clones += 1
        shutil.copytree(before / "data", self.root / "data")
        (self.root / "ws").symlink_to(self.base / "0" / "ws")
        self.disk.error, rules.broken, rules.draining = None, False, False
        self._leave()
        assert self.path is not None
        self.path = str(self.root) + self.path.removeprefix(str(before))
        rules.crash()
        self.last_run = ""
        self.start()
        kept = self.session.core.recoverable
        finished = kept.messages if kept else 0
        if hung and not self.met_a_broken_disk:
            assert finished == len(rules.recoverable)  # S-26
        rules.recoverable = rules.recoverable[:finished]
        self._did(f"crash{' in a run' * bool(hung)}")
        if recovers and rules.recoverable:
            self.recovers()

    @precondition(lambda self: self.rules.recoverable and self.rules.refusal() is None)
    @rule()
    def recovers(self) -> None:
        assert self._refused("session/recover") == ("save_failed" if self.rules.broken else None)
        self.rules.recover()
        self.recovered += 1
        self._did("recovery")

    @rule()
    def a_client_comes_or_goes(self) -> None:
        if len(self.clients) < 2:
            self._attach(self.guest.call(self.world.connect))
        else:
            self.guest.call(self.clients.pop().wire.aclose)

    # --- what must hold after every step ------------------------------------------------------------------------------

    @invariant()
    def all_agree(self) -> None:
        self.the_queue_is_what_the_rules_say()
        self.the_conversation_is_what_the_rules_say()
        self.files_are_a_paired_prefix()
        self.every_replica_is_the_snapshot()
        self.every_run_settles_once()

    def the_queue_is_what_the_rules_say(self) -> None:  # Q-1 Q-2 Q-3
        assert not self.model.faults
        state, rules = self.session.core.queue.state(), self.rules
        shown = [("".join(getattr(b, "text", "") for b in item.content), item.steer) for item in state.items]
        assert shown == [(item.said, item.steer) for item in rules.queue]
        assert [item.item_id for item in state.items] == [item.id for item in rules.queue]
        assert (state.paused, state.error is not None) == (rules.paused, rules.why)
        assert rules.hangs or rules.paused or not rules.queue, "an idle session with a queue that is not paused"
        assert (self.session.run is not None) == (rules.hangs is not None)
        assert len(self.session.core.approvals.pending) == (rules.hangs == ASKS)
        assert list(self.session.core.approvals.grants) == ([RULE] if rules.granted else [])

    def the_conversation_is_what_the_rules_say(self) -> None:
        page = self.guest.call(self.wire.call, "session/messages", {"sessionId": self.session_id})
        assert [_entry(message) for message in page["messages"]] == self.rules.history
        assert page["committed"] == self.rules.saved
        said = [entry[1] for entry in self.rules.history if entry[0] == "user"]
        said += [item.said for item in self.rules.queue]
        assert len(set(said)) == len(said)

    def files_are_a_paired_prefix(self) -> None:  # I-4 I-8
        history = self.session.core.history
        if not self.rules.hangs:
            history.require_paired()
        assert self.path is not None
        _, stored = files.read_session(FileSystem(), self.path)
        stored.require_paired()
        assert stored.messages == self.rules.saved
        assert stored.lines == history.lines[: len(stored.lines)]

    def every_replica_is_the_snapshot(self) -> None:  # I-9
        for client in self.clients:
            state = self.guest.call(client.wire.call, "session/state", {"sessionId": self.session_id})
            for params in client.wire.events[client.folded :]:
                assert client.replica is not None
                client.replica = fold(client.replica, params)
            client.folded = len(client.wire.events)
            assert client.replica == msgspec.convert(state, SessionState)

    def every_run_settles_once(self) -> None:  # I-1 I-2 Q-2
        for params in self.wire.events[self.seen :]:
            match params.event:
                case RunStarted(run_id=run_id, item_id=item_id):
                    self.last_run = run_id
                    self.started.append(run_id)
                    self.named.add(item_id or "")
                case MessageStart(item_id=str(item_id)):
                    self.named.add(item_id)
                case QueueChanged(items=items):
                    now = [item.item_id for item in items]
                    assert set(self.queued) - set(now) <= self.named, "an item is gone before it was named"
                    self.queued = now
                case RunSettled() as settled:
                    self.settled.append(settled)
        self.seen = len(self.wire.events)
        assert [(one.outcome, one.saved) for one in self.settled] == self.rules.settled
        ended = [one.run_id for one in self.settled]
        assert len(set(ended)) == len(ended)
        assert len(self.started) == len(set(self.started)) == self.rules.runs
        assert len(self.started) == len(ended) - self.recovered + (self.rules.hangs is not None)


def _entry(message: dict[str, Any]) -> Entry:
    said = "".join(block.get("text", "") for block in message["content"])
    if message["role"] == "toolResult":
        said = "error" if message["isError"] else ""
    return message["role"], said, message.get("stopReason", "")


TestTypedAhead = TypedAhead.TestCase
TestTypedAhead.settings = hypothesis.settings(
    max_examples=LIVES, stateful_step_count=40, deadline=None, database=None, print_blob=True
)
