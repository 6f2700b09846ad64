"""The real tools in a whole daemon: what a stop, the end of a session and the end of the daemon leave of them."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from agent_recording import left_over
from inprocess import REF, PlayedModel, Wire, World, call, running, text
from test_tool_images import png

from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.types import ModelRef, ToolCallBlock, Usage
from loopd.agent import Reply
from loopd.agent.tools import session_tools

pytestmark = pytest.mark.usefixtures("subreaper")

FULL: dict[str, Any] = {"permission": "danger-full-access"}
# Left its group and its parent, and never says anything.
HIDDEN = "(setsid yes >/dev/null &); echo up; sleep 30"


def played(*plays: Reply) -> PlayedModel:
    return PlayedModel([*plays])


@dataclass
class Meeting:
    """A model whose sessions all make their calls between the same two of its turns."""

    ref: ModelRef = REF
    input: frozenset[str] = frozenset({"text"})
    there: int = 0
    all_there: trio.Event = field(default_factory=trio.Event)

    encode = PlayedModel.encode

    async def respond(self, request: Any, say: Any) -> Reply:  # noqa: ARG002  the port's
        if len(request.input.turn) > 1:
            return text("fine")
        self.there += 1
        if self.there == 3:
            self.all_there.set()
        await self.all_there.wait()
        calls = [ToolCallBlock("a", "bash", {"command": "touch ran"})]
        calls.append(ToolCallBlock("b", "write", {"path": "written", "content": ""}))
        return Reply([*calls], Usage(1, 1), "toolUse")


async def make_files(world: World, name: str, **options: Any) -> None:
    cwd = Path(world.cwd, name)
    cwd.mkdir()
    wire = await world.connect()
    opened = await wire.call("runtime/open", {"cwd": str(cwd), "session": {"kind": "new"}, **FULL, **options})
    params = {"sessionId": opened["sessionId"], "content": "go", "wait": True}
    assert (await wire.call("session/prompt", params))["outcome"] == "success"
    await wire.aclose()


async def messages(wire: Wire, session: str) -> list[dict[str, Any]]:
    page: list[dict[str, Any]] = (await wire.call("session/messages", {"sessionId": session}))["messages"]
    assert [message["index"] for message in page] == list(range(len(page)))
    return page


async def test_stopped_during_a_tool_every_call_has_one_result_and_the_next_prompt_works(  # K-20
    tmp_path: Path,
) -> None:
    two = Reply(
        [*call("bash", id="a", command=f"touch made; {HIDDEN}").content, ToolCallBlock("b", "write", {})],
        call().usage,
        "toolUse",
    )
    before = left_over()
    async with running(tmp_path, model=played(two, text("fine")), tools=session_tools(bash_timeout_s=60)) as world:
        wire = await world.connect()
        opened = await wire.open(world, **FULL)
        session = {"sessionId": opened["sessionId"]}
        run_id = await wire.prompt(opened["sessionId"])
        await wire.event("tool_execution_update")
        with trio.fail_after(3):
            assert (await wire.call("session/stop", {**session, "runId": run_id}))["stopped"]
            assert (await wire.call("run/wait", {"runId": run_id}))["outcome"] == "cancelled"
        assert left_over() == before
        again = await wire.call("session/prompt", {**session, "content": "go on", "wait": True})
        assert (again["outcome"], again["saved"]) == ("success", True)
        page = await messages(wire, opened["sessionId"])
        shown = [(m["role"], m.get("toolCallId"), m.get("isError")) for m in page]
        assert shown == [
            ("user", None, None),
            ("assistant", None, None),
            ("toolResult", "a", True),
            ("toolResult", "b", True),
            ("user", None, None),
            ("assistant", None, None),
        ]
        assert "What it had done stays done" in page[2]["content"][0]["text"]
        assert (tmp_path / "ws" / "made").exists()
        await wire.aclose()


@pytest.mark.parametrize("ends", ["session", "daemon"])
async def test_no_descendant_is_left_when_the_session_or_the_daemon_ends(  # K-22
    tmp_path: Path, ends: str
) -> None:
    before = left_over()
    async with running(
        tmp_path, model=played(call("bash", command=HIDDEN)), tools=session_tools(bash_timeout_s=60)
    ) as world:
        wire = await world.connect()
        opened = await wire.open(world, **FULL)
        await wire.prompt(opened["sessionId"])
        await wire.event("tool_execution_update")
        assert left_over() != before
        with trio.fail_after(6):
            if ends == "session":
                await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
            else:  # as a TERM does it
                await wire.call("server/drain", {"exit": True, "deadlineMs": 100})
            await wire.event("run_settled")
        assert left_over() == before
    assert left_over() == before


async def test_files_and_images_pass_through_a_session_and_are_stored(tmp_path: Path) -> None:
    plays = [
        call("write", path="src/a.txt", content="one\ntwo\n"),
        call("edit", path="src/a.txt", oldText="two", newText="2"),
        call("read", path="src/a.txt"),
        call("read", path="b.png"),
        text("fine"),
    ]
    model = PlayedModel([*plays], input=frozenset({"text", "image"}))
    async with running(tmp_path, model=model, tools=session_tools(bash_timeout_s=60)) as world:
        (tmp_path / "ws" / "b.png").write_bytes(png(3, 2))
        wire = await world.connect()
        opened = await wire.open(world, **FULL)
        params = {"sessionId": opened["sessionId"], "content": "go", "wait": True}
        assert (await wire.call("session/prompt", params))["saved"]
        results = [m for m in await messages(wire, opened["sessionId"]) if m["role"] == "toolResult"]
        assert [m["isError"] for m in results] == [False] * 4
        assert results[1]["content"][0]["text"].endswith("@@ -1,2 +1,2 @@\n one\n-two\n+2")
        assert results[2]["content"][0]["text"] == "one\n2\n"
        assert [block["type"] for block in results[3]["content"]] == ["text", "image"]
        # Events carry an image by reference.
        ended = [p.event for p in wire.events if p.event.__struct_config__.tag == "message_end"]
        assert not any("iVBOR" in repr(event) for event in ended)
        await wire.aclose()


async def test_what_is_no_text_is_stored_as_text_and_the_session_reopens(tmp_path: Path) -> None:  # K-27
    model = played(call("bash", command=r"printf 'a\355\240\200b'; ls c*"), text("fine"))
    async with running(tmp_path, model=model, tools=session_tools(bash_timeout_s=60)) as world:
        (tmp_path / "ws" / os.fsdecode(b"c\xff")).touch()
        wire = await world.connect()
        opened = await wire.open(world, attach=False, **FULL)
        params = {"sessionId": opened["sessionId"], "content": "go", "wait": True}
        assert (await wire.call("session/prompt", params))["saved"]
        before = await messages(wire, opened["sessionId"])
        assert before[2]["content"][0]["text"] == "a\ufffd\ufffd\ufffdbc\ufffd\n"
        await wire.call("runtime/dispose", {"runtimeId": opened["runtimeId"]})
        session = {"kind": "open", "path": opened["path"]}
        again = await wire.call("runtime/open", {"cwd": world.cwd, "session": session})
        assert await messages(wire, again["sessionId"]) == before
        await wire.aclose()


async def test_each_session_makes_files_with_the_umask_of_who_opened_it(tmp_path: Path) -> None:
    """At the same time, in one process that has another umask; who did not say gets the usual one."""
    asked: list[tuple[str, dict[str, Any], int]] = [
        ("team", {"umask": 0o007}, 0o660),
        ("alone", {"umask": 0o077}, 0o600),
        ("nobody", {}, 0o644),
    ]
    async with running(tmp_path, model=Meeting(), tools=session_tools(bash_timeout_s=60)) as world:  # type: ignore[arg-type]
        before = os.umask(0o077)
        try:
            async with trio.open_nursery() as nursery:
                for name, options, _ in asked:
                    nursery.start_soon(partial(make_files, world, name, **options))
        finally:
            os.umask(before)
    for name, _, mode in asked:
        for made in ("ran", "written"):
            assert stat.S_IMODE((tmp_path / "ws" / name / made).stat().st_mode) == mode, (name, made)


@pytest.mark.parametrize("umask", [-1, 0o1000, "022", 0.5])
async def test_an_umask_that_is_none_is_refused(tmp_path: Path, umask: Any) -> None:
    async with running(tmp_path) as world:
        wire = await world.connect()
        with pytest.raises(RpcError, match=r"at `\$.umask`") as refused:
            await wire.open(world, umask=umask)
        assert refused.value.kind == "invalid_params"


async def test_who_joins_changes_neither_variables_nor_umask_and_who_replaces_the_session_brings_its_own(
    tmp_path: Path,
) -> None:
    async def told(session_id: str) -> str:
        await wire.call("session/setPermission", {"sessionId": session_id, **FULL})
        await wire.call("session/prompt", {"sessionId": session_id, "content": "go", "wait": True})
        shown: str = (await messages(wire, session_id))[2]["content"][0]["text"]
        return shown

    turns = [call("bash", command="umask; echo $VIRTUAL_ENV"), text("fine")]
    async with running(tmp_path, model=played(*3 * turns), tools=session_tools(bash_timeout_s=60)) as world:
        wire = await world.connect()
        mine, other = {"umask": 0o027, "env": {"VIRTUAL_ENV": "/mine"}}, {"umask": 0o022, "env": {"VIRTUAL_ENV": "/b"}}
        first = await wire.open(world, attach=False, **mine)
        joined = await wire.open(world, attach=False, kind="continue", **other)
        assert (joined["created"], joined["runtimeId"]) == (False, first["runtimeId"])
        assert await told(first["sessionId"]) == "0027\n/mine\n"
        kept = await wire.call("runtime/newSession", {"runtimeId": first["runtimeId"]})
        assert await told(kept["sessionId"]) == "0027\n/mine\n"
        brought = await wire.call("runtime/newSession", {"runtimeId": first["runtimeId"], **other})
        assert await told(brought["sessionId"]) == "0022\n/b\n"
        await wire.aclose()


async def test_without_full_access_nothing_is_changed_and_the_model_is_told(tmp_path: Path) -> None:
    plays = [
        call("write", path="made", content=""),
        call("edit", path="there", oldText="a", newText="b"),
        call("bash", command="touch made"),
        text("fine"),
    ]
    async with running(tmp_path, model=played(*plays), tools=session_tools(bash_timeout_s=60)) as world:
        (tmp_path / "ws" / "there").write_text("a")
        wire = await world.connect()
        opened = await wire.open(world)
        params = {"sessionId": opened["sessionId"], "content": "go", "wait": True, "approvals": "reject"}
        assert (await wire.call("session/prompt", params))["outcome"] == "success"
        results = [m for m in await messages(wire, opened["sessionId"]) if m["role"] == "toolResult"]
        told = [m["content"][0]["text"] for m in results]
        assert all("nobody is there who could give it" in text for text in told[:2])
        assert "Read-only file system" in told[2] or "nobody is there" in told[2]  # the sandbox, or its lack
        assert [m["isError"] for m in results] == [True] * 3
        assert os.listdir(tmp_path / "ws") == ["there"]
        assert (tmp_path / "ws" / "there").read_text() == "a"
        await wire.aclose()
