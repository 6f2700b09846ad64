"""What the tests of titles share: a model that names and keeps every request, and what must agree at rest (I-7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import trio
from inprocess import Play, PlayedModel, Wire, World, text

from loop_protocol.v1.events import SessionTitle
from loop_protocol.v1.types import ModelRef, Title, UserMessage
from loopd.agent import ModelRequest, Reply
from loopd.storage import files
from loopd.storage.fs import FileSystem

NAMER = ModelRef("titles", "namer")
FIRST: dict[str, Any] = {"mode": "first-prompt", "model": {"provider": "titles", "id": "namer"}}
ALL = FIRST | {"mode": "all-prompts"}
OFF = {"mode": "off"}


def made(text: str, *indices: int) -> dict[str, Any]:
    model = {"provider": "titles", "id": "namer"}
    return {"text": text, "source": "model", "messageIndices": list(indices), "model": model}


def first_words(text: str, index: int = 0) -> dict[str, Any]:
    return {"text": text, "source": "fallback", "messageIndices": [index]}


def by_hand(text: str) -> dict[str, Any]:
    return {"text": text, "source": "user", "messageIndices": []}


async def hangs(*_: Any) -> Reply:
    await trio.sleep_forever()
    raise AssertionError


@dataclass(slots=True)
class Namer:
    """Each request gets the next of ``answers``, the last one again and again. ``most``: so many were open at once."""

    answers: list[Reply | Play] = field(default_factory=lambda: [text("A name")])
    ref: ModelRef = NAMER
    input: frozenset[str] = frozenset({"text"})
    asked: list[ModelRequest] = field(default_factory=list)
    open: int = 0
    most: int = 0
    _came: trio.Event = field(default_factory=trio.Event)

    def encode(self, group: Sequence[Any]) -> bytes:
        return b",".join(msgspec.json.encode(message) for message in group)

    async def respond(self, request: ModelRequest, say: Any) -> Reply:
        self.asked.append(request)
        self.open += 1
        self.most = max(self.most, self.open)
        self._came.set()
        self._came = trio.Event()
        answer = self.answers[min(len(self.asked), len(self.answers)) - 1]
        try:
            await trio.lowlevel.checkpoint()
            return answer if isinstance(answer, Reply) else await answer(request, say)
        finally:
            self.open -= 1

    async def requests(self, count: int) -> None:
        """Until there were so many."""
        with trio.fail_after(10):
            while len(self.asked) < count:
                await self._came.wait()

    def texts(self, number: int = -1) -> list[str]:
        """What a request asked to name."""
        [message] = self.asked[number].input.turn
        assert isinstance(message, UserMessage)
        return msgspec.json.decode(message.content[0].text, type=list[str])  # type: ignore[union-attr]


def talks(*words: str) -> PlayedModel:
    return PlayedModel([text(*(words or ("hi",)))])


async def say(wire: Wire, opened: Any, content: Any = "Explain the project", **more: Any) -> Any:
    ask = {"sessionId": opened["sessionId"], "content": content, "wait": True, **more}
    return await wire.call("session/prompt", ask)


async def title(wire: Wire, opened: Any, what: str, **more: Any) -> Any:
    return await wire.call(f"title/{what}", {"sessionId": opened["sessionId"], **more})


async def state(wire: Wire, opened: Any) -> Any:
    return await wire.call("session/state", {"sessionId": opened["sessionId"]})


def told(wire: Wire, session_id: str | None = None) -> list[Any]:
    """Every ``session_title`` so far, without its type."""
    events = [
        msgspec.to_builtins(params.event)
        for params in wire.events
        if isinstance(params.event, SessionTitle) and session_id in (None, params.session_id)
    ]
    return [{name: value for name, value in event.items() if name != "type"} for event in events]


def stored(opened: Any) -> Title | None:
    meta, _ = files.read_session(FileSystem(), opened["path"])
    return meta.title


def file_of(opened: Any) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.json.decode(Path(opened["path"]).read_bytes())
    return document


async def agreed(world: World, wire: Wire, opened: Any, *, close: bool = True) -> Any:
    """I-7: the title in memory, on disk, in the last event and after reopening; answers it. ``wire`` is attached since
    the session is there."""
    now = await state(wire, opened)
    core = world.session_of(opened["sessionId"]).core
    shown = now.get("title")
    assert msgspec.to_builtins(core.titles.current) == shown
    titles = [event["title"] for event in told(wire, opened["sessionId"]) if "title" in event]
    assert titles[-1:] == ([shown] if shown else [])
    meta, _ = files.read_session(FileSystem(), opened["path"])
    assert msgspec.to_builtins(meta.valid_title or meta.committed.fallback) == shown
    if close:
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        assert await on_disk(world, opened) == shown
    return shown


async def on_disk(world: World, opened: Any) -> Any:
    """The title after reopening."""
    wire = await world.connect()
    session = {"kind": "open", "path": opened["path"]}
    again = await wire.call("runtime/open", {"cwd": world.cwd, "session": session, "runtimeId": "new"})
    return again["state"].get("title")
