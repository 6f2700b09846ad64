"""The queue by itself: whatever is done to it, in whatever order, against a plain list."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loop_protocol.v1.events import Event, QueueChanged
from loop_protocol.v1.types import ErrorInfo, ImageBlock, Pause, TextBlock, UserBlock
from loopd.core.guards import Declined
from loopd.core.history import Request
from loopd.core.queue import CHARACTERS, IMAGES, ITEMS, Item, Queue, new_item

REASONS: tuple[Pause, ...] = ("draining", "save_failed", "error", "stopped")  # the later one stays
NOT_TAKEN = ErrorInfo("unsupported_input", "no images")


class Told:
    def __init__(self) -> None:
        self.events: list[QueueChanged] = []

    def publish(self, event: Event) -> None:
        assert isinstance(event, QueueChanged)
        self.events.append(event)

    def stream(self, *_: object) -> None:
        raise AssertionError("a queue streams nothing")


def a_queue(*words: str, steer: bool = False) -> tuple[Queue, list[Item], Told]:
    told = Told()
    queue = Queue(told)
    items = [an_item(word, steer=steer) for word in words]
    for item in items:
        queue.add(item)
    told.events.clear()
    return queue, items, told


def an_item(text: str = "x", *images: str, steer: bool = False, request: Request | None = None) -> Item:
    content: list[UserBlock] = [TextBlock(text)] if text else []
    content += [ImageBlock(mime_type="image/png", data=data) for data in images]
    return new_item(content, steer=steer, now_ms=7, request=request)


def ids(queue: Queue) -> list[str]:
    return [item.id for item in queue.items]


@contextmanager
def declined(kind: str, queue: Queue, told: Told, **data: Any) -> Iterator[None]:
    """It is, and nothing changed by that (I-10)."""
    before, count = queue.state(), len(told.events)
    with pytest.raises(Declined) as raised:
        yield
    assert (raised.value.kind, raised.value.data) == (kind, data)
    assert (queue.state(), len(told.events)) == (before, count)


class AnyOrder(RuleBasedStateMachine):
    """``model`` is the list as it should be: id, revision, steer. ``entering`` was begun and is not told yet."""

    def __init__(self) -> None:
        super().__init__()
        self.told = Told()
        self.queue = Queue(self.told)
        self.model: list[tuple[str, int, bool]] = []
        self.paused: Pause | None = None
        self.error: tuple[str, ErrorInfo] | None = None  # of which item
        self.running: str | None = None
        self.entering: Item | None = None
        self.gone: dict[str, str | None] = {}  # with the run that each is part of
        self.runs = 0

    @contextmanager
    def change(self) -> Iterator[None]:
        """It is told once, as a whole, if there is anything to tell."""
        before, count = self.queue.state(), len(self.told.events)
        yield
        state = self.queue.state()
        changed = state != before
        assert len(self.told.events) - count == changed
        if changed:
            last = self.told.events[-1]
            assert (last.items, last.paused, last.error) == (state.items, state.paused, state.error)

    def pause_model(self, reason: Pause, error: ErrorInfo | None = None) -> None:
        waiting = [one for one in self.model if self.entering is None or one[0] != self.entering.id]
        if not waiting or (self.paused and REASONS.index(reason) < REASONS.index(self.paused)):
            return
        if reason != self.paused or error is not None:
            self.error = (self.model[0][0], error) if error else None
        self.paused = reason

    def unpause_if_empty(self) -> None:
        if not self.model:
            self.paused = self.error = None

    @rule(steer=st.booleans())
    def add(self, steer: bool) -> None:
        item = an_item(steer=steer)
        with self.change():
            self.queue.add(item)
        self.model.append((item.id, 1, steer))

    def drawn(self, data: st.DataObject) -> int | None:
        """The place of an item that waits; None where a change of what was drawn is refused."""
        known = [one[0] for one in self.model] + list(self.gone)
        chosen = data.draw(st.sampled_from(known)) if known else "nothing"
        run = self.gone.get(chosen)
        if self.entering is not None and self.entering.id == chosen:
            run = self.running
        for place, one in enumerate(self.model):
            if one[0] == chosen and run is None:
                return place
        kind, named = ("queue_item_started", {"runId": run}) if run else ("queue_item_not_found", {})
        with declined(kind, self.queue, self.told, **named):
            self.queue.edit(chosen, 1, None, None)
        with declined(kind, self.queue, self.told, **named):
            self.queue.move(chosen, 0)
        with declined(kind, self.queue, self.told, **named):
            self.queue.remove(chosen)
        return None

    @rule(data=st.data(), words=st.none() | st.sampled_from(["x", "edited"]), steer=st.none() | st.booleans())
    def edit(self, data: st.DataObject, words: str | None, steer: bool | None) -> None:
        if (place := self.drawn(data)) is None:
            return
        item_id, revision, was = self.model[place]
        for stale in (revision - 1, revision + 1):
            with declined("conflict", self.queue, self.told, revision=revision):
                self.queue.edit(item_id, stale, None, steer)
        said = self.queue.items[place].content
        content: list[UserBlock] | None = None if words is None else [TextBlock(words)]
        with self.change():
            self.queue.edit(item_id, revision, content, steer)
        other = content not in (None, said)
        if other or steer not in (None, was):
            self.model[place] = (item_id, revision + 1, was if steer is None else steer)
        if other and self.error and self.error[0] == item_id:
            self.error = None

    @rule(data=st.data(), to=st.integers(0, 6))
    def move(self, data: st.DataObject, to: int) -> None:
        if (place := self.drawn(data)) is None:
            return
        with self.change():
            self.queue.move(self.model[place][0], to)
        self.model.insert(to, self.model.pop(place))

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if (place := self.drawn(data)) is None:
            return
        item_id = self.model.pop(place)[0]
        with self.change():
            self.queue.remove(item_id)
        self.gone[item_id] = None
        self.unpause_if_empty()

    @rule(reason=st.sampled_from(REASONS), error=st.none() | st.just(NOT_TAKEN))
    def pause(self, reason: Pause, error: ErrorInfo | None) -> None:
        error = error if reason == "error" else None
        with self.change():
            self.queue.pause(reason, error)
        self.pause_model(reason, error)

    @rule(reasons=st.sets(st.sampled_from(REASONS), max_size=2))
    def lift(self, reasons: set[Pause]) -> None:
        with self.change():
            self.queue.lift(*reasons)
        if not reasons or self.paused in reasons:
            self.paused = self.error = None

    @precondition(lambda self: self.running is None)
    @rule()
    def start_what_is_next(self) -> None:
        item = self.queue.next
        assert (item is None) == (self.paused is not None or not self.model)
        if item is not None:
            assert item.id == self.model[0][0]
            self.begin(item)

    @precondition(lambda self: self.running is None)
    @rule()
    def prompt(self) -> None:
        self.runs += 1
        self.running = str(self.runs)

    def begin(self, item: Item) -> None:
        if self.running is None:
            self.prompt()
        assert self.running is not None
        with self.change():  # nothing: it is still seen to wait
            self.queue.begin(item, self.running)
        self.entering = item

    @precondition(lambda self: self.running is not None and self.entering is None)
    @rule()
    def begin_what_steers(self) -> None:
        item = self.queue.next_steering
        steering = [one[0] for one in self.model if one[2]]
        assert (item.id if item else None) == (steering[0] if steering else None)
        if item is not None:
            self.begin(item)

    def over(self) -> str:
        assert self.entering is not None
        item_id, self.entering = self.entering.id, None
        return item_id

    @precondition(lambda self: self.entering is not None)
    @rule()
    def end(self) -> None:
        item_id = self.over()
        with self.change():
            self.queue.end(item_id)
        self.model = [one for one in self.model if one[0] != item_id]
        self.gone[item_id] = self.running
        self.unpause_if_empty()
        with self.change():  # once more is nothing
            self.queue.end(item_id)

    @precondition(lambda self: self.entering is not None)
    @rule(error=st.none() | st.just(NOT_TAKEN))
    def leave(self, error: ErrorInfo | None) -> None:
        item = self.entering
        assert item is not None
        item_id = self.over()
        with self.change():
            self.queue.leave(item, error)
        if error is not None:
            (one,) = [one for one in self.model if one[0] == item_id]
            self.model = [(item_id, one[1], False), *(other for other in self.model if other[0] != item_id)]
            self.pause_model("error", error)

    @precondition(lambda self: self.running is not None)
    @rule(reason=st.none() | st.sampled_from(REASONS))
    def settle(self, reason: Pause | None) -> None:
        with self.change():
            self.queue.settle(reason)
        if self.entering is not None:  # a fault kept the end of it away
            item_id = self.over()
            self.model = [one for one in self.model if one[0] != item_id]
            self.gone[item_id] = self.running
        left = [(item_id, revision, False) for item_id, revision, steer in self.model if steer]
        self.model = left + [one for one in self.model if not one[2]]
        self.unpause_if_empty()
        if reason is not None:
            self.pause_model(reason)
        self.running = None

    @invariant()
    def is_as_the_model_says(self) -> None:
        state = self.queue.state()
        assert [(one.item_id, one.revision, one.steer) for one in state.items] == self.model
        assert [item.shown for item in self.queue.items] == state.items
        assert state.paused == self.paused
        assert state.error == (self.error[1] if self.error and self.model[0][0] == self.error[0] else None)
        assert state.items or state.paused is None
        assert state.error is None or state.paused == "error"


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
TestAnyOrder = AnyOrder.TestCase  # Q-1 Q-2 Q-3 I-10


def test_beyond_the_end_is_the_end() -> None:
    queue, (a, b, c), told = a_queue("a", "b", "c")
    queue.move(a.id, 99)
    assert ids(queue) == [b.id, c.id, a.id]
    queue.move(a.id, 1)
    assert ids(queue) == [b.id, a.id, c.id]
    assert [one.item_id for one in told.events[-1].items] == ids(queue)


def test_an_edit_of_nothing_but_steering_keeps_the_content() -> None:
    queue, (a,), _ = a_queue("a")
    edited = queue.edit(a.id, 1, None, True)
    assert (edited.content, edited.shown.steer, edited.shown.revision) == (a.content, True, 2)


def test_what_changes_nothing_is_no_change() -> None:
    queue, (a, b), told = a_queue("a", "b")
    image = an_item("", "aGVsbG8h")
    queue.add(image)
    told.events.clear()
    assert queue.edit(a.id, 1, None, None) == a
    assert queue.edit(a.id, 1, [TextBlock("a")], False) == a
    assert queue.edit(image.id, 1, list(image.content), None) == image
    assert queue.move(b.id, 1) == b
    assert told.events == []
    with declined("conflict", queue, told, revision=1):
        queue.edit(a.id, 2, None, None)
    assert queue.edit(image.id, 1, [ImageBlock(mime_type="image/png", data="aGVsbG9h")], None).shown.revision == 2


def test_images_are_shown_by_their_size_and_stay_whole_in_the_item() -> None:  # Q-1 S-23
    queue, _, told = a_queue()
    queue.add(an_item("x", "aGVsbG8h"))
    (item,) = queue.items
    image = item.shown.content[1]
    assert isinstance(image, ImageBlock)
    assert (image.data, image.bytes, image.mime_type) == (None, 6, "image/png")
    assert told.events[-1].items[0].content[1] == image
    kept = item.content[1]
    assert isinstance(kept, ImageBlock)
    assert kept.data == "aGVsbG8h"


@pytest.mark.parametrize("limit", ["items", "characters", "images"])
def test_what_has_no_room_is_refused_and_nothing_changes(limit: str) -> None:  # Q-1 I-10
    queue, _, told = a_queue()
    part = "A" * (IMAGES // 2)
    fills = {
        "items": [an_item() for _ in range(ITEMS)],
        "characters": [an_item("x" * (CHARACTERS - 1)), an_item("y")],
        "images": [an_item("", part), an_item("", part)],
    }
    for item in fills[limit]:
        queue.add(item)
    more = an_item("", "AAAA") if limit == "images" else an_item("z")
    with declined("limit_exceeded", queue, told, limit="queue"):
        queue.add(more)
    last = queue.items[-1]
    grown: dict[str, list[UserBlock]] = {
        "characters": [TextBlock("zz")],
        "images": [ImageBlock(mime_type="image/png", data=part + "AAAA")],
    }
    if limit in grown:
        with declined("limit_exceeded", queue, told, limit="queue"):
            queue.edit(last.id, 1, grown[limit], None)
    queue.remove(last.id)
    queue.add(more)


def test_what_is_characters_to_the_limit_is_text_in_all_items_and_not_its_bytes() -> None:
    queue, _, told = a_queue()
    queue.add(an_item("é" * (CHARACTERS - 1)))
    queue.add(an_item("€"))
    with declined("limit_exceeded", queue, told, limit="queue"):
        queue.add(an_item("x"))


def test_an_item_is_known_by_its_request_while_it_waits_and_by_its_run_afterwards() -> None:
    queue, _, told = a_queue()
    item = an_item(request=Request("r", "d"))
    queue.add(item)
    assert queue.requested("r") is item
    assert queue.requested("other") is None
    edited = queue.edit(item.id, 1, [TextBlock("else")], None)
    assert queue.requested("r") is edited
    queue.begin(edited, "run")
    with declined("queue_item_started", queue, told, runId="run"):
        queue.remove(item.id)
    queue.end(item.id)
    assert queue.requested("r") is None
    with declined("queue_item_started", queue, told, runId="run"):
        queue.edit(item.id, 2, None, None)


@pytest.mark.parametrize("first", REASONS)
@pytest.mark.parametrize("second", REASONS)
def test_of_two_reasons_the_stronger_one_stays(first: Pause, second: Pause) -> None:
    queue, _, _ = a_queue("a")
    queue.pause(first)
    queue.pause(second)
    assert queue.paused == max(first, second, key=REASONS.index)


def test_a_run_that_fails_after_an_input_was_not_acceptable_keeps_the_reason_for_that() -> None:
    queue, (a,), told = a_queue("a", steer=True)
    queue.begin(a, "run")
    queue.leave(a, NOT_TAKEN)
    assert len(told.events) == 1, "one change, told as two"
    queue.settle("error")
    assert (queue.paused, queue.error) == ("error", NOT_TAKEN)
    queue.pause("stopped")
    assert (queue.paused, queue.error) == ("stopped", None)


def not_taken(*words: str) -> tuple[Queue, list[Item], Told]:
    """Paused since the first of them was not acceptable."""
    queue, items, told = a_queue(*words)
    queue.pause("error", NOT_TAKEN)
    told.events.clear()
    return queue, items, told


def test_why_the_head_was_not_accepted_is_said_of_no_other_head() -> None:
    for change in (
        lambda queue, item: queue.remove(item.id),
        lambda queue, item: queue.move(item.id, 1),
        lambda queue, item: queue.edit(item.id, 1, [TextBlock("other")], None),
    ):
        queue, (a, _), told = not_taken("a", "b")
        change(queue, a)
        assert (queue.paused, queue.error) == ("error", None)
        assert [(event.paused, event.error) for event in told.events] == [("error", None)]
    queue, _, _ = not_taken("a")
    queue.add(an_item("s", steer=True))
    assert queue.error == NOT_TAKEN
    queue.settle(None)  # what was left of the run goes first
    assert (queue.paused, queue.error) == ("error", None)


def test_what_is_still_not_acceptable_keeps_its_reason() -> None:
    queue, (a, b), _ = not_taken("a", "b")
    queue.edit(a.id, 1, None, True)
    queue.remove(b.id)
    assert (queue.paused, queue.error) == ("error", NOT_TAKEN)


def test_what_was_to_steer_is_the_head_of_a_paused_queue_in_one_change() -> None:  # Q-2 Q-3
    queue, (a, b), told = a_queue("a", "b")
    steers = an_item("s", steer=True)
    queue.add(steers)
    told.events.clear()
    queue.settle("stopped")
    assert ids(queue) == [steers.id, a.id, b.id]
    assert [(len(event.items), event.paused) for event in told.events] == [(3, "stopped")]


def test_an_empty_queue_is_never_paused() -> None:
    queue, _, told = a_queue()
    for reason in REASONS:
        queue.pause(reason)
        queue.settle(reason)
    assert (queue.paused, told.events) == (None, [])
