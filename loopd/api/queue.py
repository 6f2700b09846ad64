"""``queue/*``."""

from __future__ import annotations

from msgspec.structs import asdict

from loop_protocol.v1 import methods as m
from loop_protocol.v1.types import ImageBlock

from ..core import inputs
from ..core.guards import Declined
from ..core.queue import Item, Queue
from ..core.state import SessionCore
from .call import Call
from .runs import known_run, policy_of, request_of


def queue_add(call: Call, params: m.QueueAddParams) -> m.QueueResult:
    session = call.runtimes.session(params.session_id)
    request = request_of(params)
    if run_id := known_run(session, request):
        raise Declined("queue_item_started", "this input is part of a run by now", runId=run_id)
    if request and (item := session.core.queue.requested(request.request_id)):
        if item.request != request:
            raise Declined("conflict", "this requestId was used for another input", itemId=item.id)
        return _result(item)
    content = inputs.blocks(params.content)
    item, run = session.runs.add(content, steer=params.steer, request=request, approvals=policy_of(params))
    return _result(item, run.state.id if run else None)


def queue_edit(call: Call, params: m.QueueEditParams) -> m.QueueResult:
    core = _core(call, params.session_id)
    content = None
    if params.content is not None:
        kept = _images(core.queue, params.item_id) if isinstance(params.content, str) else []
        content = inputs.blocks(params.content, kept)
        core.user_message(content)  # what does not fit in one would never have its turn
    return _result(core.queue.edit(params.item_id, params.revision, content, params.steer))


def queue_move(call: Call, params: m.QueueMoveParams) -> m.QueueResult:
    return _result(_core(call, params.session_id).queue.move(params.item_id, params.to))


def queue_remove(call: Call, params: m.QueueRemoveParams) -> m.QueueResult:
    return _result(_core(call, params.session_id).queue.remove(params.item_id))


def _core(call: Call, session_id: str) -> SessionCore:
    session = call.runtimes.session(session_id)
    session.runs.require_queue()
    return session.core


def _images(queue: Queue, item_id: str) -> list[ImageBlock]:
    """Who edits the text has not got them: clients see images by their size."""
    return [
        block for item in queue.items if item.id == item_id for block in item.content if isinstance(block, ImageBlock)
    ]


def _result(item: Item, run_id: str | None = None) -> m.QueueResult:
    return m.QueueResult(**asdict(item.shown), run_id=run_id)
