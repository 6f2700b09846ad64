"""Work that one task performs and others wait for. Waiting can be cancelled, the work cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import trio

T = TypeVar("T")


class Job(Generic[T]):
    def __init__(self) -> None:
        self._done = trio.Event()
        self._outcome: Callable[[], T] | None = None

    def succeed(self, value: T) -> None:
        self._outcome = lambda: value
        self._done.set()

    def fail(self, error: Exception) -> None:
        def outcome() -> T:
            raise error

        self._outcome = outcome
        self._done.set()

    async def settled(self) -> None:
        """Wait for its end, whatever that is."""
        await self._done.wait()

    async def wait(self) -> T:
        """Its value, or its error raised."""
        await self._done.wait()
        assert self._outcome is not None
        return self._outcome()
