"""``initialize``, ``server/*`` and ``model/list``."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

from loop_protocol import PROTOCOL_VERSIONS, jsonrpc, schema
from loop_protocol.v1 import methods as m
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.events import EVENTS, SERVER_EVENTS

from .. import __version__, event_log
from .call import IN_FLIGHT, PAGE, Call


def initialize(call: Call, params: m.InitializeParams) -> m.InitializeResult:
    common = set(params.versions) & set(PROTOCOL_VERSIONS)
    if not common:
        raise RpcError("unsupported_version", "no common protocol version", supported=list(PROTOCOL_VERSIONS))
    name = params.client.name if params.client else None
    call.client.accept_handshake(name, can_approve=bool(params.capabilities and params.capabilities.approvals))
    return m.InitializeResult(
        version=max(common),
        server=m.ServerInfo("loopd", __version__),
        capabilities=m.Capabilities(sorted(m.METHODS), sorted({*EVENTS, *SERVER_EVENTS})),
        limits=m.Limits(
            frame=jsonrpc.FRAME,
            frame_before_initialize=jsonrpc.FRAME_BEFORE_INITIALIZE,
            batch=jsonrpc.BATCH,
            nesting=jsonrpc.NESTING,
            request_id=jsonrpc.REQUEST_ID,
            connections=call.daemon.max_connections,
            requests_in_flight=IN_FLIGHT,
            event_log_events=event_log.EVENTS,
            event_log_bytes=event_log.BYTES,
            page=PAGE,
        ),
    )


def server_status(call: Call, _: m.NoParams) -> m.ServerStatus:
    daemon, runtimes = call.daemon, call.runtimes.by_id.values()
    return m.ServerStatus(
        version=__version__,
        pid=os.getpid(),
        uptime_ms=daemon.uptime_ms(),
        draining=daemon.services.draining,
        runtimes=len(runtimes),
        sessions=len(runtimes),
        runs=sum(runtime.session.core.run is not None for runtime in runtimes),
        pending_approvals=sum(len(runtime.session.core.approvals.pending) for runtime in runtimes),
        pending_saves=daemon.pending_saves(),
        connections=daemon.connections,
        socket=daemon.socket_path,
        data_dir=daemon.services.data_dir,
        counters=dict(daemon.services.counters),
        sandbox=daemon.services.sandbox.status if daemon.services.sandbox else None,
    )


def server_describe(_: Call, __: m.NoParams) -> m.DescribeResult:
    return m.DescribeResult(schema.document())


def server_drain(call: Call, params: m.DrainParams) -> Callable[[], Awaitable[m.DrainResult]]:
    return call.daemon.drain(params)


def server_watch(call: Call, _: m.NoParams) -> m.Nothing:
    """From now on; a second time changes nothing."""
    log, outbox = call.daemon.services.watch.log, call.client.outbox
    if log.runtime_id not in outbox.cursors:
        outbox.subscribe(log.subscribe(position=log.head, follow=True, notify=outbox.push))
    return m.Nothing()


def model_list(call: Call, _: m.NoParams) -> m.ModelListResult:
    return m.ModelListResult(call.daemon.services.models.rows())
