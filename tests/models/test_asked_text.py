"""What a person is asked is valid text, whatever the model or the disk calls things (K-27)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from dialects import DIALECTS, Call, Dialect, Text
from inprocess import PlayedModel, ProbeArguments, call, running, text
from scripted_provider import ScriptedProvider, sends

from loop_protocol.v1.types import TextBlock
from loopd.agent import Ask, ToolOutcome, ToolScope
from loopd.config import Config, DaemonSettings, ModelConfig, Provider
from loopd.models import Catalogue
from loopd.storage import files
from loopd.storage.fs import FileSystem


class Asking:
    """Asks in the words of its argument, and of a file whose name is no text."""

    name = "probe"
    description = "for tests"
    parameters = ProbeArguments

    async def run(self, arguments: ProbeArguments, scope: ToolScope) -> ToolOutcome:
        path = b"/a\xff".decode(errors="surrogateescape")
        ask = Ask(
            operation="write",
            reason="to be written",
            sandbox="nothing",
            rules=[f"write: {path}"],
            justification=arguments.text,
            path=path,
            diff=f"+{path}",
        )
        return ToolOutcome([TextBlock(await scope.ask(ask) or "allowed")])


async def _asked(world: Any, model: dict[str, str]) -> Any:
    """The request for approval, rejected with text of any kind; the session reopens."""
    wire = await world.connect()
    opened = await wire.open(world, model=model)
    run_id = await wire.prompt(opened["sessionId"])
    with trio.fail_after(10):
        asked = (await wire.event("approval_requested")).event.request
        answer = {"approvalId": asked.approval_id, "decision": "rejected", "feedback": "nö \u202e👍"}
        await wire.call("approval/resolve", answer)
        assert (await wire.call("run/wait", {"runId": run_id}))["outcome"] == "success"
    messages = (await wire.call("session/messages", {"sessionId": opened["sessionId"]}))["messages"]
    assert "nö \u202e👍" in messages[2]["content"][0]["text"]
    _, stored = files.read_session(FileSystem(), opened["path"])
    assert stored.messages == 4
    return asked


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.api)
async def test_a_lone_surrogate_of_a_model_is_replaced_before_anybody_is_asked(
    dialect: Dialect, provider: ScriptedProvider, tmp_path: Path
) -> None:
    made = Provider(
        name="p",
        api=dialect.api,  # type: ignore[arg-type]
        base_url=provider.url.removesuffix("/v1") if dialect.api == "anthropic-messages" else provider.url,
        api_key_env="KEY",
        models=(ModelConfig(id="m"),),
    )
    config = Config(daemon=DaemonSettings(drain_deadline_s=4), providers={"p": made})
    rounds = [
        sends(*dialect.whole(Call("c", "probe", ['{"text":"a\\ud8', '00b"}']), end="calls")),
        sends(*dialect.whole(Text(["seen"]))),
    ]

    async def script(stream: trio.SocketStream) -> None:
        await rounds.pop(0)(stream)

    provider.script = script
    async with running(tmp_path, config=config, tools=[Asking()]) as world:
        world.services.models = Catalogue(config, {"KEY": "k"})
        asked = await _asked(world, {"provider": "p", "id": "m"})
    assert (asked.justification, asked.arguments["text"]) == ("a\ufffdb", "a\ufffdb")


async def test_a_name_that_is_no_text_is_shown_as_such_and_has_no_rule(tmp_path: Path) -> None:
    model = PlayedModel([call(text="x"), text("seen")])
    async with running(tmp_path, model=model, tools=[Asking()]) as world:
        asked = await _asked(world, {"provider": "scripted", "id": "model"})
    assert (asked.path, asked.diff) == ("/a\ufffd", "+/a\ufffd")
    assert (asked.rules, asked.rules_refused) == ([], "its name cannot be shown")
