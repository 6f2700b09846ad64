"""Who gets in, and whose socket it is: one daemon per socket, its user's processes only."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_process import PATIENCE, DaemonProcess, open_session, prompt, spawned, started

from loop_protocol import paths
from loop_protocol.client import Client, LostConnection, Unreachable
from loopd import server


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with started() as daemon:
        yield daemon


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="loopd-") as directory:
        yield Path(directory)


def second(daemon: DaemonProcess) -> tuple[int, str]:
    """Start another one on the same socket: its exit code, and what it says."""
    ended = subprocess.run(
        [sys.executable, "-m", "loopd", "--socket", daemon.socket, "--data-dir", str(daemon.place / "other")],
        env={"PATH": os.environ["PATH"], "HOME": str(daemon.place)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    return ended.returncode, ended.stderr


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- one daemon per socket --------------------------------------------------------------------------------------------


def test_a_second_daemon_is_refused_while_the_first_runs_and_while_it_is_stopped(daemon: DaemonProcess) -> None:
    inode = os.stat(daemon.socket).st_ino  # K-53, D-6
    for number in (signal.SIGCONT, signal.SIGSTOP):
        daemon.signal(number)
        code, said = second(daemon)
        assert code == 69
        assert daemon.socket in said
        assert "another loopd serves" in said
    daemon.signal(signal.SIGCONT)
    assert os.stat(daemon.socket).st_ino == inode
    with daemon.connect() as client:
        assert client.call("server/status").pid == daemon.popen.pid
    daemon.signal(signal.SIGTERM)
    assert daemon.ended() == 0
    assert not os.path.exists(daemon.socket)


def test_after_a_kill_the_next_one_takes_over_socket_and_sessions(daemon: DaemonProcess) -> None:  # K-53
    with daemon.connect() as client:
        opened = open_session(client, daemon)
        assert prompt(client, opened.session_id, "hello", wait=True).saved
    daemon.signal(signal.SIGKILL)
    daemon.ended()
    assert Path(daemon.socket).is_socket()  # stale
    with started(place=daemon.place) as next_one, next_one.connect() as client:
        assert client.call("session/messages", {"path": opened.path}).committed == 2


def test_a_socket_on_which_something_else_listens_is_not_taken(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(place / "s"))
        other.listen(0)
        with pytest.raises(server.AlreadyServed):
            server.listen(str(place / "s"))
        with socket.socket(socket.AF_UNIX) as late:
            late.setblocking(False)
            assert late.connect_ex(str(place / "s")) == errno.EAGAIN  # nobody accepts, and the backlog is full
        with pytest.raises(server.AlreadyServed):
            server.listen(str(place / "s"))
    assert (place / "s").is_socket()


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_is_no_socket_is_refused_and_left_as_it_is(place: Path, kind: str) -> None:  # K-53
    at = place / "s"
    if kind == "file":
        at.write_text("precious")
    elif kind == "directory":
        at.mkdir()
    else:
        (place / "precious").write_text("precious")
        at.symlink_to(place / "precious")
    before = at.lstat()
    with pytest.raises(server.CannotServe, match="not a socket"):
        server.listen(str(at))
    assert at.lstat() == before
    assert kind == "directory" or at.read_text() == "precious"


async def test_the_socket_goes_at_the_end_only_if_it_is_still_ours(place: Path) -> None:  # noqa: ASYNC124 closing needs the loop
    path = place / "s"
    listener = server.listen(str(path))
    listener.close()
    assert not path.exists()
    listener = server.listen(str(path))
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        listener.close()
        assert path.is_socket()


async def test_an_inherited_socket_stays_where_it_is(place: Path) -> None:  # noqa: ASYNC124 closing needs the loop
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(place / "s"))
        made.listen()
        server.inherited(made.dup()).close()
    assert (place / "s").is_socket()


def test_a_daemon_with_an_inherited_socket_serves_it_and_leaves_it(place: Path) -> None:  # D-7
    program = (
        "import os, sys; os.environ['LISTEN_PID'] = str(os.getpid()); os.dup2(int(sys.argv[1]), 3, True); "
        "os.execv(sys.executable, [sys.executable, '-m', 'loopd'])"
    )
    with socket.socket(socket.AF_UNIX) as made, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        made.bind(str(place / "s"))
        made.listen()
        inbox.bind(str(place / "notify"))
        inbox.settimeout(PATIENCE)
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(place),
            "LISTEN_FDS": "1",
            "NOTIFY_SOCKET": str(place / "notify"),
        }
        with subprocess.Popen(
            [sys.executable, "-c", program, str(made.fileno())],
            env=environ,
            stderr=subprocess.DEVNULL,
            pass_fds=[made.fileno()],
        ) as child:
            try:
                with Client.connect(str(place / "s"), timeout=PATIENCE) as client:
                    assert client.call("server/status").pid == child.pid
                child.send_signal(signal.SIGTERM)
                assert child.wait(PATIENCE) == 0
            finally:
                child.kill()
    assert (place / "s").is_socket()


def test_a_term_at_the_very_moment_of_readiness_ends_it_cleanly(place: Path) -> None:
    with started(place=place) as daemon:
        daemon.signal(signal.SIGTERM)
        assert daemon.ended() == 0
    assert not (place / "s").exists()


# --- private ----------------------------------------------------------------------------------------------------------


def test_socket_and_directories_are_private_whatever_the_umask(place: Path) -> None:  # D-6, S-20, K-13
    path = place / "made" / "for" / "it" / "s"
    child = spawned(place, "--socket", str(path))
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
            inbox.bind(str(place / "notify"))
            inbox.settimeout(PATIENCE)
            while b"READY=1" not in inbox.recv(4096):
                pass
        assert mode(path) == 0o600
        assert [mode(parent) for parent in list(path.parents)[:3]] == [0o700] * 3
        (place / "ws").mkdir()
        with Client.connect(str(path)) as client:
            opened = client.call("runtime/open", {"cwd": str(place / "ws"), "session": {"kind": "new"}})
            prompt(client, opened.session_id, "hello", wait=True)
        for at in (place / "data").rglob("*"):
            assert mode(at) == (0o700 if at.is_dir() else 0o600), at
    finally:
        child.kill()
        child.wait()


def test_under_any_umask_the_socket_is_made_private_before_anybody_can_connect(place: Path) -> None:  # D-6
    before = os.umask(0)
    try:
        sock = server._bind(str(place / "s"))
    finally:
        os.umask(before)
    sock.close()
    assert mode(place / "s") == 0o600


@pytest.mark.parametrize("kind", ["link", "open", "file"])
def test_a_fallback_directory_that_others_may_have_made_is_refused(place: Path, kind: str) -> None:  # D-6
    fallback = place / f"loopd-{os.getuid()}"
    if kind == "link":
        (place / "elsewhere").mkdir(mode=0o700)
        fallback.symlink_to(place / "elsewhere")
    elif kind == "open":
        fallback.mkdir()
        fallback.chmod(0o755)
    else:
        fallback.write_text("")
    with pytest.raises(server.CannotServe, match=f"loopd-{os.getuid()}"):
        server.listen(str(fallback / "s"))
    assert not (place / "elsewhere" / "s").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("name", ["theirs", f"loopd-{os.getuid()}"])
def test_a_directory_of_somebody_else_is_refused(place: Path, name: str) -> None:  # D-6
    (place / name).mkdir(mode=0o700)
    os.chown(place / name, 12345, 12345)
    with pytest.raises(server.CannotServe, match="belongs to user 12345"):
        server.listen(str(place / name / "s"))


def test_without_a_runtime_directory_the_fallback_is_made_private(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # D-6
    monkeypatch.setattr(paths, "_is_private", lambda _: False)  # as if this machine had no /run/user
    path = paths.socket_path({"TMPDIR": str(place)})
    assert path == str(place / f"loopd-{os.getuid()}" / "loopd.sock")
    listened = server.listen(path)
    assert mode(Path(path).parent) == 0o700
    listened._sock.close()


def test_a_path_that_no_socket_can_have_is_refused_with_its_length_and_the_limit(place: Path) -> None:  # K-54
    path = place / ("d" * 120) / "s"
    with pytest.raises(server.CannotServe, match=rf"{len(os.fsencode(path))} bytes.*107"):
        server.listen(str(path))
    assert not path.parent.exists()
    child = spawned(place, "--socket", str(path))
    assert child.wait(PATIENCE) == 69
    assert "107" in (place / "log").read_text()
    just = place / ("s" * (106 - len(os.fsencode(place))))
    listener = server.listen(str(just))
    assert just.is_socket()
    listener._sock.close()


def test_a_process_of_another_user_is_refused(  # D-6
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert server.peer_uid(ours) == os.getuid()
        assert server.Listener._admit(ours, set())
        monkeypatch.setattr(server, "peer_uid", lambda _: os.getuid() + 1)
        with caplog.at_level("WARNING"):
            assert not server.Listener._admit(ours, set())
        assert theirs.recv(10) == b""
    assert str(os.getuid() + 1) in caplog.text


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_a_client_of_another_user_gets_nothing_even_if_it_can_reach_the_socket(daemon: DaemonProcess) -> None:  # D-6
    program = (
        "import os, socket, sys; sock = socket.socket(socket.AF_UNIX); sock.connect(sys.argv[1]); "
        "sock.settimeout(20); print(sock.recv(99))"
    )
    os.chmod(daemon.place, 0o755)
    os.chmod(daemon.socket, 0o666)
    done = subprocess.run(
        ["/usr/bin/env", "python3", "-c", program, daemon.socket],
        user=12345,
        capture_output=True,
        text=True,
        cwd="/",
        timeout=PATIENCE,
    )
    if done.returncode:
        pytest.skip(f"another user cannot run this Python: {done.stderr[-80:]}")
    assert done.stdout.strip() in ("b''", "")
    assert "refused a client of user 12345" in daemon.log


def test_a_client_is_told_when_its_daemon_ends(daemon: DaemonProcess) -> None:
    with daemon.connect() as client:
        open_session(client, daemon)
        daemon.signal(signal.SIGTERM)
        with pytest.raises(LostConnection):
            for _ in client.events():
                pass
    assert daemon.ended() == 0
    with pytest.raises(Unreachable):
        daemon.connect()
