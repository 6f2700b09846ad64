"""Threads for calls that a disk may hang: that holds up those who ask for the very same, and nobody else (D-5)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar
from weakref import WeakValueDictionary

import trio

T = TypeVar("T")

# A thread that was given up keeps its place until the disk answers. Places that all calls share would run out, by one
# dead directory that somebody looks at again and again.
_places: WeakValueDictionary[Hashable, trio.CapacityLimiter] = WeakValueDictionary()


async def in_thread(asked: Hashable, call: Callable[[], T]) -> T:
    """One thread at a time for what is ``asked``, however often and by whom. Cancelled, it is left to itself."""
    place = _places.get(asked)
    if place is None:
        place = _places[asked] = trio.CapacityLimiter(1)
    return await trio.to_thread.run_sync(call, limiter=place, abandon_on_cancel=True)
