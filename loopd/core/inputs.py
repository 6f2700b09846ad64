"""What a person sends: checked before acceptance, so that bad input is a refusal and not a failed run (P-4)."""

from __future__ import annotations

import binascii
import hashlib
from collections.abc import Sequence

import msgspec

from loop_protocol.v1.methods import Content, ImageInput, TextInput
from loop_protocol.v1.types import ImageBlock, TextBlock, UserBlock

IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")


class Invalid(ValueError):
    """Makes no sense, now or later; ``field`` names the part."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(f"{message} - at `$.{field}`")
        self.field = field


class UnsupportedInput(ValueError):
    """The chosen model does not take this kind of input."""


def blocks(content: Content, images: Sequence[ImageBlock] = ()) -> list[UserBlock]:
    """The content of a prompt as blocks of a user message, with ``images`` at the end. Raises :class:`Invalid`."""
    parts: Sequence[TextInput | ImageInput] = [TextInput(content)] if isinstance(content, str) else content
    made = [*(_block(part, place) for place, part in enumerate(parts)), *images]
    kept = [block for block in made if not isinstance(block, TextBlock) or block.text.strip()]
    if not kept:
        raise Invalid("the prompt is empty", "content")
    return kept


def _block(part: TextInput | ImageInput, place: int) -> UserBlock:
    if isinstance(part, TextInput):
        return TextBlock(part.text)
    if part.mime_type not in IMAGE_TYPES:
        raise Invalid(f"an image may be {', '.join(IMAGE_TYPES)}", f"content[{place}].mimeType")
    try:
        binascii.a2b_base64(part.data, strict_mode=True)
    except ValueError:
        raise Invalid("not base64", f"content[{place}].data") from None
    if not part.data:
        raise Invalid("an empty image", f"content[{place}].data")
    return ImageBlock(mime_type=part.mime_type, data=part.data)


def largest(content: Sequence[UserBlock]) -> int:
    """Bytes that the content may have as JSON: six for a character that is escaped, one for one of an image's."""
    return sum(6 * len(block.text) if isinstance(block, TextBlock) else len(block.data or "") for block in content)


def require_supported(content: Sequence[UserBlock], supported: frozenset[str], model: str) -> None:
    if "image" not in supported and any(isinstance(block, ImageBlock) for block in content):
        raise UnsupportedInput(f"{model} does not take images; choose another model or leave the image out")


def digest(content: Content) -> str:
    """Tells whether two prompts with the same ``requestId`` are the same prompt."""
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()
