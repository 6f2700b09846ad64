"""What loopd and systemd tell each other, and the units that make it one of its services. D-7"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loopd import systemd

UNITS = Path(__file__).parents[2] / "systemd"
needs_analyze = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
needs_activate = pytest.mark.skipif(
    not shutil.which("systemd-socket-activate"), reason="systemd-socket-activate is not installed"
)


@pytest.fixture
def place() -> Iterator[Path]:
    """A short private directory: pytest's own can be too long for the path of a socket."""
    with tempfile.TemporaryDirectory(prefix="loopd-") as directory:
        yield Path(directory)


@pytest.fixture(params=["path", "abstract"])
def told(request, place, monkeypatch) -> Iterator[socket.socket]:
    """The receiving end of NOTIFY_SOCKET."""
    name = str(place / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.settimeout(5)
        inbox.bind(name if request.param == "path" else f"\0{name}")
        monkeypatch.setenv("NOTIFY_SOCKET", name if request.param == "path" else f"@{name}")
        yield inbox


# --- notify -----------------------------------------------------------------------------------------------------------


def test_all_that_is_told_at_once_is_one_datagram(told):
    systemd.notify(READY="1", STATUS="serving")
    assert told.recv(999) == b"READY=1\nSTATUS=serving"
    systemd.notify(STOPPING="1", WATCHDOG="1")
    assert told.recv(999) == b"STOPPING=1\nWATCHDOG=1"


def test_a_status_cannot_smuggle_another_assignment_in(told):
    systemd.notify(STATUS="1 run\nMAINPID=1\r\n")
    assert told.recv(999) == b"STATUS=1 run MAINPID=1"


def test_nothing_to_tell_is_not_sent(told):
    systemd.notify()
    systemd.notify(STATUS="")
    assert told.recv(999) == b"STATUS="


@pytest.mark.parametrize("address", [None, "", "/nowhere/notify", "@nobody", "vsock:2:1", "/" + "x" * 200])
def test_without_a_listener_notify_does_nothing(address, monkeypatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    if address is not None:
        monkeypatch.setenv("NOTIFY_SOCKET", address)
    systemd.notify(READY="1")


def test_a_listener_that_never_reads_does_not_stop_us(told):
    for _ in range(10_000):
        systemd.notify(WATCHDOG="1")
    assert told.recv(999) == b"WATCHDOG=1"


# --- watchdog ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("micros", "pid", "interval"),
    [
        ("30000000", None, 15.0),
        ("30000000", os.getpid(), 15.0),
        ("30000000", 1, None),
        (None, None, None),
        ("0", None, None),
        ("-5", None, None),
        ("soon", None, None),
    ],
)
def test_the_watchdog_is_fed_at_half_its_time_if_it_watches_us(micros, pid, interval, monkeypatch):
    for name, value in {"WATCHDOG_USEC": micros, "WATCHDOG_PID": pid}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, str(value))
    assert systemd.watchdog_interval() == interval


# --- sockets that are handed over -------------------------------------------------------------------------------------


@contextmanager
def handed_over(sock: socket.socket, monkeypatch, *, pid: int | None = None) -> Iterator[int]:
    """``sock`` as systemd leaves one: inheritable, and named by the environment."""
    fd = os.dup(sock.fileno())
    os.set_inheritable(fd, True)
    monkeypatch.setenv("LISTEN_PID", str(pid or os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", "1")
    monkeypatch.setenv("LISTEN_FDNAMES", "loopd.socket")
    yield fd


def test_a_listening_socket_is_taken_once_and_hidden_from_children(place, monkeypatch):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(place / "s"))
        sock.listen()
        with handed_over(sock, monkeypatch) as fd:
            [taken] = systemd.listen_fds(fd)
    with taken:
        assert taken.getsockname() == str(place / "s")
        assert not taken.get_inheritable()
    assert not {"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"} & os.environ.keys()
    assert systemd.listen_fds() == []


@pytest.mark.parametrize("kind", ["not listening", "datagram", "internet"])
def test_what_is_no_listening_unix_stream_socket_is_refused_and_closed(kind, monkeypatch):
    family = socket.AF_INET if kind == "internet" else socket.AF_UNIX
    with socket.socket(family, socket.SOCK_DGRAM if kind == "datagram" else socket.SOCK_STREAM) as sock:
        if kind == "internet":
            sock.bind(("127.0.0.1", 0))
            sock.listen()
        with handed_over(sock, monkeypatch) as fd, pytest.raises(ValueError, match="no listening Unix stream socket"):
            systemd.listen_fds(fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        with handed_over(sock, monkeypatch) as fd:
            os.close(fd)
            with pytest.raises(ValueError, match="Bad file descriptor"):
                systemd.listen_fds(fd)


def test_what_was_handed_to_another_process_is_left_alone(monkeypatch):
    with socket.socket(socket.AF_UNIX) as sock, handed_over(sock, monkeypatch, pid=1) as fd:
        assert systemd.listen_fds(fd) == []
        os.close(fd)
    assert "LISTEN_FDS" not in os.environ


# --- the units --------------------------------------------------------------------------------------------------------


@needs_analyze
def test_systemd_finds_no_fault_in_the_units(place):
    home, runtime = place / "home", place / "runtime"
    runtime.mkdir(mode=0o700)
    (home / ".local/bin").mkdir(parents=True)
    (home / ".local/bin/loopd").symlink_to("/bin/true")  # the unit's program must exist to be verified
    units = [shutil.copy(UNITS / name, place) for name in ("loopd.service", "loopd.socket")]
    verified = subprocess.run(
        ["systemd-analyze", "--user", "--man=no", "verify", *units],
        env={"PATH": os.environ["PATH"], "HOME": str(home), "XDG_RUNTIME_DIR": str(runtime)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    # An unknown key is only a warning for systemd; the exit code does not tell.
    assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")


def test_the_service_leaves_the_socket_and_the_drain_alone():
    service = dict(line.split("=", 1) for line in (UNITS / "loopd.service").read_text().split("\n") if _assigns(line))
    assert "RuntimeDirectory" not in service  # it would delete the socket under an active socket unit
    assert service["KillMode"] == "mixed"  # TERM for the daemon alone, which ends its tools itself
    assert int(service["TimeoutStopSec"]) > 10  # D-4: the daemon is gone within 10 s by itself
    # 75: a rescue copy was written (D-4); 2 and 78: options or settings are wrong, and would be wrong again
    assert set(service["RestartPreventExitStatus"].split()) == {"2", "75", "78"}


def _assigns(line: str) -> bool:
    return "=" in line and not line.startswith("#")


# --- the daemon under systemd -----------------------------------------------------------------------------------------


@contextmanager
def activated(place: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program that ``systemd-socket-activate`` starts at the first connection to ``place``/s."""
    settings = {
        "HOME": str(place),
        "NOTIFY_SOCKET": str(place / "notify"),
        "WATCHDOG_USEC": "400000",
        "LOOPD_DATA_DIR": str(place / "data"),
    }
    command = ["systemd-socket-activate", f"--listen={place}/s"]
    command += [f"--setenv={name}={value}" for name, value in settings.items()]
    with subprocess.Popen(
        [*command, sys.executable, *arguments], cwd="/", stderr=subprocess.PIPE, umask=0o077
    ) as child:
        try:
            assert child.stderr is not None
            assert b"Listening on" in child.stderr.readline()
            yield child
        finally:
            child.kill()


@needs_activate
def test_a_program_that_systemd_starts_gets_its_socket(place):
    program = "from loopd import systemd; [s] = systemd.listen_fds(); s.accept()[0].sendall(s.getsockname().encode())"
    with activated(place, "-c", program), socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(str(place / "s"))
        assert client.recv(999) == f"{place}/s".encode()


@needs_activate
def test_the_daemon_serves_the_socket_it_was_started_for_reports_and_leaves_it_in_place(place):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.settimeout(20)
        inbox.bind(str(place / "notify"))
        with activated(place, "-m", "loopd", "--socket", f"{place}/s") as daemon:
            assert _hello(place / "s")["result"]["server"]["name"] == "loopd"
            assert b"READY=1" in inbox.recv(999)
            while b"WATCHDOG=1" not in inbox.recv(999):
                pass
            daemon.send_signal(signal.SIGTERM)
            while b"STOPPING=1" not in inbox.recv(999):
                pass
            assert daemon.wait(10) == 0
    assert (place / "s").is_socket()  # it is the socket unit's, which starts the next daemon on it


def _hello(path: Path) -> dict[str, dict[str, dict[str, str]]]:
    request = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"versions": [1]}}
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(20)
        client.connect(str(path))
        client.sendall(json.dumps(request).encode() + b"\n")
        with client.makefile("rb") as answers:
            answer: dict[str, dict[str, dict[str, str]]] = json.loads(answers.readline())
            return answer
