"""A turn that could not be had is asked for again: a few times, after waits that show, and never once it was seen."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import pytest
import trio
from trio.testing import MockClock

from loop_protocol.v1.types import Message, ModelRef, TextBlock, Usage
from loopd.agent import (
    Delta,
    ModelError,
    ModelRequest,
    Reply,
    RetryWait,
    TextDelta,
    ThinkingDelta,
    ToolCallDelta,
)
from loopd.agent.retry import JITTER, PATIENCE_S, PAUSE_S, TRIES, respond

ANSWER = Reply([TextBlock("done")], Usage(1, 1), "stop")
BUSY = ModelError("overloaded", "the provider is busy")
Turn = Reply | ModelError | tuple[Delta, ModelError]


@dataclass
class Flaky:
    """Its turns one after the other, the last again and again; one may say something before it fails."""

    turns: list[Turn]
    asked_at: list[float] = field(default_factory=list)
    ref: ModelRef = field(default_factory=lambda: ModelRef("p", "m"))
    input: frozenset[str] = frozenset({"text"})

    def encode(self, group: Sequence[Message]) -> bytes:
        raise NotImplementedError(group)

    async def respond(self, request: ModelRequest, say: Callable[[Delta], None]) -> Reply:
        assert request is REQUEST
        await trio.lowlevel.checkpoint()
        self.asked_at.append(trio.current_time())
        turn = self.turns.pop(0) if len(self.turns) > 1 else self.turns[0]
        if isinstance(turn, tuple):
            say(turn[0])
            raise turn[1]
        if isinstance(turn, ModelError):
            raise turn
        say(TextDelta("done"))
        return turn


class Context:
    def __init__(self) -> None:
        self.said: list[object] = []

    def say(self, said: object) -> None:
        self.said.append(said)

    @property
    def waits(self) -> list[RetryWait]:
        return [said for said in self.said if isinstance(said, RetryWait)]


REQUEST: ModelRequest = object()  # type: ignore[assignment]
Ask = Callable[[Flaky], Awaitable[Reply]]


@pytest.fixture
def context() -> Context:
    return Context()


@pytest.fixture
def ask(context: Context) -> Ask:
    return lambda model: respond(model, REQUEST, context)  # type: ignore[arg-type]


async def test_what_passes_is_asked_again_and_the_wait_shows(
    context: Context, ask: Ask, autojump_clock: MockClock
) -> None:
    model = Flaky([BUSY, ANSWER])
    assert await ask(model) is ANSWER
    [wait] = context.waits
    assert wait.reason == "the provider is busy"
    assert context.said == [wait, TextDelta("done")]
    assert autojump_clock.current_time() == pytest.approx(wait.wait_s)


async def test_the_waits_grow_differ_and_end(context: Context, ask: Ask, autojump_clock: MockClock) -> None:
    model = Flaky([BUSY])
    seen: set[float] = set()
    for _ in range(20):
        context.said.clear()
        with pytest.raises(ModelError, match=rf"is busy \(asked {TRIES} times\)") as caught:
            await ask(model)
        assert caught.value.kind == "overloaded"
        waits = [wait.wait_s for wait in context.waits]
        for failed, wait in enumerate(waits):
            assert PAUSE_S * 2**failed * (1 - JITTER) <= wait <= PAUSE_S * 2**failed
        assert len(waits) == TRIES - 1
        seen.update(waits)
    assert len(seen) > 50
    assert autojump_clock.current_time() < 20 * 10


@pytest.mark.parametrize("after_s", [5.0, float(PATIENCE_S)])
async def test_it_waits_as_long_as_the_provider_asks_for(
    after_s: float, context: Context, ask: Ask, autojump_clock: MockClock
) -> None:
    await ask(Flaky([ModelError("rate_limit", "slowly", retry_after_s=after_s), ANSWER]))
    assert [wait.wait_s for wait in context.waits] == [after_s]
    assert autojump_clock.current_time() == pytest.approx(after_s)


async def test_no_wait_at_all_is_never_taken_literally(context: Context, ask: Ask, autojump_clock: MockClock) -> None:
    await ask(Flaky([ModelError("rate_limit", "slowly", retry_after_s=0), ANSWER]))
    assert autojump_clock.current_time() >= PAUSE_S * (1 - JITTER)
    assert context.waits


@pytest.mark.parametrize(
    ("after_s", "text"), [(61, "in 61 s"), (1_400_000, "in 16 days"), (7200, "in 2 hours"), (300, "in 5 minutes")]
)
async def test_a_wait_beyond_patience_is_an_error_at_once_that_names_it(
    after_s: float, text: str, context: Context, ask: Ask, autojump_clock: MockClock
) -> None:  # K-30
    model = Flaky([ModelError("rate_limit", "slowly", retry_after_s=after_s)])
    with pytest.raises(ModelError, match=text) as caught:
        await ask(model)
    assert caught.value.kind == "rate_limit"
    assert not context.said
    assert len(model.asked_at) == 1
    assert autojump_clock.current_time() == 0


@pytest.mark.parametrize("delta", [TextDelta("a"), ThinkingDelta("a"), ToolCallDelta("c", "bash", "{")])
async def test_what_was_seen_is_never_asked_for_again(delta: Delta, context: Context, ask: Ask) -> None:
    model = Flaky([(delta, BUSY), ANSWER])
    with pytest.raises(ModelError) as caught:
        await ask(model)
    assert caught.value is BUSY
    assert context.said == [delta]
    assert len(model.asked_at) == 1


async def test_what_was_seen_counts_in_a_later_try_too(context: Context, ask: Ask, autojump_clock: MockClock) -> None:
    model = Flaky([BUSY, (TextDelta("a"), BUSY), ANSWER])
    with pytest.raises(ModelError):
        await ask(model)
    assert len(context.waits) == 1
    assert autojump_clock.current_time() > 0


@pytest.mark.parametrize("kind", ["auth", "refused", "incomplete", "content_filter", "provider"])
async def test_what_does_not_pass_is_not_asked_again(kind: str, context: Context, ask: Ask) -> None:
    model = Flaky([ModelError(kind, "no"), ANSWER])
    with pytest.raises(ModelError, match="no"):
        await ask(model)
    assert not context.said


async def test_a_stop_ends_the_wait_at_once(context: Context, ask: Ask, autojump_clock: MockClock) -> None:
    model = Flaky([ModelError("rate_limit", "slowly", retry_after_s=60)])
    with trio.move_on_after(1) as run:
        await ask(model)
    assert run.cancelled_caught
    assert autojump_clock.current_time() == pytest.approx(1)
    assert len(model.asked_at) == len(context.waits) == 1
