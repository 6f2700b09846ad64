"""Ways to a session, and what stands in the way (S-2, S-5, S-22, R-1…R-6)."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import trio
from inprocess import PlayedModel, Wire, World, running, text

from loop_protocol.v1.errors import RpcError
from loopd.storage.fs import FileSystem


async def _error(wire: Wire, method: str, params: Any) -> RpcError:
    with pytest.raises(RpcError) as caught:
        await wire.call(method, params)
    return caught.value


def _opening(world: World, kind: str, **more: Any) -> dict[str, Any]:
    session = {"kind": kind} | {key: more.pop(key) for key in ("path", "sessionDir") if key in more}
    return {"cwd": world.cwd, "session": session, **more}


async def test_a_new_session_is_on_disk_at_once_and_private(tmp_path: Path) -> None:  # S-2, S-20
    async with running(tmp_path) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        path = Path(opened["path"])
        assert opened["created"]
        assert path.name == "meta.json"
        assert path.parent.name == opened["sessionId"]
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert opened["state"]["permission"] == "read-only"
        assert "title" not in opened["state"]


async def test_an_open_workspace_is_joined_or_named_as_a_conflict(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        wire = await world.connect()
        first = await wire.open(world)
        stands = {"runtimeId": first["runtimeId"], "sessionId": first["sessionId"]}
        for kind in ("new", "memory"):
            error = await _error(wire, "runtime/open", _opening(world, kind))
            assert error.kind == "conflict"
            assert {key: error.data[key] for key in stands} == stands
        joined = await wire.call("runtime/open", _opening(world, "continue"))
        assert (joined["created"], joined["runtimeId"]) == (False, first["runtimeId"])
        again = await wire.call("runtime/open", _opening(world, "open", path=first["path"]))
        assert not again["created"]
        same = await wire.call("runtime/open", _opening(world, "continue", permission="read-only"))
        assert not same["created"]
        differs = await _error(wire, "runtime/open", _opening(world, "continue", permission="danger-full-access"))
        assert differs.kind == "conflict"
        other = await wire.call("runtime/open", _opening(world, "new", runtimeId="new"))
        assert other["runtimeId"] != first["runtimeId"]
        # That one is nobody's default, and its file is taken.
        assert (await wire.call("runtime/open", _opening(world, "continue")))["runtimeId"] == first["runtimeId"]
        locked = await _error(wire, "runtime/open", _opening(world, "open", path=other["path"]))
        assert (locked.kind, locked.data["runtimeId"]) == ("session_locked", other["runtimeId"])


async def test_ten_openings_at_once_make_one_session(tmp_path: Path) -> None:
    outcomes: list[str] = []

    async def one() -> None:
        wire = await world.connect()
        try:
            await wire.call("runtime/open", _opening(world, "new"))
            outcomes.append("created")
        except RpcError as error:
            outcomes.append(error.kind)

    async with running(tmp_path) as world:
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(one)
        assert sorted(outcomes) == ["conflict"] * 9 + ["created"]
        listed = await (await world.connect()).call("session/list", {"cwd": world.cwd})
        assert len(listed["sessions"]) == 1


async def test_continue_takes_the_most_recent_session_and_open_an_exact_path(tmp_path: Path) -> None:  # S-2, K-11
    (tmp_path / "link").symlink_to(tmp_path / "ws")
    paths = []
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        for _ in range(2):
            opened = await wire.open(world, attach=False)
            await wire.prompt(opened["sessionId"], wait=True)
            await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
            paths.append(opened["path"])
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        through_link = {"cwd": str(tmp_path / "link"), "session": {"kind": "continue"}}
        opened = await wire.call("runtime/open", through_link)
        assert opened["path"] == paths[1]
        assert opened["state"]["cwd"] == world.cwd
        assert (opened["state"]["messageCount"], opened["state"]["userMessageCount"]) == (2, 1)
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        opened = await wire.call("runtime/open", _opening(world, "open", path=paths[0]))
        assert opened["path"] == paths[0]
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        missing = os.path.join(os.path.dirname(os.path.dirname(paths[0])), "nope", "meta.json")
        assert (await _error(wire, "runtime/open", _opening(world, "open", path=missing))).kind == "session_not_found"
        listed = await wire.call("session/list", {"cwd": str(tmp_path / "link")})
        assert [row["path"] for row in listed["sessions"]] == paths[::-1]
        shutil.rmtree(tmp_path / "ws")
        gone = {"cwd": str(tmp_path), "session": {"kind": "open", "path": paths[0]}}
        assert (await _error(wire, "runtime/open", gone)).kind == "cwd_missing"  # K-12
        # A failed opening leaves nothing locked.
        (tmp_path / "ws").mkdir()
        assert (await wire.call("runtime/open", gone))["path"] == paths[0]


async def test_an_opening_that_fails_after_it_took_the_lock_locks_nobody_out(tmp_path: Path) -> None:  # S-22, I-10
    class Unlistable(FileSystem):
        broken = True

        def scan(self, fd: int) -> list[tuple[str, bool]]:
            if self.broken:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().scan(fd)

    async with running(tmp_path) as world:
        wire = await world.connect()
        path = (await wire.open(world, attach=False))["path"]
    disk = Unlistable()
    async with running(tmp_path, fs=disk) as world:
        wire = await world.connect()
        assert (await _error(wire, "runtime/open", _opening(world, "open", path=path))).kind == "save_failed"
        disk.broken = False
        assert (await wire.call("runtime/open", _opening(world, "open", path=path)))["path"] == path


async def test_a_damaged_session_is_refused_with_its_place_and_listed(tmp_path: Path) -> None:  # S-4, S-5, S-24
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        opened = await wire.open(world, attach=False)
        await wire.prompt(opened["sessionId"], wait=True)
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        history = Path(opened["path"]).with_name("history.jsonl")
        data = bytearray(history.read_bytes())
        data[20] ^= 1
        history.write_bytes(data)
        error = await _error(wire, "runtime/open", _opening(world, "open", path=opened["path"]))
        assert error.kind == "session_malformed"
        assert {"path", "reason", "offset"} <= set(error.data)
        assert history.read_bytes() == data
        Path(opened["path"]).write_bytes(b"\0" * 413)  # K-8
        listed = await wire.call("session/list", {"cwd": world.cwd})
        assert [one["path"] for one in listed["damaged"]] == [opened["path"]]
        assert (await _error(wire, "session/state", {"path": opened["path"]})).kind == "session_malformed"


@pytest.mark.parametrize(
    ("session", "field"),
    [
        ({"kind": "open"}, "session.path"),
        ({"kind": "new", "path": "/x/meta.json"}, "session.path"),
        ({"kind": "memory", "sessionDir": "/x"}, "session.sessionDir"),
        ({"kind": "draught"}, "session.kind"),
        ({"kind": "new", "colour": 1}, "colour"),
        ({"kind": "new", "sessionDir": "x"}, "session.sessionDir"),
    ],
)
async def test_a_senseless_opening_names_the_field(session: Any, field: str, tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        wire = await world.connect()
        error = await _error(wire, "runtime/open", {"cwd": world.cwd, "session": session})
        assert error.kind == "invalid_params"
        assert field in error.message


async def test_a_session_directory_of_ones_own(tmp_path: Path) -> None:  # S-2
    own = tmp_path / "own"
    async with running(tmp_path) as world:
        wire = await world.connect()
        opened = await wire.call("runtime/open", _opening(world, "new", sessionDir=str(own)))
        assert Path(opened["path"]).parent.parent == own
        default = await wire.call("session/list", {"cwd": world.cwd})
        listed = await wire.call("session/list", {"cwd": world.cwd, "sessionDir": str(own)})
        assert (len(default["sessions"]), len(listed["sessions"])) == (0, 1)
        assert listed["sessions"][0]["live"]
        joined = await wire.call("runtime/open", _opening(world, "continue", sessionDir=str(own)))
        assert not joined["created"]
        elsewhere = _opening(world, "continue", sessionDir=str(tmp_path / "other"))
        assert (await _error(wire, "runtime/open", elsewhere)).kind == "conflict"
        replaced = await wire.call("runtime/newSession", {"runtimeId": opened["runtimeId"]})
        assert Path(replaced["path"]).parent.parent == own


async def test_a_copy_of_an_open_session_is_refused_since_an_id_names_one(tmp_path: Path) -> None:
    """S-22: with two open, a prompt by id could go on in the other file."""
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        opened = await wire.open(world, attach=False)
        await wire.prompt(opened["sessionId"], wait=True)
        copy = tmp_path / "copies" / opened["sessionId"]
        shutil.copytree(Path(opened["path"]).parent, copy)
        path = str(copy / "meta.json")
        seat = await wire.call("runtime/open", _opening(world, "memory", runtimeId="new"))
        refused = [
            await _error(wire, "runtime/open", _opening(world, "open", path=path, runtimeId="new")),
            await _error(wire, "runtime/switchSession", {"runtimeId": seat["runtimeId"], "path": path}),
            await _error(wire, "runtime/switchSession", {"runtimeId": opened["runtimeId"], "path": path}),
        ]
        for error in refused:
            assert (error.kind, error.data.get("runtimeId")) == ("session_locked", None)
            assert opened["path"] in str(error)
        # The copy is not held, and is a session like any other once the other one is closed.
        assert (await wire.call("session/setPinned", {"path": path, "pinned": True}))["pinnedAt"]
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        again = await wire.call("runtime/open", _opening(world, "open", path=path))
        assert (again["sessionId"], again["path"]) == (opened["sessionId"], path)


async def test_a_time_at_the_end_of_all_times_spoils_no_session(tmp_path: Path) -> None:
    """S-9: whatever one file says, what is written after it can be read again."""
    async with running(tmp_path, model=PlayedModel([text("hi")])) as world:
        wire = await world.connect()
        for latest in (2**53 - 1, 2**53):  # the last one, and none
            opened = await wire.open(world, attach=False)
            await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
            file = Path(opened["path"])
            file.write_text(json.dumps(json.loads(file.read_text()) | {"updatedAt": latest}))
            listed = await wire.call("session/list", {"cwd": world.cwd})
            assert [one["path"] for one in listed["damaged"]] == ([opened["path"]] if latest == 2**53 else [])
            later = await wire.open(world, attach=False)
            await wire.prompt(later["sessionId"], wait=True)
            await wire.call("runtime/dispose", {"runtimeId": later["runtimeId"]})
            again = await wire.call("session/state", {"path": later["path"]})
            assert again["messageCount"] == 2
            assert again["updatedAt"] <= 2**53 - 1


async def test_an_unknown_model_is_refused_when_named_and_when_prompted(tmp_path: Path) -> None:  # P-4
    nobody = {"provider": "none", "id": "x"}
    async with running(tmp_path) as world:
        wire = await world.connect()
        assert (await _error(wire, "runtime/open", _opening(world, "new", model=nobody))).kind == "model_unavailable"
        opened = await wire.open(world)
        change = {"sessionId": opened["sessionId"], "model": nobody}
        assert (await _error(wire, "session/setModel", change)).kind == "model_unavailable"
        assert world.session().core.slot is None


async def test_another_daemon_is_told_who_holds_the_session(tmp_path: Path) -> None:  # K-5, S-22
    async with running(tmp_path) as world, running(tmp_path) as second:
        first_wire, second_wire = await world.connect(), await second.connect()
        opened = await first_wire.open(world)
        error = await _error(second_wire, "runtime/open", _opening(second, "open", path=opened["path"]))
        assert error.kind == "session_locked"
        assert error.data["holder"] == os.getpid()
        # Reading takes no lock.
        state = await second_wire.call("session/state", {"path": opened["path"]})
        assert state["sessionId"] == opened["sessionId"]
        assert "runtimeId" not in state
