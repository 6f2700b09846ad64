"""Errors of the protocol: JSON-RPC's own codes where they fit, -32000 and ``data.kind`` for the rest.

``kind`` is what programs test; the message is for people and says what to do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .types import ErrorInfo


class Kind(NamedTuple):
    code: int
    retryable: bool
    meaning: str


APPLICATION = -32000

KINDS: dict[str, Kind] = {
    "parse_error": Kind(-32700, False, "the frame is not JSON; the answer's id is null"),
    "invalid_request": Kind(-32600, False, "no JSON-RPC 2.0 request, or one that may not stand in a batch"),
    "method_not_found": Kind(-32601, False, "no such method in this version"),
    "invalid_params": Kind(-32602, False, "the parameters do not fit; the message names the field"),
    "internal": Kind(-32603, False, "a fault of the daemon; its log has the details"),
    "not_initialized": Kind(APPLICATION, False, "`initialize` comes first"),
    "unsupported_version": Kind(APPLICATION, False, "no common version; `data.supported` lists what is offered"),
    "request_cancelled": Kind(APPLICATION, True, "`$/cancelRequest` ended this wait; the work goes on"),
    "draining": Kind(APPLICATION, True, "shutting down: takes no new work"),
    "session_busy": Kind(APPLICATION, True, "something else holds the session; `data.operation` names it"),
    "approvals_pending": Kind(APPLICATION, True, "an approval must be answered first"),
    "pending_save": Kind(APPLICATION, False, "the last save failed; repair the cause, then `session/flush`"),
    "replacing": Kind(APPLICATION, True, "the runtime is just replacing its session"),
    "session_closed": Kind(APPLICATION, False, "the session is not open any more"),
    "session_not_found": Kind(APPLICATION, False, "no session with that id or path"),
    "runtime_not_found": Kind(APPLICATION, False, "no runtime with that id"),
    "run_not_found": Kind(APPLICATION, False, "no run with that id is remembered"),
    "nothing_to_resume": Kind(
        APPLICATION, False, "the conversation is empty or ends with a whole answer, and no queue is paused"
    ),
    "approval_not_pending": Kind(
        APPLICATION, False, "it is settled already: `data.outcome`, `data.by`; or there is none"
    ),
    "queue_item_not_found": Kind(APPLICATION, False, "no such item waits in this queue; it may have been removed"),
    "queue_item_started": Kind(APPLICATION, False, "that item is part of the conversation by now: `data.runId`"),
    "conflict": Kind(APPLICATION, False, "it exists with other properties; `data` names what stands in the way"),
    "session_locked": Kind(
        APPLICATION,
        True,
        "open elsewhere: `data.runtimeId` here, `data.holder` another process; or a copy of it is open",
    ),
    "session_malformed": Kind(APPLICATION, False, "the file is damaged: `data.path`, `data.offset?`, `data.reason`"),
    "session_unsupported": Kind(APPLICATION, False, "the file was written by a newer version"),
    "nothing_to_recover": Kind(APPLICATION, False, "no crash cut off a run here, or it left nothing behind"),
    "cwd_missing": Kind(APPLICATION, False, "the session's directory does not exist any more"),
    "model_unavailable": Kind(APPLICATION, False, "unknown model, or its provider is not configured"),
    "unsupported_input": Kind(APPLICATION, False, "the model does not take this kind of input"),
    "title_failed": Kind(APPLICATION, True, "no title came of it; `data.reason` says why, and the old one stays"),
    "save_failed": Kind(APPLICATION, True, "the snapshot could not be written and is kept in memory"),
    "permission_denied": Kind(APPLICATION, False, "the operating system refused"),
    "limit_exceeded": Kind(APPLICATION, False, "too large or too many; `data.limit` names the limit"),
}


class RpcError(Exception):
    """An error answer. ``data`` always carries ``kind`` and ``retryable``."""

    def __init__(self, kind: str, message: str, **data: Any) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.code = KINDS[kind].code if kind in KINDS else APPLICATION
        known = KINDS[kind].retryable if kind in KINDS else False
        self.data: dict[str, Any] = {"kind": kind, "retryable": known, **data}


def failure(error: ErrorInfo) -> Exception:
    """What a run's error is as an exception: a group when the run and its save both failed."""
    if error.errors:
        return ExceptionGroup(error.message, [failure(part) for part in error.errors])
    return RpcError(error.kind, error.message)
