"""Events that have come and that nobody has asked for yet: bounded, and honest about what was dropped."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from msgspec import Raw, Struct

from .v1.events import EventParams, EventsLost, ServerEventParams

BACKLOG_BYTES = 8 * 1024 * 1024
P = TypeVar("P", EventParams, ServerEventParams)


class _Place(Struct, rename="camel", omit_defaults=True):
    """``runtime_id`` and ``session_id`` are empty where the event is the daemon's own."""

    seq: int
    at: int
    runtime_id: str = ""
    session_id: str = ""


@dataclass(frozen=True, slots=True)
class Notification(Generic[P]):
    """One event as it came. ``raw`` is the JSON of its parameters; ``params`` is None for a type from the future."""

    raw: bytes
    params: P | None


class Backlog(Generic[P]):
    """The oldest are dropped beyond ``limit`` bytes; an ``events_lost`` per runtime then stands in their place.
    ``params`` is what the notifications hold."""

    def __init__(
        self,
        limit: int = BACKLOG_BYTES,
        params: type[P] = EventParams,  # type: ignore[assignment]  # a default cannot say that it chooses P
    ) -> None:
        self._params: type[P] = params
        self._limit = limit
        self._events: deque[tuple[_Place, Raw]] = deque()
        self._kept = 0
        self._lost: dict[str, tuple[int, _Place]] = {}

    def __bool__(self) -> bool:
        return bool(self._events or self._lost)

    def add(self, raw: Raw) -> None:
        """``raw``: the parameters of a notification. Raises msgspec's DecodeError when they are none."""
        self._events.append((msgspec.json.decode(raw, type=_Place), raw))
        self._kept += len(raw)
        while self._kept > self._limit and len(self._events) > 1:
            place, oldest = self._events.popleft()
            self._kept -= len(oldest)
            first, _ = self._lost.get(place.runtime_id, (place.seq, place))
            self._lost[place.runtime_id] = (first, place)

    def take(self) -> P | None:
        """The next event; None for one of a type that this version does not know, and when there is none."""
        return self.take_notification().params if self else None

    def take_notification(self) -> Notification[P]:
        """The next event, also of a type that this version does not know. Raises IndexError when there is none."""
        if self._lost:
            told = self._told()
            return Notification(told, self._known(Raw(told)))
        _, raw = self._events.popleft()
        self._kept -= len(raw)
        return Notification(bytes(raw), self._known(raw))

    def _known(self, raw: Raw) -> P | None:
        try:
            return msgspec.json.decode(raw, type=self._params)
        except msgspec.ValidationError:
            return None

    def _told(self) -> bytes:
        _, (first, place) = self._lost.popitem()
        lost = EventsLost(first=first, last=place.seq)
        return msgspec.json.encode({**msgspec.to_builtins(place), "event": lost})
