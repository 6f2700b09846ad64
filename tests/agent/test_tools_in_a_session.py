"""The real tools in a whole daemon: what a stop, the end of a session and the end of the daemon leave of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import trio
from agent_recording import left_over
from inprocess import PlayedModel, Wire, call, running, text
from test_tool_images import png

from loop_protocol.v1.types import ToolCallBlock
from loopd.agent import Reply
from loopd.agent.tools import session_tools

pytestmark = pytest.mark.usefixtures("subreaper")

FULL: dict[str, Any] = {"permission": "danger-full-access"}
# Left its group and its parent, and never says anything.
HIDDEN = "(setsid yes >/dev/null &); echo up; sleep 30"


def played(*plays: Reply) -> PlayedModel:
    return PlayedModel([*plays])


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
        params = {"sessionId": opened["sessionId"], "content": "go", "wait": True}
        assert (await wire.call("session/prompt", params))["outcome"] == "success"
        results = [m for m in await messages(wire, opened["sessionId"]) if m["role"] == "toolResult"]
        assert all("read-only, which forbids" in m["content"][0]["text"] for m in results)
        assert [m["isError"] for m in results] == [True] * 3
        assert os.listdir(tmp_path / "ws") == ["there"]
        assert (tmp_path / "ws" / "there").read_text() == "a"
        await wire.aclose()
