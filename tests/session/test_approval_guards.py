"""Every method while a request for approval waits, alone and over what else may be true then (A-3): it is refused
exactly as ``core/guards.py`` says, by what a person can settle, and a refusal changes nothing (I-10)."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from asking import Asking, asks, pending, requested, resolved
from inprocess import text
from seats import Seat, seated

from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.methods import METHODS
from loopd.core.guards import KIND, REFUSED, Condition, Operation

PATH = "/nowhere/meta.json"
# What each method needs, and the operation by which it is judged; of those that are not about one session none.
OPERATIONS: dict[str, tuple[Operation | None, dict[str, Any]]] = {
    "initialize": (None, {"versions": [1]}),
    "server/status": (None, {}),
    "server/describe": (None, {}),
    "server/watch": (None, {}),
    "server/drain": (None, {"cancel": True}),
    "model/list": (None, {}),
    "session/list": (None, {}),
    "runtime/list": (None, {}),
    "runtime/open": (None, {"session": {"kind": "continue"}, "cwd": True}),
    "runtime/attach": (None, {"runtimeId": True}),
    "runtime/detach": (None, {"runtimeId": True}),
    "runtime/newSession": (Operation.REPLACE, {"runtimeId": True, "discardQueue": True}),
    "runtime/switchSession": (Operation.REPLACE, {"runtimeId": True, "path": PATH, "discardQueue": True}),
    "runtime/dispose": (Operation.DISPOSE, {"runtimeId": True, "discardQueue": True}),
    "session/state": (Operation.READ, {}),
    "session/messages": (Operation.READ, {}),
    "session/prompt": (Operation.PROMPT, {"content": "x"}),
    "session/resume": (Operation.RESUME, {}),
    "session/recover": (Operation.RECOVER, {}),
    "session/stop": (Operation.STOP, {"runId": True}),
    "session/abort": (Operation.ABORT, {}),
    "session/flush": (Operation.FLUSH, {}),
    "session/setModel": (Operation.SET_MODEL, {"model": {"provider": "other", "id": "m"}}),
    "session/setPermission": (Operation.SET_PERMISSION, {"permission": "workspace-write"}),
    "session/markRead": (Operation.MARK_READ, {"messageCount": 1}),
    "session/setPinned": (Operation.SET_PINNED, {"pinned": True}),
    "session/delete": (None, {"path": True}),
    "title/rename": (Operation.RENAME_TITLE, {"text": "x"}),
    "title/refresh": (Operation.REFRESH_TITLE, {}),
    "title/wait": (Operation.READ, {}),
    "title/cancel": (Operation.CANCEL_TITLE, {}),
    "queue/add": (Operation.CHANGE_QUEUE, {"content": "x"}),
    "queue/edit": (Operation.CHANGE_QUEUE, {"itemId": True, "revision": 1, "content": "y"}),
    "queue/move": (Operation.CHANGE_QUEUE, {"itemId": True, "to": 0}),
    "queue/remove": (Operation.CHANGE_QUEUE, {"itemId": True}),
    "approval/list": (Operation.READ, {}),
    "approval/resolve": (Operation.ANSWER_APPROVAL, {"approvalId": True, "decision": "allowed-once"}),
    "run/wait": (Operation.READ, {"runId": True}),
}
SETTLING = {
    "runtime/dispose": "cancelled",
    "session/stop": "cancelled",
    "session/abort": "cancelled",
    "approval/resolve": "allowed-once",
}


def test_every_method_is_here() -> None:
    assert set(OPERATIONS) == set(METHODS)


@pytest.mark.parametrize("method", OPERATIONS)
async def test_a_method_while_an_approval_is_pending(method: str, tmp_path: Path) -> None:  # A-3 I-10
    operation, params = OPERATIONS[method]
    for number, (draining, unsaved) in enumerate(product((False, True), repeat=2)):
        root = tmp_path / str(number)
        async with seated(root, asks(), text("fine"), tools=[Asking()]) as seat:
            run_id = await seat.prompt()
            given = {
                "approvalId": await requested(seat.wire),
                "itemId": (await seat.add("waits"))["itemId"],
                "runId": run_id,
                "runtimeId": seat.runtime_id,
                "path": seat.opened["path"],
                "cwd": seat.world.cwd,
            }
            now = Condition.APPROVING | Condition.BUSY
            core = seat.world.session().core
            # Said to be so: a drain would wait, and with a save that failed no run begins.
            if draining:
                seat.world.services.draining = True
                now |= Condition.DRAINING
            if unsaved:
                core.unsaved = "no room"
                now |= Condition.UNSAVED
            filled = {name: given[name] if value is True and name in given else value for name, value in params.items()}
            if "session_id" in METHODS[method].params.__struct_fields__:
                filled["sessionId"] = seat.id
            expected = [condition for condition in REFUSED[operation] & now] if operation else []
            try:
                if expected:
                    await _refused(seat, root, method, filled, KIND[expected[0]])
                    assert [one["approvalId"] for one in await pending(seat.wire)] == [given["approvalId"]]
                else:
                    await _taken(seat, method, filled, given["approvalId"], draining=draining)
            finally:
                core.unsaved = None
                seat.world.services.draining = False


async def _refused(seat: Seat, root: Path, method: str, params: dict[str, Any], kind: str) -> None:
    def disk() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}

    before = await seat.state(), disk(), seat.world.session().events.head
    with pytest.raises(RpcError) as refused:
        await seat.wire.call(method, params)
    assert refused.value.kind == kind
    assert (await seat.state(), disk(), seat.world.session().events.head) == before


async def _taken(seat: Seat, method: str, params: dict[str, Any], approval_id: str, *, draining: bool) -> None:
    own = {"session/delete": "session_locked", **({"runtime/open": "draining"} if draining else {})}
    if method in own:
        with pytest.raises(RpcError) as refused:
            await seat.wire.call(method, params)
        assert refused.value.kind == own[method]
    elif method == "run/wait":
        waiting = await seat.wire.request(method, params)
        await seat.wire.call("server/status")
        assert waiting not in seat.wire.answers
    else:
        await seat.wire.call(method, params)
    left = [one["approvalId"] for one in await pending(seat.wire)]
    assert left == ([] if method in SETTLING else [approval_id])
    if method in SETTLING:
        assert (await resolved(seat.wire)).outcome == SETTLING[method]
