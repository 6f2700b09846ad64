"""One function per method: wire to runtime or session, and back. What can be decided at once is decided here.

A function answers with its result, or with an async function for what has to be waited for; the connection runs that
one, and cancelling it ends the wait, never the work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loop_protocol.v1.methods import METHODS

from . import approvals, queue, runs, runtimes, server, sessions, titles
from .call import IN_FLIGHT, Call, CancelRequest, Daemon
from .errors import translate

__all__ = ["IN_FLIGHT", "TABLE", "Call", "CancelRequest", "Daemon", "translate"]


def _function(name: str) -> Callable[[Call, Any], Any]:
    """``session/setModel`` is ``session_set_model``."""
    snake = "".join("_" + char.lower() if char.isupper() else char for char in name.replace("/", "_"))
    modules = (server, runtimes, sessions, runs, queue, titles, approvals)
    module = next(module for module in modules if hasattr(module, snake))
    function: Callable[[Call, Any], Any] = getattr(module, snake)
    return function


TABLE: dict[str, Callable[[Call, Any], Any]] = {name: _function(name) for name in METHODS}
