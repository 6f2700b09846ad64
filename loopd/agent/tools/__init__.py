"""The tools that a session's model can call."""

from __future__ import annotations

from loopd.agent import Tool
from loopd.agent.tools.edit import Edit
from loopd.agent.tools.read import Read
from loopd.agent.tools.shell import Bash
from loopd.agent.tools.write import Write


def session_tools(*, bash_timeout_s: float, umask: int = 0o022) -> list[Tool]:
    """Stateless: one list serves any number of sessions. ``umask`` is for what they make, the daemon has another."""
    return [Read(), Edit(), Write(umask=umask), Bash(timeout_s=bash_timeout_s, umask=umask)]
