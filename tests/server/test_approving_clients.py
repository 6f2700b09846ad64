"""Both Python clients show and answer what tools ask, with types (A-1, A-2, K-42)."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from asking import RULE, UNPARSED, Asking, asks
from inprocess import PlayedModel, running, text

from loop_protocol.client import Client
from loop_protocol.replica import fold
from loop_protocol.trio_client import follow, open_client
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.events import ApprovalRequested, ApprovalResolved, EventParams
from loop_protocol.v1.types import ApprovalRequest


async def test_the_trio_client_lists_and_answers_while_its_own_run_waits(tmp_path: Path) -> None:
    tool = Asking()
    async with (
        running(tmp_path, model=PlayedModel([asks(rules=[RULE]), asks(id="c2"), text("hi")]), tools=[tool]) as world,
        open_client(world.socket) as client,
        open_client(world.socket) as other,
        trio.open_nursery() as nursery,
    ):
        opened = await client.call("runtime/open", {"cwd": world.cwd, "session": {"kind": "new"}})
        await other.call("runtime/attach", {"runtimeId": opened.runtime_id})
        outcomes = []

        async def prompts() -> None:
            outcomes.append((await client.run(opened.session_id, "x")).outcome)

        nursery.start_soon(prompts)
        seen: list[ApprovalRequest] = []
        async for params in other.events():
            match params.event:
                case ApprovalRequested(request=request):
                    seen.append(request)
                    assert (await other.call("approval/list", {})).approvals == [request]
                    assert (request.rules, request.rules_refused) in (([RULE], None), ([], UNPARSED))
                    way = "allowed-session" if request.rules else "rejected"
                    answered = await other.call(
                        "approval/resolve", {"approvalId": request.approval_id, "decision": way}
                    )
                    assert answered.outcome == way
                case ApprovalResolved(approval_id=approval_id) if len(seen) == 2 and approval_id == seen[1].approval_id:
                    break
        with pytest.raises(RpcError) as late:
            await client.call("approval/resolve", {"approvalId": seen[0].approval_id, "decision": "rejected"})
        assert (late.value.kind, late.value.data["outcome"]) == ("approval_not_pending", "allowed-session")
    assert outcomes == ["success"]
    assert tool.done == ["it"]


async def test_who_follows_as_a_person_counts_as_there(tmp_path: Path) -> None:
    tool = Asking()
    async with (
        running(tmp_path, model=PlayedModel([asks(), text("hi")]), tools=[tool]) as world,
        open_client(world.socket, name="plugin", approvals=True) as client,
    ):
        opened = await client.call("runtime/open", {"cwd": world.cwd, "session": {"kind": "new"}})
        prompt = {"sessionId": opened.session_id, "content": "x", "approvals": "reject"}
        async with follow(opened.runtime_id, path=world.socket, approvals=True) as items:
            state = (await anext(items)).state
            run = await client.call("session/prompt", prompt)
            async for item in items:
                assert isinstance(item, EventParams)
                state = fold(state, item)
                for request in state.approvals:
                    answer = {"approvalId": request.approval_id, "decision": "allowed-once"}
                    await client.call("approval/resolve", answer)
                if isinstance(item.event, ApprovalResolved):
                    assert item.event.by is not None
                    assert item.event.by.startswith("plugin (pid ")
                    break
        await client.call("run/wait", {"runId": run.run_id})
    assert tool.done == ["it"]


async def test_the_blocking_client_does_the_same(tmp_path: Path) -> None:
    def blocking(socket: str, cwd: str) -> tuple[str, str | None]:
        with Client.connect(socket) as client:
            opened = client.call("runtime/open", {"cwd": cwd, "session": {"kind": "new"}})
            client.call("runtime/attach", {"runtimeId": opened.runtime_id})
            run = client.call("session/prompt", {"sessionId": opened.session_id, "content": "x"})
            for params in client.events():
                if isinstance(params.event, ApprovalRequested):
                    [listed] = client.call("approval/list", {"sessionId": opened.session_id}).approvals
                    assert listed == params.event.request
                    client.call("approval/resolve", {"approvalId": listed.approval_id, "decision": "allowed-once"})
                if isinstance(params.event, ApprovalResolved):
                    return client.call("run/wait", {"runId": run.run_id}).outcome, params.event.by
        raise AssertionError

    tool = Asking()
    async with running(tmp_path, model=PlayedModel([asks(), text("hi")]), tools=[tool]) as world:
        outcome, by = await trio.to_thread.run_sync(blocking, world.socket, world.cwd)
    assert outcome == "success"
    assert by is not None
    assert tool.done == ["it"]
