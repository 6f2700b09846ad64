"""What is encoded for a prompt is its new messages: the same at the tenth prompt and at the ten-thousandth."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

import model_bench as bench
import msgspec
import pytest
import strict_checkers

from loop_protocol.v1.types import Message, ThinkingBlock, ToolCallBlock
from loopd.agent.context import ConversationInput

FIRST, LAST = PROMPTS = (10, 10_000)
OWN: Any = {"provider": "local", "model": "eyes"}


@dataclass
class Counter:
    """Counts the calls of msgspec's encoder that Python code makes, whoever makes them."""

    calls: int = 0

    def __call__(self, _frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and isinstance(getattr(called, "__self__", None), msgspec.json.Encoder):
            self.calls += 1

    def __enter__(self) -> Counter:
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def prompt(index: int) -> list[Message]:
    call = ToolCallBlock("call_0", "bash", {"command": "ls"})
    signature = "anthropic-messages S"
    return [
        bench.user(index, "and now?"),
        bench.assistant(index + 1, ThinkingBlock("hm", signature), "I look", call, **OWN),
        bench.result(index + 2, call, "out"),
        bench.assistant(index + 3, "done", **OWN),
    ]


@pytest.mark.parametrize("api", strict_checkers.CHECKERS)
def test_what_is_encoded_per_prompt_does_not_grow(api: str) -> None:  # I-8
    model: Any = bench.catalogue("http://127.0.0.1:1/v1", api=api).resolve(bench.EYES)
    kept = ConversationInput(model)
    calls, sizes = {}, {}
    for number in range(1, LAST + 1):
        before = len(kept.encoded)
        with Counter() as counted:
            for message in prompt(1_000_000 + 4 * number):
                kept.add(message)
                # The model is asked after the user and after the results; in between only what is compared.
                if message.index % 4 in (0, 2) and number in PROMPTS:
                    bench.sent(model, kept)
        calls[number], sizes[number] = counted.calls, len(kept.encoded) - before
    assert calls[FIRST] == calls[LAST] > 0
    assert sizes[FIRST] == sizes[LAST] < 1000
