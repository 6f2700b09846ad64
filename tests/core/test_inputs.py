"""A prompt's content: what makes no sense is refused before anything happens (P-4)."""

from __future__ import annotations

import pytest

from loop_protocol.v1.methods import Content, ImageInput, TextInput
from loop_protocol.v1.types import ImageBlock, TextBlock
from loopd.core.inputs import Invalid, UnsupportedInput, blocks, digest, require_supported


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ("", "content"),
        (" \n\t", "content"),
        ([], "content"),
        ([TextInput("  ")], "content"),
        ([ImageInput("AAAA", "image/tiff")], "content[0].mimeType"),
        ([TextInput("x"), ImageInput("not base64!", "image/png")], "content[1].data"),
        ([ImageInput("", "image/png")], "content[0].data"),
    ],
)
def test_senseless_content_is_refused_and_named(content: Content, field: str) -> None:
    with pytest.raises(Invalid) as refused:
        blocks(content)
    assert refused.value.field == field


def test_text_is_kept_as_it_came_and_images_alone_are_a_prompt() -> None:
    assert blocks("  two\nlines ") == [TextBlock("  two\nlines ")]
    assert blocks([ImageInput("AAAA", "image/png")]) == [ImageBlock(mime_type="image/png", data="AAAA")]


def test_an_image_needs_a_model_that_takes_images() -> None:
    image = blocks([ImageInput("AAAA", "image/png")])
    require_supported(image, frozenset({"text", "image"}), "a/b")
    with pytest.raises(UnsupportedInput, match="a/b does not take images"):
        require_supported(image, frozenset({"text"}), "a/b")


def test_a_digest_tells_prompts_apart() -> None:
    assert digest("a") == digest("a")
    assert digest("a") != digest("b")
