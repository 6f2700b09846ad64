"""What a method is called with: the daemon, and the client that asks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from msgspec import Raw, Struct

from loop_protocol.v1 import methods as m

from ..outbox import Outbox
from ..runtime import Runtimes
from ..services import Services

IN_FLIGHT = 64
PAGE = 1024 * 1024


class Client(Protocol):
    """The connection that asks."""

    outbox: Outbox
    can_approve: bool
    name: str

    def accept_handshake(self, name: str | None, *, can_approve: bool) -> None: ...


class Daemon(Protocol):
    """What methods need of the daemon."""

    services: Services
    runtimes: Runtimes
    socket_path: str
    max_connections: int

    @property
    def connections(self) -> int: ...

    def uptime_ms(self) -> int: ...
    def has_room(self, receiving: int) -> bool: ...
    def pending_saves(self) -> list[m.PendingSave]: ...
    def drain(self, params: m.DrainParams) -> Callable[[], Awaitable[m.DrainResult]]: ...


@dataclass(slots=True, frozen=True)
class Call:
    daemon: Daemon
    client: Client

    @property
    def runtimes(self) -> Runtimes:
        return self.daemon.runtimes


class CancelRequest(Struct):
    """Of ``$/cancelRequest``."""

    id: Raw
