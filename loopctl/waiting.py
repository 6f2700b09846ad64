"""Inputs that wait for their turn, in words: how many, why they do not go on, what one is, and what has changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from loop_protocol.client import Client
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.events import EventParams, EventsLost, MessageStart, QueueChanged, RunStarted, SessionReplaced
from loop_protocol.v1.types import ImageBlock, Pause, QueuedItem, QueueState, SessionState, TextBlock

from .reach import ANSWER
from .terminal import ELLIPSIS, note, shortened, visible

# Why it does not go on, and what makes it.
_PAUSED: dict[Pause, tuple[str, str]] = {
    "stopped": ("the run was stopped", "`loopctl resume{of}` goes on"),
    "error": ("a run failed", "`loopctl resume{of}` goes on"),
    "save_failed": ("the conversation is not saved", "`loopctl flush{of}` saves it and goes on"),
    "draining": ("the daemon takes no new work", "`loopctl drain --cancel` lets it go on"),
}
# An edit of its text would not help: what a model does not take are the images, and they stay.
_NOT_ACCEPTED = "`loopctl queue{of} remove` takes it out, `loopctl resume{of}` tries again"
LINE = 60


def counted(inputs: int) -> str:
    return "1 queued input" if inputs == 1 else f"{inputs} queued inputs"


def pause_of(queue: QueueState, of: str = "") -> str | None:
    """Why the queue does not go on, and what to do. ``of``: the option that names its session, where one is needed."""
    if queue.paused is None:
        return None
    why, remedy = _PAUSED[queue.paused]
    if queue.error is not None:
        why, remedy = f"the next one was not accepted ({queue.error.message})", _NOT_ACCEPTED
    return f"{why}; {remedy.format(of=of)}"


def described(queue: QueueState, of: str = "") -> str | None:
    """How much waits, and why it does not go on if it does not."""
    if not queue.items:
        return None
    pause = pause_of(queue, of)
    return counted(len(queue.items)) + (f", paused: {pause}" if pause else "")


def tell_if_paused(queue: QueueState, of: str = "") -> None:
    """After something that others' inputs wait for: nothing of theirs starts by itself now."""
    if queue.paused is not None:
        note(f"{described(queue, of)}; `loopctl queue{of}` shows what waits")


def tell_if_paused_now(client: Client, session_id: str, of: str = "") -> None:
    """The same of a session whose queue is not known; one that was closed meanwhile has none."""
    with suppress(RpcError):
        state: SessionState = client.call("session/state", {"sessionId": session_id}, timeout=ANSWER)
        tell_if_paused(state.queue, of)


def tell_if_asking(state: SessionState) -> None:
    """The run that inputs wait for waits itself, for a person."""
    if state.approvals:
        note("the run waits for an approval; `loopctl approvals` shows it")


def label(item: QueuedItem, limit: int | None = None) -> str:
    """An input in one line: the first one of its text in at most ``limit`` columns, and its images by their size."""
    text = "".join(block.text for block in item.content if isinstance(block, TextBlock))
    images = [f"({one.mime_type}, {_size(one.bytes or 0)})" for one in item.content if isinstance(one, ImageBlock)]
    first, *more = text.strip().split("\n")
    line = f"{first} {ELLIPSIS}" if more else first
    if limit is not None:
        line = shortened(visible(line), max(1, limit - len(" ".join(["", *images]))))
    return " ".join([*([line] if line else []), *images])


def _size(count: int) -> str:
    return f"{count} bytes" if count < 1024 else f"{count / 1024:.0f} KiB" if count < 1 << 20 else f"{count >> 20} MiB"


class QueueNews:
    """What changes in a queue, a line for each change; the events tell the whole list each time."""

    def __init__(self, queue: QueueState | None, of: str) -> None:
        """``queue``: None where it is not known what waits. ``of``: the option that names its session, where one is
        needed."""
        self._queue = queue
        self._of = of
        self._started: set[str] = set()

    def of(self, params: EventParams) -> list[str]:
        match params.event:
            case RunStarted(item_id=str() as item) | MessageStart(item_id=str() as item):
                self._started.add(item)
            case SessionReplaced(new=new):
                self._queue = new.queue
            case EventsLost():
                self._queue = None
            case QueueChanged(items, paused, error):
                before, self._queue = self._queue, QueueState(items, paused, error)
                return [f"queue: {change}" for change in self._changes(before, self._queue)]
        return []

    def _changes(self, before: QueueState | None, now: QueueState) -> Iterator[str]:
        if before is None:
            yield described(now, self._of) or "nothing waits"
            return
        had = {item.item_id: item for item in before.items}
        has = {item.item_id: item for item in now.items}
        for id, item in _missing(had, has):
            yield f"{id} starts" if id in self._started else f"{id} was removed: {label(item, LINE)}"
        for id, item in _missing(has, had):
            yield f"{id}{' (steers)' * item.steer} waits: {label(item, LINE)}"
        kept = [(had[id], item) for id, item in has.items() if id in had]
        yield from (_change(old, new) for old, new in kept if old != new)
        if all(old == new for old, new in kept):
            yield from _moved([id for id in had if id in has], [id for id in has if id in had])
        if now.items and (now.paused, now.error) != (before.paused, before.error):
            pause = pause_of(now, self._of)
            yield f"paused: {pause}" if pause else "goes on"


def _missing(those: dict[str, QueuedItem], here: dict[str, QueuedItem]) -> list[tuple[str, QueuedItem]]:
    return [(id, item) for id, item in those.items() if id not in here]


def _change(old: QueuedItem, new: QueuedItem) -> str:
    if old.revision == new.revision:  # nobody edited it: the run that it was to steer is over
        return f"{new.item_id} did not enter the run, and waits for its turn"
    if old.content == new.content:
        return f"{new.item_id} {'steers' if new.steer else 'does not steer'} now"
    return f"{new.item_id}{' (steers)' * new.steer} is now: {label(new, LINE)}"


def _moved(old: list[str], new: list[str]) -> Iterator[str]:
    if old == new:
        return
    for id in new:
        if [one for one in old if one != id] == [one for one in new if one != id]:
            yield f"{id} was moved to {new.index(id)}"
            return
    yield "the order is another one"
