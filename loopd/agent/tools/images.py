"""Images as providers take them: known by their first bytes, whole, and of a size that is not refused later.

What a provider refuses stays in the conversation and would be refused with every further prompt: hence the checks.
"""

from __future__ import annotations

import struct

# Anthropic takes 5 MB in base64 and 8,000 pixels a side, which is the least of the three providers.
BYTES = 5 * 1024 * 1024 // 4 * 3
PIXELS = 8000

_MAGIC = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}
HEAD = 16


def image_type(head: bytes) -> str | None:
    """By the first ``HEAD`` bytes of a file; None for what is no image, or no such image."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "image/webp"
    return next((type for magic, type in _MAGIC.items() if head.startswith(magic)), None)


def dimensions(data: bytes, *, type: str) -> tuple[int, int]:
    """Width and height in pixels. Raises ValueError where the file is not whole."""
    try:
        width, height = _MEASURES[type](data)
    except struct.error:
        width = height = 0
    if not width or not height or not _ended(data, type):
        raise ValueError(f"a damaged image ({type})")
    return width, height


def _ended(data: bytes, type: str) -> bool:
    """Has it the end that a whole file has? Some programs append to it, so that is not always the last of it."""
    match type:
        case "image/webp":
            return len(data) >= 8 + int.from_bytes(data[4:8], "little")
        case "image/gif":
            return data.rstrip(b"\0").endswith(b";")
        case "image/png":
            return b"IEND\xaeB`\x82" in data
    return b"\xff\xd9" in data


def _png(data: bytes) -> tuple[int, int]:
    return struct.unpack_from(">II", data, 16)


def _gif(data: bytes) -> tuple[int, int]:
    return struct.unpack_from("<HH", data, 6)


def _jpeg(data: bytes) -> tuple[int, int]:
    """From segment to segment up to the frame's header; 0, 0 if there is none before the image data."""
    at = 2
    while True:
        mark, kind, length = struct.unpack_from(">BBH", data, at)
        if mark != 0xFF or kind == 0xDA:
            return 0, 0
        if kind == 0xFF:  # fill
            at += 1
        elif 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        else:
            at += 2 + length


def _webp(data: bytes) -> tuple[int, int]:
    match data[12:16]:
        case b"VP8 ":
            width, height = struct.unpack_from("<HH", data, 26)
            return width & 0x3FFF, height & 0x3FFF
        case b"VP8L":
            (bits,) = struct.unpack_from("<I", data, 21)
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8X":
            low, high = struct.unpack_from("<HB", data, 24), struct.unpack_from("<HB", data, 27)
            return low[0] + (low[1] << 16) + 1, high[0] + (high[1] << 16) + 1
    return 0, 0


_MEASURES = {"image/png": _png, "image/jpeg": _jpeg, "image/gif": _gif, "image/webp": _webp}
