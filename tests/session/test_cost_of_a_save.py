"""What a save costs does not depend on how long the session is: counted over the wire, at prompt 10 and at 10,000."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path

from disks import Counting
from inprocess import REF, PlayedModel, running, text

from loop_protocol.v1.types import AssistantMessage, PromptTiming, TextBlock, Usage, UserMessage
from loopd.core.history import History, RunRecord
from loopd.storage import Snapshot
from loopd.storage.files import create
from loopd.storage.fs import FileSystem

NOW = 1_700_000_000_000
# Indexes, lengths and counters have more digits at 10,000; that is all that may grow.
DIGITS = 64


def _talk(turns: int) -> History:
    history = History()
    for number in range(turns):
        first, now = history.messages, NOW + number
        history.append(UserMessage(index=first, content=[TextBlock(f"do step {number}")], timestamp=now))
        answer = AssistantMessage(
            index=first + 1,
            content=[TextBlock(f"step {number} is done")],
            timestamp=now,
            provider=REF.provider,
            model=REF.id,
            usage=Usage(3, 4),
            stop_reason="stop",
        )
        history.append(answer)
        timing = PromptTiming(user_message_index=first, started_at=now, finished_at=now + 1)
        history.append_run(RunRecord(run_id=str(uuid.uuid4()), outcome="success", timing=timing))
    return history


def _saved(root: Path, turns: int) -> str:
    """A session in the workspace of the test's daemon, as so many prompts would have left it."""
    (root / "ws").mkdir(parents=True)
    history = _talk(turns)
    store = create(
        FileSystem(),
        str(root / "data"),
        meta_id=str(uuid.uuid4()),
        cwd=str(root / "ws"),
        model=REF,
        permission="read-only",
        now_ms=NOW,
    )
    lines = history.lines
    store.commit(Snapshot(str(uuid.uuid4()), lines, len(lines), history.messages, history.user_messages))
    store.close()
    assert store.path is not None
    return store.path


@dataclass(frozen=True, slots=True)
class Cost:
    calls: list[str]
    written: int

    @classmethod
    def taken(cls, disk: Counting) -> Cost:
        cost = cls(list(disk.calls), disk.written)
        disk.calls.clear()
        disk.written = 0
        return cost


async def _costs(root: Path, before: int) -> dict[str, Cost]:
    """What the first prompt after opening costs, the one after it, and a change of model."""
    path = _saved(root, before - 2)
    disk = Counting()
    async with running(root, model=PlayedModel([text("well", " done")]), fs=disk) as world:
        wire = await world.connect()
        opened = await wire.open(world, kind="continue", attach=False)
        assert (opened["path"], opened["state"]["userMessageCount"]) == (path, before - 2)
        ids = {"sessionId": opened["sessionId"]}
        costs = {}
        Cost.taken(disk)
        for what in ("first", "next"):
            assert (await wire.call("session/prompt", {**ids, "content": "one more", "wait": True}))["saved"]
            costs[what] = Cost.taken(disk)
        history = Path(path).with_name("history.jsonl")
        stamp = (history.stat().st_ino, history.stat().st_mtime_ns, history.read_bytes())
        await wire.call("session/setModel", {**ids, "model": {"provider": "other", "id": "model"}})
        costs["setModel"] = Cost.taken(disk)
        assert (history.stat().st_ino, history.stat().st_mtime_ns, history.read_bytes()) == stamp  # S-13
    return costs


async def test_syncs_calls_and_bytes_are_the_same_at_prompt_10_and_at_10_000(tmp_path: Path) -> None:  # S-23, S-21
    early, late = await _costs(tmp_path / "early", 10), await _costs(tmp_path / "late", 10_000)
    for what, syncs in (("first", 3), ("next", 3), ("setModel", 2)):
        assert early[what].calls.count("fsync") == late[what].calls.count("fsync") == syncs
        assert abs(late[what].written - early[what].written) < DIGITS
        print(f"{what}: {syncs} syncs, {early[what].written} and {late[what].written} bytes")
    # The first save reads what is there once, since another program may have changed it after it was opened.
    assert early["next"].calls == late["next"].calls
    assert early["setModel"].calls == late["setModel"].calls
    assert "read" not in late["next"].calls
