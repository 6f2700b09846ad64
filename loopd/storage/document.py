"""``meta.json`` as a document: what we understand is validated, what we do not understand survives our rewrites."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Raw, Struct, structs

from loop_protocol.v1.types import ModelRef, Permission
from loopd.core.timings import LATEST_MS

from . import FORMAT, VERSION, Committed, Metadata, SessionMalformed, SessionUnsupported, Snapshot

META = "meta.json"
# It does not grow with the history: what is larger is something else.
LIMIT = 1024 * 1024

Document = dict[str, Raw]  # Raw, so that numbers and escapes of a newer writer come out as they went in


class _Head(Struct, rename="camel"):
    format: str
    version: Any = None
    min_reader: Any = None


_head = msgspec.json.Decoder(_Head)
_metadata = msgspec.json.Decoder(Metadata)
_document = msgspec.json.Decoder(Document)
_encode = msgspec.json.Encoder().encode


def decode(body: bytes, *, path: str, id: str) -> tuple[Metadata, Document]:
    """Raises :class:`SessionUnsupported` or :class:`SessionMalformed`. ``id`` is the session directory's name."""
    try:
        body.decode()  # msgspec does not check what it skips
        head = _head.decode(body)
        if head.format != FORMAT:
            raise SessionUnsupported(f"{path} has the format {head.format!r}")
        _require_readable(head, path)
        meta = _metadata.decode(body)
        _require_sense(meta, id)
        return meta, _document.decode(body)
    except UnicodeDecodeError as error:
        raise SessionMalformed(path, "is not UTF-8", error.start) from None
    except msgspec.ValidationError as error:
        raise SessionMalformed(path, str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise SessionMalformed(path, f"is not JSON: {error}", 0) from None
    except _Nonsense as error:
        raise SessionMalformed(path, str(error)) from None


def _require_readable(head: _Head, path: str) -> None:
    if type(head.min_reader) is int and head.min_reader > VERSION:
        raise SessionUnsupported(f"{path} needs a reader of version {head.min_reader}; this one is {VERSION}")
    if type(head.version) is int and head.version < VERSION:
        raise SessionUnsupported(f"{path} has version {head.version}, which was never kept in this form")


class _Nonsense(ValueError):
    pass


def _require_sense(meta: Metadata, id: str) -> None:
    committed, times = meta.committed, (meta.created_at, meta.updated_at, meta.pinned_at or 0)
    sense = {
        f"id is {meta.id!r}, the directory's name {id!r}": meta.id == id,
        "cwd is no absolute path": meta.cwd.startswith("/") and "\0" not in meta.cwd,
        "a time is negative": min(times) >= 0,
        f"a time is beyond {LATEST_MS} ms": max(times) <= LATEST_MS,
        "committed.commitId is empty": committed.commit_id != "",
        "a number of committed is negative": min(committed.revision, committed.bytes, committed.user_messages) >= 0,
        "committed.crc32 is no checksum": 0 <= committed.crc32 < 1 << 32,
        "more user messages than messages": committed.user_messages <= committed.messages,
    }
    for nonsense, is_fine in sense.items():
        if not is_fine:
            raise _Nonsense(nonsense)


def first_metadata(
    *, id: str, cwd: str, model: ModelRef, permission: Permission, created_at: int, updated_at: int | None = None
) -> Metadata:
    """Of an empty session. Its ``commitId`` is the session's id, so that a repeated creation knows its own."""
    return Metadata(
        format=FORMAT,
        version=VERSION,
        min_reader=VERSION,
        id=id,
        cwd=cwd,
        created_at=created_at,
        updated_at=created_at if updated_at is None else updated_at,
        unread=False,
        model=model,
        permission=permission,
        committed=Committed(commit_id=id, revision=0, bytes=0, crc32=0, messages=0, user_messages=0),
    )


def publication(meta: Metadata, snapshot: Snapshot, *, published: int) -> Metadata:
    """The metadata that publishes ``snapshot`` after ``meta``, which publishes the first ``published`` lines.

    The checksum is chained from memory over the new lines alone (rule 5). A snapshot that is published already stays
    what it is; its changes are part of it.
    """
    if snapshot.commit_id == meta.committed.commit_id:
        return structs.replace(meta, **snapshot.changes)
    if snapshot.count < published:
        raise ValueError(f"a snapshot of {snapshot.count} lines after {published} published ones")
    size, crc32 = meta.committed.bytes, meta.committed.crc32
    for number in range(published, snapshot.count):
        crc32 = zlib.crc32(snapshot.lines[number], crc32)
        size += len(snapshot.lines[number])
    committed = Committed(
        commit_id=snapshot.commit_id,
        revision=meta.committed.revision + 1,
        bytes=size,
        crc32=crc32,
        messages=snapshot.messages,
        user_messages=snapshot.user_messages,
        fallback=snapshot.fallback,
    )
    return structs.replace(meta, committed=committed, **snapshot.changes)


def checksum(blocks: Iterable[bytes]) -> int:
    crc32 = 0
    for block in blocks:
        crc32 = zlib.crc32(block, crc32)
    return crc32


def rewritten(document: Document, meta: Metadata) -> Document:
    """The document that says ``meta``. Keys that we do not know stay, in nested objects too (S-27)."""
    return _merged(document, meta)


def encode(document: Document) -> bytes:
    return _encode(document) + b"\n"


def _merged(old: Document, new: Struct) -> Document:
    known = {field.encode_name: getattr(new, field.name) for field in structs.fields(new)}
    said = {name: _value(old.get(name), value) for name, value in known.items() if value is not None}
    return said | {name: value for name, value in old.items() if name not in known}


def _value(old: Raw | None, new: Any) -> Raw:
    if old is None or not isinstance(new, Struct) or not bytes(old).startswith(b"{"):
        return Raw(_encode(new))
    return Raw(_encode(_merged(_document.decode(old), new)))
