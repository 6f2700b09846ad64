"""A whole daemon in the test's own process, on a real socket, with models and disks that a test controls."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import trio

from loop_protocol import jsonrpc
from loop_protocol.v1.events import EventParams
from loop_protocol.v1.methods import ModelRow
from loop_protocol.v1.types import ModelRef, TextBlock, ToolCallBlock, Usage
from loopd.agent import Model, Reply, TextDelta, Tool, ToolOutcome, ToolScope
from loopd.config import Config, DaemonSettings
from loopd.core.timings import Clock
from loopd.daemon import Daemon
from loopd.models import ModelUnavailable
from loopd.models.practice import Practice
from loopd.seat import Runtime
from loopd.server import listen
from loopd.services import Services
from loopd.session import Session
from loopd.storage.catalog import Catalog
from loopd.storage.fs import FileSystem

REF = ModelRef("scripted", "model")
Play = Callable[[Any, Callable[[Any], None]], Awaitable[Reply]]


def text(*words: str) -> Reply:
    return Reply([TextBlock("".join(words))], Usage(3, len(words)), "stop")


def call(name: str = "probe", *, id: str = "c1", **arguments: Any) -> Reply:
    return Reply([ToolCallBlock(id, name, arguments)], Usage(3, 1), "toolUse")


@dataclass(slots=True)
class PlayedModel:
    """Each turn is the next of ``plays``, the last one again and again; a play is a reply, or an async function of the
    request and ``say``."""

    plays: list[Reply | Play]
    ref: ModelRef = REF
    input: frozenset[str] = frozenset({"text"})
    turns: int = 0

    def encode(self, group: Sequence[Any]) -> bytes:
        return b",".join(msgspec.json.encode(message) for message in group)

    async def respond(self, request: Any, say: Callable[[Any], None]) -> Reply:
        play = self.plays[min(self.turns, len(self.plays) - 1)]
        self.turns += 1
        await trio.lowlevel.checkpoint()
        if isinstance(play, Reply):
            for block in play.content:
                if isinstance(block, TextBlock):
                    say(TextDelta(block.text))
            return play
        return await play(request, say)


class Models:
    """Stands for the catalogue: one model under every name, one for titles under ``titles/…``, and ``none/…`` which is
    not configured."""

    def __init__(self, model: Model | None = None, titles: Model | None = None) -> None:
        self.titles = titles
        self.model = model or Practice(ModelRef("practice", "echo"), frozenset({"text", "image"}))

    def default(self) -> ModelRef:
        return self.model.ref

    def resolve(self, ref: ModelRef) -> Model:
        if ref.provider == "none":
            raise ModelUnavailable(f"{ref} is not configured")
        if ref.provider == "titles" and self.titles is not None:
            return self.titles
        return self.model

    def rows(self) -> list[ModelRow]:
        return [ModelRow(provider=REF.provider, id=REF.id, usable=True, input=["text"], default=True)]

    async def warm(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


class ProbeArguments(msgspec.Struct):
    text: str = "probed"


@dataclass(slots=True)
class Probe:
    """A tool without a process: shows its text, waits a few times, answers with it."""

    name: str = "probe"
    description: str = "for tests"
    parameters: type = ProbeArguments
    waits: int = 2
    hangs: bool = False

    async def run(self, arguments: ProbeArguments, scope: ToolScope) -> ToolOutcome:
        if self.hangs:
            await trio.sleep_forever()
        for _ in range(self.waits):
            scope.output(arguments.text + "\n")
            await trio.lowlevel.checkpoint()
        return ToolOutcome([TextBlock(arguments.text)])


@dataclass(slots=True)
class World:
    """The daemon under test."""

    daemon: Daemon
    root: Path
    socket: str
    wires: list[Wire] = field(default_factory=list)
    ended: trio.Event = field(default_factory=trio.Event)
    exit_code: int | None = None

    @property
    def cwd(self) -> str:
        return str(self.root / "ws")

    @property
    def services(self) -> Services:
        return self.daemon.services

    async def serve(self, task_status: trio.TaskStatus[None]) -> None:  # noqa: ASYNC128 handed on
        self.exit_code = await self.daemon.serve(task_status)
        self.ended.set()

    def runtime(self) -> Runtime:
        (runtime,) = self.daemon.runtimes.by_id.values()
        return runtime

    def session(self) -> Session:
        return self.runtime().session

    def session_of(self, session_id: str) -> Session:
        return self.daemon.runtimes.session(session_id)

    async def connect(self, *, handshake: bool = True, framing: jsonrpc.Framing = jsonrpc.Framing.LINES) -> Wire:
        sock = trio.socket.socket(trio.socket.AF_UNIX)
        await sock.connect(self.socket)
        wire = Wire(trio.SocketStream(sock), framing)
        self.wires.append(wire)
        if handshake:
            await wire.call("initialize", {"versions": [1]})
        return wire


class Wire:
    """A raw client: one request at a time, events are kept in ``events``."""

    def __init__(self, stream: trio.SocketStream, framing: jsonrpc.Framing) -> None:
        self.stream = stream
        self.framing = framing
        self.events: list[EventParams] = []
        self.answers: dict[Any, dict[str, Any]] = {}
        self._looked = 0
        self.log: list[dict[str, Any]] = []
        self._reader = jsonrpc.FrameReader(limit=jsonrpc.FRAME)
        self._next_id = 0

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def request(self, method: str, params: Any = None) -> int:
        self._next_id += 1
        await self.send(jsonrpc.frame(jsonrpc.request_body(self._next_id, method, params), self.framing))
        return self._next_id

    async def call(self, method: str, params: Any = None) -> Any:
        """The result; an error is raised as RpcError."""
        return await self.answer(await self.request(method, params))

    async def answer(self, id: int) -> Any:
        while id not in self.answers:
            message = await self.receive()
            if "method" not in message:
                self.answers[message["id"]] = message
        message = self.answers.pop(id)
        if "error" in message:
            data = dict(message["error"]["data"])
            error = jsonrpc.RpcError(data.pop("kind"), message["error"]["message"])
            error.data |= data
            raise error
        return message["result"]

    async def receive(self, size: int = 65536) -> Any:
        """The next message, whatever it is: a list for the answer to a batch."""
        while (body := self._reader.next()) is None:
            data = await self.stream.receive_some(size)
            if not data:
                raise trio.EndOfChannel
            self._reader.feed(data)
        message = msgspec.json.decode(body)
        self.log.append(message)
        if isinstance(message, dict) and message.get("method") == "event":
            self.events.append(msgspec.json.decode(msgspec.json.encode(message["params"]), type=EventParams))
        return message

    async def event(self, type: str) -> EventParams:
        """The next event of that type after the last one that was asked for."""
        while True:
            for place in range(self._looked, len(self.events)):
                if self.events[place].event.__struct_config__.tag == type:
                    self._looked = place + 1
                    return self.events[place]
            self._looked = len(self.events)
            await self.receive()

    async def open(self, world: World, *, kind: str = "new", attach: bool = True, **options: Any) -> dict[str, Any]:
        opened = await self.call("runtime/open", {"cwd": world.cwd, "session": {"kind": kind}, **options})
        if attach:
            await self.call("runtime/attach", {"runtimeId": opened["runtimeId"]})
        return opened

    async def prompt(self, session_id: str, content: Any = "hi", **options: Any) -> str:
        run: str = (await self.call("session/prompt", {"sessionId": session_id, "content": content, **options}))[
            "runId"
        ]
        return run

    async def aclose(self) -> None:
        await self.stream.aclose()


@asynccontextmanager
async def running(
    root: Path,
    *,
    model: Model | None = None,
    titles: Model | None = None,
    models: Any = None,
    tools: Sequence[Tool] = (),
    fs: FileSystem | None = None,
    clock: Clock | None = None,
    config: Config | None = None,
    rescue_roots: Sequence[str] | None = None,
    on_demand: bool = False,
) -> AsyncIterator[World]:
    """Ends as a drain would. The socket is in a directory of its own: test paths are too long for one."""
    (root / "ws").mkdir(parents=True, exist_ok=True)
    data_dir = str(root / "data")
    fs = fs or FileSystem()
    with tempfile.TemporaryDirectory(prefix="loopd-") as place:
        path = os.path.join(place, "s")
        services = Services(
            config=config or Config(daemon=DaemonSettings(drain_deadline_s=4)),
            clock=clock or Clock(),
            models=models or Models(model, titles),
            tools=tools,
            fs=fs,
            catalog=Catalog(fs, data_dir),
            data_dir=data_dir,
            rescue_roots=[os.path.join(data_dir, "rescue")] if rescue_roots is None else rescue_roots,
            environ=dict(os.environ),
        )
        world = World(Daemon(services, listen(path), on_demand=on_demand), root, path)
        async with trio.open_nursery() as nursery:
            await nursery.start(world.serve)
            try:
                yield world
            finally:
                world.daemon.end()
                for wire in world.wires:
                    wire.stream.socket.close()
        assert "s" not in os.listdir(place), "the socket stays behind"
