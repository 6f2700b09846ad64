"""Images that ``read`` shows: known by content, to models that see, and nothing that a provider would refuse later."""

from __future__ import annotations

import base64
import dataclasses
import struct
import zlib
from pathlib import Path

import pytest
from agent_recording import MakeScope, call

from loop_protocol.v1.types import ImageBlock, TextBlock
from loopd.agent import ToolOutcome
from loopd.agent.tools import images
from loopd.agent.tools.read import Read, ReadArguments


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *, padding: int = 0) -> bytes:
    rows = zlib.compress((b"\0" + b"\x80" * width) * height)
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"tEXt", b"x" * padding), chunk(b"IDAT", rows), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def riff(kind: bytes, data: bytes) -> bytes:
    body = b"WEBP" + kind + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


FRAME = struct.pack(">BBHBHHB", 0xFF, 0xC2, 17, 8, 20, 300, 3) + b"\1\x22\0\2\x11\1\3\x11\1"
IMAGES = {
    "png": (png(300, 20), "image/png"),
    # An application segment and fill bytes come before the frame's header.
    "jpeg": (b"\xff\xd8\xff\xe1\0\x09Exif\0\0\0" + b"\xff\xff" + FRAME + b"\xff\xda\0\2\xff\xd9", "image/jpeg"),
    "gif": (b"GIF89a" + struct.pack("<HH", 300, 20) + b"\0\0\0\x2c;\0", "image/gif"),
    "webp lossy": (riff(b"VP8 ", b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 300, 20)), "image/webp"),
    "webp lossless": (riff(b"VP8L", b"\x2f" + struct.pack("<I", 299 | 19 << 14)), "image/webp"),
    "webp extended": (riff(b"VP8X", b"\0\0\0\0" + b"\x2b\x01\0\x13\0\0"), "image/webp"),
}


async def read(make_scope: MakeScope, path: Path, *, accepts: str = "text image") -> ToolOutcome:
    scope = dataclasses.replace(make_scope(permission="read-only"), accepts=frozenset(accepts.split()))
    return await Read().run(ReadArguments(str(path)), scope)


@pytest.mark.parametrize(("data", "type"), IMAGES.values(), ids=IMAGES.keys())
async def test_an_image_is_shown_whole_with_its_type_whatever_its_name(
    make_scope: MakeScope, tmp_path: Path, data: bytes, type: str
) -> None:
    path = tmp_path / "picture.txt"
    path.write_bytes(data)
    note, image = (await read(make_scope, path)).content
    assert note == TextBlock(f"[{path}: {type}, 300 x 20 pixels]")
    assert isinstance(image, ImageBlock)
    assert image.mime_type == type
    assert base64.b64decode(image.data or "", validate=True) == data


async def test_a_model_that_sees_no_images_is_told_what_it_is(make_scope: MakeScope, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png(3, 2))
    outcome = await read(make_scope, path, accepts="text")
    told = f"[an image (image/png, {len(png(3, 2))} bytes), and you cannot see images]"
    assert outcome == ToolOutcome([TextBlock(told)])


@pytest.mark.parametrize(("data", "type"), IMAGES.values(), ids=IMAGES.keys())
async def test_a_damaged_image_is_an_error_now_rather_than_with_every_later_prompt(
    make_scope: MakeScope, tmp_path: Path, data: bytes, type: str
) -> None:
    for length in range(12, len(data) - 3):
        (tmp_path / "cut").write_bytes(data[:length])
        outcome = await read(make_scope, tmp_path / "cut")
        assert outcome == ToolOutcome([TextBlock(f"{tmp_path}/cut: a damaged image ({type})")], is_error=True)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (png(2, 2, padding=images.BYTES), f"bytes, {images.BYTES} can be shown"),
        (png(images.PIXELS + 1, 1), "8001 x 1 pixels, 8000 a side"),
    ],
    ids=["bytes", "pixels"],
)
async def test_an_image_too_large_for_providers_is_an_error_that_says_what_to_do(
    make_scope: MakeScope, tmp_path: Path, data: bytes, reason: str
) -> None:
    (tmp_path / "large").write_bytes(data)
    scope = dataclasses.replace(make_scope(), accepts=frozenset({"image"}))
    text, is_error = await call(Read(), ReadArguments("large"), scope)
    assert is_error
    assert reason in text
    assert "read a copy that was scaled down" in text


def test_the_largest_image_has_five_mebibytes_as_text() -> None:
    assert len(base64.b64encode(bytes(images.BYTES))) == 5 * 1024 * 1024


@pytest.mark.parametrize("data", [b"", b"GIF", b"BM\0\0", b"RIFF\0\0\0\0WAVE", b"%PDF-1.7", b"\xff\xd8 text"])
def test_what_is_no_image_is_none(data: bytes) -> None:
    assert images.image_type(data) is None
