"""Durations are measured by a clock that nobody can set (P-2)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loopd.core.timings import Clock, begin


class SetClock(Clock):
    def __init__(self, now: int, boot: int) -> None:
        self.now = now
        self.boot = boot

    def now_ms(self) -> int:
        return self.now

    def boot_ms(self) -> int:
        return self.boot


@given(st.integers(0, 2**45), st.integers(0, 10**9), st.integers(-(10**9), 10**9))
def test_a_clock_step_does_not_change_a_duration(now: int, length: int, step: int) -> None:
    clock = SetClock(now, 1000)
    watch = begin(clock, id="r", user_message_index=4, message_start_index=4)
    clock.now += step
    clock.boot += length
    timing = watch.finish(clock, messages=7, stopped=True)
    assert timing.finished_at is not None
    assert (timing.started_at, timing.finished_at - timing.started_at) == (now, length)
    assert (timing.message_start_index, timing.message_end_index, timing.stopped) == (4, 7, True)
