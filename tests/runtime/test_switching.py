"""A seat that takes another session: what it restores, what stands in the way, who hears of it (R-1…R-5)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import trio
from inprocess import PlayedModel, Wire, World, running, text

from loop_protocol import jsonrpc
from loop_protocol.v1.errors import RpcError

REASONER = {"provider": "other", "id": "m"}


async def _error(wire: Wire, method: str, **params: Any) -> RpcError:
    with pytest.raises(RpcError) as caught:
        await wire.call(method, params)
    return caught.value


async def _kept(wire: Wire, cwd: Path, *, prompts: int = 1, **options: Any) -> str:
    """The path of a session that is closed again."""
    cwd.mkdir(exist_ok=True)
    opened = await wire.call("runtime/open", {"cwd": str(cwd), "session": {"kind": "new"}, **options})
    for _ in range(prompts):
        await wire.prompt(opened["sessionId"], wait=True)
    await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
    path: str = opened["path"]
    return path


def _types(wire: Wire) -> list[str]:
    return [str(params.event.__struct_config__.tag) for params in wire.events]


async def test_history_model_permission_and_directory_are_those_of_the_file(tmp_path: Path) -> None:
    asked: list[Any] = []

    async def listening(request: Any, _: Any) -> Any:
        asked.append(request)
        await trio.lowlevel.checkpoint()
        return text("hi")

    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "AGENTS.md").write_text("speak of there")
    async with running(tmp_path, model=PlayedModel([listening])) as world:
        wire = await world.connect()
        path = await _kept(wire, tmp_path / "there", permission="workspace-write", model=REASONER)
        opened = await wire.open(world)
        switched = await wire.call("runtime/switchSession", {"runtimeId": opened["runtimeId"], "path": path})
        state = switched.pop("state")
        assert switched == {
            "cancelled": False,
            "created": False,
            "runtimeId": opened["runtimeId"],
            "sessionId": state["sessionId"],
            "path": path,
        }
        assert (state["cwd"], state["model"], state["permission"]) == (
            str(tmp_path / "there"),
            REASONER,
            "workspace-write",
        )
        assert (state["messageCount"], state["liveCount"], state["kind"]) == (2, 2, "persistent")
        await wire.prompt(switched["sessionId"], "next", wait=True)
        assert str(tmp_path / "there") in asked[-1].system
        assert "speak of there" in asked[-1].system
        assert "workspace-write" in asked[-1].system
        page = await wire.call("session/messages", {"sessionId": switched["sessionId"]})
        assert [message["index"] for message in page["messages"]] == [0, 1, 2, 3]
        # The seat is the other workspace's now, and the one that it left has none.
        [row] = (await wire.call("runtime/list"))["runtimes"]
        assert (row["cwd"], row["default"]) == (str(tmp_path / "there"), True)
        back = await wire.open(world, kind="continue", attach=False)
        assert (back["created"], back["sessionId"]) == (True, opened["sessionId"])


async def test_the_path_that_it_has_is_nothing_to_do(tmp_path: Path) -> None:
    async def hang(*_: Any) -> Any:
        await trio.sleep_forever()

    (tmp_path / "link").symlink_to(tmp_path / "data")
    async with running(tmp_path, model=PlayedModel([text("hi"), hang])) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        await wire.prompt(opened["sessionId"], wait=True)
        seat, head = {"runtimeId": opened["runtimeId"]}, world.runtime().events.head
        same = await wire.call("runtime/switchSession", {**seat, "path": opened["path"]})
        assert (same["cancelled"], same["created"], same["sessionId"]) == (False, False, opened["sessionId"])
        assert world.runtime().events.head == head
        spelled = opened["path"].replace(str(tmp_path / "data"), str(tmp_path / "link"))
        assert (await wire.call("runtime/switchSession", {**seat, "path": spelled}))["state"] == same["state"]
        assert "session_replaced" not in _types(wire)
        run_id = await wire.prompt(opened["sessionId"])
        again = await wire.call("runtime/switchSession", {**seat, "path": opened["path"]})
        assert again["state"]["run"]["runId"] == run_id
        await wire.call("session/abort", {"sessionId": opened["sessionId"]})


async def test_what_cannot_be_prepared_leaves_the_session_and_its_stream_alone(tmp_path: Path) -> None:
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        broken, gone, taken = [await _kept(wire, tmp_path / name) for name in ("broken", "gone", "taken")]
        Path(broken).with_name("history.jsonl").write_bytes(b"{}")
        shutil.rmtree(tmp_path / "gone")
        elsewhere = await wire.call(
            "runtime/open", {"cwd": str(tmp_path / "taken"), "session": {"kind": "open", "path": taken}}
        )
        opened = await wire.open(world)
        seat = {"runtimeId": opened["runtimeId"]}
        for path, kind in (
            (str(Path(broken).with_name("nope") / "meta.json"), "session_not_found"),
            (broken.removesuffix("/meta.json"), "session_not_found"),
            (broken, "session_malformed"),
            (gone, "cwd_missing"),
            (taken, "session_locked"),
        ):
            error = await _error(wire, "runtime/switchSession", **seat, path=path)
            assert error.kind == kind
        assert error.data["runtimeId"] == elsewhere["runtimeId"]
        assert (await _error(wire, "runtime/switchSession", **seat, path="x/meta.json")).kind == "invalid_params"
        state = await wire.call("session/state", {"sessionId": opened["sessionId"]})
        assert "operation" not in state
        await wire.prompt(opened["sessionId"], wait=True)
        assert not {"session_replaced", "session_closed"} & set(_types(wire))


async def test_another_daemons_session_is_refused_with_its_holder(tmp_path: Path) -> None:  # S-22, R-3
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world, running(tmp_path) as second:
        wire, theirs = await world.connect(), await second.connect()
        other = await theirs.open(second)
        opened = await wire.open(world)
        error = await _error(wire, "runtime/switchSession", runtimeId=opened["runtimeId"], path=other["path"])
        assert error.kind == "session_locked"
        assert "holder" in error.data
        await wire.prompt(opened["sessionId"], wait=True)


async def test_a_busy_seat_refuses_to_switch_and_nothing_is_queued(tmp_path: Path) -> None:
    async def hang(*_: Any) -> Any:
        await trio.sleep_forever()

    async with running(tmp_path, model=PlayedModel([text("hi"), hang])) as world:
        wire = await world.connect()
        path = await _kept(wire, tmp_path / "there")
        opened = await wire.open(world)
        await wire.prompt(opened["sessionId"])
        switch = {"runtimeId": opened["runtimeId"], "path": path}
        assert (await _error(wire, "runtime/switchSession", **switch)).kind == "session_busy"
        await wire.call("session/abort", {"sessionId": opened["sessionId"]})
        assert world.session().core.id == opened["sessionId"]
        assert (await wire.call("runtime/switchSession", switch))["path"] == path


async def test_every_client_is_rebound_before_anything_of_the_new_session(tmp_path: Path) -> None:
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wires = [await world.connect() for _ in range(3)]
        path = await _kept(wires[0], tmp_path / "there")
        opened = await wires[0].open(world)
        for wire in wires[1:]:
            await wire.call("runtime/attach", {"runtimeId": opened["runtimeId"], "follow": wire is not wires[2]})
        switched = await wires[0].call("runtime/switchSession", {"runtimeId": opened["runtimeId"], "path": path})
        await wires[1].prompt(switched["sessionId"], wait=True)
        for wire in wires[:2]:
            event = (await wire.event("session_replaced")).event
            assert (event.old, event.new.session_id) == (opened["sessionId"], switched["sessionId"])  # type: ignore[union-attr]
            assert event.new.live_count == 2  # type: ignore[union-attr]
            await wire.event("run_settled")
            at = _types(wire).index("session_replaced")
            assert {params.session_id for params in wire.events[:at]} <= {opened["sessionId"]}
            assert {params.session_id for params in wire.events[at:]} == {switched["sessionId"]}
        await wires[2].call("server/status")
        assert _types(wires[2])[-1] == "session_replaced"
        late = await world.connect()
        await late.call("runtime/attach", {"runtimeId": opened["runtimeId"], "since": 0})
        await late.call("server/status")
        assert _types(late) == _types(wires[0])


async def test_a_workspace_never_has_two_default_runtimes(tmp_path: Path) -> None:
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        there = tmp_path / "there"
        path = await _kept(wire, there)
        theirs = await wire.call("runtime/open", {"cwd": str(there), "session": {"kind": "new"}})
        opened = await wire.open(world)
        error = await _error(wire, "runtime/switchSession", runtimeId=opened["runtimeId"], path=path)
        assert (error.kind, error.data["runtimeId"]) == ("conflict", theirs["runtimeId"])
        # Nothing of it is left open, and one that is nobody's default may go there.
        other = await wire.call("runtime/open", {"cwd": world.cwd, "session": {"kind": "memory"}, "runtimeId": "new"})
        moved = await wire.call("runtime/switchSession", {"runtimeId": other["runtimeId"], "path": path})
        assert moved["state"]["cwd"] == str(there)
        joined = await wire.call("runtime/open", {"cwd": str(there), "session": {"kind": "continue"}})
        assert joined["runtimeId"] == theirs["runtimeId"]


async def _pipelined(wire: Wire, *requests: tuple[str, Any]) -> list[Any]:
    """Sent in one piece; each result, or the kind of the error."""
    first, outcomes = wire._next_id + 1, []
    for method, params in requests:
        wire._next_id += 1
        await wire.send(jsonrpc.request_body(wire._next_id, method, params))
    for id in range(first, wire._next_id + 1):
        try:
            outcomes.append(await wire.answer(id))
        except RpcError as error:
            outcomes.append(error)
    return outcomes


async def test_two_seats_that_want_one_session_get_it_once(tmp_path: Path) -> None:  # S-22
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        path = await _kept(wire, tmp_path / "ws")
        memory = {"cwd": world.cwd, "session": {"kind": "memory"}, "runtimeId": "new"}
        for _ in range(10):
            seats = [(await wire.call("runtime/open", memory))["runtimeId"] for _ in range(2)]
            took = await _pipelined(wire, *(("runtime/switchSession", {"runtimeId": id, "path": path}) for id in seats))
            [won] = [one for one in took if not isinstance(one, RpcError)]
            [lost] = [one for one in took if isinstance(one, RpcError)]
            assert (lost.kind, lost.data["runtimeId"]) == ("session_locked", won["runtimeId"])
            assert (await wire.call("session/state", {"path": path}))["runtimeId"] == won["runtimeId"]
            for id in seats:
                await wire.call("runtime/dispose", {"runtimeId": id})


async def test_two_seats_cannot_swap_their_sessions(tmp_path: Path) -> None:  # S-22, R-3
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        new = {"cwd": world.cwd, "session": {"kind": "new"}, "runtimeId": "new"}
        one, two = await wire.call("runtime/open", new), await wire.call("runtime/open", new)
        with trio.fail_after(10):
            outcomes = await _pipelined(
                wire,
                ("runtime/switchSession", {"runtimeId": one["runtimeId"], "path": two["path"]}),
                ("runtime/switchSession", {"runtimeId": two["runtimeId"], "path": one["path"]}),
            )
        assert [outcome.kind for outcome in outcomes] == ["session_locked", "session_locked"]
        for opened in (one, two):
            await wire.prompt(opened["sessionId"], wait=True)


async def test_a_session_that_a_seat_leaves_can_be_opened_at_that_moment(tmp_path: Path) -> None:
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        path = await _kept(wire, tmp_path / "there")
        for method in ("runtime/newSession", "runtime/switchSession"):
            for pause in range(12):
                opened = await wire.call("runtime/open", {"cwd": world.cwd, "session": {"kind": "new"}})
                left = {"kind": "open", "path": opened["path"]}
                params = {"runtimeId": opened["runtimeId"]} | ({"path": path} if "switch" in method else {})
                request = await wire.request(method, params)
                for _ in range(pause * 4):
                    await trio.lowlevel.checkpoint()
                other = await world.connect()
                [again] = await _pipelined(
                    other, ("runtime/open", {"cwd": world.cwd, "session": left, "runtimeId": "new"})
                )
                await wire.answer(request)
                # Before the replacement it is the seat's, after it anybody's; it is never taken by nobody.
                if isinstance(again, RpcError):
                    assert (again.kind, again.data.get("runtimeId")) == ("session_locked", opened["runtimeId"])
                else:
                    assert again["sessionId"] == opened["sessionId"]
                await _dispose_all(world, wire)


async def test_a_prompt_at_the_moment_of_a_switch_is_refused_or_run_never_lost(tmp_path: Path) -> None:  # K-28, R-2
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        path = await _kept(wire, tmp_path / "there")
        for first in ("switch", "prompt"):
            opened = await wire.open(world)
            switch = ("runtime/switchSession", {"runtimeId": opened["runtimeId"], "path": path})
            prompt = ("session/prompt", {"sessionId": opened["sessionId"], "content": "x", "wait": True})
            outcomes = await _pipelined(wire, *((switch, prompt) if first == "switch" else (prompt, switch)))
            assert outcomes[1].kind == ("replacing" if first == "switch" else "session_busy")
            count = (await wire.call("session/state", {"path": opened["path"]}))["messageCount"]
            assert count == (0 if first == "switch" else 2)
            await _dispose_all(world, wire)


async def test_a_disposal_during_a_switch_is_refused_and_after_it_disposes_of_the_new_session(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        path = await _kept(wire, tmp_path / "there")
        opened = await wire.open(world)
        seat = {"runtimeId": opened["runtimeId"]}
        switched, refused = await _pipelined(
            wire, ("runtime/switchSession", {**seat, "path": path}), ("runtime/dispose", seat)
        )
        assert refused.kind == "replacing"
        assert await wire.call("runtime/dispose", seat) == {}
        closed = await wire.event("session_closed")
        assert closed.session_id == switched["sessionId"]
        assert (await wire.call("runtime/list"))["runtimes"] == []


async def _dispose_all(world: World, wire: Wire) -> None:
    for id in tuple(world.daemon.runtimes.by_id):
        await wire.call("runtime/dispose", {"runtimeId": id})
