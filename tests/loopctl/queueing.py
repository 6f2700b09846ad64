"""Queues, their events and their changes, as a scripted daemon tells them."""

from __future__ import annotations

from typing import Any

import msgspec

from loop_protocol.v1.types import QueuedItem, QueueState, TextBlock, UserBlock


def item(id: str, text: str = "later", *, revision: int = 1, steer: bool = False, images: Any = ()) -> QueuedItem:
    content: list[UserBlock] = [TextBlock(text), *images]
    return QueuedItem(item_id=id, revision=revision, content=content, steer=steer, created_at=1)


def waiting(*items: QueuedItem, **more: Any) -> QueueState:
    return QueueState(list(items), **more)


def changed(queue: QueueState) -> dict[str, Any]:
    """The event that tells it."""
    return {"type": "queue_changed"} | on_the_wire(queue)


def added(one: QueuedItem, run_id: str | None = None) -> dict[str, Any]:
    """What `queue/add` and the other changes answer."""
    return on_the_wire(one) | ({"runId": run_id} if run_id else {})


def on_the_wire(value: Any) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    return document
