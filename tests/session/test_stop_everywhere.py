"""Whatever ends a run, at both sides of every await of it, with a queue in play: nothing is lost, doubled or left over.

One run that has all phases: the input is built anew, the model thinks, speaks, calls in fragments, three tools in one
answer, two inputs steer it, its next request is refused once, it answers, it is saved. It is started by a prompt, by
the queue, and by a resumption. A stop comes at every await, the others at some of each phase, which is printed.
Threads write the journal, so the time is real; the model's waits are a millisecond.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import disks
import model_bench as bench
import msgspec
import pytest
import strict_checkers
import trio
from inprocess import REF, PlayedModel, Probe, Wire, World, running
from stepping import Moments

from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.methods import METHODS
from loop_protocol.v1.types import (
    AssistantMessage,
    Message,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolResultMessage,
    Usage,
    UserMessage,
)
from loopd import api
from loopd.agent import ModelError, Reply, TextDelta, ThinkingDelta, ToolCallDelta, ToolOutcome, ToolScope, retry
from loopd.agent import context as model_input
from loopd.agent.tools.process import become_subreaper
from loopd.agent.tools.shell import Bash
from loopd.core.history import History, decode_message
from loopd.core.messages import INTERRUPTED, NOT_STARTED
from loopd.core.queue import Item
from loopd.run import Run
from loopd.session import Session
from loopd.storage import files

SETTLED_S = 2.0
STEERING, WAITING = ["s1", "s2"], ["q1", "q2"]
ENDS = ["stop", "abort", "dispose", "drain", "disconnect", "bug", "steer"]
# One of so many moments of a phase.
EACH = 5
ORIGINS = ["prompt", "queue", "resume"]
# The innermost of these on the stack says which phase it is.
PHASES = {
    "ConversationInput.rebuild": "input built anew",
    "in_thread": "system prompt",
    "Spoken.thinks": "thinking",
    "Spoken.speaks": "text",
    "Spoken.calls": "call in fragments",
    "Spoken.refuses": "refusal",
    "Spoken.respond": "asked",
    "respond": "wait before a retry",
    "Agent.run": "between calls",
    "Watched.run": "tool",
    "Bash.run": "bash",
    "Saving.journal": "journal of a message",
    "Context.take_inputs": "journal of what steers",
    "Saving.save": "last save",
}


@dataclass
class Spoken:
    """A model whose turns are the next of ``turns``, each a list of acts; it breaks where ``broken`` says so. Every
    request is checked as each provider would check it."""

    turns: list[list[str]] = field(default_factory=list)
    history: Callable[[], History] = History
    ref = REF
    input = frozenset({"text"})
    broken = False
    raised = False
    unfinished = ""
    calls_made: Iterator[int] = field(default_factory=lambda: count(1))
    wrong: list[AssertionError] = field(default_factory=list)

    encode = PlayedModel.encode

    async def respond(self, request: Any, say: Callable[[Any], None]) -> Reply:
        try:
            self._check(request)
        except AssertionError as error:
            self.wrong.append(error)
        self.unfinished = ""
        content: list[Any] = []
        await self._wait()
        for act in self.turns.pop(0) if self.turns else ["speaks"]:
            content += await getattr(self, act)(say)
        self.unfinished = ""
        calls = any(isinstance(block, ToolCallBlock) for block in content)
        return Reply(content, Usage(3, 1), "toolUse" if calls else "stop")

    async def thinks(self, say: Callable[[Any], None]) -> list[Any]:
        for _ in range(2):
            say(ThinkingDelta("hm "))
            await self._wait()
        return [ThinkingBlock("hm hm ")]

    async def speaks(self, say: Callable[[Any], None]) -> list[Any]:
        for word in ("a ", "word "):
            say(TextDelta(word))
            self.unfinished += word
            await self._wait()
        return [TextBlock("a word ")]

    async def calls(self, say: Callable[[Any], None]) -> list[Any]:
        made = [ToolCallBlock(f"c{next(self.calls_made)}", "probe", {}) for _ in range(3)]
        for one in made:
            say(ToolCallDelta(one.id, one.name, "{"))
            await self._wait()
            say(ToolCallDelta(one.id, one.name, "}"))
        return made

    async def commands(self, _: Any) -> list[Any]:
        return [ToolCallBlock(f"c{next(self.calls_made)}", "bash", {"command": "sleep 0.05 & echo up; wait"})]

    async def refuses(self, _: Any) -> list[Any]:
        await self._wait()
        raise ModelError("overloaded", "not now")

    async def hangs(self, _: Any) -> list[Any]:
        await trio.sleep_forever()
        raise AssertionError

    def _wait(self) -> Awaitable[None]:
        return _Sound(self)

    def _check(self, request: Any) -> None:
        messages = messages_of(self.history())
        assert bytes(request.input.encoded) == bench.from_scratch(self, messages)  # I-8
        for kind, check in strict_checkers.CHECKERS.items():
            check(bench.body(REAL[kind], messages, tools=(bench.BASH,)))


class _Sound:
    """A checkpoint behind which a bug may strike, without a place of its own on the stack."""

    def __init__(self, model: Spoken) -> None:
        self._model = model

    def __await__(self) -> Any:
        yield from trio.lowlevel.checkpoint().__await__()  # noqa: ASYNC105
        if self._model.broken:
            self._model.raised = True
            raise LookupError("a bug in the model")


REAL = {kind: bench.catalogue("http://127.0.0.1:1/v1", api=kind).resolve(bench.M) for kind in strict_checkers.CHECKERS}
ALL_PHASES = [["thinks", "speaks", "calls"], ["refuses"], ["speaks"]]
A_COMMAND = [["commands"], ["speaks"]]


@dataclass
class Watched(Probe):
    """Knows which calls it began, and which it ended."""

    begun: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    async def run(self, _: Any, scope: ToolScope) -> ToolOutcome:
        self.begun.append(scope.call_id)
        scope.output("probed")
        await trio.lowlevel.checkpoint()
        self.ended.append(scope.call_id)
        return ToolOutcome([TextBlock("probed")])


def messages_of(history: History) -> list[Message]:
    return [decode_message(history.line(index)) for index in range(history.messages)]


def inputs_of(history: History, *, until: int | None = None) -> list[str]:
    """The texts of all inputs that are part of the conversation."""
    messages = [message for message in messages_of(history)[:until] if isinstance(message, UserMessage)]
    return [block.text for message in messages for block in message.content if isinstance(block, TextBlock)]


def waiting_in(session: Session) -> list[str]:
    """Not the one whose run has begun: that is seen to wait until its message is told."""
    queue = session.core.queue
    return [text_of(item) for item in queue.items if item.id not in queue._started]


def text_of(item: Item) -> str:
    (block,) = item.content
    assert isinstance(block, TextBlock)
    return block.text


def processes_and_pipes() -> list[str]:
    """What a tool could leave: children, dead or alive, pipes and pidfds."""
    left = []
    with suppress(ChildProcessError):
        left.append(str(os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)))
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            kind = os.readlink(f"/proc/self/fd/{name}")
            if kind.startswith("pipe:") or "pidfd" in kind:
                left.append(kind)
    return sorted(left)


@dataclass
class Life:
    """One session from its first run to its last, and what ends its target run at moment ``at``."""

    world: World
    model: Spoken
    tool: Watched
    origin: str
    end: str
    at: int
    nursery: trio.Nursery
    turns: list[list[str]]

    run: Run | None = None
    answer: Any = None
    began: trio.Event = field(default_factory=trio.Event)
    acted_at: float = 0
    answered: trio.Event = field(default_factory=trio.Event)
    generating: bool | None = None
    entered: list[str] = field(default_factory=list)
    entering: list[str] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)

    async def live(self) -> str | None:
        """The phase in which it ended; None where it was over before."""
        self.model.turns, self.model.broken, self.model.raised = [], False, False
        self.tool.begun.clear()
        self.tool.ended.clear()
        wire = await self._prepared()
        self.before = processes_and_pipes()
        moments = Moments(self._is_target, at=self.at, act=self._act, begin=self._fill)
        trio.lowlevel.add_instrument(moments)
        if self.origin == "prompt":
            await wire.prompt(self.session.core.id, "go")
        else:
            await wire.call("session/resume", self._id)
        with trio.fail_after(10):
            await self.began.wait()
            assert self.run is not None
            await self.run.done.wait()
            if moments.hit is not None:
                await self.answered.wait()
                assert trio.current_time() - self.acted_at < SETTLED_S
        trio.lowlevel.remove_instrument(moments)
        self.phases = [phase_of(place) for place in moments.places]
        if moments.hit is None:
            assert self.run.state.result is not None
            assert self.run.state.result.outcome == "success"
            await self._idle()
        else:
            self._check_end()
            wire = await self._went_on(wire)
        self._check_whole(wire)
        assert not self.model.wrong, self.model.wrong
        if self.world.daemon.runtimes.by_id:
            await wire.call("runtime/dispose", {"runtimeId": self.world.runtime().id})
        await wire.aclose()
        return phase_of(moments.hit) if moments.hit else None

    # --- up to the moment ---------------------------------------------------------------------------------------------

    async def _prepared(self) -> Wire:
        """A session whose target run is the next; only one of the queue's has an input that is built already."""
        wire = await self.world.connect()
        opened = await wire.open(self.world, permission="danger-full-access")
        self._adopt(opened)
        if self.origin == "prompt":
            await wire.prompt(self.session.core.id, "before", wait=True)
        else:
            self.model.turns = [["hangs"]]
            run_id = await wire.prompt(self.session.core.id, "before" if self.origin == "queue" else "go")
            if self.origin == "queue":
                self.item = (await wire.call("queue/add", self._id | {"content": "go"}))["itemId"]
            await wire.call("session/stop", self._id | {"runId": run_id})
        if self.origin == "queue":
            self.model.turns = [["speaks"], *self.turns]
            return wire
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        session = {"kind": "open", "path": opened["path"]}
        opened = await wire.call("runtime/open", {"cwd": self.world.cwd, "session": session})
        await wire.call("runtime/attach", {"runtimeId": opened["runtimeId"]})
        await wire.call("session/setPermission", {"sessionId": opened["sessionId"], "permission": "danger-full-access"})
        self._adopt(opened)
        self.model.turns = [*self.turns]
        return wire

    def _adopt(self, opened: dict[str, Any]) -> None:
        self.session = session = self.world.session()
        self.path = opened["path"]
        self.model.history = lambda: session.core.history

    @property
    def _id(self) -> dict[str, str]:
        return {"sessionId": self.session.core.id}

    def _is_target(self) -> bool:
        run = self.session.core.run
        if run is None or (self.origin == "queue" and run.item_id != self.item):
            return False
        return self.run is None or run is self.run.state

    def _fill(self) -> None:
        self.run = self.session.run
        self.began.set()
        for content in ("s1", "q1", "s2", "q2"):
            self._ask("queue/add", **self._id, content=content, steer=content in STEERING)

    # --- the moment itself --------------------------------------------------------------------------------------------

    def _act(self) -> None:
        """Decided at once, as the reader of a connection would."""
        assert self.run is not None
        self.acted_at = trio.current_time()
        self.generating = self.run.state.generating
        self.entered = inputs_of(self.session.core.history)
        queue = self.session.core.queue
        self.entering = [text_of(item) for item in queue.items if item.id in queue._started]
        match self.end:
            case "stop":
                answer = self._ask("session/stop", **self._id, runId=self.run.state.id)
            case "abort":
                answer = self._ask("session/abort", **self._id)
            case "dispose":
                answer = self._ask("runtime/dispose", runtimeId=self.world.runtime().id, discardQueue=True)
            case "drain":
                answer = self._ask("server/drain", deadlineMs=0)
            case "disconnect":
                for connection in self.world.daemon.clients:
                    connection._scope.cancel()
                answer = None
            case "bug":
                self.model.broken, answer = True, None
            case "steer":  # ends nothing, and enters wherever the run is
                answer = self._ask("queue/add", **self._id, content="x", steer=True)
        if callable(answer):
            self.nursery.start_soon(self._await, answer)
        else:
            self.answer = answer
            self.answered.set()

    def _ask(self, method: str, **params: Any) -> Any:
        typed: Any = msgspec.convert(params, METHODS[method].params)
        return api.TABLE[method](api.Call(self.world.daemon, None), typed)  # type: ignore[arg-type]

    async def _await(self, outcome: Callable[[], Awaitable[Any]]) -> None:
        self.answer = await outcome()
        self.answered.set()

    # --- what holds then ----------------------------------------------------------------------------------------------

    def _check_end(self) -> None:
        assert self.run is not None
        result, session = self.run.state.result, self.session
        assert result is not None
        assert result.saved
        match self.end:
            case "stop" | "abort":  # I-1
                assert self.answer.stopped is (result.outcome == "cancelled") is self.generating
                entered = inputs_of(session.core.history)
                assert [text for text in entered if text not in self.entered] in ([], self.entering)
            case "bug":
                assert result.outcome == ("error" if self.model.raised else "success")
            case "disconnect":
                assert result.outcome == "success"
            case "steer":
                ours = self.session.core.history.runs[self.run.state.id]
                assert (result.outcome, self.answer.run_id) == ("success", None)
                # Up to the step in which generation ends.
                place = inputs_of(session.core.history, until=ours.timing.message_end_index)
                assert ("x" in place) is self.generating
            case _:
                assert result.outcome in (("success", "cancelled") if self.generating else ("success",))
        self._check_partial_text(result.outcome)
        self._check_calls()
        assert processes_and_pipes() == self.before
        found = inputs_of(session.core.history)
        queued = waiting_in(session)
        # Nothing lost, nothing doubled, those that steer in their order and in front.
        assert Counter(found + queued) == Counter(set(found + queued))
        assert [text for text in found + queued if text in STEERING + WAITING] == STEERING + WAITING
        if self.end in ("disconnect", "steer") or (self.end == "bug" and not self.model.raised):
            return
        assert session.run is None
        assert not any(item.shown.steer for item in session.core.queue.items)
        stopped = result.outcome == "cancelled" or self.end in ("stop", "abort", "dispose")
        expected = "stopped" if stopped else "error" if self.end == "bug" else "draining"
        assert session.core.queue.paused == expected
        assert not any(text in WAITING for text in found)
        if self.end == "dispose":
            assert session.ended.is_set()

    def _check_partial_text(self, outcome: str) -> None:
        """S-12: all that was visible of an unfinished answer, and nothing else of it."""
        assert self.run is not None
        reason = {"cancelled": "aborted", "error": "error"}.get(outcome)
        ours = messages_of(self.session.core.history)[self.run.state.watch.timing.message_start_index :]
        partial = [one for one in ours if isinstance(one, AssistantMessage) and one.stop_reason in ("aborted", "error")]
        kept = [(one.stop_reason, one.content) for one in partial]
        assert kept == ([(reason, [TextBlock(self.model.unfinished)])] if self.model.unfinished else [])

    def _check_calls(self) -> None:
        """Each has one result, which says whether it ever ran."""
        calls: list[str] = []
        for message in messages_of(self.session.core.history):
            if isinstance(message, AssistantMessage):
                calls += [block.id for block in message.content if isinstance(block, ToolCallBlock)]
            if not isinstance(message, ToolResultMessage):
                continue
            assert message.tool_call_id == calls.pop(0)
            (block,) = message.content
            assert isinstance(block, TextBlock)
            if message.tool_name != "probe":
                assert block.text in (INTERRUPTED, NOT_STARTED) or block.text.startswith("up")
            elif message.tool_call_id in self.tool.ended:
                assert block.text in ("probed", INTERRUPTED)
            else:
                begun = message.tool_call_id in self.tool.begun
                assert block.text == INTERRUPTED if begun else block.text in (NOT_STARTED, INTERRUPTED)
        assert not calls

    # --- and then -----------------------------------------------------------------------------------------------------

    async def _went_on(self, wire: Wire) -> Wire:
        """Resumed, to the end of the queue."""
        self.model.broken, self.model.turns = False, []
        if self.end == "disconnect":
            wire = await self.world.connect()
        if self.end == "dispose":
            opened = await wire.call(
                "runtime/open", {"cwd": self.world.cwd, "session": {"kind": "open", "path": self.path}}
            )
            lost = waiting_in(self.session)
            self._adopt(opened)
            if self.session.core.history.resumable is None:
                with pytest.raises(RpcError, match="whole answer"):
                    await wire.call("session/resume", self._id)
            else:
                await wire.call("session/resume", self._id)
            await self._idle()
            self.expected = [text for text in STEERING + WAITING if text not in lost]
            return wire
        if self.end == "drain":
            await wire.call("server/drain", {"cancel": True})
        if self.session.core.queue.paused is not None:
            before = len(self.session.core.history.runs)
            await wire.call("session/resume", self._id)
            assert self.session.run is not None
            await self._idle()
            assert len(self.session.core.history.runs) > before
        await self._idle()
        return wire

    async def _idle(self) -> None:
        """Until nothing goes on, which an unpaused queue reaches only when it is empty."""
        self.expected = STEERING + ["x"] * (self.answered.is_set() and self.end == "steer") + WAITING
        with trio.fail_after(5):
            while run := self.session.run:
                await run.done.wait()
                result = run.state.result
                assert result is not None
                if run is not self.run:
                    assert (result.outcome, result.saved) == ("success", True), result

    def _check_whole(self, wire: Wire) -> None:
        core = self.session.core
        assert waiting_in(self.session) == []
        assert core.queue.paused is None
        first = ["go"] if self.origin == "resume" else ["before", "go"]
        assert inputs_of(core.history) == first + self.expected
        core.history.require_paired()
        self._check_calls()
        ranges = [(timing.message_start_index, timing.message_end_index) for timing in core.history.timings]
        assert ranges == sorted(ranges)
        assert all(timing.finished_at is not None for timing in core.history.timings)
        _, stored = files.read_session(self.world.services.fs, self.path)
        assert stored.lines == core.history.lines
        kinds = Counter(params.event.__struct_config__.tag for params in wire.events)
        if self.end not in ("disconnect", "dispose"):
            assert kinds["run_started"] >= 1
            self._check_told(wire)

    def _check_told(self, wire: Wire) -> None:
        """An item is named before it is gone from the list, and each run settles once."""
        settled: Counter[str] = Counter()
        listed: set[str] = set()
        named: set[str | None] = set()
        for params in wire.events:
            match params.event.__struct_config__.tag:
                case "run_started" | "message_start":
                    named.add(params.event.item_id)  # type: ignore[union-attr]
                case "run_settled":
                    settled[params.event.run_id] += 1  # type: ignore[union-attr]
                case "queue_changed":
                    now = {item.item_id for item in params.event.items}  # type: ignore[union-attr]
                    assert listed - now <= named
                    listed = now
        assert set(settled.values()) <= {1}


def phase_of(place: list[str]) -> str:
    if "Context.take_inputs" in place:
        return PHASES["Context.take_inputs"]
    return next((PHASES[name] for name in reversed(place) if name in PHASES), "begin")


def sampled(phases: list[str], origin: str, end: str, only: str | None) -> list[int]:
    """A stop: both sides of every await of a prompt's run, else one side of each, in turn. Another end: of each phase
    one moment in ``EACH``, one at least, not the same ones for all of them."""
    chosen = []
    for phase in [only] if only else dict.fromkeys(phases):
        moments = [at for at, name in enumerate(phases, 1) if name == phase]
        if end != "stop":
            moments = moments[ENDS.index(end) % min(len(moments), EACH) :: EACH]
        elif origin != "prompt" and len(moments) > 1:
            moments = [at for at in moments if at % 4 in (1, 2)]
        chosen += moments
    return sorted(chosen)


async def _hits(root: Path, origin: str, turns: list[list[str]], only: str | None = None) -> dict[str, Counter[str]]:
    """Sessions of one daemon, one after the other, each with the same run that ends at another moment, in the phase
    ``only`` if that is given: the number of its moments may change."""
    model, tool = Spoken(), Watched()
    hits = {end: Counter[str]() for end in ENDS}
    tools: Any = [tool, Bash(timeout_s=5)]
    async with running(root, model=model, tools=tools, fs=disks.Steps()) as world, trio.open_nursery() as nursery:
        whole = Life(world, model, tool, origin, "disconnect", 0, nursery, turns)
        assert await whole.live() is None
        for end in ENDS:
            for at in sampled(whole.phases, origin, end, only):
                phase = await Life(world, model, tool, origin, end, at, nursery, turns).live()
                assert only or phase == whole.phases[at - 1]
                if phase is not None:
                    hits[end][phase] += 1
    phases = [phase for phase in dict.fromkeys(whole.phases) if any(hits[end][phase] for end in ENDS)]
    print("\n" + bench.table([origin, *ENDS], {phase: [str(hits[end][phase]) for end in ENDS] for phase in phases}))
    return hits


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "PAUSE_S", 0.001)
    monkeypatch.setattr(model_input, "BLOCK_S", -1)  # each message of a rebuild is an await


@pytest.fixture
def subreaper() -> Iterator[None]:
    become_subreaper()
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


@pytest.mark.parametrize("origin", ORIGINS)
async def test_whatever_ends_a_run_wherever_it_is(origin: str, tmp_path: Path) -> None:  # I-1 I-2 I-8 Q-2 Q-3 Q-4 S-12
    hits = await _hits(tmp_path, origin, ALL_PHASES)
    # The queue's run comes after another one: the input is there.
    phases = set(PHASES.values()) - {"bash"} - ({"input built anew"} if origin == "queue" else set())
    for end in ENDS:
        assert phases <= set(hits[end]), end


@pytest.mark.usefixtures("subreaper")
async def test_whatever_ends_a_run_with_a_process(tmp_path: Path) -> None:  # I-1 S-12 Q-3 K-22
    hits = await _hits(tmp_path, "prompt", A_COMMAND, "bash")
    for end in ENDS:
        assert hits[end]["bash"]
