"""The power fails while a real daemon saves: what it told its client is saved is there when the disk comes back.

The data directory is an ext4 image on a loop device. ``FS_IOC_SHUTDOWN`` without a flush of the log throws away what
the kernel had not brought to the disk yet, as a power cut does; a kill of the daemon alone would lose nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from daemon_process import PATIENCE, DaemonProcess, started
from mounts import Mounts, mounts

from loop_protocol.client import Client, LostConnection
from loopd.storage.files import read_session
from loopd.storage.fs import FileSystem

CUTS = 24
SESSIONS = 3
FS_IOC_SHUTDOWN, NO_LOG_FLUSH = 0x8004587D, 2


@dataclass(slots=True)
class Told:
    """What the client knows of a session: ``saved`` messages of it, and which prompts were accepted, in their order."""

    path: str
    saved: int = 0
    said: list[str] = field(default_factory=list)
    busy: bool = False


@dataclass(slots=True)
class Disk:
    mounts: Mounts
    image: Path
    data: str

    def mount(self) -> None:
        # The loop device goes with the last mount.
        self.mounts.attempt("mount", "-o", "loop", str(self.image), self.data)

    def cut(self) -> None:
        directory = os.open(self.mounts.seen(self.data), os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(directory, FS_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(directory)

    def unmount(self) -> None:
        self.mounts.run("umount", self.data)


@contextmanager
def disk(root: Path) -> Iterator[Disk]:
    with mounts() as own:
        made = Disk(own, root / "image", str(root / "data"))
        with made.image.open("wb") as image:
            image.truncate(48 * 1024 * 1024)
        os.mkdir(made.data)
        own.attempt("mkfs.ext4", "-q", "-F", str(made.image))
        made.mount()
        own.run("chmod", "700", made.data)
        yield made


def test_what_was_told_to_be_saved_survives_every_power_cut() -> None:  # S-21, rule 2
    sessions: dict[str, Told] = {}
    caught = published = 0
    with tempfile.TemporaryDirectory(prefix="loopd-") as root, disk(Path(root)) as device:
        for number in range(CUTS):
            with started(place=Path(root), under=device.mounts.enter) as daemon, daemon.connect() as client:
                open_all(client, daemon, sessions)
                live_until_cut(client, sessions, device, number)
                daemon.signal(signal.SIGKILL)
                daemon.ended()
                hear_the_rest(client, sessions)
            device.unmount()
            device.mount()
            caught += sum(told.busy for told in sessions.values())
            published += check(device, sessions)
    print(f"{CUTS} power cuts with {caught} saves on their way, {published} of them done; {len(sessions)} sessions")
    assert caught >= CUTS


def open_all(client: Client, daemon: DaemonProcess, sessions: dict[str, Told]) -> None:
    """Those that were used last, and a new one: what was answered of its creation must last too."""
    latest = [{"kind": "open", "path": told.path} for told in [*sessions.values()][1 - SESSIONS :]]
    for session in [*latest, {"kind": "new"}]:
        asked = {"cwd": daemon.workspace, "session": session, "runtimeId": "new"}
        opened = client.call("runtime/open", asked, timeout=PATIENCE)
        told = sessions.setdefault(opened.session_id, Told(opened.path))
        assert opened.state.message_count == told.saved
        client.call("runtime/attach", {"runtimeId": opened.runtime_id})
        ask(client, opened.session_id, told)


def ask(client: Client, session_id: str, told: Told) -> None:
    text = f"prompt {len(told.said)} " + "and more " * 50
    told.said.append(text)
    told.busy = True
    client.call("session/prompt", {"sessionId": session_id, "content": text}, timeout=PATIENCE)


def live_until_cut(client: Client, sessions: dict[str, Told], device: Disk, number: int) -> None:
    """After some saves: every other cut comes when one has just been told, the rest while another one is on its way, a
    little later each time."""
    saves = 0
    while True:
        params = client.next_event(PATIENCE)
        assert params is not None
        hear(params, sessions)
        tag = params.event.__struct_config__.tag
        saves += tag == "session_saved"
        if tag == "run_settled":
            ask(client, params.session_id, sessions[params.session_id])
        enough = saves > SESSIONS + number % 5
        if enough and number % 2 and tag == "session_saved":
            return device.cut()
        if enough and not number % 2 and tag == "prompt_timing" and params.event.timing.finished_at is not None:
            time.sleep(number * 0.000_15)
            return device.cut()


def hear(params: Any, sessions: dict[str, Told]) -> None:
    if params.event.__struct_config__.tag == "session_saved":
        told = sessions[params.session_id]
        told.saved, told.busy = params.event.message_count, False


def hear_the_rest(client: Client, sessions: dict[str, Told]) -> None:
    """What the daemon said before the cut and the client had not read."""
    try:
        while (params := client.next_event(PATIENCE)) is not None:
            hear(params, sessions)
    except LostConnection:
        pass


def check(device: Disk, sessions: dict[str, Told]) -> int:
    """Every session opens with all that was told, and with one more turn at most. Answers how many have that one."""
    more = 0
    for told in sessions.values():
        _, history = read_session(FileSystem(), str(device.mounts.seen(told.path)))
        texts = [json.loads(history.line(index))["content"][0]["text"] for index in range(history.messages)]
        assert history.messages in {told.saved, told.saved + 2 * told.busy}
        assert texts == [text for text in told.said[: history.messages // 2] for _ in ("asked", "answered")]
        more += history.messages > told.saved
        told.saved, told.busy = history.messages, False
        del told.said[history.messages // 2 :]
    return more
