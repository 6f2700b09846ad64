"""``approval/*``: any client may look and answer; the first answer holds (A-2)."""

from __future__ import annotations

from loop_protocol.v1 import methods as m

from ..core.guards import Operation
from .call import Call


def approval_list(call: Call, params: m.ApprovalListParams) -> m.ApprovalListResult:
    if params.session_id is not None:
        return m.ApprovalListResult(call.runtimes.session(params.session_id).core.approvals.state())
    found = [one for runtime in call.runtimes.by_id.values() for one in runtime.session.core.approvals.state()]
    return m.ApprovalListResult(sorted(found, key=lambda request: request.created_at))


def approval_resolve(call: Call, params: m.ApprovalResolveParams) -> m.ApprovalResolveResult:
    for runtime in call.runtimes.by_id.values():
        session = runtime.session
        if params.approval_id in session.core.approvals.pending:
            session.require(Operation.ANSWER_APPROVAL)
            runtime.touch()
            session.core.approvals.answer(
                params.approval_id, params.decision, by=call.client.name, feedback=params.feedback
            )
            return m.ApprovalResolveResult(approval_id=params.approval_id, outcome=params.decision)
    raise call.daemon.services.approvals.refusal(params.approval_id)
