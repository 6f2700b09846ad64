"""Messages out of frames: every one is a request, a response, or an error that names what is wrong."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Raw

from loop_protocol import jsonrpc
from loop_protocol.jsonrpc import BadMessage, Request, Response, decode_params, parse
from loop_protocol.jsontext import depth
from loop_protocol.v1.errors import KINDS, RpcError
from loop_protocol.v1.methods import METHODS, DrainParams, MessagesParams, NoParams, SessionListParams

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.text(max_size=8)
    | st.sampled_from(['"[', "\\", '\\"{']),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


def request(**fields: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": "m", **fields}).encode()


def refused(body: bytes) -> RpcError:
    with pytest.raises(BadMessage) as caught:
        parse(body)
    return caught.value.error


# --- nothing but the three errors -------------------------------------------------------------------------------------

PIECES = [
    b'{"jsonrpc":"2.0"',
    b',"id":',
    b"1",
    b'"a"',
    b',"method":"m"',
    b',"params":',
    b"{}",
    b"[",
    b"]",
    b"}",
    b",",
    b"null",
]
PIECES += [
    b'"\\ud83d"',
    b'"\\udc00',
    b"\xff",
    b"\xf0\x9f",
    b"1e999",
    b"NaN",
    b',"result":',
    b',"error":{"code":1,"message":""}',
]


def kind_or(step: Callable[..., Any], *arguments: Any) -> Any:
    """What ``step`` answers, or the kind of the one error that it may raise."""
    try:
        return step(*arguments)
    except BadMessage as bad:
        return bad.error.kind
    except RpcError as error:
        return error.kind


@given(st.binary(max_size=200) | st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join))
def test_whatever_comes_only_the_errors_of_the_protocol_are_raised(body: bytes) -> None:
    parsed = kind_or(parse, body)
    assert not isinstance(parsed, str) or parsed in KINDS
    for message in parsed if isinstance(parsed, list) else [parsed]:
        for method in METHODS.values():
            if isinstance(message, Request):
                params = kind_or(decode_params, message.params, method.params)
                assert params == "invalid_params" or isinstance(params, method.params)


@given(JSON)
def test_all_json_is_read_and_judged_by_its_form_alone(value: Any) -> None:
    for body in (json.dumps(value).encode(), json.dumps(value, ensure_ascii=False).encode()):
        message = parse(request()[:-1] + b',"params":' + body + b"}")
        assert isinstance(message, Request)
        assert message.params is not None
        assert msgspec.json.decode(message.params) == value


HALVES = st.lists(st.sampled_from("\ud7ff\ud800\ud83d\udbff\udc00\ude00\udfff\ue000\\ud"), max_size=5).map("".join)


@given(HALVES)
@example("\\ud83d")
@example("\ud83d\ud83d\ude00\ude00")
def test_a_lone_surrogate_is_found_wherever_it_is_and_nothing_else(text: str) -> None:
    body = request(params={"unknown": [{"deep": text}]})
    try:
        # Two halves that meet are one character, in JSON too.
        text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        assert refused(body).kind == "parse_error"
    else:
        assert isinstance(parse(body), Request)


@pytest.mark.parametrize("bad", [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf0\x9f\x98", b"\xe2\x82"])
def test_bytes_that_are_no_utf8_are_found_at_every_edge_of_the_blocks_they_are_looked_at_in(bad: bytes) -> None:
    for fill in range(2**16 - 60, 2**16 + 4):
        assert refused(b'{"jsonrpc":"2.0","id":1,"method":"' + b"x" * fill + bad + b'"}').kind == "parse_error"
    good = b'{"jsonrpc":"2.0","method":"' + b"x" * (2**16 - 29) + "😀".encode() + b'"}'
    assert isinstance(parse(good), Request)


def test_bad_json_after_a_wrong_type_is_bad_json() -> None:
    assert refused(b"42 x").kind == "parse_error"
    assert refused(b'{"jsonrpc":"2.0"} {}').kind == "parse_error"
    assert refused(b"42").kind == "invalid_request"


# --- ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "id", ["1", "-7", "0", "1.0", "18446744073709551616", '"x"', '"\\u00e9"', "null", '"' + "x" * 128 + '"']
)
def test_an_id_comes_back_as_it_was_written(id: str) -> None:  # K-55
    message = parse(b'{"jsonrpc":"2.0","id":%b,"method":"m"}' % id.encode())
    assert isinstance(message, Request)
    assert message.id == id.encode()
    assert b'"id":%b,' % id.encode() in jsonrpc.result_body(message.id, {})


@pytest.mark.parametrize("id", ["true", "1.5", "{}", "[]", "1e3", '"' + "x" * 129 + '"', "1" * 41, "1." + "0" * 200])
def test_what_is_no_id_is_refused_and_answered_with_null(id: str) -> None:
    with pytest.raises(BadMessage) as caught:
        parse(b'{"jsonrpc":"2.0","id":%b,"method":"m"}' % id.encode())
    assert (caught.value.error.kind, caught.value.id) == ("invalid_request", None)


@pytest.mark.parametrize(("one", "other"), [("1", "1.0"), ("1.0", "1.00"), ('"a"', '"\\u0061"')])
def test_two_spellings_of_an_id_are_one_key(one: str, other: str) -> None:  # K-55
    first, second = Request("m", None, one.encode()), Request("m", None, other.encode())
    assert first.key == second.key
    assert first.key != Request("m", None, b'"1"').key


# --- batches ----------------------------------------------------------------------------------------------------------


def test_a_batch_is_its_messages_good_and_bad_in_their_order() -> None:
    parsed = parse(b"[%b,7,%b]" % (request(id=1), request(id="b")))
    assert isinstance(parsed, list)
    assert [type(message) for message in parsed] == [Request, BadMessage, Request]
    assert jsonrpc.batch_body([b"1\n", b"2\n"]) == b"[1,2]\n"


@pytest.mark.parametrize("body", [b"[" + b"0," * 2**21 + b"0]", b"[" + b"0," * 2000 + b"0]"], ids=["4 MiB", "2,001"])
def test_a_batch_of_very_many_is_refused_in_bounded_memory(body: bytes) -> None:  # K-56
    tracemalloc.start()
    error = refused(body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (error.kind, error.data["limit"]) == ("limit_exceeded", "batch")
    assert peak < 2**20


# --- nesting ----------------------------------------------------------------------------------------------------------


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def real_depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(real_depth, inner), default=0)


@given(JSON | st.lists(JSON.map(lambda value: [[[[[[[[[[value]]]]]]]]]]), max_size=4))
def test_depth_is_that_of_the_decoded_value(value: Any) -> None:
    assert depth(json.dumps(value).encode()) == real_depth(value)
    assert depth(json.dumps(value, ensure_ascii=False).encode()) == real_depth(value)


def test_64_levels_pass_and_65_do_not() -> None:
    assert isinstance(parse(request()[:-1] + b',"params":' + nested(63) + b"}"), Request)
    assert refused(request()[:-1] + b',"params":' + nested(64) + b"}").data["limit"] == "nesting"
    assert refused(b"[" * 10_000).kind == "limit_exceeded"
    text = json.dumps("[{" * 500).encode()
    assert isinstance(parse(request()[:-1] + b',"params":' + text + b"}"), Request)


def test_what_the_daemon_sends_may_be_nested_deeper() -> None:
    message = parse(request()[:-1] + b',"params":' + nested(100) + b"}", trusted=True)
    assert isinstance(message, Request)


@pytest.mark.parametrize("unit", [b"[],", b'"",', b'["["],', nested(62) + b",", nested(12) + b",", b'{"a":"\\"["},'])
def test_looking_at_4_mib_of_the_worst_takes_no_time_that_others_notice(unit: bytes) -> None:  # K-56
    body = request()[:-1] + b',"params":[' + unit * (2**22 // len(unit)) + b"0]}"
    started = time.process_time()
    assert isinstance(parse(body), Request)
    assert time.process_time() - started < 1.5


# --- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [None, b"null", b"{}", b"[]", b"[ ]", b"{\n}"])
def test_no_parameters_can_be_written_in_many_ways(raw: bytes | None) -> None:
    assert decode_params(None if raw is None else Raw(raw), NoParams) == NoParams()
    assert decode_params(None if raw is None else Raw(raw), SessionListParams) == SessionListParams()


def test_an_integer_may_be_written_with_a_point() -> None:
    assert decode_params(Raw(b'{"deadlineMs":5.0}'), DrainParams) == DrainParams(deadline_ms=5)
    for bad in (b"5.5", b"1e300", b"-1.0", b"1e999"):
        with pytest.raises(RpcError, match="deadlineMs") as caught:
            decode_params(Raw(b'{"deadlineMs":%b}' % bad), DrainParams)
        assert caught.value.kind == "invalid_params"


def test_large_parameters_that_do_not_fit_are_refused_in_bounded_memory() -> None:  # K-56
    raw = Raw(b'{"start":[' + b"{}," * 2**20 + b"0]}")
    tracemalloc.start()
    with pytest.raises(RpcError, match="start"):
        decode_params(raw, MessagesParams)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


# --- answers ----------------------------------------------------------------------------------------------------------


def test_an_error_is_read_as_it_was_written() -> None:
    body = jsonrpc.error_body(b"7", RpcError("session_busy", "wait", operation="prompt"))
    answer = parse(body)
    assert isinstance(answer, Response)
    assert answer.error is not None
    assert (answer.id, answer.error.kind, answer.error.code, answer.error.message) == (
        7,
        "session_busy",
        -32000,
        "wait",
    )
    assert answer.error.data == {"kind": "session_busy", "retryable": True, "operation": "prompt"}


def test_a_kind_or_code_from_the_future_is_kept() -> None:
    answer = parse(
        b'{"jsonrpc":"2.0","id":1,"error":{"code":-32099,"message":"m","data":{"kind":"new","retryable":true}}}'
    )
    assert isinstance(answer, Response)
    assert answer.error is not None
    assert (answer.error.code, answer.error.kind, answer.error.data["retryable"]) == (-32099, "new", True)


@pytest.mark.parametrize("data", [b'"text"', b"[1]", b"7", b"null"])
def test_an_error_with_odd_data_is_still_an_error(data: bytes) -> None:
    answer = parse(b'{"jsonrpc":"2.0","id":1,"error":{"code":5,"message":"m","data":%b}}' % data)
    assert isinstance(answer, Response)
    assert answer.error is not None
    assert answer.error.code == 5


def test_a_null_result_is_a_result() -> None:
    answer = parse(jsonrpc.result_body(b"1", None))
    assert isinstance(answer, Response)
    assert answer.error is None
    assert bytes(answer.result or b"") == b"null"


def test_a_request_is_read_as_it_was_written() -> None:
    message = parse(jsonrpc.request_body(3, "session/stop", {"a": "é"}))
    assert isinstance(message, Request)
    assert (message.id, message.method, bytes(message.params or b"")) == (b"3", "session/stop", '{"a":"é"}'.encode())
    notification = parse(jsonrpc.request_body(None, "$/x", []))
    assert isinstance(notification, Request)
    assert notification.id is None
