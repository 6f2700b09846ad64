"""Titles as text: the vectors, and what holds for any text."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loop_protocol.v1.types import ImageBlock, TextBlock, Title, UserBlock, UserMessage
from loopd.core.history import History
from loopd.core.titles import CAP, FALLBACK_CAP, FALLBACK_WORDS, fallback, from_answer, is_eligible, normalised

VECTORS = json.loads((Path(__file__).parents[1] / "cases/titles.json").read_text(encoding="utf-8"))
# Everything that is treated in some way comes often; surrogates too, which a model's text may have.
SPECIAL = (
    "\x1b[31m",
    "\x1b]0;t\x07",
    "\x1b]8;;u\x1b\\",
    "\x1b",
    "\x9b",
    "\x9d",
    "\x9c",
    "\x07",
    "\r\n",
    "\x85",
    "\u2028",
    "\u200b",
    "\u202e",
    "\ufeff",
    "\ud83d",
    "\u3000",
    "é",
    "🙂",
    "a b",
)
TEXT = st.lists(st.sampled_from(SPECIAL) | st.characters() | st.text(max_size=40), max_size=40).map("".join)


@pytest.mark.parametrize(("text", "title"), VECTORS["norm"])
def test_any_text_becomes_the_line_of_the_vectors(text: str, title: str) -> None:  # T-7
    assert normalised(text) == title


@pytest.mark.parametrize(("text", "title"), VECTORS["fallback"])
def test_the_first_words_become_the_fallback_of_the_vectors(text: str, title: str) -> None:  # T-2
    assert fallback(text) == title


@pytest.mark.parametrize(("answer", "title"), VECTORS["answer"])
def test_a_models_answer_becomes_the_title_of_the_vectors(answer: str, title: str) -> None:  # T-7
    assert from_answer(answer) == title


@pytest.mark.parametrize(
    ("answer", "title"),
    [
        ('"a" and "b"', '"a" and "b"'),
        ("\u201ca\u201d and \u201cb\u201d", "\u201ca\u201d and \u201cb\u201d"),
        ("\u201cwhole\u201d", "whole"),
        ('""', ""),
        ('"', '"'),
        ("``twice``", "`twice`"),
        ('"Fix "quoted" word"', 'Fix "quoted" word'),
        ('"a", "b"', '"a", "b"'),
        ("'Don't panic'", "Don't panic"),
        ("\u300ca\u300cb\u300d\u300d", "a\u300cb\u300d"),
        ("\u300ca\u300d\u3068\u300cb\u300d", "\u300ca\u300d\u3068\u300cb\u300d"),
        ('\x1b[1m " spaced " \x1b[0m', "spaced"),
        ("<THINK>a</think>b<thinking>c</thinking>d<think>e", "bd"),
        ("<think>a</thinking>b", ""),
        ('<think>"</think>"Named"', "Named"),
        (f'"{"x" * 200}"', "x" * 120),
    ],
)
def test_one_pair_of_quotes_and_all_thoughts_are_no_part_of_a_title(answer: str, title: str) -> None:  # T-7
    assert from_answer(answer) == title


@given(
    st.lists(TEXT | st.sampled_from(("<think>", "</think>", "<thinking>", "</thinking>", '"', "`", "\u300c", "\u300d")))
)
def test_whatever_a_model_answers_its_title_is_clean_and_within_the_cap(parts: list[str]) -> None:  # T-7
    title = from_answer("".join(parts))
    assert len(title.encode()) <= CAP
    assert normalised(title) == title


@pytest.mark.parametrize("piece", ["<think>", "<think>a</think>", "<", '"', "</think>", "a"])
def test_a_huge_answer_is_walked_through_once(piece: str) -> None:
    assert len(from_answer(piece * (256 * 1024 // len(piece))).encode()) <= CAP


@given(TEXT)
def test_a_text_is_eligible_where_something_of_it_can_be_seen(text: str) -> None:  # T-2
    message = UserMessage(index=0, content=[TextBlock(text)], timestamp=1)
    assert is_eligible(message) == bool(normalised(text))


@given(TEXT, st.integers(0, 200))
def test_whatever_comes_in_a_title_is_one_clean_line_within_its_cap(text: str, cap: int) -> None:  # T-7
    title = normalised(text, cap)
    assert len(title.encode()) <= cap  # encodes at all: no half of a code point is in it
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]", title)
    assert title == " ".join(title.split())
    assert normalised(title, cap) == title
    assert all(char == " " or not char.isspace() for char in title)


@given(TEXT)
def test_a_fallback_has_at_most_eight_words_of_the_normalised_text(text: str) -> None:  # T-2
    title = fallback(text)
    assert len(title.encode()) <= FALLBACK_CAP
    assert len(title.split()) <= FALLBACK_WORDS
    assert normalised(text).startswith(title)
    assert bool(title) == bool(normalised(text))


@given(st.text(st.characters(exclude_categories=("C", "Z")), max_size=60))
def test_text_without_anything_special_stays_as_it_is_up_to_the_cap(text: str) -> None:  # T-7
    assert text.startswith(normalised(text))
    cut = normalised(text)
    assert cut == text or len((cut + text[len(cut)]).encode()) > CAP
    assert unicodedata.is_normalized("NFC", cut) or not unicodedata.is_normalized("NFC", text)


@pytest.mark.parametrize("piece", [" ", "\u200b", "\x1b]", "\x9d", "\x9d ", "\x1b[", "\x9b0", "\x1b]8;;x"])
def test_a_huge_text_is_only_looked_at_where_it_begins(piece: str) -> None:
    assert len(normalised(piece * 4_000_000).encode()) <= CAP


def _user(index: int, *content: UserBlock) -> UserMessage:
    return UserMessage(index=index, content=list(content), timestamp=1)


def test_the_first_message_with_visible_text_gives_the_title_and_no_later_one_changes_it() -> None:  # T-2, T-5
    history, image = History(), ImageBlock(mime_type="image/png", data="AAAA")
    history.append(_user(0, image))
    history.append(_user(1, TextBlock("\u200b \x1b[0m")))
    assert history.fallback is None
    history.append(_user(2, image, TextBlock("Explain"), TextBlock("the scripts")))
    title = Title(text="Explain the scripts", source="fallback", message_indices=[2])
    assert history.fallback == title
    history.append(_user(3, TextBlock("something else")))
    again = History()
    for line in history.lines:
        again.read(line)
    assert again.fallback == history.fallback == title
    assert again.texts == history.texts
