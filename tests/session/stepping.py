"""Numbers the steps of a session's tasks, so that a test can act at each: before every resumption after an await."""

from __future__ import annotations

from collections.abc import Callable

import trio


class Steps(trio.abc.Instrument):
    """Calls ``act`` right before step ``at`` of the run's task or of one below it; ``count`` is how many there were.

    With ``of`` it is another of the session's tasks.
    """

    def __init__(self, *, at: int = 0, act: Callable[[], None] | None = None, of: str = "Runs._perform") -> None:
        self.count = 0
        self._at = at
        self._act = act
        self._of = of

    @property
    def hit(self) -> bool:
        """There was a step of that number."""
        return self.count >= self._at

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if not self._is_below(task):
            return
        self.count += 1
        if self.count == self._at and self._act is not None:
            self._act()

    def _is_below(self, task: trio.lowlevel.Task) -> bool:
        above: trio.lowlevel.Task | None = task
        while above is not None:
            if above.name.endswith(self._of):
                return True
            above = above.parent_nursery.parent_task if above.parent_nursery else None
        return False
