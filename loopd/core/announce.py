"""Where a session's events go, as its state sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from loop_protocol.v1.events import Event


class Announce(Protocol):
    def publish(self, event: Event) -> None:
        """An event happened; what was streamed before comes before it."""

    def stream(self, key: tuple[str, str], text: str, build: Callable[[str], Event]) -> None:
        """Text that joins what was streamed under the same ``key``, until it is sent as one event."""


class Silent:
    """For a session that is only read."""

    def publish(self, event: Event) -> None:
        pass

    def stream(self, key: tuple[str, str], text: str, build: Callable[[str], Event]) -> None:
        pass
