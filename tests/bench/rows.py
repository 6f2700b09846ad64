"""What was measured: samples beside their target, as a table for people and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass(slots=True, kw_only=True)
class Row:
    """``most``: the larger the better. CPU is the daemon's per piece of work, where ``work`` does not say otherwise."""

    work: str
    unit: str
    samples: list[float]
    target: float | None = None
    cpu_ms: list[float] = field(default_factory=list)
    cpu_target_ms: float | None = None
    most: bool = False
    pace_ms: float = 0.0

    @property
    def best(self) -> float:
        return max(self.samples) if self.most else min(self.samples)

    @property
    def met(self) -> str:
        """By the median, or by the best alone where others may have had the machine."""
        if self.target is None and self.cpu_target_ms is None:
            return ""
        if self._meets(median(self.samples), median(self.cpu_ms) if self.cpu_ms else 0.0):
            return "yes"
        return "at best" if self._meets(self.best, min(self.cpu_ms, default=0.0)) else "no"

    def _meets(self, value: float, cpu_ms: float) -> bool:
        sign = -1 if self.most else 1
        in_time = self.target is None or sign * value <= sign * self.target
        return in_time and (self.cpu_target_ms is None or cpu_ms <= self.cpu_target_ms)

    def cells(self) -> list[str]:
        cpu = f"{_number(min(self.cpu_ms))}, {_number(median(self.cpu_ms))}" if self.cpu_ms else ""
        targets = [f"{_number(self.target)} {self.unit}"] if self.target is not None else []
        targets += [f"CPU {_number(self.cpu_target_ms)} ms"] if self.cpu_target_ms is not None else []
        values = [f"{_number(self.best)} {self.unit}", f"{_number(median(self.samples))} {self.unit}"]
        return [self.work, *values, cpu, ", ".join(targets), self.met, _number(self.pace_ms)]

    def document(self) -> dict[str, Any]:
        return {
            "work": self.work,
            "unit": self.unit,
            "best": self.best,
            "median": median(self.samples),
            "samples": self.samples,
            "cpuMs": self.cpu_ms,
            "target": self.target,
            "cpuTargetMs": self.cpu_target_ms,
            "met": self.met,
            "paceMs": self.pace_ms,
        }


def _number(value: float) -> str:
    """Three digits, no exponent."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}".rstrip("0").rstrip(".") if value else "0"


TITLES = ["work", "best", "median", "CPU ms: best, median", "target", "met", "pace ms"]


def head() -> str:
    return f"| {' | '.join(TITLES)} |\n|{'---|' * len(TITLES)}"


def line(row: Row) -> str:
    return f"| {' | '.join(row.cells())} |"


@dataclass(slots=True, frozen=True, kw_only=True)
class Settings:
    """``repeat`` multiplies how often everything is done."""

    repeat: float = 1.0
    idle_wait_s: float = 65.0

    def times(self, usual: int) -> range:
        return range(max(1, round(usual * self.repeat)))


Measure = Callable[[Settings], Iterator[Row]]
