"""JSON-RPC 2.0 without I/O: frames in, messages out; envelopes, parameters, and how answers are written."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from .framing import FRAME as FRAME
from .framing import FRAME_BEFORE_INITIALIZE as FRAME_BEFORE_INITIALIZE
from .framing import FrameReader as FrameReader
from .framing import Framing as Framing
from .framing import FramingError as FramingError
from .framing import frame as frame
from .jsontext import check_text, depth
from .v1.errors import RpcError

# An element that is no request costs 2 KiB, 1,000 times its bytes for `[0,0,…`: so a batch has limits of its own.
BATCH = 256 * 1024
BATCH_MESSAGES = 1024
NESTING = 64
REQUEST_ID = 128


class _Envelope(Struct):
    jsonrpc: Raw | UnsetType = UNSET
    id: Raw | UnsetType = UNSET
    method: Raw | UnsetType = UNSET
    params: Raw | UnsetType = UNSET
    result: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET


class Request(Struct, frozen=True):
    """A request or, without ``id``, a notification. ``id`` is the raw JSON of the id, echoed as it came."""

    method: str
    params: Raw | None
    id: bytes | None

    @property
    def key(self) -> bytes:
        """The id as one spelling: 1 and 1.0 are the same id, and so are "a" and "\\u0061"."""
        id = self.id or b"null"
        return _encode(msgspec.json.decode(id)) if id.startswith(b'"') else re.sub(rb"\.0+$", b"", id)


class Response(Struct, frozen=True):
    """An answer, as a client reads it."""

    id: Any
    result: Raw | None
    error: RpcError | None


class BadMessage(Exception):
    """One message of a frame is no request; ``id`` is what could be read of its id."""

    def __init__(self, error: RpcError, id: bytes | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.id = id


_envelope = msgspec.json.Decoder(_Envelope)
_batch = msgspec.json.Decoder(list[Raw])
_raw = msgspec.json.Decoder(Raw)
_INTEGER = re.compile(rb"-?[0-9]{1,40}(\.0+)?")


def parse(body: bytes, *, trusted: bool = False) -> list[Request | Response | BadMessage] | Request | Response:
    """One frame: a message, or a list for a batch. Raises :class:`BadMessage` for a frame that is neither.

    What passes is JSON to its last byte, parameters of unknown shape included; only numbers may turn out to be out of
    range. ``trusted`` is for clients: what the daemon sends may be nested deeper and batched longer.
    """
    try:
        check_text(body)
    except ValueError as error:
        raise BadMessage(RpcError("parse_error", str(error))) from None
    if not trusted:
        _check_bounds(body)
    if not body.startswith(b"["):
        return _message(body)
    parts = _decode(_batch, body)
    if not parts:
        raise BadMessage(RpcError("invalid_request", "an empty batch"))
    if len(parts) > BATCH_MESSAGES and not trusted:
        raise BadMessage(RpcError("limit_exceeded", f"a batch may have {BATCH_MESSAGES} messages", limit="batch"))
    return [_element(part) for part in parts]


def _element(part: Raw) -> Request | Response | BadMessage:
    try:
        return _message(part)
    except BadMessage as bad:
        return bad.with_traceback(None)


def _check_bounds(body: bytes) -> None:
    if body.startswith(b"[") and len(body) > BATCH:
        raise BadMessage(RpcError("limit_exceeded", f"a batch may have {BATCH} bytes", limit="batch"))
    if body.count(b"[") + body.count(b"{") > NESTING and depth(body) > NESTING:
        raise BadMessage(_too_deep())


def _decode(decoder: msgspec.json.Decoder[Any], body: bytes | Raw) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        _decode(_raw, body)  # it says so at the first wrong type, before it has seen whether the rest is JSON
        raise BadMessage(RpcError("invalid_request", f"not a JSON-RPC 2.0 message: {error}")) from None
    except msgspec.DecodeError as error:
        raise BadMessage(RpcError("parse_error", f"not JSON: {error}")) from None
    except RecursionError:
        raise BadMessage(_too_deep()) from None


def _too_deep() -> RpcError:
    return RpcError("limit_exceeded", f"JSON may be nested {NESTING} deep", limit="nesting")


def _message(body: bytes | Raw) -> Request | Response:
    envelope: _Envelope = _decode(_envelope, body)
    id = None if isinstance(envelope.id, UnsetType) else _id(bytes(envelope.id))
    if isinstance(envelope.jsonrpc, UnsetType) or bytes(envelope.jsonrpc) != b'"2.0"':
        raise BadMessage(RpcError("invalid_request", '"jsonrpc" must be "2.0"'), id)
    if isinstance(envelope.method, UnsetType):
        if isinstance(envelope.result, UnsetType) and isinstance(envelope.error, UnsetType):
            raise BadMessage(RpcError("invalid_request", '"method" is missing'), id)
        return _response(envelope, id)
    try:
        method = msgspec.json.decode(envelope.method, type=str)
    except msgspec.ValidationError:
        raise BadMessage(RpcError("invalid_request", '"method" must be a string'), id) from None
    params = None if isinstance(envelope.params, UnsetType) else envelope.params
    return Request(method, params, id)


def _id(raw: bytes) -> bytes | None:
    if len(raw) <= REQUEST_ID + 2 and (raw == b"null" or raw.startswith(b'"') or _INTEGER.fullmatch(raw)):
        return raw
    raise BadMessage(RpcError("invalid_request", f'"id" must be an integer, or a string of at most {REQUEST_ID} bytes'))


class _WireError(Struct):
    code: int
    message: str
    data: Any = None


def _response(envelope: _Envelope, id: bytes | None) -> Response:
    number = None if id is None else msgspec.json.decode(id)
    if isinstance(envelope.error, UnsetType):
        return Response(number, envelope.result if isinstance(envelope.result, Raw) else None, None)
    try:
        wire = msgspec.json.decode(envelope.error, type=_WireError)
    except msgspec.DecodeError as error:
        raise BadMessage(RpcError("invalid_request", f"not an error object: {error}"), id) from None
    data = dict(wire.data) if isinstance(wire.data, dict) else {}
    failure = RpcError(str(data.pop("kind", "internal")), wire.message)
    failure.code = wire.code
    failure.data |= data
    return Response(number, None, failure)


def decode_params(raw: Raw | None, type: Any) -> Any:
    """The parameters as ``type``. Missing, null, ``{}`` and ``[]`` are the same, and 1.0 is the integer 1.

    ``raw`` comes from :func:`parse`. Raises :class:`RpcError` ``invalid_params``, naming the field.
    """
    body: Any = b"{}" if raw is None or _EMPTY.fullmatch(raw) else raw
    try:
        return msgspec.json.decode(body, type=type)
    except msgspec.ValidationError as error:
        problem = RpcError("invalid_params", str(error))
    # The second reading makes an object of every value, 30 times the bytes of `[{},{},…`; what has integers is small.
    if len(body) > BATCH:
        raise problem
    try:
        return msgspec.convert(_integral(_anything.decode(body)), type)
    except msgspec.ValidationError:
        raise problem from None


_EMPTY = re.compile(rb"null|\{[ \t\r\n]*\}|\[[ \t\r\n]*\]")


def check_json(body: bytes | Raw) -> None:
    """Raise :class:`BadMessage` for what is no JSON; :func:`parse` lets nothing through for which this would."""
    _decode(_raw, body)


_anything: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def _integral(value: Any) -> Any:
    match value:
        case float() if value.is_integer() and abs(value) < 2**53:
            return int(value)
        case dict():
            return {key: _integral(item) for key, item in value.items()}
        case list():
            return [_integral(item) for item in value]
    return value


# --- writing ----------------------------------------------------------------------------------------------------------

_encode = msgspec.json.Encoder().encode


def result_body(id: bytes | None, result: Any) -> bytes:
    # One copy of what is encoded already: a list of 10,000 sessions has 3 MB.
    encoded = result if isinstance(result, Raw) else _encode(result)
    return b"".join((b'{"jsonrpc":"2.0","id":', id or b"null", b',"result":', encoded, b"}\n"))


def error_body(id: bytes | None, error: RpcError) -> bytes:
    wire = {"code": error.code, "message": error.message, "data": error.data}
    return b'{"jsonrpc":"2.0","id":%b,"error":%b}\n' % (id or b"null", _encode(wire))


def request_body(id: int | None, method: str, params: Any) -> bytes:
    """A request, or a notification when ``id`` is None."""
    head = b"" if id is None else b'"id":%d,' % id
    return b'{"jsonrpc":"2.0",%b"method":%b,"params":%b}\n' % (head, _encode(method), _encode(params))


def batch_body(bodies: list[bytes]) -> bytes:
    return b"[%b]\n" % b",".join(body.rstrip(b"\n") for body in bodies)
