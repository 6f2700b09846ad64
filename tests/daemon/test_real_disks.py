"""A real daemon on disks that really fail: what is refused is said and kept, what was saved reads, nothing comes twice.

Whatever the fault is, the rest is the same (``Talk``): prompts are refused until it is repaired and flushed, and then a
later daemon finds every turn once (S-14…S-16, D-5, storage rule 15).
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from daemon_process import PATIENCE, DaemonProcess, open_session, prompt, started
from mounts import Mounts, mounts

from loop_protocol.client import Client
from loop_protocol.v1.errors import RpcError
from loopd.storage.files import read_session
from loopd.storage.fs import FileSystem


@dataclass(slots=True)
class Talk:
    """A conversation with the daemon, whose model says everything again."""

    daemon: DaemonProcess
    client: Client
    opened: Any
    said: list[str] = field(default_factory=list)
    under: Sequence[str] = ()

    @property
    def ids(self) -> dict[str, str]:
        return {"sessionId": self.opened.session_id}

    @property
    def directory(self) -> Path:
        return Path(self.opened.path).parent

    @property
    def history(self) -> Path:
        return self.directory / "history.jsonl"

    def prompt(self, text: str) -> bool:
        """Whether it was saved."""
        result = prompt(self.client, self.opened.session_id, text, wait=True)
        self.said.append(text)
        assert result.outcome == "success"
        saved: bool = result.saved
        return saved

    def fails(self, text: str, reason: str) -> None:
        """That prompt is answered and not saved, which is said; then others are refused until it is."""
        assert not self.prompt(text)
        self.is_pending(reason)
        for _ in range(2):
            with pytest.raises(RpcError) as refused:
                prompt(self.client, self.opened.session_id, "another")
            assert refused.value.kind == "pending_save"

    def is_pending(self, reason: str) -> None:
        state = self.client.call("session/state", self.ids, timeout=PATIENCE)
        assert state.has_pending_save
        assert reason in state.save_error
        assert state.live_count == 2 * len(self.said)
        status = self.client.call("server/status", timeout=PATIENCE)
        assert [one.session_id for one in status.pending_saves] == [self.opened.session_id]

    def flush(self) -> None:
        assert self.client.call("session/flush", self.ids, timeout=PATIENCE).flushed
        assert not self.client.call("session/state", self.ids).has_pending_save
        self.is_whole()

    def is_whole(self) -> None:
        """Every turn is there, once."""
        body = self.client.call_raw("session/messages", self.ids, timeout=PATIENCE)
        texts = [message["content"][0]["text"] for message in json.loads(body)["messages"]]
        assert texts == [text for text in self.said for _ in ("asked", "answered")]

    def goes_on(self) -> None:
        """After the repair: a flush, another prompt, and all of it in a daemon that comes after a kill."""
        self.flush()
        assert self.prompt("and on")
        self.is_whole()
        self.outlives_a_kill()

    def outlives_a_kill(self) -> None:
        self.daemon.signal(signal.SIGKILL)
        self.daemon.ended()
        with started(place=self.daemon.place, under=self.under) as later, later.connect() as client:
            again = Talk(later, client, reopened(client, later, self.opened.path), list(self.said))
            again.is_whole()
            assert again.prompt("after the kill")


def reopened(client: Client, daemon: DaemonProcess, path: str, **options: Any) -> Any:
    asked = {"cwd": daemon.workspace, "session": {"kind": "open", "path": path}, **options}
    return client.call("runtime/open", asked, timeout=PATIENCE)


@pytest.fixture
def talk() -> Iterator[Talk]:
    with started() as daemon, daemon.connect() as client:
        talk = Talk(daemon, client, open_session(client, daemon, permission="danger-full-access"))
        assert talk.prompt("first")
        yield talk


# --- system calls that fail, one by one


@contextmanager
def injected(talk: Talk, fault: str, name: str) -> Iterator[None]:
    """``fault`` is strace's: a system call on that file of the session, or on its directory, fails the first time.
    It must have been hit when this is left."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    trace = talk.daemon.place / "trace"
    call = fault.partition(":")[0]
    # By its descriptor and by the name that is given beside the directory's. Never with --seccomp-bpf: injected signals
    # are dropped then, without a word.
    at = ["-P", str(talk.directory / name), *(["-P", name] if name else [])]
    command = ["strace", "-f", "-o", str(trace), "-p", str(talk.daemon.popen.pid), *at]
    with subprocess.Popen(
        [*command, "-e", f"trace={call}", "-e", f"inject={fault}:when=1"], stderr=subprocess.PIPE, text=True
    ) as tracer:
        assert tracer.stderr is not None
        told = ""
        while "attached" not in told:
            told = tracer.stderr.readline()
            if not told or "not permitted" in told:
                pytest.skip(f"strace: {told or 'ended'}")
        try:
            yield
        finally:
            tracer.send_signal(signal.SIGINT)  # lets go of the daemon
            tracer.wait(PATIENCE)
    seen = trace.read_text()
    hit = seen.count("(INJECTED)") + seen.count(f"{call}(") * ("signal=KILL" in fault)
    print(f"{fault} at {name or 'the directory'}: {hit} hit")
    assert hit


HISTORY, META, BESIDE, DIRECTORY = "history.jsonl", "meta.json", ".meta.json.tmp", ""


@pytest.mark.parametrize(
    ("call", "number", "name"),
    [
        ("newfstatat", "EACCES", META),
        ("openat", "EMFILE", HISTORY),
        ("ftruncate", "EIO", HISTORY),
        ("pwrite64", "ENOSPC", HISTORY),
        ("fsync", "EIO", HISTORY),  # K-2
        ("close", "EIO", HISTORY),
        ("openat", "EROFS", BESIDE),
        ("fchmod", "EACCES", BESIDE),
        ("pwrite64", "EDQUOT", BESIDE),
        ("pwrite64", "EFBIG", BESIDE),
        ("fsync", "EIO", BESIDE),
        ("renameat", "EDQUOT", BESIDE),
        ("fsync", "EIO", DIRECTORY),
    ],
)
def test_a_system_call_that_fails_once_costs_no_turn(call: str, number: str, name: str, talk: Talk) -> None:  # K-2, K-6
    before = talk.history.read_bytes()
    with talk.history.open("ab") as history:
        history.write(b'{"a tail":"of a write that was cut off')
    with injected(talk, f"{call}:error={number}", name):
        talk.fails("second", number)
        assert read_session(FileSystem(), talk.opened.path)[1].messages in (2, 4)
        assert talk.history.read_bytes().startswith(before)
    talk.goes_on()
    assert b"a tail" not in talk.history.read_bytes()


@pytest.mark.parametrize(
    ("call", "name", "kept"),
    [
        ("pwrite64", HISTORY, 2),
        ("fsync", HISTORY, 2),
        ("pwrite64", BESIDE, 2),
        ("fsync", BESIDE, 2),
        ("renameat", BESIDE, 2),
        ("fsync", DIRECTORY, 4),  # it is published, though not answered
    ],
)
def test_a_kill_at_a_system_call_of_a_save_leaves_the_old_range_or_the_new_one(
    call: str, name: str, kept: int, talk: Talk
) -> None:  # K-9, I-4
    with injected(talk, f"{call}:signal=KILL", name):
        prompt(talk.client, talk.opened.session_id, "second")
        talk.daemon.ended()
    with started(place=talk.daemon.place) as later, later.connect() as client:
        said = [*talk.said, "second"][: kept // 2]
        again = Talk(later, client, reopened(client, later, talk.opened.path), said)
        again.is_whole()
        assert again.prompt("third")
        again.is_whole()
        records = [json.loads(line) for line in talk.history.read_bytes().splitlines()]
        assert [record["index"] for record in records if "role" in record] == list(range(kept + 2))


# --- limits of the process


def test_a_file_size_limit_cuts_a_write_short_and_nothing_is_glued_to_it(talk: Talk) -> None:  # K-6
    before = talk.history.read_bytes()
    unlimited = resource.RLIM_INFINITY
    with limited(talk, resource.RLIMIT_FSIZE, 100_000):
        talk.fails("x" * 120_000, "EFBIG")
        assert talk.history.stat().st_size == 100_000  # as much as the system let through
        assert read_session(FileSystem(), talk.opened.path)[1].messages == 2
        assert talk.history.read_bytes().startswith(before)
        with pytest.raises(RpcError, match="EFBIG"):
            talk.client.call("session/flush", talk.ids)
    assert resource.prlimit(talk.daemon.popen.pid, resource.RLIMIT_FSIZE)[0] == unlimited
    talk.goes_on()


def test_without_descriptors_it_serves_who_is_there_and_afterwards_who_waits(talk: Talk) -> None:  # D-5
    with limited(talk, resource.RLIMIT_NOFILE, 3):
        talk.fails("second", "EMFILE")
        with pytest.raises(RpcError, match="EMFILE"):
            talk.client.call("session/list", {"cwd": talk.daemon.workspace}, timeout=PATIENCE)
        waiting = socket.socket(socket.AF_UNIX)
        waiting.connect(talk.daemon.socket)  # by the kernel: the daemon has nothing to take it with
    with Client(waiting) as other:
        hello = {"versions": [1], "client": {"name": "waiting"}}
        assert other.call("initialize", hello, timeout=PATIENCE).version == 1
        assert len(other.call("session/list", {"cwd": talk.daemon.workspace}, timeout=PATIENCE).sessions) == 1
    talk.goes_on()


@contextmanager
def limited(talk: Talk, limit: int, value: int) -> Iterator[None]:
    """The soft limit of the live process."""
    pid = talk.daemon.popen.pid
    try:
        soft, hard = resource.prlimit(pid, limit)
        resource.prlimit(pid, limit, (value, hard))
    except PermissionError as error:
        pytest.skip(f"prlimit: {error}")
    yield
    resource.prlimit(pid, limit, (soft, hard))


# --- file systems


@contextmanager
def on_its_own_disk(*mount: str) -> Iterator[tuple[Talk, Mounts, str]]:
    """A daemon whose data directory is a mount, made with those arguments; that directory comes last."""
    with mounts() as own, tempfile.TemporaryDirectory(prefix="loopd-") as root:
        data = os.path.join(root, "data")
        os.mkdir(data, 0o700)
        own.attempt("mount", *mount, data)
        with started(place=Path(root), under=own.enter) as daemon, daemon.connect() as client:
            yield Talk(daemon, client, open_session(client, daemon), under=own.enter), own, data


def fill(talk: Talk) -> None:
    while talk.prompt(f"{len(talk.said)} {'x' * 3000}"):
        pass
    assert len(talk.said) > 3


def stored(talk: Talk, own: Mounts) -> int:
    """Messages on disk; and there is no empty file beside them, and nothing left of an attempt."""
    directory = own.seen(talk.directory)
    names = {path.name for path in directory.iterdir()}
    assert names - {"run.journal", "run.journal.old"} == {"meta.json", "history.jsonl"}
    assert all(path.stat().st_size for path in directory.iterdir())
    return read_session(FileSystem(), str(directory / "meta.json"))[1].messages


TINY = ("-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs")


def test_a_full_disk_that_gets_room_again_loses_no_turn() -> None:  # K-1
    with on_its_own_disk(*TINY) as (talk, own, data):
        fill(talk)
        talk.is_pending("ENOSPC")
        assert stored(talk, own) == 2 * len(talk.said) - 2
        with pytest.raises(RpcError, match="ENOSPC"):
            talk.client.call("session/flush", talk.ids)
        own.run("mount", "-o", "remount,size=1m", data)
        talk.goes_on()


def test_a_daemon_that_starts_on_a_full_disk_opens_the_last_commit_and_rescues_what_comes() -> None:  # K-1, S-25
    with on_its_own_disk(*TINY) as (talk, own, _):
        fill(talk)
        talk.daemon.signal(signal.SIGKILL)
        talk.daemon.ended()
        short = "[daemon]\ndrain_deadline_s = 2.2\n"
        with started(place=talk.daemon.place, under=own.enter, settings=short) as later, later.connect() as client:
            again = Talk(later, client, reopened(client, later, talk.opened.path), talk.said[:-1])
            again.is_whole()
            again.fails("y" * 9000, "ENOSPC")
            assert stored(again, own) == 2 * len(again.said) - 2
            later.signal(signal.SIGTERM)
            assert later.ended() == 75
        (copy,) = (talk.daemon.place / "run" / "loopd" / "rescue").iterdir()
        assert (copy / "history.jsonl").read_bytes().count(b"y" * 9000) == 2


def test_a_disk_that_turns_read_only_and_writable_again_loses_no_turn() -> None:  # EROFS
    with on_its_own_disk("-t", "tmpfs", "-o", "mode=700", "tmpfs") as (talk, own, data):
        assert talk.prompt("first")
        own.run("mount", "-o", "remount,bind,ro", data)
        talk.fails("second", "EROFS")
        assert stored(talk, own) == 2
        # What only reads goes on.
        assert len(talk.client.call("session/list", {"cwd": talk.daemon.workspace}, timeout=PATIENCE).sessions) == 1
        own.run("mount", "-o", "remount,bind,rw", data)
        talk.goes_on()


# --- what people and programs do to the files


def test_a_directory_that_was_moved_away_is_an_error_at_once_and_flushed_when_it_is_back(talk: Talk) -> None:  # K-3
    away = talk.daemon.place / "away"
    talk.directory.rename(away)
    talk.fails("second", "put it back")
    assert not talk.directory.exists()
    away.rename(talk.directory)
    talk.goes_on()


def test_a_history_that_is_removed_while_a_tool_runs_is_written_anew_by_a_flush_only(talk: Talk) -> None:  # K-4
    result = prompt(talk.client, talk.opened.session_id, f"shell: rm {talk.history} && echo done", wait=True)
    assert (result.outcome, result.saved) == ("success", False)
    assert "was removed" in result.error.message
    assert not talk.history.exists()
    assert talk.client.call("session/flush", talk.ids).flushed
    _, history = read_session(FileSystem(), talk.opened.path)
    roles = [json.loads(history.line(index))["role"] for index in range(history.messages)]
    assert roles == ["user", "assistant", "user", "assistant", "toolResult", "assistant"]
    assert talk.prompt("and on")


def test_a_workspace_that_is_removed_costs_its_tools_and_no_turn(talk: Talk) -> None:  # K-12, S-5
    workspace = Path(talk.daemon.workspace)
    workspace.rmdir()
    result = prompt(talk.client, talk.opened.session_id, "shell: true", wait=True)
    assert (result.outcome, result.saved) == ("success", True)
    body = talk.client.call_raw("session/messages", talk.ids)
    (tool,) = [one for one in json.loads(body)["messages"] if one["role"] == "toolResult"]
    assert tool["isError"]
    talk.client.call("runtime/dispose", {"runtimeId": talk.opened.runtime_id})
    with pytest.raises(RpcError) as refused:
        talk.client.call(
            "runtime/open", {"cwd": str(talk.daemon.place), "session": {"kind": "open", "path": talk.opened.path}}
        )
    assert refused.value.kind == "cwd_missing"
    workspace.mkdir()
    assert reopened(talk.client, talk.daemon, talk.opened.path).state.message_count == 6


def test_two_daemons_with_one_data_directory_do_not_share_a_session(talk: Talk) -> None:  # K-5, S-22
    data = {"LOOPD_DATA_DIR": str(talk.daemon.place / "data")}
    with started(environ=data) as other, other.connect() as client:
        with pytest.raises(RpcError) as refused:
            reopened(client, other, talk.opened.path)
        assert (refused.value.kind, refused.value.data["holder"]) == ("session_locked", talk.daemon.popen.pid)
        assert client.call("session/messages", {"path": talk.opened.path}).total == 2
        assert talk.prompt("second")
        talk.daemon.signal(signal.SIGKILL)
        talk.daemon.ended()
        mine = Talk(other, client, reopened(client, other, talk.opened.path), talk.said)
        mine.is_whole()
        assert mine.prompt("third")
        mine.is_whole()
