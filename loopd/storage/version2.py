"""A session of version 2 in the form of today: ``<id>.jsonl`` has a header and then a message per line (S-18).

What its writer left out gets a neutral value, what is not known stays, what makes no sense is refused with its place;
nothing is skipped. The files are not touched.
"""

from __future__ import annotations

import re
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct, field, structs

from loop_protocol.jsontext import check_text
from loop_protocol.v1.types import AssistantMessage, ModelRef, Permission, PromptTiming, Title, ToolCallBlock
from loopd.core.history import LINE, History, Malformed

from . import FORMAT, Metadata, SessionMalformed, SessionUnsupported, Snapshot
from .document import LIMIT, Document, decode, encode, first_metadata, publication, rewritten
from .fs import FileSystem, canonical
from .places import utf8
from .reading import blocks_of

VERSION = 2
UNKNOWN = "unknown"

_Time = int | Annotated[datetime, Meta(tz=True)]


class _Kind(Struct):
    format: str
    version: Any = None


class _Header(Struct, rename="camel", kw_only=True):
    """What is understood of the first line. The rest goes on into the metadata as it is (S-27)."""

    cwd: str
    id: str | None = None
    created_at: _Time | None = None
    updated_at: _Time | None = None
    pinned_at: _Time | None = None
    unread: bool | None = None
    model: ModelRef | None = None
    permission: Permission | None = None
    title: Title | None = None
    prompt_timings: list[Raw] = field(default_factory=list)


class _Said(Struct, rename="camel"):
    role: Literal["user", "assistant", "toolResult"]
    tool_call_id: str = ""


_kind = msgspec.json.Decoder(_Kind)
_head = msgspec.json.Decoder(_Header)
_said = msgspec.json.Decoder(_Said)
_timing = msgspec.json.Decoder(PromptTiming)
_document = msgspec.json.Decoder(Document)
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True, frozen=True)
class Converted:
    meta: Metadata
    document: Document
    history: History


def lines_of(fs: FileSystem, fd: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Each line without its newline, and where it starts. One that never ends is told up to what a line may have."""
    start, parts = 0, [b""]
    for block in blocks_of(fs, fd, size):
        *ends, rest = block.split(b"\n")
        for end in ends:
            line = b"".join((*parts, end))
            yield start, line
            start += len(line) + 1
            parts = [b""]
        parts.append(rest)
        if sum(map(len, parts)) > LINE:
            break
    if rest := b"".join(parts):
        yield start, rest


def converted(fs: FileSystem, fd: int, path: str, id: str, *, model: ModelRef, permission: Permission) -> Converted:
    """Raises SessionMalformed, SessionUnsupported and OSError. ``model`` and ``permission``: for a header without."""
    of = fs.fstat(fd)
    if not stat.S_ISREG(of.st_mode):
        raise SessionMalformed(path, "is no regular file")
    lines = lines_of(fs, fd, of.st_size)
    with _refusing(path, 0):
        head = text(next(lines, (0, b""))[1])
        _require_version(head, path)
        header = _head.decode(head)
        meta = _metadata(header, id, written=of.st_mtime_ns // 1_000_000, model=model, permission=permission)
    history = _messages(lines, path, meta.created_at)
    with _refusing(path, of.st_size):
        history.require_paired()
    with _refusing(path, 0):
        for number, raw in enumerate(header.prompt_timings):
            history.read(_timing_line(number, bytes(raw), history))
        return _published(_document.decode(head), header, meta, history, path)


@contextmanager
def _refusing(path: str, offset: int) -> Iterator[None]:
    try:
        yield
    except msgspec.ValidationError as error:
        raise SessionMalformed(path, str(error), offset) from None
    except msgspec.DecodeError as error:
        raise SessionMalformed(path, f"is not JSON: {error}", offset) from None
    except RecursionError:
        raise SessionMalformed(path, "nested too deep", offset) from None
    except ValueError as error:  # Malformed among them
        raise SessionMalformed(path, str(error), offset) from None


_ESCAPES = re.compile(
    rb"\\(?:\\|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2}))"
)


def text(line: bytes) -> bytes:
    """The line as it can be decoded: a text that was cut within a character has half of a pair there, which JSON can
    write and Unicode has not."""
    if len(line) > LINE:
        raise Malformed(f"longer than a line may be, {LINE} bytes")
    if b"\\ud" in line or b"\\uD" in line:
        line = _ESCAPES.sub(lambda found: rb"\ufffd" if found[1] else found[0], line)
    check_text(line)
    return line


def _require_version(head: bytes, path: str) -> None:
    kind = _kind.decode(head)
    if kind.format != FORMAT or kind.version != VERSION:
        raise SessionUnsupported(f"{path} has the format {kind.format!r}, version {kind.version!r}")


def _metadata(header: _Header, id: str, *, written: int, model: ModelRef, permission: Permission) -> Metadata:
    """Of a session without history yet. ``written`` stands for times that are not told."""
    if header.id not in (None, id):
        raise Malformed(f"id is {header.id!r}, the file's name {id!r}")
    if not header.cwd.startswith("/") or "\0" in header.cwd:
        raise Malformed("cwd is no absolute path")
    meta = first_metadata(
        id=id,
        cwd=utf8(canonical(header.cwd)),
        model=header.model or model,
        permission=header.permission or permission,
        created_at=_ms(header.created_at, written),
        updated_at=_ms(header.updated_at, written),
    )
    pinned_at = None if header.pinned_at is None else _ms(header.pinned_at, written)
    return structs.replace(meta, unread=header.unread or False, pinned_at=pinned_at)


def _ms(time: _Time | None, missing: int) -> int:
    if isinstance(time, datetime):
        return round(time.timestamp() * 1000)
    return missing if time is None else time


def _messages(lines: Iterator[tuple[int, bytes]], path: str, created_at: int) -> History:
    history = History()
    tools: dict[str, str] = {}
    for start, line in lines:
        with _refusing(path, start):
            history.read(_completed(text(line), history.messages, created_at, tools) + b"\n")
        if isinstance(said := history.last_message, AssistantMessage):
            tools = {block.id: block.name for block in said.content if isinstance(block, ToolCallBlock)}
    return history


def _completed(line: bytes, index: int, created_at: int, tools: dict[str, str]) -> bytes:
    """The message with what is missing; all that is there stays, be it known or not."""
    said, record = _said.decode(line), _document.decode(line)
    neutral: dict[str, Any] = {"index": index, "timestamp": created_at}
    match said.role:
        case "assistant":
            neutral |= {"provider": UNKNOWN, "model": UNKNOWN, "usage": {}, "stopReason": "stop"}
        case "toolResult":
            neutral |= {"toolName": tools.get(said.tool_call_id, UNKNOWN), "isError": False}
    for name, value in neutral.items():
        if bytes(record.get(name, Raw(b"null"))) == b"null":
            record[name] = Raw(_encode(value))
    content, usage = bytes(record.get("content", Raw())), bytes(record.get("usage", Raw()))
    if content.startswith(b'"'):
        record["content"] = Raw(b'[{"type":"text","text":' + content + b"}]")
    if said.role == "assistant" and usage.startswith(b"{"):
        counts = {"inputTokens": Raw(b"0"), "outputTokens": Raw(b"0")} | _document.decode(usage)
        record["usage"] = Raw(_encode(counts))
    return _encode(record)


def _timing_line(number: int, raw: bytes, history: History) -> bytes:
    """Byte for byte, with ids and ranges or without (P-6)."""
    try:
        history.require_range(_timing.decode(raw))
    except Malformed as error:
        raise Malformed(f"promptTimings[{number}] is {error}") from None
    return _encode({"type": "timing", "timing": Raw(raw)}) + b"\n"


def _published(whole: Document, header: _Header, meta: Metadata, history: History, path: str) -> Converted:
    snapshot = Snapshot(
        commit_id=str(uuid.uuid4()),
        lines=history.lines,
        count=len(history.lines),
        messages=history.messages,
        user_messages=history.user_messages,
        fallback=history.fallback,
    )
    title = {} if header.title is None else {"title": whole["title"]}
    others = {name: raw for name, raw in whole.items() if name not in ("promptTimings", "committed", "title")}
    document = rewritten(others, publication(meta, snapshot, published=0)) | title
    body = encode(document)
    if len(body) > LIMIT:
        raise Malformed(f"without its timings the header is larger than {LIMIT} bytes")
    return Converted(*decode(body, path=path, id=meta.id), history)
