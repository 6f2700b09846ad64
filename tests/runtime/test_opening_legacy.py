"""One-file sessions of an earlier version over the wire: reading leaves them, opening moves them, both paths lead there
afterwards (S-18)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio
from inprocess import PlayedModel, Wire, World, running, text

from loop_protocol.v1.errors import RpcError

TIMINGS = [{"userMessageIndex": 0, "startedAt": 5}, {"id": "t", "userMessageIndex": 0, "startedAt": 7, "finishedAt": 9}]


def _old(tmp_path: Path, **header: Any) -> Path:
    file = tmp_path / "kept" / "old.jsonl"
    file.parent.mkdir(exist_ok=True)
    (tmp_path / "ws").mkdir(exist_ok=True)
    head = {"format": "loop-session", "version": 2, "cwd": str(tmp_path / "ws"), "updatedAt": 11}
    said = {"role": "assistant", "content": "hello yourself"}
    lines = (head | {"promptTimings": TIMINGS} | header, {"role": "user", "content": "hello"}, said)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def _opening(world: World, path: Path, **more: Any) -> dict[str, Any]:
    return {"cwd": world.cwd, "session": {"kind": "open", "path": str(path)}, **more}


async def _error(wire: Wire, method: str, params: Any) -> RpcError:
    with pytest.raises(RpcError) as caught:
        await wire.call(method, params)
    return caught.value


def _names(file: Path) -> list[str]:
    return sorted(path.name for path in file.parent.iterdir())


async def test_opening_moves_it_and_both_paths_lead_to_the_same_session(tmp_path: Path) -> None:  # S-18, P-6
    file = _old(tmp_path)
    moved = file.parent / "old" / "meta.json"
    async with running(tmp_path, model=PlayedModel([text("more")])) as world:
        wire = await world.connect()
        opened = await wire.call("runtime/open", _opening(world, file))
        assert (opened["created"], opened["sessionId"], opened["path"]) == (True, "old", str(moved))
        state = opened["state"]
        assert (state["messageCount"], state["userMessageCount"], state["updatedAt"]) == (2, 1, 11)
        assert state["timings"] == TIMINGS
        assert "lastRun" not in state
        assert not file.exists()
        for path in (file, moved):
            joined = await wire.call("runtime/open", _opening(world, path))
            assert (joined["created"], joined["runtimeId"]) == (False, opened["runtimeId"])
            taken = await _error(wire, "runtime/open", _opening(world, path, runtimeId="new"))
            assert (taken.kind, taken.data["runtimeId"]) == ("session_locked", opened["runtimeId"])
        await wire.prompt(opened["sessionId"], wait=True)
        assert (await wire.call("session/state", {"path": str(file)}))["runtimeId"] == opened["runtimeId"]
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        for path in (file, moved):
            again = await wire.call("runtime/open", _opening(world, path))
            assert (again["path"], again["state"]["messageCount"]) == (str(moved), 4)
            assert again["state"]["timings"][:2] == TIMINGS
            assert len(again["state"]["timings"]) == 3
            await wire.call("runtime/dispose", {"runtimeId": again["runtimeId"]})
        page = await wire.call("session/messages", {"path": str(file)})
        assert [one["index"] for one in page["messages"]] == [0, 1, 2, 3]
        assert (await wire.call("session/state", {"path": str(file)}))["path"] == str(moved)


async def test_reading_and_listing_leave_it_and_continue_starts_a_new_one(tmp_path: Path) -> None:  # S-4, S-18, S-28
    file = _old(tmp_path)
    body = file.read_bytes()
    async with running(tmp_path) as world:
        wire = await world.connect()
        place = {"cwd": world.cwd, "sessionDir": str(file.parent)}
        assert (await wire.call("session/list", place))["legacy"] == [str(file)]
        state = await wire.call("session/state", {"path": str(file)})
        assert (state["sessionId"], state["path"], state["messageCount"]) == ("old", str(file), 2)
        assert state["timings"] == TIMINGS
        page = await wire.call("session/messages", {"path": str(file), "start": 1})
        assert [one["content"] for one in page["messages"]] == [[{"type": "text", "text": "hello yourself"}]]
        assert (_names(file), file.read_bytes()) == (["old.jsonl"], body)
        session = {"kind": "continue", "sessionDir": str(file.parent)}
        opened = await wire.call("runtime/open", {"cwd": world.cwd, "session": session})
        assert opened["state"]["messageCount"] == 0
        assert file.read_bytes() == body
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        await wire.call("runtime/open", _opening(world, file))
        listed = await wire.call("session/list", place)
        assert listed["legacy"] == []
        assert "old" in [row["sessionId"] for row in listed["sessions"]]


async def test_what_opens_is_listed_also_with_a_title_that_was_cut_within_a_character(tmp_path: Path) -> None:
    """S-4, S-18: old writers cut by UTF-16, so half of a pair can end a text."""
    file = _old(tmp_path, title={"text": "half \ud83d", "source": "user", "messageIndices": []})
    assert b"\\ud83d" in file.read_bytes()
    async with running(tmp_path) as world:
        wire = await world.connect()
        listed = await wire.call("session/list", {"cwd": world.cwd, "sessionDir": str(file.parent)})
        assert (listed["legacy"], listed["unsupported"]) == ([str(file)], 0)
        assert (await wire.call("runtime/open", _opening(world, file)))["state"]["title"]["text"] == "half \ufffd"


async def test_a_refused_opening_leaves_it_as_it_is(tmp_path: Path) -> None:  # S-5, I-10
    gone, broken = _old(tmp_path, cwd="/nowhere/at/all"), _old(tmp_path).with_name("broken.jsonl")
    _old(tmp_path, cwd="/nowhere/at/all")
    head = '{"format":"loop-session","version":2,"cwd":"/"}\n'
    broken.write_text(head + '{"role":"user","content":"x"}\n{"role":"us')
    bodies = {path: path.read_bytes() for path in (gone, broken)}
    async with running(tmp_path) as world:
        wire = await world.connect()
        assert (await _error(wire, "runtime/open", _opening(world, gone))).kind == "cwd_missing"
        for method, params in (
            ("runtime/open", _opening(world, broken)),
            ("session/state", {"path": str(broken)}),
        ):
            error = await _error(wire, method, params)
            assert error.kind == "session_malformed"
            assert (error.data["path"], error.data["offset"]) == (str(broken), len(head) + 30)
        missing = broken.with_name("none.jsonl")
        for method, params in (("runtime/open", _opening(world, missing)), ("session/state", {"path": str(missing)})):
            assert (await _error(wire, method, params)).kind == "session_not_found"
        assert {path: path.read_bytes() for path in bodies} == bodies
        assert _names(gone) == ["broken.jsonl", "old.jsonl"]
        assert not world.daemon.runtimes.by_id


async def test_many_clients_of_two_daemons_at_once_get_one_session(tmp_path: Path) -> None:  # S-18, S-22
    file = _old(tmp_path)
    outcomes: list[tuple[str, str]] = []

    async def one(world: World) -> None:
        wire = await world.connect()
        try:
            opened = await wire.call("runtime/open", _opening(world, file, runtimeId="new"))
            outcomes.append(("opened", opened["path"]))
        except RpcError as error:
            outcomes.append((error.kind, ""))

    async with running(tmp_path) as world, running(tmp_path) as second:
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(one, (world, second)[number % 2])
        opened = [path for kind, path in outcomes if kind == "opened"]
        assert opened == [str(file.parent / "old" / "meta.json")]
        assert {kind for kind, _ in outcomes} == {"opened", "session_locked"}
    assert _names(file) == ["old"]


async def test_a_header_without_model_and_permission_takes_what_opening_says(tmp_path: Path) -> None:  # S-18
    file = _old(tmp_path)
    async with running(tmp_path) as world:
        wire = await world.connect()
        model = {"provider": "practice", "id": "echo"}
        opened = await wire.call("runtime/open", _opening(world, file, model=model, permission="workspace-write"))
        assert (opened["state"]["model"], opened["state"]["permission"]) == (model, "workspace-write")
