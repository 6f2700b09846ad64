"""The processes that are measured, in directories of their own and each ended by its pid, and what the system says of
them: CPU time, memory, file calls."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loop_protocol.client import Client

PATIENCE = 60.0
HERE = Path(__file__).parent
# Where the checkout is run and not an installation, its programs must find it too.
IMPORTS = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
SETTINGS = """\
[default]
model = "bench/bench"
permission = "danger-full-access"
[daemon]
durability = "{durability}"
[providers.bench]
api = "openai-chat"
base_url = "http://127.0.0.1:{port}/v1"
auth = "none"
[[providers.bench.models]]
id = "bench"
"""
CALL = re.compile(r"^\d+ +([\d.]+) (\w+)\(.* = (\d+)", re.MULTILINE)


class Peer:
    """One of our own programs, which talks in lines."""

    def __init__(self, program: str, *arguments: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-P", str(HERE / program), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PATH": os.environ["PATH"], **IMPORTS},
        )

    def line(self) -> str:
        assert self.popen.stdout is not None
        if not (line := self.popen.stdout.readline()):
            raise RuntimeError(f"{self.popen.args!r} has ended")
        return line.decode().strip()

    def ask(self) -> str:
        assert self.popen.stdin is not None
        self.popen.stdin.write(b"\n")
        self.popen.stdin.flush()
        return self.line()

    def end(self) -> None:
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.popen.stdin.close()
        try:
            self.popen.wait(5)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self.popen.stdout.close()


@contextmanager
def peer(program: str, *arguments: str) -> Iterator[Peer]:
    started = Peer(program, *arguments)
    try:
        yield started
    finally:
        started.end()


@dataclass(slots=True)
class Provider:
    peer: Peer
    port: str

    def answers(self, count: int = 1) -> list[dict[str, float]]:
        return [json.loads(self.peer.line()) for _ in range(count)]


@dataclass(slots=True)
class Daemon:
    """Ready. ``ready_s``: how long that took since it was started."""

    root: Path
    popen: subprocess.Popen[bytes]
    ready_s: float
    pid: int = field(init=False)

    def __post_init__(self) -> None:
        with self.connect() as client:
            self.pid = client.call("server/status").pid

    @property
    def socket(self) -> str:
        return str(self.root / "s")

    def connect(self) -> Client:
        return Client.connect(self.socket, timeout=PATIENCE)

    def cpu(self) -> float:
        return cpu_of(self.pid)

    def rss(self) -> float:
        """MiB."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20

    def pss(self) -> float | None:
        """MiB. Only root may see it: the daemon closes its ``/proc`` to processes of its own user."""
        try:
            rollup = Path(f"/proc/{self.pid}/smaps_rollup").read_text()
        except PermissionError:
            return None
        return int(next(line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:"))) / 1024

    def file_calls(self, since: float) -> list[tuple[str, int]]:
        """What ``strace`` saw since then (Unix time): the call and its result."""
        trace = (self.root / "trace").read_text(errors="replace")
        # A call that another thread interrupted is on two lines; the second one has the result.
        calls = re.sub(r"<\.\.\. (\w+) resumed>", r"\1(", trace)
        return [(name, int(result)) for at, name, result in CALL.findall(calls) if float(at) >= since]


def cpu_of(pid: int) -> float:
    """CPU seconds of all threads of a process, ended ones too, to the nanosecond (``clock_getcpuclockid``)."""
    return time.clock_gettime(~pid << 3 | 2)


class World:
    """A private directory and what runs in it. Leaving it ends all of that."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.root = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))

    def __enter__(self) -> World:
        try:
            started = self._stack.enter_context(peer("provider.py"))
            self.provider = Provider(started, started.line())
            self.workspace = self.root / "w"
            self.workspace.mkdir()
            return self
        except BaseException:
            self._stack.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def data(self) -> str:
        return str(self.root / "data")

    @property
    def environment(self) -> dict[str, str]:
        """For the daemon, and for a ``loopctl`` that starts one."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.root),
            "XDG_RUNTIME_DIR": str(self.root / "r"),
            "LOOPD_SOCKET": str(self.root / "s"),
            "LOOPD_DATA_DIR": self.data,
            "LOOPD_CONFIG": str(self.root / "config.toml"),
            **IMPORTS,
        }

    def configure(self, *, durable: bool = True) -> None:
        text = SETTINGS.format(port=self.provider.port, durability="power-loss" if durable else "process")
        (self.root / "config.toml").write_text(text)

    @contextmanager
    def daemon(self, *, durable: bool = True, traced: bool = False) -> Iterator[Daemon]:
        self.configure(durable=durable)
        trace = ["strace", "-f", "-qq", "-ttt", "-e", "trace=fsync,fdatasync,pwrite64", "-o", str(self.root / "trace")]
        notify = self.root / "notify"
        notify.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox, (self.root / "log").open("ab") as log:
            inbox.settimeout(PATIENCE)
            inbox.bind(str(notify))
            start = time.monotonic()
            popen = subprocess.Popen(
                [*(trace if traced else ()), sys.executable, "-P", "-m", "loopd"],
                cwd="/",
                env={**self.environment, "NOTIFY_SOCKET": str(notify)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            pid = popen.pid
            try:
                while b"READY=1" not in inbox.recv(4096):
                    pass
                daemon = Daemon(self.root, popen, time.monotonic() - start)
                pid = daemon.pid
                yield daemon
            finally:
                end_process(pid)
                if popen.poll() is None and pid != popen.pid:
                    popen.wait(PATIENCE)  # strace ends with what it watches
                popen.wait()

    def loopctl(self, *arguments: str) -> tuple[float, float]:
        """Run it to its end: seconds of wall and CPU time."""
        return timed([sys.executable, "-m", "loopctl", *arguments], cwd=self.workspace, env=self.environment)


def timed(command: list[str], *, cwd: Path, env: dict[str, str]) -> tuple[float, float]:
    """Wall and CPU seconds of a command that must succeed, its own children not counted."""
    start = time.monotonic()
    popen = subprocess.Popen(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(popen.pid, 0)
    wall = time.monotonic() - start
    popen.returncode = os.waitstatus_to_exitcode(status)
    if popen.returncode:
        raise RuntimeError(f"{command} ended with {popen.returncode}")
    return wall, usage.ru_utime + usage.ru_stime


def end_process(pid: int) -> None:
    """A TERM, and a KILL where that is not enough."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            signal.pidfd_send_signal(descriptor, number)
            if _ends(descriptor):
                return
    except ProcessLookupError:
        return
    finally:
        os.close(descriptor)


def _ends(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(15_000))


def pace() -> float:
    """CPU milliseconds of a fixed piece of Python, the least of some tries: how fast the machine is just now."""
    spent = []
    for _ in range(10):
        start = time.process_time()
        sum(number * number for number in range(100_000))
        spent.append((time.process_time() - start) * 1000)
    return min(spent)


def facts() -> dict[str, Any]:
    """What the numbers depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model,
        "python": sys.version.split()[0],
        "kernel": os.uname().release,
        "load": os.getloadavg()[0],
        "strace": shutil.which("strace") is not None,
    }
