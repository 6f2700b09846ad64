"""A world to escape into, and what of it must be as before: files, processes, sockets, the host's own settings.

Whether an attempt succeeded is read off the world, not off what the tool says. It lies below `/var/tmp`, since a
sandbox has a `/tmp` of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import secrets
import select
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from loopd.agent.protected import Protected

_LEFT = ("/tmp/*{}*", "/var/tmp/{}*", "/dev/shm/*{}*", "/run/*{}*", "/etc/*{}*", "/*{}*", "/var/spool/cron/*{}*")
_HOST = ("/proc/self/mountinfo", "/proc/sys/kernel/hostname", "/proc/sys/kernel/core_pattern", "/proc/sysvipc/shm")
OTHER_RIGHTS = "other rights than its user has"
_HOOK = "#!/bin/sh\necho old\n"


class World:
    """``close`` it. ``secret`` begins everything that no tool may tell."""

    def __init__(self) -> None:
        self.token = f"x{secrets.token_hex(6)}x"
        self.secret = f"SECRET-{self.token}"
        self.root = Path(tempfile.mkdtemp(prefix="loopd-escape-", dir="/var/tmp"))
        self.ws, self.out, self.home, self.own = (self.root / name for name in ("ws", "out", "home", "own"))
        self._opened = contextlib.ExitStack()
        self._make_files()
        self.protected = self._make_own()
        self.listeners = self._listen()
        self._make_memory()
        self._terminal, pts = os.openpty()
        os.set_blocking(self._terminal, False)
        self._opened.callback(os.close, self._terminal)
        self._opened.callback(os.close, pts)
        self._start_victim()
        self._heard: list[str] = []
        self._lock = threading.Lock()
        end, self._end = os.pipe()
        self._opened.callback(os.close, end)
        self._thread = threading.Thread(target=self._serve, args=(end,))
        self._thread.start()
        port = {
            name: str(self.listeners[name].getsockname()[1])
            for name in ("TCP", "TCP6", "UDP")
            if name in self.listeners
        }
        self.variables = {
            "W": str(self.ws), "O": str(self.out), "H": str(self.home), "P": str(self.own), "R": str(self.root),
            "T": self.token, "V": str(self.victim.pid), "KEY": str(self._key), "PTS": os.ttyname(pts), "TCP6": "1",
            **port,
        }  # fmt: skip

    def _make_files(self) -> None:
        for path in ("ws/.git/hooks", "ws/.git/objects", "ws/.git/refs", "ws/linked/real/hooks", "out/dir", "home"):
            (self.root / path).mkdir(parents=True)
        # A directory that is a valid repository, and one whose `.git` only names it.
        (self.ws / ".git/HEAD").write_text("ref: refs/heads/main\n")
        (self.ws / ".git/config").write_text("[core]\n\trepositoryformatversion = 0\n")
        (self.ws / ".git/hooks/sample").write_text(_HOOK)
        (self.ws / "linked/.git").write_text("gitdir: real\n")
        (self.ws / "linked/real/hooks/sample").write_text(_HOOK)
        for path in ("ws/file", "out/file", "out/dir/file", "out/program", "home/.bashrc"):
            (self.root / path).write_text("old\n")
        (self.out / "program").chmod(0o755)
        os.mkfifo(self.out / "fifo")
        os.link(self.out / "file", self.ws / "before")

    def _make_own(self) -> Protected:
        """What the daemon keeps from its tools; some of it lies in the workspace."""
        files = [
            "own/data/sessions/one/history.jsonl",
            "own/conf/loopd/config.toml",
            "own/key",
            "own/creds/key",
            "own/log",
        ]
        for path in [*files, "own/run/loopd/sock.lock", "ws/own/deep/key"]:
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_text(f"{self.secret}-{path.replace('/', '-')}\n")
        os.link(self.own / "key", self.ws / "before-key")
        own = [self.own / name for name in ("data", "conf/loopd", "key", "creds", "log", "run/loopd", "absent")]
        return Protected([str(path) for path in [*own, self.ws / "own/deep", f"{self.ws}/own/later/"]])

    def _listen(self) -> dict[str, socket.socket]:
        places: dict[str, tuple[int, int, object]] = {
            "sock": (socket.AF_UNIX, socket.SOCK_STREAM, str(self.out / "sock")),
            "datagrams": (socket.AF_UNIX, socket.SOCK_DGRAM, str(self.out / "datagrams")),
            "abstract": (socket.AF_UNIX, socket.SOCK_STREAM, f"\0{self.token}"),
            "daemon": (socket.AF_UNIX, socket.SOCK_STREAM, str(self.own / "run/loopd/sock")),
            "TCP": (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            "UDP": (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            "TCP6": (socket.AF_INET6, socket.SOCK_STREAM, ("::1", 0)),
        }
        listeners = {}
        for name, (family, kind, place) in places.items():
            try:
                listener = self._opened.enter_context(socket.socket(family, kind))
                listener.bind(place)
            except OSError:
                if name != "TCP6":  # not every machine has it
                    raise
                continue
            listener.setblocking(False)
            if kind == socket.SOCK_STREAM:
                listener.listen()
            listeners[name] = listener
        return listeners

    def _make_memory(self) -> None:
        self._key = secrets.randbelow(1 << 29) + 1
        libc = ctypes.CDLL(None, use_errno=True)
        libc.shmat.restype = ctypes.c_void_p
        memory = libc.shmget(self._key, 4096, 0o1600)
        at = libc.shmat(memory, None, 0)
        ctypes.memmove(at, f"{self.secret}-memory".encode(), len(self.secret) + 7)
        libc.shmdt(ctypes.c_void_p(at))
        for key in (self._key, self._key + 1):  # the second is what an attempt may leave
            self._opened.callback(lambda key=key: libc.shmctl(libc.shmget(key, 0, 0), 0, None))

    def _start_victim(self) -> None:
        """A process outside, with secrets, that holds a file open and stays in the workspace's parent."""
        with open(self.out / "file", "r+") as held:
            self.victim = subprocess.Popen(
                [f"{self.secret}-argument"], executable="/bin/cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=held, cwd=self.root, env={"KEY": f"{self.secret}-environment"}, process_group=0,
            )  # fmt: skip

    def close(self) -> None:
        os.close(self._end)
        self._thread.join()
        self.victim.kill()
        self.victim.wait()
        for pipe in (self.victim.stdin, self.victim.stdout):
            assert pipe is not None
            pipe.close()
        self._opened.close()
        shutil.rmtree(self.root)
        for path in self._left():
            if os.path.isdir(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)

    def tidy(self) -> None:
        """The workspace as it was, but for what nobody may change in it."""
        for path in self.ws.glob("s*"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    # --- what must be as before ---------------------------------------------------------------------------------------

    def seen(self, *, writable: bool) -> dict[str, object]:
        """Everything that an attempt must leave alone. ``writable``: the workspace is its own, but for git's and the
        daemon's files."""
        return {**dict(self._files(writable=writable)), **self._machine(), "left": self._left(), "heard": self.heard()}

    def _files(self, *, writable: bool) -> Iterator[tuple[str, object]]:
        for place, directories, files in os.walk(self.root):
            for name in [*directories, *files]:
                path = os.path.join(place, name)
                inside = os.path.relpath(path, self.ws)
                if (
                    not writable
                    or inside.startswith("..")
                    or inside.startswith((".git", "own", "linked/.git", "linked/real"))
                ):
                    yield path, _facts(path)
                elif os.lstat(path).st_mode & 0o6000:
                    yield path, OTHER_RIGHTS

    def _machine(self) -> dict[str, object]:
        facts: dict[str, object] = {name: Path(name).read_text() for name in _HOST if os.path.exists(name)}
        pid = self.victim.pid
        facts["alive"] = self.victim.poll() is None
        if facts["alive"]:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            facts["state"] = fields[0], fields[16]  # and how nice it is
            facts["limits"] = Path(f"/proc/{pid}/limits").read_text()
            facts["score"] = Path(f"/proc/{pid}/oom_score_adj").read_text()
        return facts

    def _left(self) -> list[str]:
        return sorted(path for place in _LEFT for path in glob.glob(place.format(self.token)))

    def heard(self) -> list[str]:
        """Which listeners got something since one asked last."""
        with self._lock:
            self._answer()
            heard, self._heard = self._heard, []
        return sorted(heard)

    def _serve(self, end: int) -> None:
        """In a thread: whoever connects is hung up on, so that no program waits for an answer."""
        while end not in select.select([*self.listeners.values(), end], [], [])[0]:
            with self._lock:
                self._answer()

    def _answer(self) -> None:
        for name, listener in self.listeners.items():
            with contextlib.suppress(BlockingIOError):
                if listener.type == socket.SOCK_DGRAM:
                    listener.recv(1)
                else:
                    listener.accept()[0].close()
                self._heard.append(name)
        with contextlib.suppress(BlockingIOError):
            os.read(self._terminal, 100)
            self._heard.append("terminal")


def _facts(path: str) -> object:
    status = os.lstat(path)
    content = b""
    if os.path.isfile(path) and not os.path.islink(path):
        content = Path(path).read_bytes()
    attributes = {
        name: os.getxattr(path, name, follow_symlinks=False) for name in os.listxattr(path, follow_symlinks=False)
    }
    kept = (status.st_mode, status.st_uid, status.st_gid, status.st_nlink, status.st_ino, status.st_size)
    return *kept, status.st_mtime_ns, status.st_ctime_ns, content, attributes
