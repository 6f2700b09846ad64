"""The tools that a session's model can call."""

from __future__ import annotations

from loopd.agent import Tool
from loopd.agent.protected import NOTHING, Protected
from loopd.agent.tools.edit import Edit
from loopd.agent.tools.read import Read
from loopd.agent.tools.sandbox import Sandbox
from loopd.agent.tools.shell import Bash
from loopd.agent.tools.write import Write


def session_tools(
    *, bash_timeout_s: float, protected: Protected = NOTHING, sandbox: Sandbox | None = None
) -> list[Tool]:
    """Stateless: one list serves any number of sessions. ``protected``: what restricted presets keep from them.
    ``sandbox``: what their commands run in, made for the same."""
    bash = Bash(timeout_s=bash_timeout_s, sandbox=sandbox or Sandbox(protected))
    return [Read(protected), Edit(protected), Write(protected), bash]
