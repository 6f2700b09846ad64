"""Disks whose every call a test sees: one that counts them, one that breaks at the k-th."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from loopd.storage.fs import FileSystem


class Steps(FileSystem):
    """Every call goes through :meth:`step`. Nothing is really synced: no test here pulls the plug."""

    def step(self, name: str, args: tuple[Any, ...], go: Callable[[], Any]) -> Any:  # noqa: ARG002 for subclasses
        return go()


def _through_step(name: str) -> Callable[..., Any]:
    real = FileSystem.fstat if name == "fsync" else getattr(FileSystem, name)

    def call(self: Steps, *args: Any, **named: Any) -> Any:
        return self.step(name, args, lambda: real(self, *args, **named))

    return call


for _name in [name for name in vars(FileSystem) if not name.startswith("_")]:
    setattr(Steps, _name, _through_step(_name))


class Counting(Steps):
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.written = 0

    def step(self, name: str, args: tuple[Any, ...], go: Callable[[], Any]) -> Any:  # noqa: ARG002 see Steps
        self.calls.append(name)
        result = go()
        if name == "write":
            self.written += result
        return result


class Faulty(Steps):
    """The k-th call raises, before or after it took effect; ``short``: the k-th write writes 7 bytes, the next raises.

    ``lasting``: so do all calls after it, or with ``short`` all writes, until it is disarmed. ``hit`` names the first.
    """

    def __init__(self) -> None:
        self.at = 0
        self.number = 0
        self.after = self.short = self.lasting = False
        self.hit: str | None = None

    def arm(self, at: int, number: int, *, after: bool = False, short: bool = False, lasting: bool = False) -> None:
        self.at, self.number, self.after, self.short, self.lasting, self.hit = at, number, after, short, lasting, None

    def disarm(self) -> None:
        self.at, self.lasting = 0, False

    @property
    def reached(self) -> bool:
        """There were as many calls, whether one of them could be broken or not."""
        return self.at <= 0

    def step(self, name: str, args: tuple[Any, ...], go: Callable[[], Any]) -> Any:
        if self.short and name != "write":
            return go()
        self.at -= 1
        if self.at > 0 or (self.at < 0 and not self.lasting):
            return go()
        if self.short and self.hit is None:
            self.hit, self.at = name, 1  # the next call is the write of the rest
            return os.pwrite(args[0], bytes(args[1])[:7], args[2])
        self.hit = self.hit or name
        done = None
        with suppress(OSError):
            done = go() if self.after or name == "close" else None
        if name == "open" and done is not None:
            os.close(done)
        raise OSError(self.number, os.strerror(self.number))
