"""From the shell through the daemon to a provider and back: text, and a round of a tool."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from loopctl_world import World

KEY = "sk-of-the-test-0123456789"
FULL = ("--permission", "danger-full-access")


class _Provider(BaseHTTPRequestHandler):
    """Chat Completions: makes the call that ``call NAME ARGUMENTS`` asks for, else answers with a few words."""

    requests: ClassVar[list[dict[str, Any]]] = []
    keys: ClassVar[list[str | None]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.requests.append(body)
        self.keys.append(self.headers["authorization"])
        last = body["messages"][-1]
        if last["role"] == "user" and last["content"].startswith("call "):
            _, name, arguments = last["content"].split(" ", 2)
            function = {"name": name, "arguments": arguments}
            delta: Any = {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": function}]}
            finish = "tool_calls"
        else:
            delta, finish = {"content": f"seen: {last['content'].strip()}"}, "stop"
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for choice in ({"delta": delta, "finish_reason": None}, {"delta": {}, "finish_reason": finish}):
            chunk = {"id": "x", "object": "chat.completion.chunk", "choices": [{"index": 0, **choice}]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def _provider() -> Iterator[str]:
    _Provider.requests.clear()
    _Provider.keys.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Provider) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


def _configure(world: World, url: str) -> None:
    config = world.root / "c" / "loopd" / "config.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(
        f'[providers.mine]\napi = "openai-chat"\nbase_url = "{url}"\napi_key_env = "MINE_API_KEY"\n'
        '[[providers.mine.models]]\nid = "m"\n'
    )


def test_text_and_a_tool_round_through_a_configured_provider(world: World) -> None:
    with _provider() as url:
        _configure(world, url)
        said = world.loopctl("prompt", "hello", MINE_API_KEY=KEY)
        assert (said.returncode, said.stdout) == (0, "seen: hello\n")
        assert "practice" not in said.stderr
        used = world.loopctl("prompt", 'call bash {"command": "echo from the tool"}', *FULL)
        assert (used.returncode, used.stdout) == (0, "seen: from the tool\n")
        assert "bash" in used.stderr
        roles = [message["role"] for message in _Provider.requests[-1]["messages"]]
        assert roles == ["system", "user", "assistant", "user", "assistant", "tool"]
        assert set(_Provider.keys) == {f"Bearer {KEY}"}
        kept = b"".join(path.read_bytes() for path in (world.root / "s").rglob("*") if path.is_file())
        assert KEY.encode() not in kept  # K-31: no log, no session file
        spied = world.loopctl("rpc", "session/list", "{}")
        assert KEY not in spied.stdout


def test_what_a_command_and_a_tool_make_has_the_umask_of_the_shell_that_asks(world: World) -> None:
    """Not the one that the daemon was started with, by another shell."""
    with _provider() as url:
        _configure(world, url)
        assert world.loopctl("prompt", "hello", MINE_API_KEY=KEY).returncode == 0
        before = os.umask(0o027)
        try:
            for call in ('bash {"command": "touch ran"}', 'write {"path": "new/written", "content": "x"}'):
                ran = world.loopctl("prompt", f"call {call}", "--new", *FULL)
                assert ran.returncode == 0, ran.stderr
        finally:
            os.umask(before)
        modes = {name: stat.S_IMODE((world.workspace / name).stat().st_mode) for name in ("ran", "new", "new/written")}
        assert modes == {"ran": 0o640, "new": 0o750, "new/written": 0o640}


def test_no_tool_reads_a_key_from_the_daemon(world: World) -> None:  # K-31
    spying = "shell: env; tr '\\0' '\\n' < /proc/$PPID/environ"
    seen = world.loopctl(
        "prompt",
        spying,
        "--permission",
        "danger-full-access",
        OPENAI_API_KEY=KEY,
        MINE_TOKEN=KEY,
        LOOPD_CONFIG=str(_practice_only(world)),
    )
    assert "PATH=" in seen.stdout
    assert KEY not in seen.stdout + seen.stderr


def test_a_key_that_only_the_shell_has_is_told_and_a_restart_brings_it_to_the_daemon(world: World) -> None:
    missing = "ANTHROPIC_API_KEY is set here, but not in the running daemon"
    assert world.loopctl("prompt", "hello").returncode == 0
    for arguments in (("models",), ("prompt", "hello")):
        assert missing in world.loopctl(*arguments, ANTHROPIC_API_KEY=KEY).stderr
    assert world.loopctl("daemon", "restart", ANTHROPIC_API_KEY=KEY).returncode == 0
    listed = world.loopctl("models", ANTHROPIC_API_KEY=KEY)
    assert missing not in listed.stderr
    assert "*  anthropic/" in listed.stdout


def _practice_only(world: World) -> Any:
    config = world.root / "practice.toml"
    config.write_text('[default]\nmodel = "practice/echo"\n')
    return config
