"""Where title work meets what it seldom meets: newer work, a drain over a pending save, a fault, huge pictures."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import trio
from inprocess import PlayedModel, running, text
from test_saving import Breaking
from titling import ALL, FIRST, Namer, agreed, first_words, hangs, made, say, state, talks, title

from loopd import title_worker
from loopd.agent import ModelError, Reply
from loopd.core.history import decode_message
from loopd.core.state import SessionCore
from loopd.saving import Saving

SAYS = "Explain the project"


@pytest.mark.parametrize("method", ["title/cancel", "session/abort"])
async def test_who_cancels_waits_for_what_it_cancelled_and_for_no_newer_work(method: str, tmp_path: Path) -> None:
    """T-9: else a conversation that goes on would keep the answer from coming."""
    gate = trio.Event()

    async def lets_go_late(*_: Any) -> Reply:
        with trio.CancelScope(shield=True):
            await gate.wait()
        return text("Too late")

    namer = Namer([lets_go_late, hangs])
    async with running(tmp_path, model=talks(), titles=namer) as world:
        wire, other = await world.connect(), await world.connect()
        opened = await wire.open(world, title=ALL)
        await say(wire, opened, "first")
        await namer.requests(1)
        cancelling = await other.request(method, {"sessionId": opened["sessionId"]})
        await other.call("server/status")
        await say(wire, opened, "second")
        gate.set()
        with trio.fail_after(5):
            answer = await other.answer(cancelling)
        assert answer in ({"cancelled": True}, {"stopped": False})
        await namer.requests(2)
        assert (namer.open, namer.most) == (1, 1)  # what came later goes on
        await title(wire, opened, "cancel")
        assert await agreed(world, wire, opened) == first_words("first")


@pytest.mark.parametrize("method", ["session/abort", "session/stop"])
async def test_a_text_that_enters_a_run_while_that_is_aborted_asks_for_no_title(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T-9, Q-2: it is being written already when the abort comes. A stop ends only the run."""
    gate, journal = trio.Event(), Saving.journal
    at, go_on = trio.Event(), trio.Event()

    async def waits(*_: Any) -> Reply:
        await gate.wait()
        return text("hi")

    async def slow(*args: Any) -> None:
        await journal(*args)
        if b"steer it" in args[-1]:
            at.set()
            with trio.CancelScope(shield=True):  # as the write is
                await go_on.wait()

    monkeypatch.setattr(Saving, "journal", slow)
    namer = Namer([text("One"), text("Two")])
    async with running(tmp_path, model=PlayedModel([waits, text("hi")]), titles=namer) as world:
        wire, other = await world.connect(), await world.connect()
        opened = await wire.open(world, title=ALL)
        session = {"sessionId": opened["sessionId"]}
        run_id = await wire.prompt(opened["sessionId"], "first")
        await title(wire, opened, "wait")
        await wire.call("queue/add", session | {"content": "steer it", "steer": True})
        gate.set()
        await at.wait()
        ending = await other.request(method, session | ({} if method == "session/abort" else {"runId": run_id}))
        await other.call("server/status")
        go_on.set()
        assert await other.answer(ending) == {"stopped": True}
        await title(wire, opened, "wait")
        expected = made("One", 0) if method == "session/abort" else made("Two", 0, 2)
        assert len(namer.asked) == (1 if method == "session/abort" else 2)
        assert await agreed(world, wire, opened) == expected


async def test_a_drain_over_a_pending_save_loses_no_finished_title(tmp_path: Path) -> None:  # D-4, T-9
    fs, gate = Breaking(), trio.Event()

    async def waits(*_: Any) -> Reply:
        await gate.wait()
        return text("A name")

    async with running(tmp_path, model=talks(), titles=Namer([waits]), fs=fs) as world:
        wire, other = await world.connect(), await world.connect()
        opened = await wire.open(world, title=FIRST)
        fs.error = errno.ENOSPC
        assert not (await say(wire, opened))["saved"]
        gate.set()
        assert await title(wire, opened, "wait") == {"title": first_words(SAYS)}
        assert (await other.call("server/drain", {"deadlineMs": 100}))["pendingSaves"]
        fs.error = None
        assert (await wire.call("session/flush", {"sessionId": opened["sessionId"]}))["flushed"]
        assert await agreed(world, wire, opened, close=False) == made("A name", 0)
        await other.call("server/drain", {"cancel": True})


async def test_a_fault_before_a_text_was_told_leaves_no_title_that_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D-5, S-25, T-9: no place takes a rescue copy, so the session stays open, and idle."""
    fs = Breaking()
    async with running(tmp_path, model=talks(), titles=Namer(), fs=fs) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=FIRST)

        def breaks(*_: Any) -> None:
            raise ValueError("a bug")

        monkeypatch.setattr(SessionCore, "announce_run", breaks)
        fs.error = errno.ENOSPC
        await say(wire, opened)
        monkeypatch.undo()
        assert (await state(wire, opened))["hasPendingSave"]
        with trio.fail_after(5):
            await title(wire, opened, "wait")
        fs.error = None
        assert (await wire.call("session/flush", {"sessionId": opened["sessionId"]}))["flushed"]
        assert (await state(wire, opened))["title"] == first_words(SAYS)


async def test_texts_among_huge_pictures_are_read_with_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T-6, D-5: pictures count for no title, but the lines that they stand in are long."""
    picture = {"type": "image", "data": "A" * 1_000_000, "mimeType": "image/png"}
    read, most = 0, 0

    class Turns(trio.abc.Instrument):
        def before_task_step(self, _: Any) -> None:
            nonlocal read
            read = 0

    def counted(line: bytes) -> Any:
        nonlocal read, most
        read += len(line)
        most = max(most, read)
        return decode_message(line)

    namer = Namer()
    async with running(
        tmp_path, model=PlayedModel([text("hi")], input=frozenset({"text", "image"})), titles=namer
    ) as w:
        wire = await w.connect()
        opened = await wire.open(w, title=ALL | {"mode": "off"})
        for number in range(8):
            await say(wire, opened, [{"type": "text", "text": f"see {number}"}, picture])
        await wire.call("runtime/newSession", {"runtimeId": opened["runtimeId"]})
        ask = {"runtimeId": opened["runtimeId"], "path": opened["path"], "title": ALL}
        await wire.call("runtime/switchSession", ask)
        monkeypatch.setattr(title_worker, "decode_message", counted)
        turns = Turns()
        trio.lowlevel.add_instrument(turns)
        assert (await title(wire, opened, "refresh"))["title"]["text"] == "A name"
        trio.lowlevel.remove_instrument(turns)
        assert len(namer.texts()) == 8
        assert most < 3_000_000


async def test_a_log_says_that_no_title_came_and_nothing_of_the_conversation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """T-11: services quote what they were sent."""

    async def quotes(*_: Any) -> Reply:  # noqa: ASYNC124
        raise ModelError("refused", "a service refused: bad input 'my secret plan'")

    async with running(tmp_path, model=talks(), titles=Namer([quotes])) as world:
        wire = await world.connect()
        opened = await wire.open(world, title=FIRST)
        await say(wire, opened, "my secret plan")
        assert "my secret plan" in (await title(wire, opened, "wait"))["titleError"]["message"]
        assert f"session {opened['sessionId']}: no title: refused" in caplog.text
        assert "secret" not in caplog.text
