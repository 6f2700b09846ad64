"""One connection, from hello to end: what is refused, how it is told, and that nobody else notices."""

from __future__ import annotations

import gc
import time
import tracemalloc
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from inprocess import PlayedModel, Wire, World, text
from pacing import MakeWorld, Paced

from loop_protocol import jsonrpc
from loop_protocol.jsonrpc import Framing
from loop_protocol.v1.errors import RpcError
from loopd import connection as connections
from loopd import daemon as daemons

FRAMINGS = pytest.mark.parametrize("framing", list(Framing), ids=[framing.value for framing in Framing])
HELLO = {"versions": [1]}
MIB = 1024 * 1024


async def refusal(wire: Wire, method: str, params: Any = None) -> RpcError:
    with pytest.raises(RpcError) as refused:
        await wire.call(method, params)
    return refused.value


def body(id: int | None, method: str, params: Any = None) -> bytes:
    return jsonrpc.request_body(id, method, {} if params is None else params)


async def gone(world: World, wire: Wire) -> None:
    """Close it and wait until the daemon has noticed."""
    before = set(world.daemon.clients)
    await wire.aclose()
    with trio.fail_after(5):
        while world.daemon.clients >= before:  # noqa: ASYNC110 nothing tells
            await trio.lowlevel.checkpoint()


# --- the hello --------------------------------------------------------------------------------------------------------


async def test_before_the_hello_everything_is_refused_by_name_and_the_hello_still_works(make_world: MakeWorld) -> None:
    world = await make_world()  # D-1
    wire = await world.connect(handshake=False)
    assert (await refusal(wire, "server/status")).kind == "not_initialized"
    assert (await refusal(wire, "no/such")).kind == "method_not_found"
    unfit = await refusal(wire, "initialize", {"versions": [0, 2, 99]})
    assert (unfit.kind, unfit.data["supported"]) == ("unsupported_version", [1])
    assert (await refusal(wire, "server/status")).kind == "not_initialized"
    hello = await wire.call("initialize", {"versions": [99, 1], "client": {"name": "x", "colour": 1}, "later": {}})
    assert hello["version"] == 1
    assert hello["limits"]["frame"] == 32 * MIB
    assert (await wire.call("server/status"))["connections"] == 1
    await wire.aclose()


@pytest.mark.parametrize(
    ("method", "params", "path"),
    [
        ("runtime/open", {"cwd": "/", "session": {"kind": "new", "colour": 1}}, "$.session"),
        ("runtime/open", {"cwd": "/", "session": {"kind": "newest"}}, "$.session.kind"),
        ("runtime/open", {"cwd": "/", "session": {"kind": "open"}}, "session.path"),
        ("runtime/attach", {"runtimeId": "r", "since": -1}, "$.since"),
        ("runtime/attach", {"runtimeId": "r", "since": 1.5}, "$.since"),
        ("session/prompt", {"sessionId": "s", "content": [{"type": "sound"}]}, "$.content[0]"),
        ("session/state", {}, "$.sessionId"),
        ("server/status", {"verbose": True}, "verbose"),
        ("session/messages", {"sessionId": "s", "start": 2**53}, "$.start"),
    ],
)
async def test_a_value_that_does_not_fit_is_refused_with_its_path(  # D-1
    make_world: MakeWorld, method: str, params: dict[str, Any], path: str
) -> None:
    wire = await (await make_world()).connect()
    error = await refusal(wire, method, params)
    assert error.kind == "invalid_params"
    assert path in error.message + str(error.data.get("field"))
    await wire.aclose()


@pytest.mark.parametrize("params", [b"", b',"params":null', b',"params":[]', b',"params":{}', b',"params":[ ]'])
async def test_no_params_may_be_written_in_any_way(make_world: MakeWorld, params: bytes) -> None:  # D-1
    wire = await (await make_world()).connect()
    await wire.send(b'{"jsonrpc":"2.0","id":"n","method":"runtime/list"%b}\n' % params)
    assert (await wire.receive())["result"] == {"runtimes": []}
    await wire.aclose()


# --- framing ----------------------------------------------------------------------------------------------------------


@FRAMINGS
async def test_a_client_that_sends_and_reads_byte_by_byte_is_served(make_world: MakeWorld, framing: Framing) -> None:
    wire = await (await make_world()).connect(handshake=False, framing=framing)  # D-1
    for one in jsonrpc.frame(body(1, "initialize", HELLO), framing) + jsonrpc.frame(body(2, "runtime/list"), framing):
        await wire.send(bytes([one]))
    assert [(await wire.receive(1))["id"] for _ in range(2)] == [1, 2]
    await wire.aclose()


async def test_headers_of_any_case_and_number_before_a_body_that_comes_later(make_world: MakeWorld) -> None:
    world = await make_world()
    wire = await world.connect(handshake=False)
    for number, request in enumerate([body(1, "initialize", HELLO), body(2, "runtime/list").rstrip()]):
        head = b"X-Colour: blue\r\ncontent-LENGTH:%d\r\nContent-Type: application/vscode-jsonrpc; charset=utf-8\r\n\r\n"
        await wire.send(head % len(request))
        await trio.testing.wait_all_tasks_blocked()
        await wire.send(request)
        raw = await wire.stream.receive_some()
        header, _, answer = bytes(raw).partition(b"\r\n\r\n")
        assert header == b"Content-Length: %d" % len(answer)
        assert msgspec.json.decode(answer)["id"] == number + 1
    await wire.aclose()


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (b"\x16\x03\x01 hello", "parse_error"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "parse_error"),
        (b"Content-Length: -1\r\n\r\n{}", "parse_error"),
        (b"Content-Length: 99999999999\r\n\r\n", "limit_exceeded"),
        (b"A" * 5000, "parse_error"),
        (b"{" + b" " * 65536, "limit_exceeded"),
    ],
)
async def test_a_stream_that_cannot_be_followed_is_told_why_and_closed(  # D-1
    make_world: MakeWorld, sent: bytes, kind: str
) -> None:
    world = await make_world()
    wire = await world.connect(handshake=False)
    await wire.send(sent)
    answer = await wire.receive()
    assert (answer["id"], answer["error"]["data"]["kind"]) == (None, kind)
    with pytest.raises((trio.EndOfChannel, trio.BrokenResourceError)):
        await wire.receive()
    await wire.aclose()


async def test_before_the_hello_a_frame_may_have_64_kib_and_right_after_it_32_mib(make_world: MakeWorld) -> None:
    world = await make_world()
    wire = await world.connect(handshake=False)
    big = body(2, "session/prompt", {"sessionId": "s", "content": "x" * MIB})
    await wire.send(body(1, "initialize", HELLO) + big)  # in one write: the limit is raised between the two
    assert "result" in await wire.receive()
    assert (await wire.receive())["error"]["data"]["kind"] == "session_not_found"
    await wire.aclose()


# --- the end ----------------------------------------------------------------------------------------------------------


@FRAMINGS
async def test_after_a_half_close_every_outstanding_answer_goes_out_and_then_the_end(
    make_world: MakeWorld, framing: Framing
) -> None:
    model = Paced()
    world = await make_world(model=model)
    first = await world.connect()
    opened = await first.open(world)
    run_id = await first.prompt(opened["sessionId"])
    wire = await world.connect(framing=framing)
    await wire.call("runtime/attach", {"runtimeId": opened["runtimeId"]})
    await wire.request("run/wait", {"runId": run_id})
    await wire.request("runtime/list")
    await wire.stream.send_eof()
    assert (await wire.answer(4))["runtimes"]  # events of the run that just began may come before it
    model.go.set()
    assert (await wire.answer(3))["outcome"] == "success"
    with pytest.raises(trio.EndOfChannel):
        await wire.receive()
    assert [params.event.__struct_config__.tag for params in wire.events][-1] == "run_settled"
    await wire.aclose()
    await first.aclose()


async def test_a_last_line_without_its_newline_is_answered_when_the_client_is_done(make_world: MakeWorld) -> None:
    wire = await (await make_world()).connect()
    await wire.send(body(9, "runtime/list").rstrip())
    await wire.stream.send_eof()
    assert (await wire.receive())["id"] == 9
    with pytest.raises(trio.EndOfChannel):
        await wire.receive()
    await wire.aclose()


@pytest.mark.parametrize("half", [False, True])
async def test_a_client_that_is_gone_is_not_kept_for_what_it_waited_for(
    make_world: MakeWorld, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HANGUP_S", 0.01)  # after a half-close nothing tells, so it is looked
    model = Paced()
    world = await make_world(model=model)
    first = await world.connect()
    opened = await first.open(world)
    run_id = await first.prompt(opened["sessionId"])
    wire = await world.connect()
    await wire.request("run/wait", {"runId": run_id})
    await wire.call("runtime/list")
    if half:
        await wire.stream.send_eof()
        await trio.testing.wait_all_tasks_blocked()
    await gone(world, wire)
    assert world.session().run is not None  # a disconnect cancels no work
    model.go.set()
    assert (await first.call("run/wait", {"runId": run_id}))["outcome"] == "success"
    await first.aclose()


async def test_cancel_request_ends_the_wait_and_not_the_work(make_world: MakeWorld) -> None:
    model = Paced()
    world = await make_world(model=model)
    wire = await world.connect()
    opened = await wire.open(world, attach=False)
    run_id = await wire.prompt(opened["sessionId"])
    waiting = await wire.request("run/wait", {"runId": run_id})
    ids: list[dict[str, Any]] = [{"id": "other"}, {"id": None}, {"id": []}, {}, {"id": float(waiting)}]
    for params in ids:
        await wire.send(jsonrpc.request_body(None, "$/cancelRequest", params))
    await wire.send(jsonrpc.request_body(None, "$/setTrace", {"value": "off"}))
    with pytest.raises(RpcError) as ended:
        await wire.answer(waiting)
    assert ended.value.kind == "request_cancelled"
    model.go.set()
    assert (await wire.call("run/wait", {"runId": run_id}))["outcome"] == "success"
    await wire.aclose()


async def test_a_hundred_clients_that_close_in_mid_stream_take_nobody_with_them(make_world: MakeWorld) -> None:  # K-51
    model = Paced(words=100_000)
    world = await make_world(model=model)
    first, served = await _served(world)
    opened = await first.open(world)
    run_id = await first.prompt(opened["sessionId"])
    for number in range(100):
        wire = await world.connect(framing=Framing.HEADERS if number % 2 else Framing.LINES)
        await wire.call("runtime/attach", {"runtimeId": opened["runtimeId"]})
        await wire.request("run/wait", {"runId": run_id})
        if number % 3:
            await wire.event("message_update")
        await wire.aclose()
    assert (await first.call("session/stop", {"sessionId": opened["sessionId"], "runId": run_id}))["stopped"]
    with trio.fail_after(5):
        for client in world.daemon.clients - {served}:
            await client.ended.wait()
    assert world.daemon.clients == {served}
    assert world.runtime().events.cursors == set(served.outbox.cursors.values())
    assert [params.seq for params in first.events] == list(range(1, len(first.events) + 1))
    await first.aclose()


# --- ids, batches, numbers --------------------------------------------------------------------------------------------


async def test_the_same_id_on_two_connections_and_twice_in_flight_on_one(make_world: MakeWorld) -> None:  # K-55
    model = Paced()
    world = await make_world(model=model)
    one, other = await world.connect(), await world.connect()
    opened = await one.open(world, attach=False)
    run_id = await one.prompt(opened["sessionId"])
    for wire in (one, other):
        await wire.send(body(1000, "run/wait", {"runId": run_id}))
    await one.send(b'{"jsonrpc":"2.0","id":1000.0,"method":"runtime/list"}\n')  # the same number
    await one.send(b'{"jsonrpc":"2.0","id":"1000","method":"runtime/list"}\n')  # another id
    refused = await one.receive()
    assert refused["error"]["data"]["kind"] == "invalid_request"
    assert "result" in await one.receive()
    model.go.set()
    for wire in (one, other):
        assert (await wire.receive())["result"]["runId"] == run_id
        await wire.aclose()


async def test_64_requests_may_be_in_flight_and_one_more_is_refused_by_name(make_world: MakeWorld) -> None:  # D-1
    model = Paced()
    world = await make_world(model=model)
    wire = await world.connect()
    opened = await wire.open(world, attach=False)
    run_id = await wire.prompt(opened["sessionId"])
    await wire.send(b"".join(body(100 + number, "run/wait", {"runId": run_id}) for number in range(65)))
    refused = await wire.receive()
    assert (refused["id"], refused["error"]["data"]["kind"]) == (164, "limit_exceeded")
    assert refused["error"]["data"]["limit"] == "requestsInFlight"
    model.go.set()
    assert sorted([(await wire.receive())["id"] for _ in range(64)]) == list(range(100, 164))
    assert await wire.call("runtime/list")
    await wire.aclose()


async def test_a_batch_is_answered_as_one_array_once_its_last_wait_is_over(make_world: MakeWorld) -> None:
    model = Paced()
    world = await make_world(model=model)
    wire = await world.connect()
    opened = await wire.open(world, attach=False)
    session_id = opened["sessionId"]
    run_id = await wire.prompt(session_id)
    requests = [
        body(1, "run/wait", {"runId": run_id}),
        body(2, "session/prompt", {"sessionId": session_id, "content": "x"}),
        body(3, "runtime/list"),
        body(None, "$/cancelRequest", {"id": 5}),
        body(4, "session/list", {"cwd": world.cwd}),
        body(1, "run/wait", {"runId": run_id}),
    ]
    await wire.send(jsonrpc.batch_body(requests) + body(6, "server/status"))
    assert (await wire.receive())["id"] == 6  # others are not held up by it
    model.go.set()
    answers = await wire.receive()
    assert sorted(answer["id"] for answer in answers) == [1, 1, 2, 3, 4]
    kinds = [(answer["id"], answer["error"]["data"]["kind"]) for answer in answers if "error" in answer]
    assert kinds == [(2, "invalid_request"), (1, "invalid_request")]  # starts work; its id is in flight
    assert world.session().core.history.user_messages == 1
    await wire.aclose()


async def test_a_batch_of_notifications_alone_is_not_answered(make_world: MakeWorld) -> None:
    wire = await (await make_world()).connect()
    await wire.send(jsonrpc.batch_body([body(None, "$/x"), body(None, "runtime/list")]) + body(7, "runtime/list"))
    assert (await wire.receive())["id"] == 7
    await wire.aclose()


async def test_the_65th_connection_is_told_why_and_a_place_that_is_free_again_is_given(make_world: MakeWorld) -> None:
    world = await make_world()  # D-1
    wires = [await world.connect() for _ in range(64)]
    late = await world.connect(handshake=False)
    answer = await late.receive()
    assert (answer["error"]["data"]["kind"], answer["error"]["data"]["limit"]) == ("limit_exceeded", "connections")
    with pytest.raises((trio.EndOfChannel, trio.BrokenResourceError)):
        await late.receive()
    await gone(world, wires.pop())
    wires.append(await world.connect())
    assert (await wires[-1].call("server/status"))["connections"] == 64
    for wire in (*wires, late):
        await wire.aclose()


async def test_of_a_hundred_that_connect_at_once_64_are_served_and_every_other_is_told_why(
    make_world: MakeWorld,
) -> None:
    world = await make_world()
    wires: list[Wire] = []
    outcomes: list[str] = []

    async def knock() -> None:
        wire = await world.connect(handshake=False)
        wires.append(wire)
        with suppress(trio.BrokenResourceError):  # refused before it could speak; the answer is there all the same
            await wire.send(body(1, "initialize", HELLO))
        answer = await wire.receive()
        outcomes.append("served" if "result" in answer else answer["error"]["data"]["limit"])

    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(knock)
    assert sorted(outcomes) == ["connections"] * 36 + ["served"] * 64
    for wire in wires:
        await wire.aclose()


# --- hostile input ----------------------------------------------------------------------------------------------------

HOSTILE = {
    "an array of zeros": b"[" + b"0," * (2 * MIB) + b"0]\n",
    "an array without an end": b"[" + b"0," * (2 * MIB) + b"\n",
    "deep brackets": b"[" * (4 * MIB) + b"\n",
    "mountains": b'{"jsonrpc":"2.0","id":1,"method":"server/status","params":[' + b"[[[[]]]]," * (MIB // 2) + b"0]}\n",
    "zeros as params": b'{"jsonrpc":"2.0","id":1,"method":"server/status","params":[' + b"0," * (2 * MIB) + b"0]}\n",
    "objects as params": b'{"jsonrpc":"2.0","id":1,"method":"session/list","params":[' + b"{}," * MIB + b"0]}\n",
    "escaped halves": b'{"jsonrpc":"2.0","id":1,"method":"' + b"\\ud83d\\ude00" * (MIB // 3) + b'"}\n',
    "many small requests": body(1, "no/such") * (4 * MIB // 64),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_four_mebibytes_of_nonsense_get_an_error_while_others_are_answered_at_once(
    make_world: MakeWorld, name: str
) -> None:  # K-56
    world = await make_world()
    bystander = await world.connect()
    assert await _longest_wait(world, bystander, HOSTILE[name]) < 0.25
    await bystander.aclose()


async def _longest_wait(world: World, bystander: Wire, hostile: bytes) -> float:
    """In seconds of this thread, the daemon's too, so that other programs on this machine do not count."""
    wire = await world.connect()
    worst = 0.0
    gc.collect()
    gc.freeze()  # like a daemon at its start: a collection of all that other tests left is not its doing
    async with trio.open_nursery() as nursery:

        async def read() -> None:
            answer = await wire.receive()
            assert "error" in answer
            while answer.get("id") != 7:
                answer = await wire.receive()
            nursery.cancel_scope.cancel()

        nursery.start_soon(read)
        nursery.start_soon(wire.send, hostile + body(7, "runtime/list"))
        while True:
            began = time.thread_time()
            await bystander.call("runtime/list")
            worst = max(worst, time.thread_time() - began)
    gc.unfreeze()
    await wire.aclose()
    return worst


@pytest.mark.parametrize("opening", [b"{", b'{"a":"', b"["])
async def test_forty_megabytes_without_a_newline_end_that_connection_in_bounded_memory(
    make_world: MakeWorld, opening: bytes
) -> None:  # K-56
    world = await make_world()
    wire, bystander = await world.connect(), await world.connect()
    endless = opening + b"x" * 40_000_000
    tracemalloc.start()
    try:
        with pytest.raises(trio.BrokenResourceError):
            await wire.send(endless)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 48 * MIB
    assert (await wire.receive())["error"]["data"]["kind"] == "limit_exceeded"
    assert await bystander.call("runtime/list") == {"runtimes": []}
    for one in (wire, bystander):
        await one.aclose()


async def test_unfinished_frames_of_all_clients_together_have_a_budget(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemons, "RECEIVING", MIB)
    world = await make_world()
    first, second, small = await world.connect(), await world.connect(), await world.connect()
    request = body(50, "session/prompt", {"sessionId": "s", "content": "x" * (900 * 1024)})
    await first.send(request[:-1])
    await trio.testing.wait_all_tasks_blocked()
    with pytest.raises(trio.BrokenResourceError):
        await second.send(request[: 600 * 1024])
    assert (await second.receive())["error"]["data"]["limit"] == "receiving"
    await small.send(request[: 8 * 1024])  # a small one is always let in
    await first.send(request[-1:])
    assert (await first.receive())["error"]["data"]["kind"] == "session_not_found"
    assert len(world.daemon.clients) == 2
    for wire in (first, second, small):
        await wire.aclose()


# --- slow readers of answers ------------------------------------------------------------------------------------------


async def _with_long_history(make_world: MakeWorld) -> tuple[World, Wire, str]:
    world = await make_world(model=PlayedModel([text("yes")]))
    wire = await world.connect()
    opened = await wire.open(world, attach=False)
    await wire.prompt(opened["sessionId"], "x" * 900_000, wait=True)
    return world, wire, opened["sessionId"]


async def _served(world: World) -> tuple[Wire, connections.Connection]:
    """A client, and what the daemon has of it."""
    before = set(world.daemon.clients)
    wire = await world.connect()
    (connection,) = world.daemon.clients - before
    return wire, connection


def _waiting(connection: connections.Connection) -> int:
    return sum(len(reply) for reply, _ in connection.outbox._replies)


async def test_a_client_that_asks_much_and_reads_nothing_is_not_read_from(make_world: MakeWorld) -> None:  # D-3
    world, first, session_id = await _with_long_history(make_world)
    wire, connection = await _served(world)
    asked = b"".join(body(100 + number, "session/messages", {"sessionId": session_id}) for number in range(200))
    await wire.send(asked)
    await trio.testing.wait_all_tasks_blocked()
    assert _waiting(connection) < 3 * MIB  # the limit, and the answer that went beyond it
    assert await first.call("server/status")
    for number in range(200):
        answer = await wire.receive()
        assert (answer["id"], answer["result"]["total"]) == (100 + number, 2)
        wire.log.clear()
    for one in (first, wire):
        await one.aclose()


async def test_a_batch_cannot_collect_more_answers_than_memory_should_hold(make_world: MakeWorld) -> None:  # D-3
    world, first, session_id = await _with_long_history(make_world)
    wire, connection = await _served(world)
    page = body(1, "session/messages", {"sessionId": session_id})
    await wire.send(jsonrpc.batch_body([page] * 1000))
    await trio.testing.wait_all_tasks_blocked()
    assert _waiting(connection) < 12 * MIB
    answers = await wire.receive()
    assert len(answers) == 1000
    kinds = {answer["error"]["data"]["kind"] for answer in answers if "error" in answer}
    assert kinds == {"limit_exceeded"}
    assert "result" in answers[0]
    for one in (first, wire):
        await one.aclose()
