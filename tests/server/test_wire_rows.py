"""Every row of ``cases/rpc.json`` at a living daemon, in both framings: its answer, and that the connection goes on."""

from __future__ import annotations

import json
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from inprocess import World, running

from loop_protocol import jsonrpc
from loop_protocol.jsonrpc import Framing

CASES = json.loads((pathlib.Path(__file__).parents[1] / "cases/rpc.json").read_text(encoding="utf-8"))["cases"]
OK = "result"
# Code and id of each answer, in order; a row without one is answered by nothing.
ANSWERS: dict[str, list[tuple[Any, Any]]] = {
    "cut JSON": [(-32700, None)],
    "not an object": [(-32600, None)],
    "empty batch": [(-32600, None)],
    "batch": [(OK, 1), (-32600, None), (-32601, "b")],
    "no jsonrpc": [(-32600, 1)],
    "jsonrpc 1.0": [(-32600, 1)],
    "id true": [(-32600, None)],
    "id fraction": [(-32600, None)],
    "id 1.0": [(OK, 1)],
    "id object": [(-32600, None)],
    "id too long": [(-32600, None)],
    "id 2^64": [(OK, 2**64)],
    "method number": [(-32600, 1)],
    "params string": [(-32602, 1)],
    "params null": [(OK, 1)],
    "params empty array": [(OK, 1)],
    "unknown method": [(-32601, 1)],
    "unknown field": [(-32602, 1)],
    "wrong type": [(-32602, 1)],
    "relative cwd": [(-32602, 1)],
    "NUL in path": [(-32602, 1)],
    "NaN": [(-32700, None)],
    "1e999": [(-32602, 1)],
    "duplicate key": [(-32601, 1)],
    "lone surrogate": [(-32700, None)],
    "invalid UTF-8": [(-32700, None)],
    "BOM first": [(OK, 1)],
    "blank lines": [(OK, 1)],
    "CRLF line": [(OK, 1)],
    "depth 10000": [(-32000, None)],
    "stray response": [],
    "unknown notification": [],
}
NAMED = {"unknown method": "method_not_found", "unknown field": "colour", "wrong type": "cwd", "1e999": "deadlineMs"}
STATUS = b'{"jsonrpc":"2.0","id":"after","method":"server/status"}\n'


@pytest.fixture
async def world(tmp_path: pathlib.Path) -> AsyncIterator[World]:
    async with running(tmp_path) as world:
        yield world


def test_every_row_has_its_answer_here() -> None:
    assert set(ANSWERS) == {name for name, _, _ in CASES}


@pytest.mark.parametrize("framing", list(Framing), ids=[framing.value for framing in Framing])
async def test_each_row_alone_is_answered_as_it_says_and_the_connection_goes_on(  # D-1
    world: World, framing: Framing
) -> None:
    for name, text, _ in CASES:
        wire = await world.connect(framing=framing)
        await wire.send(jsonrpc.frame(text.encode("latin-1") + b"\n", framing) + jsonrpc.frame(STATUS, framing))
        answers: list[dict[str, Any]] = []
        message = await wire.receive()
        while isinstance(message, list) or message["id"] != "after":
            answers += message if isinstance(message, list) else [message]
            message = await wire.receive()
        assert [_told(answer) for answer in answers] == ANSWERS[name], name
        assert NAMED.get(name, "") in json.dumps(answers), name
        assert message["result"]["draining"] is False, name
        await wire.aclose()


def _told(answer: dict[str, Any]) -> tuple[Any, Any]:
    assert ("result" in answer) != ("error" in answer)
    assert answer["jsonrpc"] == "2.0"
    if "error" in answer:
        assert set(answer["error"]["data"]) >= {"kind", "retryable"}
    return OK if "result" in answer else answer["error"]["code"], answer["id"]
