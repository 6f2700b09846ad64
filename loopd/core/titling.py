"""A session's title as its state knows it: which one holds, which text asks for another, and what came of that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loop_protocol.v1.events import SessionTitle
from loop_protocol.v1.types import ErrorInfo, Title, Usage, UserMessage

from .announce import Announce
from .history import History

Mode = Literal["off", "first-prompt", "all-prompts"]


@dataclass(slots=True)
class Titles:
    """``stored`` is a title of its own, not the fallback that the history gives. ``error`` is why the last title that
    was to come by itself did not; ``usage`` is what all requests for titles took since the session was opened."""

    history: History
    announce: Announce
    stored: Title | None = None
    error: ErrorInfo | None = None
    usage: Usage | None = None

    @property
    def current(self) -> Title | None:
        """None for a session without eligible text: clients show ``New session`` (T-4)."""
        return self.stored or self.history.fallback

    def given_by(self, message: UserMessage) -> Title | None:
        """The fallback, where the session had no title before that message (T-2)."""
        first = self.history.fallback
        return first if self.stored is None and first is not None and first.message_indices == [message.index] else None

    def is_asked_by(self, message: UserMessage, mode: Mode) -> bool:
        """Whether the newest text of the conversation wants a title to be generated (T-3). A person's own is kept."""
        match mode:
            case "off":
                return False
            case "first-prompt":
                return self.given_by(message) is not None
            case "all-prompts":
                return self.stored is None or self.stored.source != "user"

    def sources(self, mode: Mode) -> list[int]:
        """The messages that a title is made of."""
        return self.history.texts if mode == "all-prompts" else self.history.texts[:1]

    # ``spent``: what the request for it took. It is told with what came of it, so that a replica can follow.

    def change(self, title: Title, spent: Usage | None = None) -> None:
        """It was just saved."""
        self.stored, self.error = title, None
        self.announce.publish(SessionTitle(title=title, usage=self._counted(spent)))

    def fail(self, error: ErrorInfo, spent: Usage | None = None) -> None:
        """The title stays what it is, and the session says so until the next one succeeds (T-11)."""
        self.error = error
        self.announce.publish(SessionTitle(error=error, usage=self._counted(spent)))

    def spend(self, spent: Usage | None) -> None:
        """Nothing came of it but the bill."""
        if spent is not None:
            self.announce.publish(SessionTitle(usage=self._counted(spent)))

    def _counted(self, spent: Usage | None) -> Usage | None:
        if spent is None:
            return None
        self.usage = spent if self.usage is None else self.usage + spent
        return self.usage
