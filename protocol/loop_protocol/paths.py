"""Where the daemon's socket, data, configuration and log are: one answer for the daemon and for every client.

Everything works with an empty environment too: the home directory then comes from the password database. A relative
path in a variable is taken from the current directory (``LOOPD_*``) or ignored (``XDG_*``, as its specification asks).
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Mapping

# sockaddr_un.sun_path has 108 bytes on Linux, and the last one is a NUL.
SOCKET_PATH_LIMIT = 107

Environment = Mapping[str, str]


class PathProblem(Exception):
    """A path cannot be used; the message says which, why, and what to do."""


def socket_path(environ: Environment) -> str:
    """The socket to serve on or to connect to. Nothing is created."""
    if chosen := environ.get("LOOPD_SOCKET"):
        return os.path.abspath(chosen)
    return os.path.join(_runtime_dir(environ), "loopd.sock")


def check_socket_path(path: str) -> str:
    """The same path, if a Unix socket's address can hold it (K-54)."""
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_LIMIT:
        raise PathProblem(
            f"the socket path has {length} bytes, a Unix socket's may have {SOCKET_PATH_LIMIT}: {path}\n"
            "Choose a shorter one with --socket or LOOPD_SOCKET."
        )
    return path


def state_dir(environ: Environment) -> str:
    return os.path.join(_base(environ, "XDG_STATE_HOME", ".local/state"), "loopd")


def data_dir(environ: Environment) -> str:
    """Where the sessions are."""
    chosen = environ.get("LOOPD_DATA_DIR")
    return os.path.abspath(chosen) if chosen else state_dir(environ)


def config_path(environ: Environment) -> str:
    chosen = environ.get("LOOPD_CONFIG")
    usual = os.path.join(_base(environ, "XDG_CONFIG_HOME", ".config"), "loopd", "config.toml")
    return os.path.abspath(chosen) if chosen else usual


def log_path(environ: Environment) -> str:
    """Where a daemon that was started on demand logs to."""
    return os.path.join(state_dir(environ), "loopd.log")


def home(environ: Environment) -> str:
    return _absolute(environ, "HOME") or pwd.getpwuid(os.getuid()).pw_dir


def private_directory(path: str) -> None:
    """Make sure that ``path`` is a directory in which nobody else can put a socket of theirs.

    What is missing is made with mode 0700. Raises :class:`PathProblem` for a directory of somebody else, and is strict
    about ``loopd-<uid>``: in a temporary directory anybody may have made that one first, so it must be a real
    directory, ours, and closed to all others (D-6).
    """
    _make(path)
    check_private_directory(path)


def check_private_directory(path: str) -> None:
    """The same of a directory that is there; nothing is made. Raises FileNotFoundError where there is none."""
    fallback = os.path.basename(path) == _fallback_name()
    found = os.lstat(path) if fallback else os.stat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise PathProblem(f"{path} is not a directory: remove it, or use another place")
    if found.st_uid not in ((os.getuid(),) if fallback else (os.getuid(), 0)):
        raise PathProblem(f"{path} belongs to user {found.st_uid}: use a place of your own")
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        raise PathProblem(f"others may write into {path}, and put a socket of theirs there: run `chmod go-w {path}`")
    if fallback and found.st_mode & 0o077:
        raise PathProblem(f"{path} is open to other users: run `chmod 700 {path}` if it is yours")


def _make(path: str) -> None:
    if os.path.lexists(path):
        return
    _make(os.path.dirname(path))
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return  # somebody was faster; the checks look at what is there now
    except OSError as error:
        raise PathProblem(f"cannot make {path}: {error.strerror}") from None


def _runtime_dir(environ: Environment) -> str:
    if chosen := _absolute(environ, "XDG_RUNTIME_DIR"):
        return os.path.join(chosen, "loopd")
    usual = f"/run/user/{os.getuid()}"
    return os.path.join(usual, "loopd") if _is_private(usual) else os.path.join(_temporary(environ), _fallback_name())


def _fallback_name() -> str:
    return f"loopd-{os.getuid()}"


def _is_private(path: str) -> bool:
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700


def _temporary(environ: Environment) -> str:
    # As tempfile does, whose import costs a client 10 ms.
    chosen = _absolute(environ, "TMPDIR")
    return chosen if chosen and os.path.isdir(chosen) else "/tmp"


def _base(environ: Environment, name: str, below_home: str) -> str:
    return _absolute(environ, name) or os.path.join(home(environ), below_home)


def _absolute(environ: Environment, name: str) -> str | None:
    value = environ.get(name, "")
    return value if os.path.isabs(value) else None
