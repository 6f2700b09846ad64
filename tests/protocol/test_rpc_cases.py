"""Malformed and unusual messages, one per row of ``cases/rpc.json``, as far as they are decided without a daemon."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from loop_protocol.jsonrpc import BadMessage, FrameReader, Request, Response, decode_params, parse
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.methods import METHODS

CASES = json.loads((pathlib.Path(__file__).parents[1] / "cases/rpc.json").read_text(encoding="utf-8"))["cases"]
HELLO = b'{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"versions":[1]}}\n'
OK = "result"
SILENCE = None
ROWS: dict[str, list[tuple[Any, bytes | None]]] = {
    "cut JSON": [(-32700, None)],
    "not an object": [(-32600, None)],
    "empty batch": [(-32600, None)],
    "batch": [(OK, b"1"), (-32600, None), (SILENCE, None), (-32601, b'"b"')],
    "no jsonrpc": [(-32600, b"1")],
    "jsonrpc 1.0": [(-32600, b"1")],
    "id true": [(-32600, None)],
    "id fraction": [(-32600, None)],
    "id 1.0": [(OK, b"1.0")],
    "id object": [(-32600, None)],
    "id too long": [(-32600, None)],
    "id 2^64": [(OK, b"18446744073709551616")],
    "method number": [(-32600, b"1")],
    "params string": [(-32602, b"1")],
    "params null": [(OK, b"1")],
    "params empty array": [(OK, b"1")],
    "unknown method": [(-32601, b"1")],
    "unknown field": [(-32602, b"1")],
    "wrong type": [(-32602, b"1")],
    "relative cwd": [(-32602, b"1")],
    "NUL in path": [(-32602, b"1")],
    "NaN": [(-32700, None)],
    "1e999": [(-32602, b"1")],
    "duplicate key": [(-32601, b"1")],
    "lone surrogate": [(-32700, None)],
    "invalid UTF-8": [(-32700, None)],
    "BOM first": [(OK, b"1")],
    "blank lines": [(OK, b"1")],
    "CRLF line": [(OK, b"1")],
    "depth 10000": [(-32000, None)],
    "stray response": [(SILENCE, None)],
    "unknown notification": [(SILENCE, None)],
}
NAMED = {
    "unknown field": "colour",
    "wrong type": "cwd",
    "relative cwd": "cwd",
    "1e999": "deadlineMs",
    "depth 10000": "nested",
}


def judge(message: Request | Response | BadMessage) -> tuple[Any, bytes | None, str]:
    """What a daemon answers as far as this layer knows: a code or ``OK``, the id, and the text."""
    match message:
        case BadMessage(error=error, id=id):
            return error.code, id, error.message
        case Request(method=method, id=id, params=params) if id is not None:
            if method not in METHODS:
                return -32601, id, ""
            try:
                decode_params(params, METHODS[method].params)
            except RpcError as error:
                return error.code, id, error.message
            return OK, id, ""
    return SILENCE, None, ""


def test_every_row_has_its_expectation_here() -> None:
    assert set(ROWS) == {name for name, _, _ in CASES}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, text, _ in CASES], ids=[case[0] for case in CASES])
def test_a_row_is_answered_as_it_says_and_the_next_message_is_read(name: str, text: str) -> None:  # D-1
    reader = FrameReader()
    reader.feed(HELLO + text.encode("latin-1") + b"\n" + HELLO)
    frames = list(iter(reader.next, None))
    assert frames[0] == frames[-1] == HELLO.rstrip()
    answers = []
    for body in frames[1:-1]:
        try:
            parsed = parse(body)
        except BadMessage as bad:
            parsed = [bad]
        answers += [judge(message) for message in (parsed if isinstance(parsed, list) else [parsed])]
    assert [answer[:2] for answer in answers] == ROWS[name]
    assert NAMED.get(name, "") in answers[0][2]
