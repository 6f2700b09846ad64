"""Wall time of a prompt (P-1, P-2): when it started by the clock, how long it took by a clock that nobody can set."""

from __future__ import annotations

import time
from dataclasses import dataclass

from msgspec.structs import replace

from loop_protocol.v1.types import PromptTiming

# The largest number that every client's JSON holds; what is stored beyond it is no time.
LATEST_MS = 2**53 - 1


class Clock:
    """Milliseconds. ``boot_ms`` counts suspend and ignores clock steps; tests pass a clock of their own."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def boot_ms(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


def following(now_ms: int, *earlier: int) -> int:
    """A time after each of those, whatever the clock says, as long as there is one."""
    return min(max(now_ms, *(time + 1 for time in earlier)), LATEST_MS)


@dataclass(slots=True, frozen=True)
class Stopwatch:
    """A timing under way."""

    timing: PromptTiming
    boot_ms: int

    def finish(self, clock: Clock, *, messages: int, stopped: bool) -> PromptTiming:
        """``messages``: how many the conversation has now."""
        length = max(0, clock.boot_ms() - self.boot_ms)
        finished_at = self.timing.started_at + length
        return replace(self.timing, message_end_index=messages, finished_at=finished_at, stopped=stopped)


def begin(clock: Clock, *, id: str, user_message_index: int, message_start_index: int) -> Stopwatch:
    timing = PromptTiming(
        id=id,
        user_message_index=user_message_index,
        message_start_index=message_start_index,
        started_at=clock.now_ms(),
    )
    return Stopwatch(timing, clock.boot_ms())
