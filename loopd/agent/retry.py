"""One model turn, asked for again while nothing of its answer was seen: a few times, after waits that show and end.

A wait is cancelled with the run. What people saw once is never said again: with the first delta of any kind the turn
stands, and its failure is the run's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import trio

from loopd.agent import Delta, Model, ModelError, ModelRequest, Reply, RetryWait, RunContext

TRIES = 4
# How long a provider may ask us to wait; beyond it people rather know at once.
PATIENCE_S = 60
# The first pause, doubled each time. A random part of it is left out, or clients that failed together come back so.
PAUSE_S = 1.0
JITTER = 0.5


async def respond(model: Model, request: ModelRequest, context: RunContext) -> Reply:
    """The turn's reply, with all that came of it said to ``context``. Raises :class:`ModelError`."""
    failed = 0
    while True:
        said = _Watched(context.say)
        try:
            return await model.respond(request, said)
        except ModelError as error:
            if said.anything or not error.retryable:
                raise
            failed += 1
            wait = RetryWait(_pause(error, failed), str(error))
        context.say(wait)
        await trio.sleep(wait.wait_s)


@dataclass(slots=True)
class _Watched:
    """Passes on what is said, and knows whether anything was."""

    say: Callable[[Delta], None]
    anything: bool = False

    def __call__(self, delta: Delta) -> None:
        self.anything = True
        self.say(delta)


def _pause(error: ModelError, failed: int) -> float:
    """How long to wait after so many failures. Raises ``error``, and why, where there is nothing to wait for."""
    if failed == TRIES:
        raise ModelError(error.kind, f"{error} (asked {TRIES} times)") from None
    asked = error.retry_after_s or 0
    if asked > PATIENCE_S:
        text = (
            f"{error}; it wants to be asked again in {_span(asked)}, where {PATIENCE_S} s are the most that is waited"
        )
        raise ModelError(error.kind, text) from None
    pause: float = PAUSE_S * 2 ** (failed - 1)
    return max(asked, pause * (1 - JITTER * random.random()))


def _span(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
