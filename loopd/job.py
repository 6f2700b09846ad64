"""Work that one task performs and others wait for. Waiting can be cancelled, the work cannot."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
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


class Jobs:
    """Jobs in a nursery that is none of a connection's: a client that goes away leaves nothing half done. ``given_up``
    makes the error of those that the end of the daemon cuts short."""

    def __init__(self, nursery: trio.Nursery, given_up: Callable[[], Exception]) -> None:
        self._nursery = nursery
        self._given_up = given_up
        self._performing: set[trio.CancelScope] = set()

    def start(self, work: Callable[[], Awaitable[T]]) -> Job[T]:
        job: Job[T] = Job()
        self._nursery.start_soon(self._perform, job, work)
        return job

    async def _perform(self, job: Job[T], work: Callable[[], Awaitable[T]]) -> None:
        with trio.CancelScope(shield=True) as performing:
            self._performing.add(performing)
            try:
                job.succeed(await work())
            except Exception as error:  # boundary: request; whoever waits for the job gets it
                job.fail(error)
            finally:
                self._performing.discard(performing)
        if performing.cancelled_caught:
            job.fail(self._given_up())

    def give_up(self) -> None:
        """The daemon ends and waits no longer for what does not come to an end."""
        for performing in tuple(self._performing):
            performing.cancel()
