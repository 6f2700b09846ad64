"""Events that wait for their reader: all of them, or a plain statement of which are gone."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from loop_protocol.backlog import Backlog
from loop_protocol.v1.events import EventParams, EventsLost, SaveFailed


def event(seq: int, runtime: str = "r", text: str = "") -> Raw:
    params = EventParams(runtime_id=runtime, session_id="s", seq=seq, at=seq, event=SaveFailed(text))
    return Raw(msgspec.json.encode(params))


def drain(backlog: Backlog) -> list[EventParams]:
    taken = []
    while backlog:
        if params := backlog.take():
            taken.append(params)
    return taken


def test_events_are_taken_in_their_order() -> None:
    backlog = Backlog()
    for seq in range(5):
        backlog.add(event(seq))
    assert [params.seq for params in drain(backlog)] == list(range(5))


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 300)), max_size=30), st.integers(100, 900))
def test_beyond_the_limit_every_runtime_has_a_hole_without_a_gap_around_it(
    plan: list[tuple[str, int]], limit: int
) -> None:
    backlog, next_seq = Backlog(limit), {"a": 1, "b": 1}
    for runtime, size in plan:
        backlog.add(event(next_seq[runtime], runtime, "x" * size))
        next_seq[runtime] += 1
    seen = {"a": 1, "b": 1}
    for params in drain(backlog):
        lost = params.event if isinstance(params.event, EventsLost) else None
        assert (lost.first if lost else params.seq) == seen[params.runtime_id]
        seen[params.runtime_id] = params.seq + 1
    assert seen == next_seq


def test_an_event_larger_than_the_limit_is_kept_until_the_next_one() -> None:
    backlog = Backlog(100)
    backlog.add(event(1, text="x" * 1000))
    assert [params.seq for params in drain(backlog)] == [1]


def test_a_type_from_the_future_is_passed_over() -> None:
    backlog = Backlog()
    backlog.add(Raw(b'{"runtimeId":"r","sessionId":"s","seq":1,"at":1,"event":{"type":"sunrise","colour":"red"}}'))
    backlog.add(event(2))
    assert [params.seq for params in drain(backlog)] == [2]
