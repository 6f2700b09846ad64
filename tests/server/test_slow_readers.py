"""Clients that read slowly or never: bounded memory, nobody else delayed, and they are told what they missed."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import trio
import trio.testing
from inprocess import PlayedModel, Wire, World, text
from pacing import MakeWorld, Paced, tag

from loop_protocol.v1.events import EventsLost
from loopd import event_log, outbox
from loopd.agent import Reply, TextDelta

MIB = 1024 * 1024


async def attached(world: World, opened: dict[str, Any], **options: Any) -> Wire:
    wire = await world.connect()
    await wire.call("runtime/attach", {"runtimeId": opened["runtimeId"], **options})
    return wire


async def read_on(wire: Wire) -> None:
    while True:
        await wire.receive()


async def test_who_reads_nothing_of_100_000_deltas_is_told_what_was_lost_and_gets_the_tail(
    make_world: MakeWorld,
) -> None:  # K-50, D-3
    deltas = 100_000

    async def stream(_: object, say: Any) -> Reply:
        for number in range(deltas):
            say(TextDelta(f"{number} "))
            if number % 16 == 15:  # about 6,000 events, more than the log keeps
                await trio.lowlevel.checkpoint()
        return text("done")

    world = await make_world(model=PlayedModel([stream]))
    reader = await world.connect()
    opened = await reader.open(world)
    deaf = await attached(world, opened)
    log = world.runtime().events
    await reader.prompt(opened["sessionId"])
    await reader.event("run_settled")
    assert [params.seq for params in reader.events] == list(range(1, log.head + 1))
    assert log.size <= event_log.BYTES + 64 * 1024
    assert log.head > event_log.EVENTS
    assert all(len(client.outbox._unsent or b"") < 64 * 1024 for client in world.daemon.clients)

    answer = await deaf.call("runtime/list")  # it comes after what it had to follow
    assert len(answer["runtimes"]) == 1
    lost = [params for params in deaf.events if isinstance(params.event, EventsLost)]
    assert len(lost) == 1
    numbers: list[int] = []
    for params in deaf.events:
        if isinstance(params.event, EventsLost):
            assert params.seq == params.event.last
            numbers += range(params.event.first, params.event.last)
        numbers.append(params.seq)
    assert numbers == list(range(1, log.head + 1))
    for wire in (reader, deaf):
        await wire.aclose()


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
async def test_fifty_clients_that_never_read_cost_less_than_a_mebibyte_together(make_world: MakeWorld) -> None:  # D-3
    model = Paced(words=3000, length=200)
    world = await make_world(model=model)
    first = await world.connect()
    opened = await first.open(world, attach=False)
    deaf = [await attached(world, opened) for _ in range(50)]
    before = _held()
    await first.prompt(opened["sessionId"])
    await model.said.wait()
    await first.call("runtime/list")
    assert all(client.outbox._unsent for client in world.daemon.clients if client.outbox.cursors)
    assert _held() - before < MIB
    for wire in (first, *deaf):
        await wire.aclose()


def _held() -> int:
    """What was allocated for single clients: by their readers, writers and queues, and by cursors."""
    gc.collect()
    names = ("outbox", "connection", "server")
    ours = [tracemalloc.Filter(True, f"*/loopd/{name}.py") for name in names]
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(ours).traces)


async def test_a_client_that_takes_nothing_for_30_seconds_is_closed_and_one_that_takes_a_little_is_not(
    make_world: MakeWorld, mock_clock: trio.testing.MockClock
) -> None:  # D-3
    model = Paced(words=4000, length=400)
    world = await make_world(model=model)
    first = await world.connect()
    opened = await first.open(world, attach=False)
    deaf, slow = await attached(world, opened), await attached(world, opened)
    await first.prompt(opened["sessionId"])
    await model.said.wait()
    await trio.testing.wait_all_tasks_blocked()
    assert len(world.daemon.clients) == 3
    for _ in range(3):
        mock_clock.jump(outbox.PROGRESS_S * 0.6)
        left = 200_000  # enough for the socket to count as writable again
        while left:
            left -= len(await slow.stream.receive_some(left))
        await trio.testing.wait_all_tasks_blocked()
    assert len(world.daemon.clients) == 2
    with pytest.raises((trio.EndOfChannel, trio.BrokenResourceError)):
        await read_on(deaf)
    for wire in (first, deaf, slow):
        await wire.aclose()


async def test_an_answer_is_never_dropped_however_far_behind_its_client_is(make_world: MakeWorld) -> None:
    model = Paced(words=9000, length=200)
    world = await make_world(model=model)
    wire = await world.connect()
    opened = await wire.open(world)
    await wire.prompt(opened["sessionId"])
    other = await world.connect()
    await model.said.wait()
    asked = [await wire.request("runtime/list") for _ in range(50)]
    await other.call("runtime/list")
    model.go.set()
    await wire.answer(asked[-1])
    answers = [tag(message) for message in wire.log if "result" in message]
    assert answers[-50:] == [f"answer {id}" for id in asked]
    await wire.event("run_settled")
    assert [tag(message) for message in wire.log].count("events_lost") >= 1
    for one in (wire, other):
        await one.aclose()


async def test_an_attached_client_that_reads_nothing_does_not_delay_the_run(make_world: MakeWorld) -> None:
    model = Paced(words=3000, length=400)
    model.go.set()
    world = await make_world(model=model)
    first = await world.connect()
    opened = await first.open(world, attach=False)
    deaf = [await attached(world, opened) for _ in range(10)]
    result = await first.call("session/prompt", {"sessionId": opened["sessionId"], "content": "x", "wait": True})
    assert (result["outcome"], result["saved"]) == ("success", True)
    for wire in (first, *deaf):
        await wire.aclose()
