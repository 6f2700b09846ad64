"""Titles from real adapters: what goes out, and what becomes of a service that is down, slow or nonsense."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import dialects
import model_bench as bench
import pytest
import scripted_provider as scripted
import trio
from dialects import Call, Dialect, Text, Thinking
from inprocess import Probe, Wire, World, running
from titling import agreed, first_words, say, state, title, told
from trio.testing import MockClock

from loopd.agent.prompt import TITLE_PROMPT
from loopd.models import Catalogue

ECHO = {"provider": "practice", "id": "echo"}
POLICY = {"mode": "first-prompt", "model": {"provider": "local", "id": "m"}}
SAYS = "Explain the project"
PAGE = b"<html><body><h1>Gateway trouble</h1></body></html>"
STATUS = b'{"error":{"message":"no"}}'


@pytest.fixture(params=dialects.DIALECTS, ids=lambda dialect: dialect.api)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    made: Dialect = request.param
    return made


@pytest.fixture
def api(dialect: Dialect) -> str:
    return dialect.api


@pytest.fixture
async def world(tmp_path: Path, models: Catalogue) -> AsyncIterator[World]:
    async with running(tmp_path, models=models, tools=[Probe()]) as world:
        yield world


async def _opened(world: World, **more: Any) -> tuple[Wire, Any]:
    wire = await world.connect()
    return wire, await wire.open(world, model=ECHO, title=POLICY | more)


def _whole(dialect: Dialect, *blocks: dialects.Block, end: dialects.End = "stop") -> scripted.Script:
    body = b"".join(dialect.whole(*blocks, end=end))
    return scripted.says(scripted.STREAM + scripted.chunked(body) + scripted.END)


async def test_a_title_comes_from_every_api_and_the_request_has_its_limit_and_no_tools(
    world: World, provider: scripted.ScriptedProvider, dialect: Dialect
) -> None:  # T-6
    provider.script = _whole(dialect, Thinking(["so"], "s"), Text(['"The', ' project"']))
    wire, opened = await _opened(world, maxOutputTokens=77)
    await say(wire, opened)
    await title(wire, opened, "wait")
    [asked] = provider.asked
    assert asked.path.endswith(dialect.path)
    limits = {name: asked.json[name] for name in asked.json if name.startswith("max_")}
    assert set(limits.values()) == {77}
    assert "tools" not in asked.json
    assert b'[\\"Explain the project\\"]' in asked.body
    assert TITLE_PROMPT.splitlines()[0].encode() in asked.body
    now = await state(wire, opened)
    assert now["titleUsage"]["inputTokens"] == 12
    assert now["titleUsage"]["outputTokens"] == 7
    shown = await agreed(world, wire, opened)
    assert (shown["text"], shown["model"]) == ("The project", {"provider": "local", "id": "m"})


async def _wordy(stream: trio.SocketStream, dialect: Dialect) -> None:
    """10 MB, as fast as they are taken."""
    head, *rest = dialect.whole(Text(["x" * 1000]))
    piece = next(event for event in rest if b"x" * 1000 in event)
    begin = b"".join([head, *rest[: rest.index(piece)]])
    await stream.send_all(scripted.STREAM + scripted.chunked(begin))
    for _ in range(100):
        await stream.send_all(scripted.chunked(piece * 100))


def _ten_megabytes(dialect: Dialect) -> scripted.Script:
    async def script(stream: trio.SocketStream) -> None:
        await _wordy(stream, dialect)

    return script


@pytest.mark.parametrize(
    ("kind", "script"),
    [
        ("auth", lambda _: scripted.answers(401, STATUS)),
        ("rate_limit", lambda _: scripted.answers(429, STATUS)),
        ("provider", lambda _: scripted.answers(500, STATUS)),
        ("provider", lambda _: scripted.answers(200, PAGE, "text/html")),
        ("provider", lambda _: scripted.answers(502, PAGE, "text/html")),
        ("unreachable", lambda _: scripted.resets()),
        ("incomplete", lambda dialect: _whole(dialect, Text(["The proj"]), end="length")),
        ("tool_call", lambda dialect: _whole(dialect, Text(["A name"]), Call("c", "bash", ["{}"]), end="calls")),
        ("incomplete", lambda dialect: _whole(dialect)),
        ("incomplete", lambda dialect: _whole(dialect, Thinking(["so"], "s"))),
        ("empty", lambda dialect: _whole(dialect, Text(["<think>so it is</think>\n"]))),
        ("empty", lambda dialect: _whole(dialect, Text(['"\u200b"']))),
        ("provider", _ten_megabytes),
    ],
    ids=[
        "401",
        "429",
        "500",
        "page",
        "bad gateway",
        "reset",
        "length",
        "call",
        "nothing",
        "thinking",
        "think",
        "unseen",
        "10 MB",
    ],
)
async def test_a_title_service_that_fails_is_asked_once_and_the_prompt_knows_nothing_of_it(
    world: World,
    provider: scripted.ScriptedProvider,
    dialect: Dialect,
    kind: str,
    script: Callable[[Dialect], scripted.Script],
) -> None:  # T-11, K-41
    provider.script = script(dialect)
    wire, opened = await _opened(world)
    assert (await say(wire, opened))["outcome"] == "success"
    waited = await title(wire, opened, "wait")
    assert (waited["title"], waited["titleError"]["kind"]) == (first_words(SAYS), kind), waited
    assert bench.KEY not in str(waited)
    assert told(wire)[-1]["error"] == waited["titleError"]
    assert len(provider.asked) == 1
    assert (await say(wire, opened, "and more"))["outcome"] == "success"
    await title(wire, opened, "wait")
    assert len(provider.asked) == 1
    assert await agreed(world, wire, opened) == first_words(SAYS)


@pytest.mark.parametrize("ends", ["deadline", "cancel", "abort", "rename", "dispose"])
async def test_a_service_that_hangs_is_left_at_its_deadline_or_before(
    world: World, provider: scripted.ScriptedProvider, ends: str, mock_clock: MockClock
) -> None:  # T-11, K-40, K-41
    reached = trio.Event()
    provider.script = scripted.hangs(scripted.STREAM, reached)
    wire, opened = await _opened(world)
    session = {"sessionId": opened["sessionId"]}
    assert (await say(wire, opened))["outcome"] == "success"
    await reached.wait()
    match ends:
        case "deadline":
            mock_clock.jump(15)
            assert (await title(wire, opened, "wait"))["titleError"]["kind"] == "timeout"
        case "cancel":
            await title(wire, opened, "cancel")
        case "abort":
            await wire.call("session/abort", session)
        case "rename":
            await title(wire, opened, "rename", text="Mine")
        case "dispose":
            await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
    await provider.idle.wait()
    assert (provider.open, len(provider.asked)) == (0, 1)
    if ends != "dispose":
        shown = await agreed(world, wire, opened)
        assert shown["text"] == ("Mine" if ends == "rename" else SAYS)


async def test_the_older_request_is_closed_before_a_newer_text_is_asked_for(
    world: World, provider: scripted.ScriptedProvider, dialect: Dialect
) -> None:  # T-10
    """As the provider's own sockets know it, whoever of the two tasks there is first."""
    hanging: list[trio.SocketStream] = []
    still_open: list[int] = []

    async def hangs(stream: trio.SocketStream) -> None:
        still_open.append(sum(not _was_closed(one) for one in hanging))
        hanging.append(stream)
        await stream.send_all(scripted.STREAM)
        assert await stream.receive_some() == b""
        hanging.remove(stream)

    provider.script = hangs
    wire, opened = await _opened(world, mode="all-prompts")
    for number in range(1, 10):
        await say(wire, opened, f"text {number}")
        with trio.fail_after(10):
            while len(still_open) < number:  # noqa: ASYNC110 nothing tells
                await trio.lowlevel.checkpoint()
    provider.script = _whole(dialect, Text(["A name"]))
    await say(wire, opened, "the last")
    await title(wire, opened, "wait")
    assert still_open == [0] * 9
    assert len(provider.asked) == 10
    assert (await agreed(world, wire, opened))["messageIndices"] == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]


def _was_closed(stream: trio.SocketStream) -> bool:
    if stream.socket.fileno() < 0:  # by ourselves, once the other end was gone
        return True
    with suppress(BlockingIOError), socket.socket(fileno=os.dup(stream.socket.fileno())) as peeked:
        return peeked.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    return False


async def test_the_deadline_covers_the_key_too(
    tmp_path: Path, provider: scripted.ScriptedProvider, mock_clock: MockClock
) -> None:  # T-11
    models = bench.catalogue(provider.url, api_key_command=("sleep", "60"), environ={"PATH": "/usr/bin:/bin"})
    async with running(tmp_path, models=models) as world:
        wire, opened = await _opened(world, timeoutMs=3000)
        assert (await say(wire, opened))["outcome"] == "success"
        await trio.testing.wait_all_tasks_blocked(0.01)
        mock_clock.jump(3)
        assert (await title(wire, opened, "wait"))["titleError"]["kind"] == "timeout"
        assert not provider.asked
        assert await agreed(world, wire, opened) == first_words(SAYS)


async def test_practice_names_a_conversation_the_same_each_time(tmp_path: Path, mock_clock: MockClock) -> None:
    async with running(tmp_path) as world:
        wire = await world.connect()
        for says, named in (
            ("Tell me what this project is about", "Practice: Tell me what this project"),
            ("slow", "Practice: slow"),
        ):
            opened = await wire.open(
                world, runtimeId="new", model=ECHO, title={"mode": "all-prompts", "timeoutMs": 60_000}
            )
            run_id = await wire.prompt(opened["sessionId"], says)
            while says == "slow" and mock_clock.current_time() < 11:
                mock_clock.jump(0.2)
                await trio.testing.wait_all_tasks_blocked(0.001)
            await wire.call("run/wait", {"runId": run_id})
            waited = await title(wire, opened, "wait")
            assert waited["title"]["text"] == named
            usage = (await state(wire, opened))["titleUsage"]
            assert await title(wire, opened, "refresh") == waited if says != "slow" else True
            assert usage["inputTokens"] > len(TITLE_PROMPT) // 4
        opened = await wire.open(world, runtimeId="new", model=ECHO, title={"mode": "first-prompt"})
        assert (await say(wire, opened, "fail"))["outcome"] == "error"
        assert (await title(wire, opened, "wait"))["titleError"]["kind"] == "provider"
