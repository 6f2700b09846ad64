"""Runs trio beside a test that is not asynchronous: one loop in the test's own thread, turned while a call waits."""

from __future__ import annotations

import queue
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import outcome
import trio

T = TypeVar("T")
PATIENCE_S = 30.0


class Guest:
    """``call`` performs an async function to its end; ``enter`` keeps an async context open until ``close``."""

    def __init__(self) -> None:
        self._turns: queue.Queue[Callable[[], Any]] = queue.Queue()
        self._ended: list[outcome.Outcome[None]] = []
        self._nursery: trio.Nursery | None = None
        trio.lowlevel.start_guest_run(
            self._main,
            run_sync_soon_threadsafe=self._turns.put,
            done_callback=self._ended.append,
            host_uses_signal_set_wakeup_fd=False,
        )
        self._turn(lambda: self._nursery is not None)

    async def _main(self) -> None:
        async with trio.open_nursery() as self._nursery:
            await trio.sleep_forever()

    def call(self, work: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        results: list[outcome.Outcome[T]] = []

        async def perform() -> None:
            results.append(await outcome.acapture(work, *arguments))

        assert self._nursery is not None
        self._nursery.start_soon(perform)
        self._turn(lambda: bool(results))
        return results[0].unwrap()

    def enter(self, context: AbstractAsyncContextManager[T]) -> tuple[T, Callable[[], None]]:
        """What the context gives, and how to leave it."""
        entered: list[T] = []
        leaving, left = trio.Event(), trio.Event()

        async def keep() -> None:
            async with context as value:
                entered.append(value)
                await leaving.wait()
            left.set()

        async def leave() -> None:
            leaving.set()
            await left.wait()

        assert self._nursery is not None
        self._nursery.start_soon(keep)
        self._turn(lambda: bool(entered))
        return entered[0], lambda: self.call(leave)

    def close(self) -> None:
        assert self._nursery is not None
        self._nursery.cancel_scope.cancel()
        self._turn(lambda: bool(self._ended))
        self._ended[0].unwrap()

    def _turn(self, over: Callable[[], bool]) -> None:
        while not over():
            if self._ended:
                self._ended[0].unwrap()
                raise RuntimeError("the loop ended while something waited for it")
            self._turns.get(timeout=PATIENCE_S)()
