"""What went wrong inside, as the wire tells it: translated once, here."""

from __future__ import annotations

import logging

from loop_protocol.v1.errors import RpcError

from ..core import inputs
from ..core.guards import KIND, Declined, Refused
from ..models import ModelUnavailable
from ..opening import CwdMissing
from ..storage import SessionLocked, SessionMalformed, SessionMissing, SessionUnsupported, StorageError

log = logging.getLogger("loopd.api")


def translate(error: Exception) -> RpcError:
    """What went wrong inside, as the wire tells it. A bug is ``internal``; its traceback is in the log."""
    text = str(error)
    match error:
        case RpcError():
            return error
        case Refused():
            return RpcError(KIND[error.condition], text, operation=error.holder or error.operation.value)
        case Declined():
            return RpcError(error.kind, text, **error.data)
        case CwdMissing():
            return RpcError("cwd_missing", text)
        case inputs.Invalid():
            return RpcError("invalid_params", text, field=error.field)
        case inputs.UnsupportedInput():
            return RpcError("unsupported_input", text)
        case ModelUnavailable():
            return RpcError("model_unavailable", text)
        case SessionLocked():
            holder = {} if error.holder is None else {"holder": error.holder}
            return RpcError("session_locked", text, path=error.path, **holder)
        case SessionMissing():
            return RpcError("session_not_found", text)
        case SessionMalformed():
            offset = {} if error.offset is None else {"offset": error.offset}
            return RpcError("session_malformed", text, path=error.path, reason=error.reason, **offset)
        case SessionUnsupported():
            return RpcError("session_unsupported", text)
        case StorageError():
            return RpcError("save_failed", text)
    log.error("a fault in a request", exc_info=error)
    return RpcError("internal", f"a fault in the daemon: {type(error).__name__}; its log has the details")
