"""One session's title work, beside the runs, which it never delays: one request at a time, for the newest text.

A title is accepted at its check in the store's turn, right before its write. What supersedes it earlier makes it stale,
and nothing comes of it then; what supersedes it later is written after it (T-10).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec
import trio

from loop_protocol.v1.types import (
    ErrorInfo,
    ModelRef,
    TextBlock,
    Title,
    ToolCallBlock,
    Usage,
    UserMessage,
)

from .agent import Delta, ModelError, ModelRequest, Reply, TextDelta
from .agent.context import ConversationInput
from .agent.prompt import TITLE_PROMPT
from .config import TitlePolicy
from .core.guards import Declined
from .core.history import decode_message
from .core.state import SessionCore
from .core.titles import from_answer, text_of
from .models import ModelUnavailable
from .saving import Saving
from .services import Services
from .storage import StorageError

# Characters of an answer. What is longer is no title, and is not read to its end.
ANSWER = 256 * 1024
# The title says of which messages it was made, and the file that it stands in has a limit.
SOURCES = 50_000
# Bytes of history that are read at once before everybody else gets a turn: pictures stand in the same lines.
AT_ONCE = 64 * 1024

log = logging.getLogger("loopd.title")
_encode = msgspec.json.Encoder().encode


class TitleFailed(Exception):
    """No title comes of it; ``kind`` for programs."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True, eq=False)
class Work:
    """One title to be. ``announced``: its text was seen. Cancelling ``scope`` makes it stale. ``title`` is what was
    generated, ``spent`` what that took and was not told yet; ``error`` is why nothing came of it."""

    announced: trio.Event = field(default_factory=trio.Event)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    done: trio.Event = field(default_factory=trio.Event)
    title: Title | None = None
    spent: Usage | None = None
    written: bool = False
    error: Exception | None = None

    @property
    def stale(self) -> bool:
        return self.scope.cancel_called


class TitleWorker:
    """``nursery`` is the session's: its end is the end of what goes on here."""

    def __init__(self, core: SessionCore, saving: Saving, services: Services, policy: TitlePolicy) -> None:
        self.nursery: trio.Nursery
        self.policy = policy
        self._core = core
        self._saving = saving
        self._services = services
        self._current: Work | None = None
        # A finished title whose session has a pending save: it waits for the flush (T-9).
        self._held: Work | None = None

    # --- what starts it, and what makes it stale ----------------------------------------------------------------------

    def accept(self, message: UserMessage) -> None:
        """A text became part of the conversation: what older ones asked for is stale. What this one asks for begins
        once it is announced, so that no title comes before its text."""
        core, mode = self._core, self.policy.mode
        if core.history.texts[-1:] != [message.index]:
            return
        self.cancel()
        is_over = core.closed or core.disposing or self._services.draining
        if core.titles.is_asked_by(message, mode) and not is_over:
            before, work = self._begin()
            self.nursery.start_soon(self._perform_beside, work, before)

    def announce(self) -> None:
        """The newest text was seen."""
        if self._current:
            self._current.announced.set()

    def cancel(self) -> bool:
        """No title of older work is accepted from here on; whether there was any. ``end`` waits for it."""
        works = [work for work in (self._current, self._held) if work is not None and not work.stale]
        for work in works:
            work.scope.cancel()
        self._held = None
        return bool(works)

    def interrupt(self) -> None:
        """No request goes on from here on. A title that waits for a flush still does."""
        if self._current:
            self._current.scope.cancel()

    @property
    def busy(self) -> bool:
        return self._current is not None

    @property
    def end(self) -> Callable[[], Awaitable[None]]:
        """Waits for what goes on now, and for nothing that comes later: who cancels does not wait for newer work."""
        return self._current.done.wait if self._current else trio.lowlevel.checkpoint

    async def settled(self) -> None:
        """Until nothing goes on here. A finished title that waits for a flush does not count (T-9)."""
        while self._current:
            await self._current.done.wait()

    async def drain(self) -> None:
        """Cancel and wait: no request and no write of a title is open then."""
        self.cancel()
        await self.end()

    def begin_refresh(self) -> Callable[[], Awaitable[Title]]:
        """Older work is stale; what this answers generates the title, and can be cancelled from now on."""
        self.cancel()
        before, work = self._begin()
        work.announced.set()
        return partial(self._refresh, work, before)

    async def _refresh(self, work: Work, before: Work | None) -> Title:
        """In the session's slot, also instead of a person's own title (T-8). Raises ``Declined``, and ``StorageError``
        where the write fails."""
        await self._perform(work, before)
        if work.written and work.title:
            return work.title
        if work.stale or work.error is None:
            raise Declined("title_failed", "the title work was cancelled", reason="cancelled")
        if isinstance(work.error, StorageError):
            raise work.error
        error = _described(work.error)
        raise Declined("title_failed", error.message, reason=error.kind)

    async def write_held(self) -> None:
        """The pending save is over, and the title that waited for that is written."""
        if work := self._held:
            self._held, self._current = None, work
            work.scope, work.done = trio.CancelScope(), trio.Event()
            await self._perform_beside(work, None)

    # --- its course ---------------------------------------------------------------------------------------------------

    def _begin(self) -> tuple[Work | None, Work]:
        before, self._current = self._current, Work()
        return before, self._current

    async def _perform_beside(self, work: Work, before: Work | None) -> None:
        """Nobody asked for it, so what goes wrong is only told (T-11)."""
        await self._perform(work, before, contained=True)

    async def _perform(self, work: Work, before: Work | None, *, contained: bool = False) -> None:
        try:
            if before is not None:
                with trio.CancelScope(shield=True):  # it is stale, and what is left of it is bounded
                    await before.done.wait()
            await self._attempt(work)
            self._tell(work, contained=contained)
        finally:
            if self._current is work:
                self._current = None
            work.done.set()

    async def _attempt(self, work: Work) -> None:
        try:
            with work.scope:
                await work.announced.wait()
                if work.title is None:
                    work.title = await self._made(work)
                work.written = await self._saving.retitle(work.title, lambda: self._accept(work), work.spent)
        except Exception as error:  # boundary: title job; outside the scope, where a clean-up that raises lands too
            work.error = error

    def _accept(self, work: Work) -> bool:
        """In the store's turn. Over a pending save nothing of the session is changed (S-15)."""
        if self._core.unsaved is not None and not work.stale:
            self._held = work
        return not work.stale and self._held is not work

    def _tell(self, work: Work, *, contained: bool) -> None:
        """What did not become the title; nothing is said of what is stale but what it took."""
        spent, work.spent = work.spent, None
        if work.written:
            return
        if contained and work.error is not None and not work.stale:
            error = _described(work.error)
            # Its kind alone: a service's own words may quote the conversation, which is in no log.
            log.warning("session %s: no title: %s", self._core.id, error.kind)
            self._core.titles.fail(error, spent)
        else:
            self._core.titles.spend(spent)

    # --- one request --------------------------------------------------------------------------------------------------

    async def _made(self, work: Work) -> Title:
        """What the policy says, of the texts that there are. Raises :class:`TitleFailed`, ``ModelError`` and
        ``ModelUnavailable``."""
        history, policy = self._core.history, self.policy
        if policy.mode == "off":
            assert history.fallback is not None
            return history.fallback
        sources = list(self._core.titles.sources(policy.mode))
        texts = await self._texts(sources)
        # Without an effort: thinking hard is not asked for, and would use up the few tokens of the answer.
        ref = policy.model or ModelRef(self._core.model.provider, self._core.model.id)
        with trio.move_on_after(policy.timeout_ms / 1000) as deadline:
            reply = await self._asked(ref, texts)
            work.spent = reply.usage
            return Title(
                text=_title_of(reply),
                source="model",
                message_indices=sources,
                model=ModelRef(ref.provider, ref.id),
            )
        assert deadline.cancelled_caught
        raise TitleFailed("timeout", f"{ref} did not answer within {policy.timeout_ms} ms")

    async def _texts(self, sources: list[int]) -> bytes:
        """The texts as compact JSON. A long conversation fails before all of it is read."""
        history, limit = self._core.history, self.policy.max_input_bytes
        if len(sources) > SOURCES:
            raise TitleFailed("input_too_large", f"there are more than {SOURCES} texts")
        too_large = TitleFailed("input_too_large", f"the texts have more than {limit} bytes as JSON")
        texts: list[str] = []
        size = 1  # the opening bracket; a comma or the closing one follows each text
        if size + 4 * len(sources) > limit:  # each has a character, two quotes and what follows them
            raise too_large
        read = 0
        for index in sources:
            line = history.line(index)
            if (read := read + len(line)) > AT_ONCE:
                await trio.lowlevel.checkpoint()
                read = len(line)
            message = decode_message(line)
            assert isinstance(message, UserMessage)
            text = text_of(message)
            size += 1 + (len(text) if len(text) > limit else len(_encode(text)))
            if size > limit:
                raise too_large
            texts.append(text)
        return _encode(texts)

    async def _asked(self, ref: ModelRef, texts: bytes) -> Reply:
        """One turn of a conversation of its own, without tools, and asked once (T-6, T-11)."""
        model = self._services.models.resolve(ref)
        asked = ConversationInput(model)
        asked.add(UserMessage(index=0, content=[TextBlock(texts.decode())], timestamp=self._core.clock.now_ms()))
        request = ModelRequest(system=TITLE_PROMPT, input=asked, max_output_tokens=self.policy.max_output_tokens)
        return await model.respond(request, _Heard())


@dataclass(slots=True)
class _Heard:
    """Listens to an answer, and stops one that is far too long."""

    characters: int = 0

    def __call__(self, delta: Delta) -> None:
        if isinstance(delta, TextDelta):
            self.characters += len(delta.text)
        if self.characters > ANSWER:
            raise ModelError("provider", f"answered a request for a title with more than {ANSWER} characters")


def _title_of(reply: Reply) -> str:
    """Raises :class:`TitleFailed` where the answer is none, or not a whole one."""
    if any(isinstance(block, ToolCallBlock) for block in reply.content):
        raise TitleFailed("tool_call", "the model called a tool where a title was due")
    if reply.stop_reason != "stop":
        raise TitleFailed("incomplete", f"the model's answer was cut off ({reply.stop_reason})")
    said = "".join(block.text for block in reply.content if isinstance(block, TextBlock))
    text = from_answer(said)
    if not text:
        raise TitleFailed("empty", "the model answered nothing that can be a title")
    return text


def _described(error: Exception) -> ErrorInfo:
    """For people and programs. A bug is logged with its traceback and named as such."""
    match error:
        case ExceptionGroup(exceptions=[Exception() as only]):
            return _described(only)
        case TitleFailed() | ModelError():
            return ErrorInfo(error.kind, str(error))
        case ModelUnavailable():
            return ErrorInfo("model_unavailable", str(error))
        case StorageError():
            return ErrorInfo("save_failed", str(error))
    log.error("a fault in title work", exc_info=error)
    return ErrorInfo("internal", f"a fault in the daemon: {type(error).__name__}: {error}")
