"""The sandbox of a restricted preset: the host read-only, without network, and without the daemon's own files (A-7).

It is made by bubblewrap anew for each command and goes with it. ``die-with-parent`` must not be used: the parent is the
thread that started it, which ends after ten idle seconds.

What it does not keep from a command: reading whatever else the person may read, opening a FIFO of the host for
writing (no mount forbids that), and in the writable workspace a repository below it or one that it makes itself: only
the workspace's own ``.git`` is read-only, unless it is a link, with the directory in the workspace that it names. A
hard link that somebody put there before is the file that it is, wherever its other name is. Nor is it bounded in memory
and processes.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Literal

import trio

from loop_protocol.v1.methods import SandboxStatus
from loopd.agent.protected import NOTHING, Protected
from loopd.agent.tools.enclosure import Enclosure
from loopd.agent.tools.git import git_directories, within
from loopd.agent.tools.process import start
from loopd.agent.tools.seccomp import program_for

log = logging.getLogger(__name__)

Preset = Literal["read-only", "workspace-write"]

# Where a shell is. Of the PATH only the system's own directories count: it may lead through a workspace, where a
# command would leave a bwrap for the next start to find.
PLACES = "/usr/bin:/bin:/usr/local/bin:/run/current-system/sw/bin"
# It takes 20 ms as a rule.
TRIAL_S = 5.0
_LINKS = 40
ALLOWED: dict[Preset, str] = {
    "read-only": "reading files; no writing except below $TMPDIR, no network",
    "workspace-write": "reading files, writing in the workspace (not its .git) and below $TMPDIR; no network",
}
# What is in there are devices and the kernel's settings. Mounted as a workspace, the host's own would be back.
_KERNELS = ("/proc", "/sys", "/dev")
_NAMESPACES = [f"--unshare-{kind}" for kind in ("user", "pid", "net", "ipc", "uts", "cgroup-try")]
# Settings of the kernel that keep bubblewrap from working, by what they are then.
_SYSCTLS = {
    ("kernel/apparmor_restrict_unprivileged_userns", "1"): "AppArmor has to allow it, by a profile for bwrap or with "
    "`sysctl kernel.apparmor_restrict_unprivileged_userns=0`",
    ("kernel/unprivileged_userns_clone", "0"): "`sysctl kernel.unprivileged_userns_clone=1` allows it",
    ("user/max_user_namespaces", "0"): "`sysctl user.max_user_namespaces` has to be more than 0",
}


class Sandbox:
    """``status`` is None until it was tried: after READY, or with the first command; a trial that takes too long is
    made again."""

    def __init__(self, protected: Protected = NOTHING, *, places: str | None = None) -> None:
        self.status: SandboxStatus | None = None
        self._overdue = False  # the last trial told nothing: the machine was busy
        self._protected = protected
        self._bwrap = _systems_own("bwrap") if places is None else shutil.which("bwrap", path=places)

    async def tried(self) -> SandboxStatus:
        """Whether it works here. Never raises, takes ``TRIAL_S`` at most."""
        if self.status is None or self._overdue:
            reason = await self._trial()
            self.status = SandboxStatus(reason is None, reason)
            if reason is not None:
                log.warning("there is no sandbox, so each command of a restricted preset asks: %s", reason)
        return self.status

    async def _trial(self) -> str | None:
        try:
            enclose = partial(self.enclosure, "read-only", "/")
            tree = await start(["/bin/sh", "-c", ":"], cwd="/", env={}, umask=0o077, enclose=enclose)
        except (OSError, NotImplementedError) as error:
            return getattr(error, "strerror", None) or str(error)
        said = b""
        async with tree:
            with trio.move_on_after(TRIAL_S) as bound:
                while data := await tree.read():
                    said = (said + data)[:1000]
                await tree.exited()
        self._overdue = bound.cancelled_caught
        if tree.returncode == 0 and tree.entered:
            return None
        what = "it did not end in time" if bound.cancelled_caught else first_line(said)
        hint = await trio.to_thread.run_sync(_hint)
        return "; ".join([f"bubblewrap does not work here: {what}", *hint])

    def enclosure(self, preset: Preset, workspace: str) -> Enclosure:
        """The command that makes it. ``workspace`` is a real path. It looks at the disk; raises OSError.

        What is protected and a command could make in its workspace is made first, since what is not there cannot be
        covered.
        """
        if self._bwrap is None:
            raise FileNotFoundError(errno.ENOENT, "bubblewrap is not installed (package: bubblewrap)")
        if os.path.realpath(workspace) != workspace:  # another session's command may have put a link there meanwhile
            raise OSError(errno.ELOOP, f"the workspace {workspace} leads somewhere else by now")
        if any(within(workspace, place) for place in _KERNELS) and not within(workspace, "/dev/shm"):
            raise OSError(errno.EINVAL, f"no sandbox can have the workspace {workspace}: it would be let out by it")
        writable = preset == "workspace-write"
        mounts = _private(preset, workspace)
        if workspace != "/":  # mounted again, for it may lie below what is private
            mounts += ["--bind" if writable else "--ro-bind", workspace, workspace]
        covers = _covers(self._protected.paths, workspace if writable else None)
        mounts += [word for _, words in sorted(covers.items()) for word in words]  # parents first
        # Run by root it would keep root's capabilities.
        argv = [self._bwrap, *_NAMESPACES, "--cap-drop", "ALL", *mounts, "--chdir", workspace]
        return Enclosure(argv, program_for(), {"TMPDIR": "/tmp" if writable else "/dev/shm"})


def _systems_own(name: str) -> str | None:
    for directory in filter(os.path.isabs, os.environ.get("PATH", os.defpath).split(":")):
        # What a command of root's leaves in its workspace belongs to root too, like the system's own.
        if os.geteuid() == 0 and directory not in PLACES.split(":"):
            continue
        path = os.path.join(directory, name)
        with suppress(OSError):
            if all(_is_the_systems(os.stat(one)) for one in (directory, path)) and os.access(path, os.X_OK):
                return path
    return None


def _is_the_systems(status: os.stat_result) -> bool:
    return status.st_uid == 0 and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def first_line(said: bytes | str) -> str:
    text = said.decode(errors="replace") if isinstance(said, bytes) else said
    return text.strip().partition("\n")[0] or "it said nothing"


# Run by root a command may change the kernel's settings: they go by the user and by no namespace (core_pattern names
# a program that the host's root runs).
_OWN_DEV_AND_PROC = ["--dev", "/dev", "--proc", "/proc", "--remount-ro", "/proc"]


def _private(preset: Preset, workspace: str) -> list[str]:
    """The host, and what each command has for itself."""
    if preset == "read-only":
        return ["--ro-bind", "/", "/", *_OWN_DEV_AND_PROC, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    if workspace == "/":
        # Devices and the kernel's settings are no files of a workspace.
        return ["--bind", "/", "/", *_OWN_DEV_AND_PROC, "--ro-bind-try", "/sys", "/sys"]
    private = [] if workspace == "/tmp" else ["--tmpfs", "/tmp"]
    return ["--ro-bind", "/", "/", *_OWN_DEV_AND_PROC, *private]


def _covers(protected: tuple[str, ...], workspace: str | None) -> dict[str, list[str]]:
    """What is mounted over which path. A mount point can neither be renamed nor removed: so each directory between a
    writable workspace and what is protected in it is one. A link can be neither, so the directory that holds one is
    read-only."""
    covers: dict[str, list[str]] = {}
    hidden: dict[str, bool] = {}  # whether it is a directory, where it does not exist
    for path in sorted(set(protected)):
        real, holders = _walk(path)
        covers |= {holder: ["--ro-bind", holder, holder] for holder in holders if within(holder, workspace)}
        hidden[real] = hidden.get(real, False) or path.endswith("/")
    for real in sorted(hidden):
        if any(within(real, other) for other in hidden if other != real):
            continue  # gone with that
        if within(real, workspace) and not os.path.lexists(real):
            _make(real, is_directory=hidden[real])
        if words := _hide(real):
            covers[real] = words
    if workspace is not None:
        # Hooks and settings in it are run by the person's own git later, with all rights.
        for git in git_directories(workspace):
            if not any(within(git, other) for other in hidden):
                covers.setdefault(git, ["--ro-bind", git, git])
        for path in list(covers):
            for parent in _between(workspace, path):
                covers.setdefault(parent, ["--bind", parent, parent])
    return covers


def _make(path: str, *, is_directory: bool) -> None:
    os.makedirs(path if is_directory else os.path.dirname(path), 0o700, exist_ok=True)
    if not is_directory:  # empty, it says as little as none: settings and keys may be there later
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))


def _hide(path: str) -> list[str]:
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []  # where nothing can be made either
    if stat.S_ISDIR(mode):
        return ["--tmpfs", path, "--remount-ro", path]
    return ["--ro-bind", "/dev/null", path]


def _walk(path: str) -> tuple[str, set[str]]:
    """The real path, and the directories of all links on the way to it."""
    real, holders, links = "/", set(), 0
    ahead = path.split("/")[::-1]
    while ahead:
        step = os.path.normpath(os.path.join(real, ahead.pop()))
        try:
            target = os.readlink(step)
        except OSError:  # no link, or nothing at all
            real = step
            continue
        if (links := links + 1) > _LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        holders.add(os.path.dirname(step))
        real = "/" if target.startswith("/") else real
        ahead += target.split("/")[::-1]
    return real, holders


def _between(directory: str, path: str) -> Iterator[str]:
    """The directories below ``directory`` that lead to ``path``."""
    if within(path, directory):
        while (path := os.path.dirname(path)) != directory and path != "/":
            yield path


def _hint() -> list[str]:
    hints = []
    for (name, value), hint in _SYSCTLS.items():
        try:
            with open(f"/proc/sys/{name}") as file:
                if file.read().strip() == value:
                    hints.append(hint)
        except OSError:
            continue
    return hints
