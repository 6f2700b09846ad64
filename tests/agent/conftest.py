"""A scope for single tool calls, and a process that is a subreaper as the daemon is."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from agent_recording import MakeScope, left_over

from loop_protocol.v1.types import Permission
from loopd.agent import Ask, ToolEnvironment, ToolScope
from loopd.agent.tools.process import become_subreaper
from loopd.agent.tools.sandbox import Sandbox


async def nobody(_: Ask) -> str | None:  # noqa: ASYNC124 async as its port is
    return "nobody is there"


@pytest.fixture
def make_scope(tmp_path: Path) -> MakeScope:
    def make(
        *,
        cwd: str = str(tmp_path),
        permission: Permission = "danger-full-access",
        output: Callable[[str], None] = lambda _: None,
        umask: int = 0o022,
    ) -> ToolScope:
        env = ToolEnvironment({"PATH": os.environ["PATH"], "HOME": str(tmp_path)}, umask)
        return ToolScope("call", cwd, env, permission, nobody, output)

    return make


@pytest.fixture
def subreaper() -> Iterator[None]:
    """As the daemon is one; what is there before belongs to other tests, what is there afterwards is a failure."""
    before = set(left_over())
    become_subreaper()
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)
    assert set(left_over()) <= before


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    """One that works; where none does, what needs it is skipped and says why."""
    sandbox = Sandbox()
    if (reason := trio.run(sandbox.tried).reason) is not None:
        pytest.skip(reason)
    return sandbox


@pytest.fixture(params=["danger-full-access", "workspace-write"], ids=["bare", "sandboxed"])
def way(request: pytest.FixtureRequest) -> Permission:
    """A preset in which commands run without a sandbox, and one in which they run in it."""
    permission: Permission = request.param
    if permission != "danger-full-access":
        request.getfixturevalue("sandbox")
    return permission
