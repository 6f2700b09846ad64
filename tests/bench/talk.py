"""A client that prompts and takes the time; and the prompts, which say what the provider shall answer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from loop_protocol.v1.events import EventParams, RunSettled

from .machine import PATIENCE, Daemon, Provider


def script(*, n: int = 4, size: int = 8, batch: int = 32, gap: float = 0, tool: str = "") -> str:
    return f"BENCH n={n} size={size} batch={batch} gap={gap} tool={tool}"


@dataclass(slots=True, frozen=True)
class Prompted:
    """Times in seconds: from sending it to the provider, between the provider's first answer and the next request, from
    the provider's last byte to ``run_settled``; the daemon's CPU."""

    before: float
    between: float
    after: float
    cpu: float


class Talk:
    """One connection, in one session at a time."""

    def __init__(self, daemon: Daemon, provider: Provider) -> None:
        self._daemon = daemon
        self._provider = provider
        self.client = daemon.connect()

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def open(
        self,
        cwd: str,
        *,
        kind: str = "new",
        path: str | None = None,
        attach: bool = True,
        permission: str | None = None,
    ) -> Any:
        session = {"kind": kind} if path is None else {"kind": "open", "path": path}
        opened = self.client.call("runtime/open", {"cwd": cwd, "session": session, "runtimeId": "new"})
        if permission is not None:
            self.client.call("session/setPermission", {"sessionId": opened.session_id, "permission": permission})
        if attach:
            self.client.call("runtime/attach", {"runtimeId": opened.runtime_id})
        return opened

    def dispose(self, opened: Any) -> None:
        self.client.call("runtime/dispose", {"runtimeId": opened.runtime_id})

    def start(self, opened: Any, text: str) -> float:
        """Send a prompt; answers when."""
        sent = time.monotonic()
        self.client.call("session/prompt", {"sessionId": opened.session_id, "content": text})
        return sent

    def prompt(self, opened: Any, text: str, *, requests: int = 1) -> Prompted:
        """A whole run, in a session that is attached."""
        cpu = self._daemon.cpu()
        sent = self.start(opened, text)
        while not isinstance(params := self.client.next_event(PATIENCE), EventParams) or not isinstance(
            params.event, RunSettled
        ):
            if params is None:
                raise TimeoutError("no event")
        settled = time.monotonic()
        if params.event.outcome != "success":
            raise RuntimeError(f"a run failed: {params.event}")
        answers = self._provider.answers(requests)
        cpu = self._daemon.cpu() - cpu
        between = answers[-1]["asked"] - answers[0]["done"]
        return Prompted(answers[0]["asked"] - sent, between, settled - answers[-1]["done"], cpu)

    def settle(self, opened: Any, text: str) -> None:
        """A run of which only the end counts."""
        params = {"sessionId": opened.session_id, "content": text, "wait": True}
        if (result := self.client.call("session/prompt", params)).outcome != "success":
            raise RuntimeError(f"a run failed: {result}")
        self._provider.answers()
