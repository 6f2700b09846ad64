"""The tools that a session's model can call."""

from __future__ import annotations

from loopd.agent import Tool
from loopd.agent.tools.files import Read
from loopd.agent.tools.shell import Bash


def session_tools(*, bash_timeout_s: float) -> list[Tool]:
    """Stateless: one list serves any number of sessions."""
    return [Read(), Bash(timeout_s=bash_timeout_s)]
