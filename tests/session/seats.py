"""One client at one session, with a model whose turns the test holds, and which remembers what it was sent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from inprocess import Play, PlayedModel, Probe, Wire, World, running, text

from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.events import MessageEnd, MessageStart, QueueChanged, RunSettled, RunStarted
from loopd.agent import Reply, TextDelta
from loopd.models import forms


@dataclass(slots=True)
class Sent(PlayedModel):
    """``sent`` has the messages of each request, as roles with texts; partial text is left out as adapters do it."""

    sent: list[list[str]] = field(default_factory=list)

    def encode(self, group: Sequence[Any]) -> bytes:
        return b"" if forms.left_out(group) else PlayedModel.encode(self, group)

    async def respond(self, request: Any, say: Callable[[Any], None]) -> Reply:
        self.sent.append([_brief(one) for one in msgspec.json.decode(b"[" + bytes(request.input.encoded) + b"]")])
        return await PlayedModel.respond(self, request, say)


def _brief(message: dict[str, Any]) -> str:
    said = "".join(block.get("text") or block.get("name") or "*" for block in message["content"])
    return f"{message['role']}: {said}"


class Held:
    """A turn that says ``words`` and then waits until ``go`` is set; then it is ``reply``, else the words."""

    def __init__(self, *words: str, reply: Reply | None = None) -> None:
        self.words = words
        self.reply = reply or text(*(words or ("held",)))
        self.asked = trio.Event()
        self.go = trio.Event()

    async def __call__(self, _: Any, say: Callable[[Any], None]) -> Reply:
        for word in self.words:
            say(TextDelta(word))
        self.asked.set()
        await self.go.wait()
        return self.reply


@dataclass(slots=True)
class Seat:
    world: World
    wire: Wire
    model: Sent
    opened: dict[str, Any]

    @property
    def id(self) -> str:
        found: str = self.opened["sessionId"]
        return found

    @property
    def runtime_id(self) -> str:
        found: str = self.opened["runtimeId"]
        return found

    async def ask(self, method: str, **params: Any) -> Any:
        return await self.wire.call(method, {"sessionId": self.id, **params})

    async def refusal(self, method: str, **params: Any) -> RpcError:
        """It changed nothing (I-10)."""
        before, head = await self.state(), self.world.session_of(self.id).events.head
        with pytest.raises(RpcError) as refused:
            await self.ask(method, **params)
        assert (await self.state(), self.world.session_of(self.id).events.head) == (before, head)
        return refused.value

    async def add(self, content: Any, **options: Any) -> Any:
        return await self.ask("queue/add", content=content, **options)

    async def prompt(self, content: Any = "hi", **options: Any) -> str:
        return await self.wire.prompt(self.id, content, **options)

    async def begin(self, turn: Held, content: Any = "hi", **options: Any) -> str:
        """The prompt's run waits in that turn, and says nothing more."""
        run_id = await self.prompt(content, **options)
        await turn.asked.wait()
        return run_id

    async def stop(self, run_id: str) -> bool:
        stopped: bool = (await self.ask("session/stop", runId=run_id))["stopped"]
        return stopped

    async def resume(self) -> str:
        run_id: str = (await self.ask("session/resume"))["runId"]
        return run_id

    async def over(self, run_id: str) -> Any:
        return await self.wire.call("run/wait", {"runId": run_id})

    async def state(self) -> Any:
        return await self.ask("session/state")

    async def queue(self) -> Any:
        return (await self.state())["queue"]

    async def waiting(self) -> list[str]:
        return [item["content"][0].get("text", "*") for item in (await self.queue())["items"]]

    async def messages(self) -> list[Any]:
        found: list[Any] = (await self.ask("session/messages"))["messages"]
        return found

    async def brief(self) -> list[str]:
        return [_brief(message) for message in await self.messages()]

    async def quiet(self) -> None:
        """Until nothing goes on and nothing is about to start; then all events up to here are in."""
        while (await self.state()).get("operation"):
            await self.wire.event("run_settled")

    async def reopen(self, world: World | None = None) -> None:
        """By path, in a daemon of its own where one is given."""
        if world is None:
            await self.wire.call("runtime/dispose", {"runtimeId": self.runtime_id, "discardQueue": True})
        else:
            self.world, self.wire = world, await world.connect()
        session = {"kind": "open", "path": self.opened["path"]}
        self.opened = await self.wire.call("runtime/open", {"cwd": self.opened["state"]["cwd"], "session": session})
        await self.wire.call("runtime/attach", {"runtimeId": self.runtime_id})

    def told(self) -> list[str]:
        """What was said of runs, inputs and the queue, in order and in short."""
        return [line for params in self.wire.events if (line := _line(params.event)) is not None]


def _line(event: Any) -> str | None:
    match event:
        case RunStarted():
            return f"started {event.item_id or '-'}"
        case MessageStart(item_id=str(item_id)):
            return f"message {item_id}"
        case MessageEnd(index=int()):
            return f"end {msgspec.json.decode(event.message, type=dict)['role']}"  # type: ignore[arg-type]
        case QueueChanged():
            ids = " ".join(item.item_id for item in event.items)
            return f"queue [{ids}]" + (f" {event.paused}" if event.paused else "")
        case RunSettled():
            return f"settled {event.outcome}"
    return None


@asynccontextmanager
async def seated(
    root: Path,
    *plays: Reply | Play,
    kind: str = "new",
    input: frozenset[str] = frozenset({"text"}),
    tools: Sequence[Any] = (),
    **options: Any,
) -> AsyncIterator[Seat]:
    model = Sent(list(plays), input=input)
    async with running(root, model=model, tools=tools or [Probe()], **options) as world:
        wire = await world.connect()
        yield Seat(world, wire, model, await wire.open(world, kind=kind))


PNG = {"type": "image", "data": "aGVsbG8h", "mimeType": "image/png"}
IMAGES = frozenset({"text", "image"})


def words(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
