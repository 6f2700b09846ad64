"""A whole daemon with real keys, a provider that repeats them, and tools that look for them: they are nowhere."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scripted_provider as scripted
import trio
from dialects import DIALECTS, Call, Dialect, Text
from inprocess import World, running
from scripted_provider import ScriptedProvider, answers, sends

from loopd.agent import retry
from loopd.agent.tools import session_tools
from loopd.config import Config, DaemonSettings, Default, ModelConfig, Provider
from loopd.models import Catalogue

KEYS = {"env": "sk-from-the-environment-1", "file": "sk-from-a-file-22", "command": "sk-from-a-command-333"}
HEADER = "a-secret-in-a-header-4444"
# On one line, where `cat` puts no newline of its own between the variables.
SPYING = r"env; cat /proc/$PPID/environ /proc/self/environ | tr '\\0' ' '"


def _sources(root: Path) -> dict[str, dict[str, Any]]:
    (root / "key").write_text(KEYS["file"])
    return {
        "env": {"api_key_env": "MINE_API_KEY"},
        "file": {"api_key_file": str(root / "key")},
        "command": {"api_key_command": ("/bin/sh", "-c", f"cat {root}/printed")},
    }


def _config(url: str, root: Path, api: Any) -> Config:
    (root / "printed").write_text(KEYS["command"])
    providers = {
        name: Provider(
            name=name,
            api=api,
            base_url=url.removesuffix("/v1") if api == "anthropic-messages" else url,
            headers={"x-secret": HEADER},
            models=(ModelConfig(id="m"),),
            **source,
        )
        for name, source in _sources(root).items()
    }
    return Config(
        default=Default(permission="danger-full-access"),
        daemon=DaemonSettings(log_level="debug", drain_deadline_s=4),
        providers=providers,
    )


def _failures(key: str, dialect: Dialect) -> Iterator[scripted.Script]:
    """Each of them repeats what it was sent, as proxies and gateways do."""
    told = f"you sent Bearer {key} and x-secret: {HEADER}"
    body = json.dumps({"error": {"message": told}}).encode()
    yield answers(429, body)
    yield answers(401, body)
    yield answers(500, f"<html>{told}</html>".encode(), "text/html")
    yield sends(dialect.error("invalid_request_error", told))
    yield sends(*dialect.whole(Text(["hm"]))[: -dialect.closing], f"data: {told}\n\n".encode())
    yield answers(200, told.encode(), "text/plain")


@pytest.mark.parametrize(
    ("dialect", "source"),
    [*((dialect, "env") for dialect in DIALECTS), (DIALECTS[0], "file"), (DIALECTS[0], "command")],
    ids=lambda value: getattr(value, "api", value),
)
async def test_no_key_gets_out(
    dialect: Dialect,
    source: str,
    provider: ScriptedProvider,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # K-31
    caplog.set_level(logging.DEBUG, logger="loopd")
    monkeypatch.setattr(retry, "PAUSE_S", 0.01)
    monkeypatch.setenv("MINE_API_KEY", KEYS["env"])
    monkeypatch.setenv("OPENAI_API_KEY", KEYS["env"])
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    config = _config(provider.url, secrets, dialect.api)
    models = Catalogue(config, {"MINE_API_KEY": KEYS["env"], "PATH": "/usr/bin:/bin"})
    tools = session_tools(bash_timeout_s=30)
    async with running(tmp_path / "world", config=config, tools=tools) as world:
        world.services.models = models
        seen = await _everything_said(world, provider, dialect, source)
        files = b"".join(path.read_bytes() for path in (tmp_path / "world").rglob("*") if path.is_file())
    headers = provider.asked[-1].headers
    sent = headers["x-api-key"] if dialect.api == "anthropic-messages" else headers["authorization"]
    assert sent.removeprefix("Bearer ") == KEYS[source]
    assert headers["x-secret"] == HEADER
    assert "[secret]" in seen
    assert "PATH=" in seen  # the tool did run
    for secret in (*KEYS.values(), HEADER):
        assert secret not in seen
        assert secret not in caplog.text
        assert secret.encode() not in files


async def _everything_said(world: World, provider: ScriptedProvider, dialect: Dialect, source: str) -> str:
    """All answers and events of a session in which everything fails, and whose tool looks around."""
    wire = await world.connect()
    await wire.call("model/list")
    opened = await wire.open(world, model={"provider": source, "id": "m"})
    outcomes = []
    for provider.script in _failures(KEYS[source], dialect):
        with trio.fail_after(10):
            outcomes.append((await _prompted(wire, opened))["outcome"])
    assert outcomes == ["error"] * 6
    rounds = [
        sends(*dialect.whole(Call("c", "bash", [json.dumps({"command": SPYING})]), end="calls")),
        sends(*dialect.whole(Text(["seen"]))),
    ]

    async def script(stream: trio.SocketStream) -> None:
        await rounds.pop(0)(stream)

    provider.script = script
    assert (await _prompted(wire, opened))["outcome"] == "success"
    await wire.call("session/messages", {"sessionId": opened["sessionId"]})
    await wire.call("server/status")
    return json.dumps(wire.log, ensure_ascii=False)


async def _prompted(wire: Any, opened: dict[str, Any]) -> Any:
    return await wire.call("session/prompt", {"sessionId": opened["sessionId"], "content": "go", "wait": True})
