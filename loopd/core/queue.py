"""Inputs that wait for their turn: one ordered list per session, in memory only (Q-1…Q-5).

Every change is decided at once and told as the whole list; ``runs.py`` starts what is next, ``run.py`` lets in what
steers.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from msgspec.structs import replace

from loop_protocol.v1.events import QueueChanged
from loop_protocol.v1.types import ErrorInfo, ImageBlock, Pause, QueuedItem, QueueState, TextBlock, UserBlock

from .announce import Announce
from .guards import Declined
from .history import Request
from .runs import WAITING, ApprovalPolicy

ITEMS = 256
# Each change tells all of the text to every client, and it stays in memory with the images.
CHARACTERS = 256 * 1024
IMAGES = 64 * 1024 * 1024
REMEMBERED = 256

# Which reason stays when there are two: a flush, or the end of a drain, must not undo what a person said.
_STRONGER: tuple[Pause, ...] = ("draining", "save_failed", "error", "stopped")


@dataclass(slots=True, frozen=True)
class Item:
    """``shown`` is what clients see; ``content`` has the images too, ``approvals`` is for a run that it starts."""

    shown: QueuedItem
    content: list[UserBlock]
    request: Request | None = None
    approvals: ApprovalPolicy = WAITING

    @property
    def id(self) -> str:
        return self.shown.item_id


def new_item(
    content: list[UserBlock],
    *,
    steer: bool,
    now_ms: int,
    request: Request | None = None,
    approvals: ApprovalPolicy = WAITING,
) -> Item:
    """Its id is short, since people type it, and random, so that one of another daemon's life names nothing."""
    shown = QueuedItem(
        item_id=uuid.uuid4().hex[:8], revision=1, content=_by_size(content), steer=steer, created_at=now_ms
    )
    return Item(shown, content, request, approvals)


@dataclass(slots=True)
class Queue:
    """``paused`` and ``error`` are as in ``QueueState``: only a queue with items is ever paused. ``refused`` is the
    head that was not acceptable, with the reason."""

    announce: Announce
    items: list[Item] = field(default_factory=list)
    paused: Pause | None = None
    refused: tuple[str, ErrorInfo] | None = None
    # The runs of items that have started. One whose message is not told yet is here already, and in ``items`` still.
    _started: OrderedDict[str, str] = field(default_factory=OrderedDict)

    @property
    def error(self) -> ErrorInfo | None:
        """It is said of that head alone, while it is the head."""
        return self.refused[1] if self.refused and self.items and self.items[0].id == self.refused[0] else None

    def state(self) -> QueueState:
        return QueueState([item.shown for item in self.items], self.paused, self.error)

    def _tell(self) -> None:
        state = self.state()
        self.announce.publish(QueueChanged(state.items, state.paused, state.error))

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Of several changes at once, if there are any: as one, or clients would see what never was."""
        before = self.state()
        yield
        if not self.items:
            self.paused = self.refused = None
        if self.state() != before:
            self._tell()

    # --- what people do -----------------------------------------------------------------------------------------------

    def requested(self, request_id: str) -> Item | None:
        """The item that waits because of that request."""
        return next((item for item in self.items if item.request and item.request.request_id == request_id), None)

    def add(self, item: Item) -> None:
        """To the end. Raises ``Declined`` where it has no room."""
        self._require_room([*self.items, item])
        self.items.append(item)
        self._tell()

    def edit(self, item_id: str, revision: int, content: list[UserBlock] | None, steer: bool | None) -> Item:
        """Raises ``Declined`` for an item that is gone, and where ``revision`` is not the one that it has. An edit that
        changes nothing is none."""
        place, item = self._find(item_id)
        now = item.shown.revision
        if revision != now:
            raise Declined("conflict", f"item {item_id} was edited since: it has revision {now}", revision=now)
        content = item.content if content is None or content == item.content else content
        steer = item.shown.steer if steer is None else steer
        if content is item.content and steer == item.shown.steer:
            return item
        shown = replace(item.shown, revision=now + 1, content=_by_size(content), steer=steer)
        edited = dataclasses.replace(item, shown=shown, content=content)
        self._require_room([*self.items[:place], edited, *self.items[place + 1 :]])
        self.items[place] = edited
        if self.refused and self.refused[0] == item_id and content is not item.content:
            self.refused = None  # what it says now was not tried yet
        self._tell()
        return edited

    def move(self, item_id: str, to: int) -> Item:
        place, item = self._find(item_id)
        with self._telling():
            del self.items[place]
            self.items.insert(to, item)
        return item

    def remove(self, item_id: str) -> Item:
        place, item = self._find(item_id)
        with self._telling():
            del self.items[place]
        return item

    def _find(self, item_id: str) -> tuple[int, Item]:
        if run_id := self._started.get(item_id):
            raise Declined("queue_item_started", f"item {item_id} has started", runId=run_id)
        for place, item in enumerate(self.items):
            if item.id == item_id:
                return place, item
        raise Declined("queue_item_not_found", f"no item {item_id} waits here")

    # --- pausing ------------------------------------------------------------------------------------------------------

    def pause(self, reason: Pause, error: ErrorInfo | None = None) -> None:
        """It does not go on by itself (Q-3). Of two reasons the stronger one stays; ``error`` is about the head, and
        stays with its reason."""
        with self._telling():
            self._pause(reason, error)

    def _pause(self, reason: Pause, error: ErrorInfo | None = None) -> None:
        if all(item.id in self._started for item in self.items):
            return
        if self.paused is not None and _STRONGER.index(reason) < _STRONGER.index(self.paused):
            return
        if error is not None:
            self.refused = self.items[0].id, error
        elif reason != self.paused:
            self.refused = None
        self.paused = reason

    def lift(self, *reasons: Pause) -> None:
        """It may go on, if it is paused for one of those reasons; any reason where none is given."""
        with self._telling():
            if not reasons or self.paused in reasons:
                self.paused = self.refused = None

    # --- taking -------------------------------------------------------------------------------------------------------

    @property
    def next(self) -> Item | None:
        """What is due when nothing else goes on."""
        return self.items[0] if self.items and self.paused is None else None

    @property
    def next_steering(self) -> Item | None:
        """What is due at a safe boundary, whether or not the queue is paused: it was asked for."""
        return next((item for item in self.items if item.shown.steer), None)

    def begin(self, item: Item, run_id: str) -> None:
        """It is about to be part of that run: nobody changes it from here on, though it is seen to wait until its
        message is seen. ``end`` follows, or ``leave`` where it could not enter."""
        self._started[item.id] = run_id
        while len(self._started) > REMEMBERED:
            self._started.popitem(last=False)

    def end(self, item_id: str) -> None:
        """Its message was told. The event that named it comes before the shorter list, so that whoever waits for it
        knows that nobody removed it."""
        with self._telling():
            self.items = [item for item in self.items if item.id != item_id]

    def leave(self, item: Item, error: ErrorInfo | None = None) -> None:
        """It did not enter. With an ``error`` it was not acceptable: it becomes the head, and the queue is paused."""
        self._started.pop(item.id, None)
        if error is not None:
            with self._telling():
                self.items = [_ordinary(item), *(one for one in self.items if one.id != item.id)]
                self._pause("error", error)

    def settle(self, reason: Pause | None) -> None:
        """The run is over. What was to steer it becomes the head, in its order (Q-2): ordinary items from here on, or
        they would enter a run that nobody meant. ``reason``: the run did not end well."""
        with self._telling():
            # Of one that has started, a fault may have kept ``end`` away.
            waiting = [item for item in self.items if item.id not in self._started]
            left = [_ordinary(item) for item in waiting if item.shown.steer]
            self.items = left + [item for item in waiting if not item.shown.steer]
            if reason is not None:
                self._pause(reason)

    def _require_room(self, items: Sequence[Item]) -> None:
        blocks = [block for item in items for block in item.content]
        characters = sum(len(block.text) for block in blocks if isinstance(block, TextBlock))
        images = sum(len(block.data or "") for block in blocks if isinstance(block, ImageBlock))
        if len(items) > ITEMS or characters > CHARACTERS or images > IMAGES:
            raise Declined(
                "limit_exceeded",
                f"a queue holds {ITEMS} inputs, with {CHARACTERS} characters and {IMAGES >> 20} MiB of images in all; "
                "send this one when its turn has come",
                limit="queue",
            )


def _ordinary(item: Item) -> Item:
    return dataclasses.replace(item, shown=replace(item.shown, steer=False))


def _by_size(content: Sequence[UserBlock]) -> list[UserBlock]:
    return [
        ImageBlock(mime_type=block.mime_type, bytes=len(block.data or "") * 3 // 4)
        if isinstance(block, ImageBlock)
        else block
        for block in content
    ]
