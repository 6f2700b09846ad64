"""The client for trio programs against a scripted peer on a real socket: one test for each way in which
trio-jsonrpc 0.4.0 was seen to fail, and what this client promises beyond it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from scripted_peer import Peer, Script, event, serving, stay

pytest.importorskip("trio_jsonrpc")

from loop_protocol.client import LostConnection
from loop_protocol.jsonrpc import error_body, request_body, result_body
from loop_protocol.trio_client import Client, SocketTransport, open_client
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.methods import Nothing, PromptResult
from loop_protocol.v1.types import ErrorInfo, Outcome, RunResult


@asynccontextmanager
async def connected(path: str, script: Script) -> AsyncIterator[Client]:
    async with serving(path, script), open_client(path) as client:
        yield client


# --- what 0.4.0 gets wrong --------------------------------------------------------------------------------------------


async def test_a_pending_call_ends_when_the_peer_goes_and_so_do_later_ones_and_events(path: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.expect("server/status")

    async with connected(path, script) as client:
        with pytest.raises(LostConnection, match="closed the connection"):
            await client.call("server/status")
        with pytest.raises(LostConnection):
            await client.call("server/status")
        with pytest.raises(LostConnection):
            await anext(client.events())


async def test_a_cancelled_call_whose_answer_comes_late_harms_nothing(path: str) -> None:
    cancelled: list[Any] = []

    async def script(peer: Peer) -> None:
        late = await peer.expect("run/wait")
        cancel = await peer.expect("$/cancelRequest")
        cancelled.append((late.id, msgspec.json.decode(cancel.params or b"null")["id"]))
        await peer.send(result_body(late.id, Nothing()))
        await peer.answer("runtime/detach", Nothing())
        await stay(peer)

    async with connected(path, script) as client:
        with trio.move_on_after(0.02) as waiting:
            await client.call("run/wait", {"runId": "x"})
        assert waiting.cancelled_caught
        assert await client.call("runtime/detach", {"runtimeId": "r"}) == Nothing()
    assert cancelled == [(b"2", 2)]


async def test_a_second_answer_to_one_call_harms_nothing(path: str) -> None:
    async def script(peer: Peer) -> None:
        request = await peer.expect("runtime/detach")
        await peer.send(result_body(request.id, Nothing()), result_body(request.id, Nothing()))
        await peer.answer("runtime/detach", Nothing())
        await stay(peer)

    async with connected(path, script) as client:
        for _ in range(2):
            assert await client.call("runtime/detach", {"runtimeId": "r"}) == Nothing()


@pytest.mark.usefixtures("autojump_clock")
async def test_cancelling_a_block_around_the_client_ends_it_at_once(path: str) -> None:
    async with serving(path, stay):
        started = trio.current_time()
        with trio.CancelScope() as scope:
            async with open_client(path) as client:
                scope.cancel()
                await client.call("server/status")
        assert scope.cancelled_caught
        assert trio.current_time() - started < 1


async def test_a_null_result_is_a_result(path: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.answer("some/thing", None)
        await stay(peer)

    async with connected(path, script) as client:
        assert await client.request("some/thing") is None


@pytest.mark.parametrize(
    ("code", "kind"),
    [(-32602, "invalid_params"), (-32603, "internal"), (-32000, "pending_save"), (-31999, "from_the_future")],
)
async def test_the_code_and_kind_of_an_error_arrive_as_they_were_sent(path: str, code: int, kind: str) -> None:
    async def script(peer: Peer) -> None:
        request = await peer.expect("server/status")
        error = RpcError(kind, "no", detail=7)
        error.code = code
        await peer.send(error_body(request.id, error))
        await stay(peer)

    async with connected(path, script) as client:
        with pytest.raises(RpcError) as caught:
            await client.call("server/status")
    assert (caught.value.code, caught.value.kind, caught.value.message) == (code, kind, "no")
    assert caught.value.data["detail"] == 7


async def test_events_that_nobody_reads_do_not_hold_up_an_answer(path: str) -> None:
    async def script(peer: Peer) -> None:
        request = await peer.expect("runtime/detach")
        await peer.send(*(event(seq) for seq in range(500)), result_body(request.id, Nothing()))
        await stay(peer)

    async with connected(path, script) as client:
        await client.call("runtime/detach", {"runtimeId": "r"})
        events = client.events()
        assert [(await anext(events)).seq for _ in range(500)] == list(range(500))


async def test_a_request_from_the_peer_and_unknown_notifications_are_passed_over(path: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.send(request_body(1, "window/ask", {}), request_body(None, "$/noise", None))
        await peer.send(b'{"jsonrpc":"2.0","method":"event","params":{"runtimeId":"r","sessionId":"s","seq":1,"at":1,')
        await peer.send(b'"event":{"type":"sunrise"}}}\n', event(2))
        await stay(peer)

    async with connected(path, script) as client:
        assert (await anext(client.events())).seq == 2


async def test_a_bad_line_is_passed_over_once(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async def script(peer: Peer) -> None:
        bad = [b"{]\n", b"{}\n", b"[7]\n", b'{"jsonrpc":"2.0","method":"event","params":{"seq":"x"}}\n', b"\xff\n"]
        await peer.send(*bad)
        await peer.answer("runtime/detach", Nothing())
        await stay(peer)

    async with connected(path, script) as client:
        await client.call("runtime/detach", {"runtimeId": "r"})
    assert len(caplog.records) == 4


async def test_what_cannot_be_followed_any_further_ends_the_connection(path: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.expect("server/status")
        await peer.send(b"x" * (2**26 + 2**17))

    async with connected(path, script) as client:
        with pytest.raises(LostConnection, match="not the protocol"):
            await client.call("server/status")


async def test_when_the_peer_cannot_read_a_frame_nobody_waits_for_ever(path: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.expect("server/status")
        await peer.send(error_body(None, RpcError("limit_exceeded", "too large", limit="frame")))
        await stay(peer)

    async with connected(path, script) as client:
        with pytest.raises(LostConnection, match="too large"):
            await client.call("server/status")


async def test_a_call_cancelled_while_its_frame_is_being_sent_cuts_no_frame(path: str) -> None:
    ready = trio.Event()
    seen: list[str] = []

    async def script(peer: Peer) -> None:
        await ready.wait()
        seen.extend([(await peer.read()).method for _ in range(2)])
        await peer.answer("after/it", None)
        await stay(peer)

    async with connected(path, script) as client:
        with trio.move_on_after(0.05) as large:  # larger than what the kernel takes while nobody reads
            await client.call("session/prompt", {"sessionId": "s", "content": "x" * 2**22})
        assert large.cancelled_caught
        ready.set()
        await client.request("after/it")
    assert seen == ["session/prompt", "$/cancelRequest"]


async def test_what_was_sent_right_before_the_end_still_arrives(path: str) -> None:
    arrived = trio.Event()

    async def script(peer: Peer) -> None:
        await peer.expect("$/last")
        arrived.set()

    async with serving(path, script):
        async with open_client(path) as client:
            await client.notify("$/last", {})
        await arrived.wait()


async def test_a_peer_that_takes_nothing_delays_the_end_by_a_second_at_most(path: str) -> None:
    async with serving(path, stay):
        started = trio.current_time()
        async with open_client(path) as client:
            await client.notify("$/large", {"text": "x" * 2**22})
        assert trio.current_time() - started < 3


# --- what it promises beyond that -------------------------------------------------------------------------------------


async def test_calls_in_flight_together_get_their_own_answers(path: str) -> None:
    async def script(peer: Peer) -> None:
        requests = [await peer.read() for _ in range(3)]
        await peer.send(*(result_body(request.id, request.params) for request in reversed(requests)))
        await stay(peer)

    answers: dict[int, Any] = {}

    async def ask(client: Client, number: int) -> None:
        answers[number] = await client.request("echo", {"number": number})

    async with connected(path, script) as client, trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(ask, client, number)
    assert answers == {number: {"number": number} for number in range(3)}


async def test_a_result_that_does_not_fit_is_an_error_of_that_call_alone(path: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.answer("server/status", {"pid": "x"})
        await peer.answer("runtime/detach", Nothing())
        await stay(peer)

    async with connected(path, script) as client:
        with pytest.raises(RpcError, match="server/status"):
            await client.call("server/status")
        await client.call("runtime/detach", {"runtimeId": "r"})


async def test_an_error_of_the_block_leaves_as_it_is(path: str) -> None:
    async with serving(path, stay):
        with pytest.raises(KeyError, match="mine"):
            async with open_client(path):
                raise KeyError("mine")


async def test_a_refused_handshake_is_that_error(path: str) -> None:
    async def refuse(listener: trio.SocketListener) -> None:
        async with await listener.accept() as stream:
            peer = Peer(stream)
            hello = await peer.expect("initialize")
            await peer.send(error_body(hello.id, RpcError("unsupported_version", "no", supported=[2])))

    sock = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
    await sock.bind(path)
    sock.listen()
    async with trio.SocketListener(sock) as listener, trio.open_nursery() as nursery:
        nursery.start_soon(refuse, listener)
        with pytest.raises(RpcError) as caught:
            async with open_client(path):
                pass
    assert caught.value.data["supported"] == [2]


async def test_where_nobody_listens_it_is_an_os_error(path: str) -> None:
    with pytest.raises(FileNotFoundError):
        async with open_client(path):
            pass


def settling(result: RunResult) -> Script:
    async def script(peer: Peer) -> None:
        await peer.answer("session/prompt", PromptResult(run_id="run"))
        await peer.answer("run/wait", result)
        await stay(peer)

    return script


@pytest.mark.parametrize("outcome", ["success", "cancelled"])
async def test_a_run_that_succeeded_or_was_stopped_answers_its_result(path: str, outcome: Outcome) -> None:
    result = RunResult(run_id="run", outcome=outcome, saved=True)
    async with connected(path, settling(result)) as client:
        assert await client.run("s", "hi") == result


async def test_a_failed_run_raises_its_error(path: str) -> None:
    result = RunResult(run_id="run", outcome="error", saved=True, error=ErrorInfo("model_error", "no"))
    async with connected(path, settling(result)) as client:
        with pytest.raises(RpcError) as caught:
            await client.run("s", "hi")
    assert (caught.value.kind, caught.value.message) == ("model_error", "no")


async def test_a_run_and_a_save_that_failed_both_raise_a_group_of_the_two(path: str) -> None:  # S-17
    parts = [ErrorInfo("model_error", "no"), ErrorInfo("save_failed", "disk full")]
    error = ErrorInfo("run_and_save_failed", "no; and the save failed: disk full", parts)
    result = RunResult(run_id="run", outcome="error", saved=False, error=error)
    async with connected(path, settling(result)) as client:
        with pytest.RaisesGroup(RpcError, RpcError) as caught:
            await client.run("s", "hi")
    kinds = [part.kind for part in caught.value.exceptions if isinstance(part, RpcError)]
    assert kinds == ["model_error", "save_failed"]


async def test_a_transport_takes_nothing_after_its_end() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    transport = SocketTransport(ours)
    transport.close()
    transport.send_if_room(b"{}\n")
    with pytest.raises(Exception, match="closed"):
        await transport.send(b"{}")
    await theirs.aclose()
