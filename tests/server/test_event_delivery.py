"""Events at clients: after what, before what, without holes, and exactly once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from inprocess import PlayedModel, Probe, Wire, World, call, text
from pacing import MakeWorld, Paced, tag

from loop_protocol import jsonrpc
from loop_protocol.jsonrpc import Framing
from loop_protocol.v1.errors import RpcError
from loopd import event_log
from loopd.agent import TextDelta

FRAMINGS = pytest.mark.parametrize("framing", list(Framing), ids=[framing.value for framing in Framing])


def body(id: int, method: str, params: Any) -> bytes:
    return jsonrpc.request_body(id, method, params)


def seqs(wire: Wire) -> list[int]:
    return [params.seq for params in wire.events]


async def attach(wire: Wire, opened: dict[str, Any], **options: Any) -> Any:
    return await wire.call("runtime/attach", {"runtimeId": opened["runtimeId"], **options})


async def read_up_to(wire: Wire, head: int) -> None:
    while not wire.events or wire.events[-1].seq < head:
        await wire.receive()


# --- attaching --------------------------------------------------------------------------------------------------------


async def test_whoever_attaches_in_mid_stream_gets_a_snapshot_and_then_every_later_event_once(
    make_world: MakeWorld,
) -> None:
    model = Paced(words=300)
    world = await make_world(model=model)
    first = await world.connect()
    opened = await first.open(world)
    await first.prompt(opened["sessionId"])
    late: list[tuple[Wire, Any]] = []
    for _ in range(8):
        wire = await world.connect()
        snapshot = await attach(wire, opened)
        assert not wire.events  # nothing is sent before the snapshot
        late.append((wire, snapshot))
    model.go.set()
    await first.event("run_settled")
    head = first.events[-1].seq
    whole = "".join(f"{number:08d} " for number in range(300))
    for wire, snapshot in late:
        await read_up_to(wire, head)
        assert seqs(wire) == list(range(snapshot["seq"] + 1, head + 1))
        drafted = "".join(block["text"] for block in snapshot["state"].get("draft", {"content": []})["content"])
        heard = "".join(getattr(params.event, "text_delta", None) or "" for params in wire.events)
        assert drafted + heard == whole
        await wire.aclose()
    assert seqs(first) == list(range(1, head + 1))
    await first.aclose()


async def test_since_replays_exactly_what_was_missed_and_nothing_before_the_answer(make_world: MakeWorld) -> None:
    world = await make_world(model=PlayedModel([call(), text("done")]), tools=[Probe()])
    first = await world.connect()
    opened = await first.open(world)
    await first.prompt(opened["sessionId"])
    await first.event("run_settled")
    told = [message for message in first.log if tag(message) not in ("answer 1", "answer 2", "answer 3", "answer 4")]
    for missed_from in (0, 1, len(told) // 2, len(told) - 1, len(told)):
        wire = await world.connect()
        for _ in range(2):  # attaching again moves the cursor back
            answer = await attach(wire, opened, since=missed_from)
            assert answer == {"seq": missed_from, "replayed": True}
            assert not wire.events
            if missed_from < len(told):
                await read_up_to(wire, len(told))
            await wire.call("runtime/list")
            assert [message for message in wire.log if "method" in message] == told[missed_from:]
            wire.events.clear()
            wire.log.clear()
        await wire.aclose()
    await first.aclose()


async def test_since_beyond_the_last_event_or_of_another_life_is_refused(make_world: MakeWorld) -> None:
    world = await make_world()
    wire = await world.connect()
    opened = await wire.open(world, attach=False)
    with pytest.raises(RpcError, match=r"\$\.since") as beyond:
        await attach(wire, opened, since=1)
    assert beyond.value.kind == "invalid_params"
    with pytest.raises(RpcError) as unknown:
        await wire.call("runtime/attach", {"runtimeId": "of-an-earlier-daemon", "since": 5})
    assert unknown.value.kind == "runtime_not_found"
    assert not world.runtime().events.cursors
    await wire.aclose()


async def test_since_that_is_too_old_gives_a_snapshot(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "EVENTS", 64)
    model = Paced(words=200)
    model.go.set()
    world = await make_world(model=model)
    wire = await world.connect()
    opened = await wire.open(world)
    await wire.prompt(opened["sessionId"])
    await wire.event("run_settled")
    head, first = wire.events[-1].seq, world.runtime().events.first
    again = await world.connect()
    answer = await attach(again, opened, since=first - 2)
    assert (answer["seq"], "replayed" in answer, answer["state"]["liveCount"]) == (head, False, 2)
    answer = await attach(again, opened, since=first - 1)  # this one is still whole
    assert answer == {"seq": first - 1, "replayed": True}
    await read_up_to(again, head)
    assert seqs(again) == list(range(first, head + 1))
    for one in (wire, again):
        await one.aclose()


async def test_after_detach_no_event_comes_any_more(make_world: MakeWorld) -> None:
    world = await make_world(model=PlayedModel([text("yes")]))
    wire = await world.connect()
    opened = await wire.open(world)
    await wire.send(
        body(50, "runtime/attach", {"runtimeId": opened["runtimeId"]})
        + body(51, "runtime/detach", {"runtimeId": opened["runtimeId"]})
    )
    await wire.answer(51)
    await wire.prompt(opened["sessionId"], wait=True)
    await wire.call("runtime/list")
    assert not wire.events
    await wire.aclose()


# --- replacing --------------------------------------------------------------------------------------------------------


async def test_every_client_is_told_of_the_new_session_between_the_events_of_both(make_world: MakeWorld) -> None:
    world = await make_world(model=PlayedModel([text("yes")]))
    wires = [await world.connect(framing=framing) for framing in (*Framing, *Framing)]
    opened = await wires[0].open(world)
    for wire in wires[1:]:
        await attach(wire, opened)
    old = opened["sessionId"]
    await wires[0].prompt(old, wait=True)
    new = await wires[1].call("runtime/newSession", {"runtimeId": opened["runtimeId"]})
    assert (new["cancelled"], new["runtimeId"]) == (False, opened["runtimeId"])
    await wires[2].prompt(new["sessionId"], wait=True)
    for wire in wires:
        await wire.event("session_replaced")
        await wire.event("run_settled")
        order = [(params.session_id, params.event.__struct_config__.tag) for params in wire.events]
        turn = order.index((new["sessionId"], "session_replaced"))
        assert {session_id for session_id, _ in order[:turn]} == {old}
        assert {session_id for session_id, _ in order[turn:]} == {new["sessionId"]}
        replaced: Any = wire.events[turn].event
        assert (replaced.old, replaced.new.session_id) == (old, new["sessionId"])
        assert replaced.new.live_count == 0
        await wire.aclose()


async def test_without_follow_a_subscription_ends_with_the_session_that_it_was_made_for(make_world: MakeWorld) -> None:
    world = await make_world(model=PlayedModel([text("yes")]))
    leaver, stayer = await world.connect(), await world.connect()
    opened = await leaver.open(world, attach=False)
    await attach(leaver, opened, follow=False)
    await attach(stayer, opened)
    new = await stayer.call("runtime/newSession", {"runtimeId": opened["runtimeId"]})
    await stayer.prompt(new["sessionId"], wait=True)
    await stayer.event("run_settled")
    await leaver.event("session_replaced")
    await leaver.call("runtime/list")
    assert leaver.events[-1].event.__struct_config__.tag == "session_replaced"
    assert len(world.runtime().events.cursors) == 1
    await attach(leaver, opened)  # and may begin again
    for wire in (leaver, stayer):
        await wire.aclose()


# --- answers and events -----------------------------------------------------------------------------------------------


@FRAMINGS
async def test_of_two_pipelined_prompts_the_first_is_accepted_and_the_second_refused(
    make_world: MakeWorld, framing: Framing
) -> None:  # K-28
    model = Paced()
    world = await make_world(model=model)
    for attempt in range(5):
        wire = await world.connect(framing=framing)
        opened = await wire.open(world, kind="continue")
        prompt = {"sessionId": opened["sessionId"], "content": "x"}
        await wire.send(b"".join(jsonrpc.frame(body(id, "session/prompt", prompt), framing) for id in (50, 51)))
        accepted, refused = await wire.receive(), await wire.receive()
        assert (accepted["id"], "result" in accepted) == (50, True)
        assert (refused["id"], refused["error"]["data"]["kind"]) == (51, "session_busy")
        assert refused["error"]["data"]["operation"] == "prompt"
        model.go.set()
        await wire.event("run_settled")
        assert world.session().core.history.user_messages == attempt + 1
        await wire.aclose()


@FRAMINGS
async def test_prompt_and_stop_in_one_write_are_accepted_told_and_settled_in_that_order(
    make_world: MakeWorld, framing: Framing
) -> None:  # D-2, I-1
    world = await make_world(model=Paced())
    wire = await world.connect(framing=framing)
    opened = await wire.open(world)
    session = {"sessionId": opened["sessionId"]}
    requests = [body(50, "session/prompt", {**session, "content": "x"}), body(51, "session/abort", session)]
    await wire.send(b"".join(jsonrpc.frame(request, framing) for request in requests))
    assert (await wire.answer(51)) == {"stopped": True}
    order = [tag(message) for message in wire.log]
    assert order.index("answer 50") < order.index("run_started") < order.index("run_settled") < order.index("answer 51")
    settled: Any = wire.events[-1].event
    assert settled.outcome == "cancelled"
    assert world.session().core.history.user_messages == 1
    await wire.aclose()


@FRAMINGS
@pytest.mark.parametrize("size", [1, 65536])
async def test_bytes_read_one_by_one_tell_the_run_in_its_order(
    make_world: MakeWorld, framing: Framing, size: int
) -> None:  # I-3
    world = await make_world(model=PlayedModel([call(), text("done")]), tools=[Probe()])
    wire = await world.connect(framing=framing)
    opened = await wire.open(world)
    await wire.request("session/prompt", {"sessionId": opened["sessionId"], "content": "x"})
    while "result" not in (answer := await wire.receive(size)):
        pass
    waiting = await wire.request("run/wait", {"runId": answer["result"]["runId"]})
    while (await wire.receive(size)).get("id") != waiting:
        pass
    order = [tag(message) for message in wire.log]
    finish = [at for at, name in enumerate(order) if name == "prompt_timing"][-1]
    expected = [
        order.index(f"answer {waiting - 1}"),
        order.index("run_started"),
        finish,
        order.index("session_saved"),
        order.index("run_settled"),
        order.index(f"answer {waiting}"),
    ]
    assert expected == sorted(expected)
    await wire.aclose()


async def test_an_event_is_encoded_once_whatever_the_number_of_clients(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[object] = []
    encode = event_log._encode

    def counting(event: object) -> bytes:
        encoded.append(event)
        return encode(event)

    monkeypatch.setattr(event_log, "_encode", counting)
    world = await make_world(model=PlayedModel([text("yes")]))
    wires = [await world.connect(framing=framing) for _ in range(10) for framing in Framing]
    opened = await wires[0].open(world)
    for wire in wires[1:]:
        await attach(wire, opened)
    await wires[0].prompt(opened["sessionId"], wait=True)
    head = world.runtime().events.head
    for wire in wires:
        await read_up_to(wire, head)
        await wire.aclose()
    assert len(encoded) == head


async def test_what_is_streamed_in_one_go_is_one_event(make_world: MakeWorld) -> None:
    async def at_once(_: object, say: Any) -> Any:
        for number in range(10_000):
            say(TextDelta(f"{number} "))
        await trio.lowlevel.checkpoint()
        return text("".join(f"{number} " for number in range(10_000)))

    world = await make_world(model=PlayedModel([at_once]))
    wire = await world.connect()
    opened = await wire.open(world)
    await wire.prompt(opened["sessionId"])
    await wire.event("run_settled")
    updates = [params.event for params in wire.events if params.event.__struct_config__.tag == "message_update"]
    assert len(updates) == 1
    await wire.aclose()


async def test_disposing_tells_every_client_and_their_subscriptions_are_over(make_world: MakeWorld) -> None:
    world: World = await make_world(model=Paced())
    one, other = await world.connect(), await world.connect(framing=Framing.HEADERS)
    opened = await one.open(world)
    await attach(other, opened)
    await one.prompt(opened["sessionId"])
    assert await one.call("runtime/dispose", {"runtimeId": opened["runtimeId"]}) == {}
    for wire in (one, other):
        await wire.event("run_settled")
        closed: Any = await wire.event("session_closed")
        assert closed.event.reason == "disposed"
        await wire.call("server/status")
    assert not any(client.outbox.cursors for client in world.daemon.clients)
    assert Path(opened["path"]).exists()
    for wire in (one, other):
        await wire.aclose()
