"""Numbers the steps of a session's tasks, so that a test can act at each: before every resumption after an await."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


class Moments(trio.abc.Instrument):
    """Both sides of each await of a run's task and of those below it: where it has just come to wait, so that a
    cancellation ends that wait, and right before it goes on, where it comes too late for it.

    ``begin`` is called before the first step, ``act`` at moment ``at``; ``places`` is what stood there on the stack at
    each, the innermost last. ``watched`` says whether the run that is meant is the one that goes on, ``within`` which
    part of it.
    """

    def __init__(
        self,
        watched: Callable[[], bool],
        *,
        at: int = 0,
        act: Callable[[], None],
        begin: Callable[[], None],
        within: str = "Runs._perform",
    ) -> None:
        self.places: list[list[str]] = []
        self.hit: list[str] | None = None
        self._watched = watched
        self._at = at
        self._act = act
        self._begin: Callable[[], None] | None = begin
        self._within = within

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._moment(task)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task.coro.cr_frame is not None:  # it waits, and has not ended
            self._moment(task)

    def _moment(self, task: trio.lowlevel.Task) -> None:
        place = stack(task)
        if self._within not in place or not self._watched():
            return
        if self._begin is not None:
            begin, self._begin = self._begin, None
            begin()
        self.places.append(place)
        if len(self.places) == self._at:
            self.hit = place
            self._act()


def stack(task: trio.lowlevel.Task | None) -> list[str]:
    """The functions in which a task waits, and those that its nursery's task is in, the outermost first."""
    names: list[str] = []
    while task is not None:
        frames: list[str] = []
        waiting: Any = task.coro
        while (code := getattr(waiting, "cr_code", None)) is not None:
            frames.append(code.co_qualname)
            waiting = waiting.cr_await
        names = frames + names
        task = task.parent_nursery.parent_task if task.parent_nursery else None
    return names
