"""Random lives of sessions, over a real store and a real socket, against a plain model of what the rules promise.

Prompts, approvals, settings, receipts, pins, titles, disks that break at any call and are repaired, flushes, disposals,
reopenings, clean restarts and crashes. After each step the daemon, the files and the model must agree (I-2, I-4, I-5,
I-6; S-3, S-6…S-9, S-14…S-16, S-28), and nothing of an approval is in a file (A-5). ``LOOPD_TEST_LIVES`` says how many.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import hypothesis
import trio
from asking import REASON, Asking, answer, asks, pending
from guest import Guest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from inprocess import PlayedModel, Probe, Wire, call, running, text

from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.types import ApprovalOutcome
from loopd.agent import ModelError
from loopd.agent.permissions import answer_for
from loopd.core.messages import NOT_ALLOWED
from loopd.storage import files
from loopd.storage.fs import FileSystem

STUMBLING = ["pin", "rename", "model", "read", "prompt"]
LIVES = int(os.environ.get("LOOPD_TEST_LIVES", "40"))
ANSWERED = ["allowed-once", "rejected"]
WORDS = st.sampled_from(["alpha", "beta", "gamma", "delta", "ein längeres Wort", "e\u0301 😀"])


class Failing(FileSystem):
    """Once ``left`` changing calls were made, every further one fails, some of them after they have done their work:
    an error does not mean that nothing happened."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.hits = 0

    def _step(self) -> None:
        if self.left is None:
            return
        if self.left <= 0:
            self.hits += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.left -= 1

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        if self.left == 0:
            super().write(fd, data[: len(data) // 2], offset)
        self._step()
        return super().write(fd, data, offset)

    def truncate(self, fd: int, size: int) -> None:
        self._step()
        super().truncate(fd, size)

    def fsync(self, fd: int) -> None:
        self._step()
        super().fsync(fd)

    def rename(self, source: str, target: str, *, dir_fd: int) -> None:
        super().rename(source, target, dir_fd=dir_fd)
        self._step()


@dataclass
class Kept:
    """What the rules say of one session. ``live`` is what memory holds, the first ``saved`` of it are acknowledged."""

    path: str
    live: list[str] = field(default_factory=list)
    saved: int = 0
    unread: bool = False
    pinned: bool = False
    title: str | None = None
    model: str = "model"
    draft: bool = False
    doubtful: bool = False  # a write failed: the disk may be a step ahead of what was acknowledged

    @property
    def pending(self) -> bool:
        return self.saved < len(self.live)


class Lives(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.guest = Guest()
        self.base = Path(tempfile.mkdtemp(prefix="loopd-lives-"))
        self.root = self.base / "0"
        self.fs = Failing()
        self.sessions: dict[str, Kept] = {}
        self.now: Kept | None = None
        self.ids: dict[str, str] = {}
        self.clones = 0
        self.counter = 0
        self.hits_before = 0

    # --- the daemon ---------------------------------------------------------------------------------------------------

    @initialize()
    def start(self) -> None:
        self.model = PlayedModel([text("so be it")])
        self.world, self._leave = self.guest.enter(
            running(self.root, model=self.model, tools=[Probe(), Asking()], fs=self.fs, rescue_roots=[])
        )
        self.wire: Wire = self.guest.call(self.world.connect)

    def _ask(self, method: str, **params: Any) -> Any:
        self.hits_before = self.fs.hits
        return self.guest.call(self.wire.call, method, params)

    def _refused(self, method: str, **params: Any) -> str | None:
        """The kind of the refusal, None where there was none."""
        try:
            self._ask(method, **params)
        except RpcError as error:
            return error.kind
        return None

    def _disk_failed(self) -> bool:
        """During what was asked last."""
        return self.fs.hits > self.hits_before

    def teardown(self) -> None:
        hypothesis.event(f"disk failures: {min(self.fs.hits, 5)}, crashes: {min(self.clones, 5)}")
        self.fs.left = None
        self._leave()
        self.guest.close()
        shutil.rmtree(self.base)

    # --- opening and closing ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.now is None and self.fs.left is None)
    @rule(kind=st.sampled_from(["new", "new", "draft"]))
    def opens(self, kind: str) -> None:
        opened = self._ask("runtime/open", cwd=self.world.cwd, session={"kind": kind})
        self._entered(opened, Kept(opened["path"], draft=kind == "draft"))
        self.sessions[opened["path"]] = self.now

    def _entered(self, opened: dict[str, Any], kept: Kept) -> None:
        self.now = kept
        self.runtime_id = opened["runtimeId"]
        self.session_id = opened["sessionId"]

    @precondition(lambda self: self.now is None and self.fs.left is None and self.sessions)
    @rule(data=st.data())
    def reopens(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(list(self.sessions)), label="path")
        if self.sessions[path].doubtful:
            self._survived(self.sessions[path])
        opened = self._ask("runtime/open", cwd=self.world.cwd, session={"kind": "open", "path": path})
        assert opened["created"]
        self._entered(opened, self.sessions[path])

    @precondition(lambda self: self.now is not None)
    @rule()
    def disposes(self) -> None:
        assert self.now is not None
        refused = self._refused("runtime/dispose", runtimeId=self.runtime_id)
        assert refused == ("pending_save" if self.now.pending else None)
        if refused is None:
            # A disk that works is told what holds before the session is let go (I-6).
            self.now.doubtful = self.now.doubtful and self._disk_failed()
            self._gone(self.now)
            self.now = None

    def _gone(self, kept: Kept) -> None:
        """A draft that was never committed does not survive (S-3)."""
        kept.draft = kept.draft and not os.path.exists(kept.path)
        if kept.draft:
            del self.sessions[kept.path]

    # --- what people do -----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.now is not None)
    @rule(word=WORDS, how=st.sampled_from(["answers", "answers", "uses a tool", "fails"]))
    def prompts(self, word: str, how: str) -> None:
        kept = self.now
        assert kept is not None
        self.counter += 1
        said = f"{word} {self.counter}"
        self.model.turns = 0
        self.model.plays = {
            "answers": [text("so be it")],
            "uses a tool": [call(text=said), text("done")],
            "fails": [_failing],
        }[how]
        params = {"sessionId": self.session_id, "content": said, "wait": True}
        if kept.pending:
            assert self._refused("session/prompt", **params) == "pending_save"
            return
        result = self._ask("session/prompt", **params)
        kept.live += {
            "answers": [said, "so be it"],
            "uses a tool": [said, "", said, "done"],
            "fails": [said],
        }[how]
        assert result["outcome"] == ("error" if how == "fails" else "success")
        if kept.title is None:
            kept.title = said
        assert result["saved"] or self._disk_failed()
        self._saved(ok=result["saved"])

    @precondition(lambda self: self.now is not None and not self.now.pending)
    @rule(word=WORDS, outcome=st.sampled_from([*ANSWERED, "unavailable", "timed-out", "cancelled", "dispose", "crash"]))
    def is_asked(self, word: str, outcome: str) -> None:
        kept, hits = self.now, self.fs.hits
        assert kept is not None
        self.counter += 1
        said = f"{word} {self.counter}"
        self.model.turns, self.model.plays = 0, [asks(said), text("done")]
        policy: dict[str, Any] = {"unavailable": {"approvals": "reject"}, "timed-out": {"approvalTimeoutMs": 1}}
        run_id = self._ask("session/prompt", sessionId=self.session_id, content=said, **policy.get(outcome, {}))[
            "runId"
        ]
        if outcome not in policy:
            approval_id = self.guest.call(self._is_pending)
            self._is_not_stored(approval_id)
            assert self._refused("title/rename", sessionId=self.session_id, text="never") == "approvals_pending"
        if outcome in ANSWERED:
            self.guest.call(answer, self.wire, approval_id, outcome)
        elif outcome == "cancelled":
            assert self._ask("session/stop", sessionId=self.session_id, runId=run_id)["stopped"]
        elif outcome == "crash":
            self.crashes()
            return
        refused = self._refused("runtime/dispose", runtimeId=self.runtime_id) if outcome == "dispose" else None
        assert refused in (None, "save_failed")
        result = self._ask("run/wait", runId=run_id)
        self.hits_before = hits
        told = "did " + said if outcome == "allowed-once" else _TOLD[outcome]
        kept.live += [said, "", told, *(["done"] if told != NOT_ALLOWED else [])]
        kept.title = kept.title or said
        assert result["outcome"] == ("cancelled" if told == NOT_ALLOWED else "success")
        assert result["saved"] or self._disk_failed()
        self._saved(ok=result["saved"])
        if outcome == "dispose" and refused is None:
            self.now = None

    async def _is_pending(self) -> str:
        while not (found := await pending(self.wire)):  # noqa: ASYNC110 the run is on its way to it
            pass
        approval_id: str = found[0]["approvalId"]
        return approval_id

    def _is_not_stored(self, approval_id: str) -> None:
        """Its reason is not in the conversation either."""
        found = b"".join(path.read_bytes() for path in (self.root / "data").rglob("*") if path.is_file())
        assert approval_id.encode() not in found
        assert REASON.encode() not in found

    def _saved(self, *, ok: bool) -> None:
        kept = self.now
        assert kept is not None
        if not ok:
            kept.doubtful = True
            return
        # New output makes it unread (S-8); a run without any leaves it.
        kept.unread |= any(not one.startswith(_OURS) for one in kept.live[kept.saved :])
        kept.saved = len(kept.live)
        kept.draft = kept.doubtful = False

    @precondition(lambda self: self.now is not None)
    @rule()
    def flushes(self) -> None:
        assert self.now is not None
        pending, result = self.now.pending, self._done("session/flush", sessionId=self.session_id)
        if result and pending:
            assert result["flushed"]
            self._saved(ok=True)
        elif result:  # what a failed change of settings may have left on disk is as memory has it again
            self.now.doubtful = False

    @precondition(lambda self: self.now is not None)
    @rule(pinned=st.booleans())
    def pins(self, pinned: bool) -> None:
        self._set(self.now, "session/setPinned", "pinned", pinned, sessionId=self.session_id)

    @precondition(lambda self: self.now is not None)
    @rule(title=WORDS)
    def renames(self, title: str) -> None:
        assert self.now is not None
        params = {"sessionId": self.session_id, "text": title}
        if self.now.pending:
            assert self._refused("title/rename", **params) == "pending_save"
        elif self._done("title/rename", **params):
            self.now.title = title

    @precondition(lambda self: self.now is not None)
    @rule(name=st.sampled_from(["model", "other"]))
    def switches_model(self, name: str) -> None:
        assert self.now is not None
        params = {"sessionId": self.session_id, "model": {"provider": "scripted", "id": name}}
        if self.now.pending:
            assert self._refused("session/setModel", **params) == "pending_save"
        elif self._done("session/setModel", **params):
            self.now.model = name

    @precondition(lambda self: self.now is not None)
    @rule(stale=st.booleans())
    def reads(self, stale: bool) -> None:
        kept = self.now
        assert kept is not None
        count = kept.saved + 1 if stale else kept.saved
        params = {"sessionId": self.session_id, "messageCount": count}
        if kept.pending:
            assert self._refused("session/markRead", **params) == "pending_save"
            return
        result = self._done("session/markRead", **params)
        if result:
            assert result["read"] == (not stale and kept.saved > 0)
            kept.unread = kept.unread and not result["read"]

    def _set(self, kept: Kept | None, method: str, name: str, value: Any, **who: str) -> None:
        assert kept is not None
        if self._done(method, **{name: value}, **who) is not None:
            setattr(kept, name, value)

    def _done(self, method: str, **params: Any) -> dict[str, Any] | None:
        """The result; it may fail only with the disk, and then nothing has changed."""
        try:
            result: dict[str, Any] = self._ask(method, **params)
        except RpcError as error:
            if error.kind != "save_failed" or not self._disk_failed():
                raise
            assert self.now is not None
            self.now.doubtful = True
            return None
        return result

    # --- sessions that are not open -----------------------------------------------------------------------------------

    def _closed(self) -> list[str]:
        # In the order in which they were made: ids are random, and a life must be the same when it is lived again.
        return [path for path, kept in self.sessions.items() if kept is not self.now]

    @precondition(lambda self: self._closed() and self.fs.left is None)
    @rule(data=st.data(), pinned=st.booleans())
    def pins_a_saved_one(self, data: st.DataObject, pinned: bool) -> None:
        path = data.draw(st.sampled_from(self._closed()), label="path")
        self._set(self.sessions[path], "session/setPinned", "pinned", pinned, path=path)

    @precondition(lambda self: self._closed() and self.fs.left is None)
    @rule(data=st.data())
    def reads_a_saved_one(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(self._closed()), label="path")
        kept = self.sessions[path]
        read = self._ask("session/markRead", path=path, messageCount=kept.saved)["read"]
        assert read == (kept.saved > 0)
        kept.unread = kept.unread and not read

    @precondition(lambda self: self._closed() and self.fs.left is None)
    @rule(data=st.data())
    def deletes(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(self._closed()), label="path")
        self._ask("session/delete", path=path)
        del self.sessions[path]
        assert self._refused("session/state", path=path) == "session_not_found"

    # --- what the world does ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.fs.left is None and self.now is not None)
    @rule(after=st.integers(0, 8))
    def breaks(self, after: int) -> None:
        self.fs.left = after

    @precondition(lambda self: self.fs.left is None and self.now is not None)
    @rule(
        after=st.sampled_from([0, 1, 2, 2, 3, 3, 4]), act=st.sampled_from(["pin", "rename", "model", "read", "prompt"])
    )
    def stumbles(self, after: int, act: str) -> None:
        """The disk fails during one write, often right after its rename, and is well again."""
        kept = self.now
        assert kept is not None
        self.fs.left = after
        match act:
            case "pin":
                self.pins(not kept.pinned)
            case "rename":
                self.renames(f"renamed {self.counter}")
            case "model":
                self.switches_model("model" if kept.model == "other" else "other")
            case "read":
                self.reads(stale=False)
            case _:
                self.prompts("alpha", "answers")
        self.fs.left = None

    @precondition(lambda self: self.fs.left is not None)
    @rule()
    def is_repaired(self) -> None:
        self.fs.left = None

    @precondition(lambda self: self.fs.left is None)
    @rule()
    def restarts(self) -> None:
        """A clean end: what was pending is saved on the way out (S-25)."""
        drained = self._ask("server/drain")
        assert not drained["pendingSaves"]
        if self.now is not None:
            if self.now.pending:
                self._saved(ok=True)
            self._gone(self.now)
        self._leave()
        self.now = None
        self.start()

    @precondition(lambda self: self.sessions)
    @rule()
    def crashes(self) -> None:
        """The files as they are at this moment, and a new daemon on them."""
        self.clones += 1
        before, self.root = self.root, self.base / str(self.clones)
        (before / "data").mkdir(exist_ok=True)
        shutil.copytree(before / "data", self.root / "data")
        # The workspace is part of a session's identity, so it stays where it is.
        (self.root / "ws").symlink_to(self.base / "0" / "ws")
        if self.now is not None:
            self._gone(self.now)
        self.fs.left = None
        self._leave()
        self.sessions = {str(self.root) + path.removeprefix(str(before)): kept for path, kept in self.sessions.items()}
        for path, kept in self.sessions.items():
            kept.path = path
            self._survived(kept)
        self.now = None
        self.start()

    def _survived(self, kept: Kept) -> None:
        """What was acknowledged is there (I-4); where a write had failed, the disk may be one step ahead."""
        meta, history = files.read_session(FileSystem(), kept.path)
        assert history.messages in ({kept.saved, len(kept.live)} if kept.doubtful else {kept.saved})
        if not kept.doubtful:
            assert meta.unread == kept.unread
            assert (meta.pinned_at is not None) == kept.pinned
        kept.live, kept.saved = kept.live[: history.messages], history.messages
        kept.unread, kept.pinned, kept.model = meta.unread, meta.pinned_at is not None, meta.model.id
        kept.title = _title(json.loads(Path(kept.path).read_bytes()))
        kept.doubtful = False

    # --- what must hold after every step ------------------------------------------------------------------------------

    @invariant()
    def daemon_and_model_agree(self) -> None:
        if self.now is None:
            return
        state = self._ask("session/state", sessionId=self.session_id)
        kept = self.now
        assert state["hasPendingSave"] == kept.pending
        assert (state["messageCount"], state["liveCount"]) == (kept.saved, len(kept.live))
        assert state["unread"] == kept.unread
        assert ("pinnedAt" in state) == kept.pinned
        assert (state.get("title") or {}).get("text") == kept.title
        assert state["model"]["id"] == kept.model
        assert state["kind"] == ("draft" if kept.draft else "persistent")
        page = self._ask("session/messages", sessionId=self.session_id)
        assert [_text(message) for message in page["messages"]] == kept.live

    @invariant()
    def files_and_model_agree(self) -> None:
        """At rest the metadata is a function of the state (I-6), and a list tells it without an open session."""
        if not self.sessions:
            return
        rows = {row["path"]: row for row in self._ask("session/list", cwd=self.world.cwd)["sessions"]}
        # A first save that failed on a disk that took nothing back may have left an empty session.
        begun = {path for path, kept in self.sessions.items() if kept.draft and kept.doubtful}
        assert set(rows) - begun == {path for path, kept in self.sessions.items() if not kept.draft}
        for path, row in rows.items():
            kept = self.sessions[path]
            if kept.doubtful:
                continue
            assert row["messageCount"] == kept.saved
            assert row["unread"] == kept.unread
            assert ("pinnedAt" in row) == kept.pinned
            assert (row.get("title") or {}).get("text") == kept.title
            assert row["live"] == (kept is self.now)


async def _failing(_request: Any, _say: Callable[[Any], None]) -> Any:
    await trio.lowlevel.checkpoint()
    raise ModelError("bad_request", "the provider refuses")


_TOLD = {
    **{outcome: answer_for(outcome, None) or "" for outcome in get_args(ApprovalOutcome)},
    "cancelled": NOT_ALLOWED,
    "dispose": NOT_ALLOWED,
}
_OURS = ("alpha", "beta", "gamma", "delta", "ein", "e\u0301")


def _text(message: dict[str, Any]) -> str:
    return "".join(block.get("text", "") for block in message["content"])


def _title(meta: dict[str, Any]) -> str | None:
    told = meta.get("title") or meta["committed"].get("fallback") or {}
    return told.get("text")


TestLives = Lives.TestCase
TestLives.settings = hypothesis.settings(max_examples=LIVES, stateful_step_count=50, deadline=None, database=None)
