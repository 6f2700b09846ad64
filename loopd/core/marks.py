"""What a person does to a session without saying anything: reading and pinning it."""

from __future__ import annotations


def is_seen(message_count: int, *, saved: int) -> bool:
    """Whether somebody who saw so many messages has seen the conversation; an empty one is never read (S-6)."""
    return message_count == saved > 0


def pin_of(pinned_at: int | None, *, pinned: bool, now_ms: int) -> int | None:
    """The stamp of a session that shall be ``pinned``, or not: what is pinned already keeps its own (S-7)."""
    return (pinned_at or now_ms) if pinned else None
