"""A command with everything that descends from it: started in a session of its own, and gone when its scope ends.

The group is killed as one. What left it with ``setsid`` is found because the daemon is a subreaper, so that orphans
become its children, and because each call marks its environment: that tells whose an orphan is while several calls
run. A process that wiped its environment has no marker; it goes when its ancestors were seen alive, or with the last
call under way. All of this holds for children outside the daemon's own session only, so whatever else the daemon
starts must stay in that session.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType

import trio

from loopd.agent.tools.enclosure import Enclose, Entry
from loopd.agent.tools.procfs import Process, below, kill, mark_of, process_table, send

log = logging.getLogger(__name__)

MARK = "LOOPD_CALL"
# How long a clean-up may take, shielded: a process in a dead file system neither dies nor comes up.
CLEANUP_S = 2.0
_PR_SET_CHILD_SUBREAPER = 36
_CHUNK = 64 * 1024

# Before 3.11.6 vfork kept the GIL until the child's exec was over, so a program or a working directory on a dead file
# system would have held up the whole daemon (gh-104372); after fork only the thread that starts it waits.
if sys.version_info < (3, 11, 6):
    subprocess._USE_VFORK = False  # type: ignore[misc]  # it is there to be set

# Children belong to the whole process, so this one list does too: a clean-up must know whose a child is.
_running: dict[str, Tree] = {}
_sweeping = trio.CapacityLimiter(8)


def become_subreaper() -> None:
    """Orphans of this process's descendants become its children. Once at start; raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")


async def start(
    argv: Sequence[str], *, cwd: str, env: Mapping[str, str], umask: int, enclose: Enclose | None = None
) -> Tree:
    """Enter the answer at once. Raises OSError, or ValueError for a NUL byte, and what ``enclose`` raises, which is
    called in the thread that starts it.

    ``umask`` is the person's: the daemon's 077 is for its own files. All limits are those that it was started with.
    """
    tree = Tree()
    await trio.lowlevel.checkpoint_if_cancelled()  # behind it the thread starts, whatever is cancelled
    try:
        await trio.to_thread.run_sync(
            partial(tree._come_up, argv, cwd, {**env, MARK: tree.token}, umask, enclose),
            limiter=trio.CapacityLimiter(1),  # a dead working directory holds this thread and no other call's
            abandon_on_cancel=True,
        )
    except trio.Cancelled:
        with trio.move_on_after(2 * CLEANUP_S, shield=True):
            await tree._withdraw()
        raise
    return tree


class Tree:
    """One command under way: ``async with`` it. The shell stays a zombie until the group is killed, so that neither its
    pid nor its group's can come to mean anything else. In an enclosure that process is bubblewrap's, which ends with
    the shell in it and with its exit code; all else in there dies with its first process, which is in the group."""

    __slots__ = (
        "_entry",
        "_given_up",
        "_output",
        "_pidfd",
        "_popen",
        "_seen",
        "_settled",
        "_turn",
        "entered",
        "pid",
        "returncode",
        "since",
        "token",
    )

    def __init__(self) -> None:
        self.token = secrets.token_hex(8)  # not the call's id, which providers repeat
        self.pid: int | None = None  # None while it is being started
        self.returncode: int | None = None
        self._entry: Entry | None = None
        self.entered = False  # after the end: whether the command ran in its enclosure
        # When the first of the calls started that have overlapped ever since, in the ticks of /proc/PID/stat.
        now = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
        self.since: int = min((tree.since for tree in _running.copy().values()), default=now)
        self._seen: set[tuple[int, int]] = set()
        # Whose it is when it comes up while its caller gives it up: the thread's that started it, or the caller's.
        self._turn = threading.Condition()
        self._settled = self._given_up = False

    async def exited(self) -> None:
        """Until the shell itself has ended."""
        await trio.lowlevel.wait_readable(self._pidfd)

    async def read(self) -> bytes:
        """What arrived on stdout and stderr; empty once nobody holds them open any more."""
        while True:
            await trio.lowlevel.wait_readable(self._output)
            # The command can open /proc/self/fd/1 and read its own output back before we do.
            with suppress(BlockingIOError):
                return os.read(self._output, _CHUNK)

    def signal(self, number: int) -> None:
        """To the whole group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, number)

    async def terminate(self) -> None:
        """SIGTERM to the group. In an enclosure to those in it only: the process around them would end at once, and
        none of them could tidy up (K-23)."""
        if self._entry is None:
            self.signal(signal.SIGTERM)
        else:
            await trio.to_thread.run_sync(self._terminate_inside, limiter=_sweeping, abandon_on_cancel=True)

    async def __aenter__(self) -> Tree:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Synchronous: from here on the group does nothing, whatever becomes of the awaits below.
        self.signal(signal.SIGSTOP)
        try:
            with trio.move_on_after(CLEANUP_S, shield=True) as bound:
                await self._end()
        finally:
            self._close()
        if bound.cancelled_caught:
            log.warning("processes of a tool call did not die within %s s", CLEANUP_S)

    async def _withdraw(self) -> None:
        """After a cancellation. As a rule it comes up in milliseconds; what comes up too late, its thread ends."""
        if await trio.to_thread.run_sync(self._comes_up, limiter=trio.CapacityLimiter(1)):
            async with self:
                pass

    async def _end(self) -> None:
        if not _exited(self._pidfd):
            # Now, while its descendants can still be told by their parents.
            await trio.to_thread.run_sync(self._see, limiter=_sweeping, abandon_on_cancel=True)
        self.signal(signal.SIGKILL)
        await self.exited()
        self.returncode = self._popen.wait()
        pause = 0.001
        while not _childless():
            if not await trio.to_thread.run_sync(self._sweep, limiter=_sweeping, abandon_on_cancel=True):
                return
            await trio.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _close(self) -> None:
        _running.pop(self.token, None)
        if self.returncode is None:
            self.signal(signal.SIGKILL)
            self.returncode = self._popen.poll()
        if self._entry is not None:
            self.entered = self._entry.close()
        os.close(self._pidfd)
        os.close(self._output)

    # --- in a thread --------------------------------------------------------------------------------------------------

    def _come_up(
        self, argv: Sequence[str], cwd: str, env: Mapping[str, str], umask: int, enclose: Enclose | None
    ) -> None:
        _running[self.token] = self
        try:
            if enclose is not None:
                self._entry = entry = Entry(enclose())
                argv, env = entry.argv(argv), entry.env(env)
            self._spawn(argv, cwd, env, umask)
        except BaseException:  # it did not come up: nobody may look for it
            _running.pop(self.token, None)
            if self._entry is not None:
                self._entry.close()
            self._settle()
            raise
        if not self._settle():
            self._discard()

    def _spawn(self, argv: Sequence[str], cwd: str, env: Mapping[str, str], umask: int) -> None:
        self._output, write = os.pipe()
        os.set_blocking(self._output, False)  # see `read`
        try:
            self._popen = subprocess.Popen(
                argv,
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=write,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=umask,
                pass_fds=self._entry.passed if self._entry else (),
            )
        except BaseException:  # there is no process to read from
            os.close(self._output)
            raise
        finally:
            os.close(write)
        if self._entry is not None:
            self._entry.taken()
        self._pidfd = self._open_pidfd()
        self.pid = self._popen.pid

    def _open_pidfd(self) -> int:
        try:
            return os.pidfd_open(self._popen.pid)
        except OSError:  # no descriptor left: nobody could wait for it
            os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()
            os.close(self._output)
            raise

    def _settle(self) -> bool:
        """It is up, or never will be; whether somebody still wants it."""
        with self._turn:
            self._settled = True
            self._turn.notify()
            return not self._given_up

    def _comes_up(self) -> bool:
        """Wait for that, within bounds; afterwards the process is either the caller's or the other thread's to end."""
        with self._turn:
            self._given_up = not self._turn.wait_for(lambda: self._settled, CLEANUP_S)
            if self._given_up:
                _running.pop(self.token, None)  # no call under way: the orphans of the others are not held up by it
                log.warning("a tool call did not start within %s s of being stopped", CLEANUP_S)
            return not self._given_up and self.pid is not None

    def _discard(self) -> None:
        """The end of what came up after it was given up."""
        self.signal(signal.SIGSTOP)
        try:
            self._see()
            self.signal(signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.returncode = self._popen.wait(CLEANUP_S)
            until = time.monotonic() + CLEANUP_S
            while self._sweep() and time.monotonic() < until:
                time.sleep(0.01)
        finally:
            self._close()

    def _terminate_inside(self) -> None:
        # Of the group, as without an enclosure. Its first process ignores it, being the first of its namespace.
        for process in below(process_table(), self._popen.pid):
            if process.session == self._popen.pid:
                send(process, signal.SIGTERM)

    def _see(self) -> None:
        found = list(below(process_table(), self._popen.pid))
        self._seen.update(process.key for process in found)
        for process in found:
            kill(process)

    def _sweep(self) -> bool:
        """Kill what is left of this call and reap what is dead of it; whether there was any."""
        table = process_table()
        orphans = [child for child in table[os.getpid()] if child.session != os.getsid(0) and self._owns(child)]
        found = orphans + [process for orphan in orphans for process in below(table, orphan.pid)]
        self._seen.update(process.key for process in found)
        for process in found:
            kill(process)
        for orphan in orphans:
            if orphan.zombie:
                with suppress(ChildProcessError):
                    os.waitpid(orphan.pid, os.WNOHANG)
        return bool(found)

    def _owns(self, child: Process) -> bool:
        if child.key in self._seen or child.session == self.pid or mark_of(child.pid, MARK) == self.token:
            return True
        # After the look at the process: a call that started it is listed by now, if only as starting.
        others = [tree.pid for tree in _running.copy().values() if tree is not self]
        # Nobody waits for a dead orphan, so it may be reaped whose ever it was, but not another call's shell. A living
        # one without our marker may be any running call's.
        unclaimed = None not in others and child.pid not in others if child.zombie else not others
        return unclaimed and child.started >= self.since


def _exited(pidfd: int) -> bool:
    return os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _childless() -> bool:
    """The usual case, in a microsecond: orphans would be children of ours."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False
