"""The nursery tree: what is owned by what, and so the order in which the daemon ends.

``connections`` is the outermost, so that answers still go out while everything else ends; in it ``accepting``, since
whoever drains must still get in; in it ``live``, the sessions, which end first.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import trio

from loop_protocol.v1 import methods as m
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.events import DaemonState

from . import systemd
from .connection import Connection
from .runtime import Runtimes
from .server import CONNECTIONS, Listener
from .services import Services
from .session import Session
from .storage import StorageError

EXIT_RESCUED = 75
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Of the deadline of a TERM this much is for stopping, saving and rescuing: it holds also when nothing goes well (D-4).
STOPPING_S = 2.0
RETRY_S = 0.25
TIDY_S = 15.0
# A session that nobody has had to do with for so long is closed; it opens again by path and by continue.
IDLE_SESSION_S = 30 * 60.0
IDLE_LOG_MS = 60_000
# Frames that are still being received, of all clients together.
RECEIVING = 256 * 1024 * 1024

log = logging.getLogger("loopd")


@dataclass(eq=False)
class Daemon:
    """``serve`` is its life. The rest is what methods of ``api.py`` ask of it."""

    services: Services
    listener: Listener
    on_demand: bool = False
    max_connections: int = CONNECTIONS
    clients: set[Connection] = field(default_factory=set)
    exit_code: int = 0

    def __post_init__(self) -> None:
        self.socket_path = self.listener.path
        self.services.watch.state = self._state
        self._started_ms = self.services.clock.boot_ms()
        self._exit = trio.Event()
        self._hurry = trio.Event()
        self._terminating = False
        self._drains: set[trio.CancelScope] = set()
        self._rescued: dict[str, str] = {}

    # --- life ---------------------------------------------------------------------------------------------------------

    async def serve(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> int:
        """Until a signal or a drain ends it; answers the exit code."""
        async with trio.open_nursery() as connections:
            connections.start_soon(self.services.pump.run)
            async with trio.open_nursery() as accepting:
                async with trio.open_nursery() as live:
                    self.runtimes = Runtimes(self.services, live)
                    accepting.start_soon(self._accept, connections)
                    await live.start(self._signals, live)  # before READY: from then on a TERM drains
                    live.start_soon(self._watchdog)
                    live.start_soon(self._tidy)
                    systemd.notify(READY="1", STATUS="serving")
                    log.info("serving on %s", self.socket_path)
                    task_status.started()
                    live.start_soon(self.services.models.warm)
                    if self.services.sandbox is not None:
                        live.start_soon(self.services.sandbox.tried)
                    await self._exit.wait()
                    systemd.notify(STOPPING="1")
                    for session in self.sessions():
                        session.end("shutdown", rescued=self._rescued.get(session.core.id))
                    accepting.start_soon(self._insist)
                    live.cancel_scope.cancel()
                accepting.cancel_scope.cancel()
            self.listener.close()
            for client in tuple(self.clients):
                client.close()
            for client in tuple(self.clients):
                await client.ended.wait()
            await self.services.models.aclose()
            connections.cancel_scope.cancel()
        log.info("ended")
        return self.exit_code

    async def _insist(self) -> None:
        """What a hung disk still holds is given up, or the end would wait for it."""
        await trio.sleep(STOPPING_S)
        for session in self.sessions():
            session.give_up()
        self.runtimes.give_up()

    async def _accept(self, nursery: trio.Nursery) -> None:
        await self.listener.serve(self, self.clients, nursery)

    def sessions(self) -> list[Session]:
        return [runtime.session for runtime in self.runtimes.by_id.values()]

    async def _signals(self, live: trio.Nursery, task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(*ENDING) as received:
            # Blocked since before the socket was made: one that came meanwhile is received here.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
            task_status.started()
            async for number in received:
                log.info("%s: draining", signal.Signals(number).name)
                if self._terminating:
                    self._hurry.set()
                else:
                    self._terminating = True
                    live.start_soon(self._terminate)

    async def _watchdog(self) -> None:
        interval = systemd.watchdog_interval()
        while interval:
            systemd.notify(WATCHDOG="1")
            await trio.sleep(interval)

    async def _tidy(self) -> None:
        """Shorten the logs of idle runtimes, dispose of those that nobody uses, and end a daemon that nobody uses where
        it comes back on demand."""
        idle_since = trio.current_time()
        allowed = self.services.config.daemon.idle_exit_s
        while True:
            await trio.sleep(min(TIDY_S, allowed or TIDY_S))
            now_ms, watch = self.services.clock.boot_ms(), self.services.watch
            if now_ms - watch.log.touched_ms > IDLE_LOG_MS:
                watch.log.shrink()
            for runtime in self.runtimes.by_id.values():
                if runtime.session.core.run is None and now_ms - runtime.events.touched_ms > IDLE_LOG_MS:
                    runtime.events.shrink()
                if runtime.idle_s(trio.current_time()) >= IDLE_SESSION_S:
                    self.runtimes.dispose(runtime, "idle")  # decided at once: what comes now is refused, not lost
            if self.clients or any(not session.can_be_reopened for session in self.sessions()):
                idle_since = trio.current_time()
            if self.on_demand and allowed and trio.current_time() - idle_since >= allowed:
                log.info("idle for %.0f s: ending", allowed)
                self.services.draining = True
                self._exit.set()

    # --- draining (D-4) -----------------------------------------------------------------------------------------------

    def drain(self, params: m.DrainParams) -> Callable[[], Awaitable[m.DrainResult]]:
        if params.cancel:
            self._take_work_again()
            return self._report
        began = self._begin_draining()
        job = self.runtimes.start(partial(self._drain, params, began=began))
        return job.wait

    def _begin_draining(self) -> bool:
        """Whether it was this call that began it."""
        began = not self.services.draining
        if began:
            self.services.draining = True
            systemd.notify(STATUS="draining")
            self.services.watch.state_changed()
        return began

    def _take_work_again(self) -> None:
        if self._terminating:
            raise RpcError("conflict", "the daemon was told to end by a signal")
        self.services.draining = False
        for drain in self._drains:
            drain.cancel()
        for session in self.sessions():
            session.core.queue.lift("draining")
            session.runs.start_queued()
        systemd.notify(STATUS="serving")
        self.services.watch.state_changed()

    async def _drain(self, params: m.DrainParams, *, began: bool) -> m.DrainResult:
        """A daemon that was asked to exit and must not, because something is unsaved, goes on as before."""
        allowed = self.services.config.daemon.drain_deadline_s
        seconds = allowed if params.deadline_ms is None else params.deadline_ms / 1000
        with trio.CancelScope() as drain:
            self._drains.add(drain)
            await self._quiesce(trio.current_time() + seconds)
            await self._retry_saves(trio.current_time())
            if params.exit and params.rescue:
                await self._rescue()
        self._drains.discard(drain)
        if params.exit and not drain.cancel_called:
            if self._nothing_is_lost(rescued=params.rescue):
                self.end()
            elif began and not self._terminating:
                self._take_work_again()
        return await self._report()

    def _nothing_is_lost(self, *, rescued: bool) -> bool:
        """Every session is saved or, if that is enough, has a rescue copy."""
        copied = self._rescued if rescued else {}
        return all(pending.session_id in copied for pending in self.pending_saves())

    def end(self) -> None:
        """Now; runs that still go on are stopped and saved on the way out."""
        self.exit_code = EXIT_RESCUED if self.pending_saves() else 0
        self._exit.set()

    async def _report(self) -> m.DrainResult:
        await trio.lowlevel.checkpoint()
        state = self._state()
        return m.DrainResult(
            draining=state.draining,
            quiet=not state.runs,
            exiting=self._exit.is_set(),
            runs=state.runs,
            pending_saves=state.pending_saves,
            rescued=list(self._rescued.values()),
            queued=sum(len(session.core.queue.items) for session in self.sessions()),
        )

    def _state(self) -> DaemonState:
        runs = sum(session.run is not None for session in self.sessions())
        return DaemonState(draining=self.services.draining, runs=runs, pending_saves=self.pending_saves())

    async def _terminate(self) -> None:
        """The path of a signal: exit 0 when all is saved, 75 after a rescue copy; stay only if even that failed."""
        with trio.CancelScope(shield=True):
            self._begin_draining()
            deadline = trio.current_time() + self.services.config.daemon.drain_deadline_s
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._hurried, nursery.cancel_scope)
                await self._quiesce(max(trio.current_time(), deadline - STOPPING_S), deadline)
                with trio.move_on_at(deadline):
                    await self._retry_saves(deadline)
                nursery.cancel_scope.cancel()
            await self._quiesce(trio.current_time(), trio.current_time() + STOPPING_S / 2)
            await self._rescue()
            if self._nothing_is_lost(rescued=True):
                self.end()
                return
            self._terminating, self._hurry = False, trio.Event()
            text = "still running: a save is pending and no place takes a rescue copy; make room and send TERM again"
            log.error(text)
            systemd.notify(STATUS=text)

    async def _hurried(self, scope: trio.CancelScope) -> None:
        await self._hurry.wait()
        scope.cancel()

    async def _quiesce(self, stop_at: float, give_up_at: float | None = None) -> None:
        """Runs and titles may finish until ``stop_at``, then they are stopped; a write that hangs is given up on."""
        with trio.move_on_at(stop_at):
            await self._all_quiet()
        for session in self.sessions():
            session.interrupt()
        with trio.move_on_at(trio.current_time() + 3600 if give_up_at is None else give_up_at):
            await self._all_quiet()
        for session in self.sessions():
            session.saving.give_up()

    async def _all_quiet(self) -> None:
        for session in self.sessions():
            await session.quiet()

    async def _retry_saves(self, until: float) -> None:
        """Flush what is pending, again and again until the deadline, once at least."""
        while True:
            for session in self.sessions():
                await session.retry_save()
            if not self.pending_saves() or trio.current_time() + RETRY_S > until:
                return
            await trio.sleep(RETRY_S)

    async def _rescue(self) -> None:
        """Copy what is unsaved elsewhere, all sessions at once: each may be waiting for a disk that hangs."""
        self._rescued.clear()  # an older copy may not hold what came since
        async with trio.open_nursery() as nursery:
            for session in self.sessions():
                if session.saving.unsaved and session.core.kind != "memory":
                    nursery.start_soon(self._rescue_one, session)

    async def _rescue_one(self, session: Session) -> None:
        try:
            self._rescued[session.core.id] = path = await session.saving.rescue()
            log.error("session %s could not be saved; `loopd rescue apply` takes its copy: %s", session.core.id, path)
        except StorageError as error:
            log.error("session %s: no rescue copy: %s", session.core.id, error)

    # --- for api.py ---------------------------------------------------------------------------------------------------

    @property
    def connections(self) -> int:
        return len(self.clients)

    def uptime_ms(self) -> int:
        return self.services.clock.boot_ms() - self._started_ms

    def has_room(self, receiving: int) -> bool:
        """All clients' unfinished frames share one budget; a small one is always let in."""
        if receiving <= RECEIVING // CONNECTIONS:
            return True
        return sum(client.receiving for client in self.clients) <= RECEIVING

    def pending_saves(self) -> list[m.PendingSave]:
        return [
            m.PendingSave(session_id=session.core.id, path=session.core.path, reason=session.core.unsaved)
            for session in self.sessions()
            if session.core.unsaved is not None
        ]
