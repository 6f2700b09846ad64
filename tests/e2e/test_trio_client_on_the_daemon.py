"""The client for trio programs on the real daemon: what its scripted peers promise is what it meets."""

from __future__ import annotations

from pathlib import Path

import pytest
from inprocess import PlayedModel, running, text

pytest.importorskip("trio_jsonrpc", reason="the extra `client` has no wheel for this Python or machine")

from loop_protocol.replica import fold
from loop_protocol.trio_client import follow, open_client
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.events import EventParams, RunSettled
from loop_protocol.v1.types import SessionState


async def test_a_program_prompts_follows_and_gets_typed_answers(tmp_path: Path) -> None:
    async with running(tmp_path, model=PlayedModel([text("fine")])) as world, open_client(world.socket) as client:
        opened = await client.call("runtime/open", {"cwd": world.cwd, "session": {"kind": "new"}})
        async with follow(opened.runtime_id, path=world.socket) as news:
            first = await news.receive()
            state: SessionState = first.state
            result = await client.run(opened.session_id, "hi")
            assert (result.outcome, result.saved) == ("success", True)
            while True:
                item = await news.receive()
                assert isinstance(item, EventParams)
                state = fold(state, item)
                if isinstance(item.event, RunSettled):
                    break
        assert state == await client.call("session/state", {"sessionId": opened.session_id})
        with pytest.raises(RpcError) as refused:
            await client.call("session/prompt", {"sessionId": "nobody", "content": "x"})
        assert refused.value.kind == "session_not_found"
