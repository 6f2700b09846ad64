"""What starts and ends runs: ``session/prompt``, ``resume``, ``stop``, ``abort``, and ``run/wait``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from loop_protocol.v1 import methods as m
from loop_protocol.v1.types import RunResult

from ..core import inputs
from ..core.guards import Declined
from ..core.history import Request
from ..core.runs import ApprovalPolicy
from ..run import Run
from ..session import Session
from .call import Call


def session_prompt(call: Call, params: m.PromptParams) -> m.PromptResult | Callable[[], Awaitable[m.PromptResult]]:
    session = call.runtimes.session(params.session_id)
    run_id, run = _accepted(call, session, params)
    if not params.wait:
        return m.PromptResult(run_id=run_id)

    async def settled() -> m.PromptResult:
        result = await _result(run)
        return m.PromptResult(run_id=run_id, outcome=result.outcome, saved=result.saved, error=result.error)

    return settled


def _accepted(call: Call, session: Session, params: m.PromptParams) -> tuple[str, Run | RunResult]:
    """A new run, or the one that the same ``requestId`` started."""
    request = request_of(params)
    if run_id := known_run(session, request):
        return run_id, _run(call, run_id)
    if request and (item := session.core.queue.requested(request.request_id)):
        raise Declined("conflict", "this requestId was used for an input that waits in the queue", itemId=item.id)
    run = session.runs.prompt(inputs.blocks(params.content), request, policy_of(params))
    return run.state.id, run


def request_of(params: m.PromptParams | m.QueueAddParams) -> Request | None:
    """What a repeat of it is known by."""
    return Request(params.request_id, inputs.digest(params.content)) if params.request_id else None


def policy_of(params: m.ApprovingParams) -> ApprovalPolicy:
    return ApprovalPolicy(params.approvals, params.approval_timeout_ms)


def known_run(session: Session, request: Request | None) -> str | None:
    """The run that has what was sent under that id. Raises ``Declined`` where it was something else."""
    if request is None or (known := session.core.started_by(request.request_id)) is None:
        return None
    run_id, digest = known
    if digest != request.digest:
        raise Declined("conflict", "this requestId was used for another prompt", runId=run_id)
    return run_id


def _run(call: Call, run_id: str) -> Run | RunResult:
    if run := call.runtimes.runs.get(run_id):
        return run
    for runtime in call.runtimes.by_id.values():
        core = runtime.session.core
        if core.last_run is not None and core.last_run.run_id == run_id:
            return core.last_run
        if record := core.history.runs.get(run_id):
            return record.result(saved=(record.timing.message_end_index or 0) <= core.committed)
    raise Declined("run_not_found", f"no run {run_id}; the last 256 are remembered, and those of open sessions")


async def _result(run: Run | RunResult) -> RunResult:
    result = run if isinstance(run, RunResult) else await run.result()
    if result is None:
        raise Declined("session_closed", "a fault closed the session before the run settled; see the daemon's log")
    return result


def run_wait(call: Call, params: m.RunParams) -> Callable[[], Awaitable[RunResult]]:
    return partial(_result, _run(call, params.run_id))


def session_stop(call: Call, params: m.StopParams) -> m.StopResult | Callable[[], Awaitable[m.StopResult]]:
    session = call.runtimes.session(params.session_id)
    if session.run is None or session.run.state.id != params.run_id:
        _run(call, params.run_id)
        return m.StopResult(False)
    run = session.runs.stop()
    assert run is not None

    async def stopped() -> m.StopResult:
        await run.done.wait()
        return m.StopResult(run.state.stop_requested)

    return stopped


def session_resume(call: Call, params: m.ResumeParams) -> m.ResumeResult:
    return m.ResumeResult(call.runtimes.session(params.session_id).runs.resume(policy_of(params)).state.id)


def session_abort(call: Call, params: m.SessionParams) -> m.StopResult | Callable[[], Awaitable[m.StopResult]]:
    session = call.runtimes.session(params.session_id)
    run = session.runs.stop()
    if run is not None:
        run.state.aborted = True
    session.titles.cancel()
    end = session.titles.end
    if run is None and not session.titles.busy:
        return m.StopResult(False)

    async def drained() -> m.StopResult:
        if run is not None:
            await run.done.wait()
        await end()
        return m.StopResult(run is not None and run.state.stop_requested)

    return drained
