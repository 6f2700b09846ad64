"""What every session of the daemon shares. Plain values, made once by ``__main__.py``, or by a test with fakes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from .agent import Tool
from .agent.protected import NOTHING, Protected
from .agent.tools.sandbox import Sandbox
from .config import Config
from .core.approvals import Settled
from .core.timings import Clock
from .event_log import Pump
from .models import Catalogue
from .storage.catalog import Catalog
from .storage.fs import FileSystem
from .watch import Watch


@dataclass(slots=True, kw_only=True)
class Services:
    """``draining``, the counters and what ``approvals`` remembers are all that changes here."""

    config: Config
    clock: Clock
    models: Catalogue
    tools: Sequence[Tool]
    fs: FileSystem
    catalog: Catalog
    data_dir: str
    rescue_roots: Sequence[str]
    environ: dict[str, str]
    umask: int = 0o022  # of tools whose caller did not say
    protected: Protected = NOTHING  # what tools never get
    sandbox: Sandbox | None = None  # that of the tools; where there is none, nobody asks for its status
    # A whole history is in memory while it is read: not all of 64 requests at once.
    reading: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(2))
    draining: bool = False
    counters: dict[str, int] = field(default_factory=dict)
    pump: Pump = field(default_factory=Pump)
    approvals: Settled = field(default_factory=Settled)
    watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = Watch(self.clock, self.pump)

    def count(self, counter: str) -> None:
        self.counters[counter] = self.counters.get(counter, 0) + 1

    @property
    def durable(self) -> bool:
        return self.config.daemon.durability == "power-loss"
