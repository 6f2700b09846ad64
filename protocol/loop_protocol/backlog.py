"""Events that have come and that nobody has asked for yet: bounded, and honest about what was dropped."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec
from msgspec import Raw, Struct

from .v1.events import EventParams, EventsLost

BACKLOG_BYTES = 8 * 1024 * 1024


class _Place(Struct, rename="camel"):
    runtime_id: str
    session_id: str
    seq: int
    at: int


@dataclass(frozen=True, slots=True)
class Notification:
    """One event as it came. ``raw`` is the JSON of its parameters; ``params`` is None for a type from the future."""

    raw: bytes
    params: EventParams | None


def _known(raw: Raw) -> EventParams | None:
    try:
        return msgspec.json.decode(raw, type=EventParams)
    except msgspec.ValidationError:
        return None


class Backlog:
    """The oldest are dropped beyond ``limit`` bytes; an ``events_lost`` per runtime then stands in their place."""

    def __init__(self, limit: int = BACKLOG_BYTES) -> None:
        self._limit = limit
        self._events: deque[tuple[_Place, Raw]] = deque()
        self._kept = 0
        self._lost: dict[str, tuple[int, _Place]] = {}

    def __bool__(self) -> bool:
        return bool(self._events or self._lost)

    def add(self, raw: Raw) -> None:
        """``raw``: the parameters of an ``event`` notification. Raises msgspec's DecodeError when they are none."""
        self._events.append((msgspec.json.decode(raw, type=_Place), raw))
        self._kept += len(raw)
        while self._kept > self._limit and len(self._events) > 1:
            place, oldest = self._events.popleft()
            self._kept -= len(oldest)
            first, _ = self._lost.get(place.runtime_id, (place.seq, place))
            self._lost[place.runtime_id] = (first, place)

    def take(self) -> EventParams | None:
        """The next event; None for one of a type that this version does not know, and when there is none."""
        return self.take_notification().params if self else None

    def take_notification(self) -> Notification:
        """The next event, also of a type that this version does not know. Raises IndexError when there is none."""
        if self._lost:
            told = self._told()
            return Notification(msgspec.json.encode(told), told)
        _, raw = self._events.popleft()
        self._kept -= len(raw)
        return Notification(bytes(raw), _known(raw))

    def _told(self) -> EventParams:
        _, (first, place) = self._lost.popitem()
        return EventParams(
            runtime_id=place.runtime_id,
            session_id=place.session_id,
            seq=place.seq,
            at=place.at,
            event=EventsLost(first=first, last=place.seq),
        )
