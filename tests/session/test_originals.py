"""What a model is told around a conversation never changes the conversation (S-19), and what is kept apart from the
messages comes back with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio
from inprocess import PlayedModel, Probe, Wire, call, running, text

from loopd.agent import ModelError
from loopd.storage import files
from loopd.storage.fs import FileSystem

OTHER = {"provider": "other", "id": "m"}


class Asked(NamedTuple):
    system: str
    encoded: bytes
    turn: list[int]


class Listening(PlayedModel):
    """Keeps what each turn was asked with."""

    def __init__(self) -> None:
        super().__init__([self._answer])
        self.asked: list[Any] = []

    async def _answer(self, request: Any, _: Any) -> Any:
        await trio.lowlevel.checkpoint()
        # A copy: the input grows with the conversation.
        self.asked.append(
            Asked(request.system, bytes(request.input.encoded), [one.index for one in request.input.turn])
        )
        return call() if len(request.input.turn) == 1 else text("done")


def _old(root: Path) -> dict[str, Any]:
    """A session of an earlier version, with a timing that has neither id nor range."""
    cwd = root / "ws"
    cwd.mkdir()
    timing = {"userMessageIndex": 0, "startedAt": 5, "finishedAt": 9}
    lines: list[Any] = [
        {"format": "loop-session", "version": 2, "cwd": str(cwd), "promptTimings": [timing]},
        {"role": "user", "content": "how it began", "timestamp": 5},
        {"role": "assistant", "content": "so", "model": "m", "provider": "p"},
    ]
    (root / "old.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"kind": "open", "path": str(root / "old.jsonl")}


async def _page(wire: Wire, opened: Any) -> list[Any]:
    page = await wire.call("session/messages", {"sessionId": opened["sessionId"]})
    messages: list[Any] = page["messages"]
    return messages


@pytest.mark.parametrize("begins", ["new", "of an earlier version"])
async def test_permission_and_model_change_what_the_model_is_told_and_no_message_index_title_or_count(
    begins: str, tmp_path: Path
) -> None:
    """S-19, S-11"""
    session = {"kind": "new"} if begins == "new" else _old(tmp_path)
    model = Listening()
    async with running(tmp_path, model=model, tools=[Probe()]) as world:
        wire = await world.connect()
        opened = await wire.call("runtime/open", {"cwd": world.cwd, "session": session})
        ask = {"sessionId": opened["sessionId"]}
        history = Path(opened["path"]).with_name("history.jsonl")
        stored, told = history.read_bytes(), await _page(wire, opened)
        titles, before = [], len(told)
        for number, permission in enumerate(["read-only", "workspace-write", "danger-full-access", "read-only"]):
            await wire.call("session/setPermission", {**ask, "permission": permission})
            if number == 2:
                await wire.call("session/setModel", {**ask, "model": OTHER})
            assert history.read_bytes() == stored
            await wire.call("session/prompt", {**ask, "content": f"prompt {number}", "wait": True})
            now, page = history.read_bytes(), await _page(wire, opened)
            assert now.startswith(stored)
            assert page[: len(told)] == told
            stored, told = now, page
            titles.append((await wire.call("session/state", ask))["title"])
        assert [one["index"] for one in told] == list(range(before + 4 * 4))
        roles = ["user", "assistant", "toolResult", "assistant"]
        assert [one["role"] for one in told[before:]] == roles * 4
        assert titles == [titles[0]] * 4
        # Each request says the permission of its time, and repeats the messages of before as they were.
        systems = [asked.system for asked in model.asked]
        for at, permission in ((0, "read-only"), (2, "workspace-write"), (4, "danger-full-access"), (6, "read-only")):
            assert permission in systems[at]
        assert systems[0] == systems[6]
        for earlier, later in zip(model.asked, model.asked[1:], strict=False):
            assert later.encoded.startswith(earlier.encoded)
        # What it was told is kept apart, as far as it changed, with the place of the change (S-19).
        kept = [record for line in stored.splitlines() if (record := json.loads(line)).get("type") == "instructions"]
        assert [(one["messages"], list(one["sections"])) for one in kept] == [
            (before + 1, ["role", "environment", "permission", "guidance"]),
            *((before + 1 + 4 * number, ["permission"]) for number in (1, 2, 3)),
        ]
        assert all(one["sections"]["permission"] in systems[2 * number] for number, one in enumerate(kept))
        state = await wire.call("session/state", ask)
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        again = await wire.call("runtime/open", {"cwd": world.cwd, "session": {"kind": "open", "path": opened["path"]}})
        assert history.read_bytes() == stored
        assert await _page(wire, again) == told
        same = ("title", "timings", "messageCount", "userMessageCount", "usage", "updatedAt", "model", "permission")
        assert {key: again["state"][key] for key in same} == {key: state[key] for key in same}


async def test_what_is_kept_of_runs_is_no_message_and_comes_back_with_them(tmp_path: Path) -> None:
    """S-19, P-6: outcome, timing and request of each run, after reopening too."""
    model = Listening()
    async with running(tmp_path, model=model, tools=[Probe()]) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        asks = [{"content": f"prompt {number}", "requestId": f"r{number}", "wait": True} for number in range(3)]
        runs = [await wire.call("session/prompt", {"sessionId": opened["sessionId"], **one}) for one in asks]
        state = await wire.call("session/state", {"sessionId": opened["sessionId"]})
        lines = Path(opened["path"]).with_name("history.jsonl").read_bytes().splitlines()
        records = [json.loads(line) for line in lines]
        [prompt] = [one for one in records if one.get("type") == "instructions"]
        assert prompt == records[1]
        apart = [one for one in records if "role" not in one and one is not prompt]
        assert [(one["type"], one["runId"]) for one in apart] == [("run", run["runId"]) for run in runs]
        assert [one["timing"] for one in apart] == state["timings"]
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        again = await wire.open(world, kind="continue")
        assert again["state"]["timings"] == state["timings"]
        turns = len(model.asked)
        for one, run in zip(asks, runs, strict=True):
            assert await wire.call("session/prompt", {"sessionId": again["sessionId"], **one}) == run
            assert (await wire.call("run/wait", {"runId": run["runId"]}))["outcome"] == "success"
        assert len(model.asked) == turns
        await wire.call("session/prompt", {"sessionId": again["sessionId"], "content": "more", "wait": True})
        for timing in state["timings"]:
            assert timing["id"].encode() not in model.asked[-1].encoded


async def test_each_prompt_starts_from_the_stored_messages_and_all_is_stored_however_it_ends(tmp_path: Path) -> None:
    """S-1: a fresh agent each time, whatever the one before did."""

    async def fails(*_: Any) -> Any:
        await trio.lowlevel.checkpoint()
        raise ModelError("auth", "no key")

    async def breaks(*_: Any) -> Any:
        await trio.lowlevel.checkpoint()
        raise ZeroDivisionError("a bug")

    async def hangs(*_: Any) -> Any:
        await trio.sleep_forever()

    async with running(tmp_path, tools=[Probe()]) as world:
        wire = await world.connect()
        opened = await wire.open(world)
        ask = {"sessionId": opened["sessionId"]}
        known = 0
        for number, (play, adds, outcome) in enumerate(
            [
                (None, 4, "success"),
                (fails, 1, "error"),
                (None, 4, "success"),
                (breaks, 1, "error"),
                (hangs, 1, "cancelled"),
                (None, 4, "success"),
            ]
        ):
            model = Listening()
            if play is not None:
                model.plays = [play]
            world.services.models.model = model  # type: ignore[attr-defined]
            run_id = await wire.prompt(ask["sessionId"], f"prompt {number}")
            if play is hangs:
                await wire.call("session/stop", {**ask, "runId": run_id})
            result = await wire.call("run/wait", {"runId": run_id})
            assert (result["outcome"], result["saved"]) == (outcome, True)
            _, stored = files.read_session(FileSystem(), opened["path"])
            assert stored.messages == known + adds
            assert stored.lines == world.session().core.history.lines
            if play is None:
                asked = json.loads(b"[" + model.asked[0].encoded + b"]")
                assert asked == [json.loads(stored.line(index)) for index in range(known + 1)]
                assert model.asked[0].turn == [known]
            known += adds
