"""``practice/echo``: a model without network or account, whose every answer can be foretold.

It goes by the last user message: it echoes the text; ``stream N`` gives N words at once, ``slow`` gives 50 words in ten
seconds, ``fail`` fails. ``shell: COMMAND``, ``read PATH``, ``write PATH: TEXT`` and ``edit PATH: OLD => NEW`` call the
tool and then give its text; ``escalate: COMMAND`` is ``shell:`` that asks for all rights. A path may have spaces, but
no colon where a text follows it. A conversation is named after the first words of its last text; ``slow`` and ``fail``
do there what they do elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import trio

from loop_protocol.v1.types import (
    AssistantBlock,
    AssistantMessage,
    ImageBlock,
    Message,
    ModelRef,
    TextBlock,
    ToolCallBlock,
    ToolResultMessage,
    Usage,
    UserMessage,
)

from ..agent import Delta, ModelError, ModelRequest, Reply, TextDelta, ToolCallDelta
from ..agent.prompt import TITLE_PROMPT

MOST_WORDS = 1_000_000
# How many words go out before everybody else gets a turn.
AT_ONCE = 500
SLOW_WORDS = 50
SLOW_S = 0.2
TITLE_WORDS = 5

_encode = msgspec.json.Encoder().encode
_STREAM = re.compile(r"stream ([0-9]{1,12})")
_SHELL = re.compile(r"shell:\s*(\S.*)", re.DOTALL)
_ESCALATE = re.compile(r"escalate:\s*(\S.*)", re.DOTALL)
_READ = re.compile(r"read (\S.*)")
# The text begins after one blank or line break, and is taken as it is from there on.
_WRITE = re.compile(r"write (\S[^:\n]*):[ \n]?(.+)", re.DOTALL)
_EDIT = re.compile(r"edit (\S[^:\n]*):[ \n]?(.+?) =>(?:[ \n](.*))?", re.DOTALL)
_WORD = re.compile(r"\s*\S+\s*|\s+")

Say = Callable[[Delta], None]


@dataclass(slots=True, frozen=True)
class Practice:
    """The Model port. In its provider's form a message is its role and its text."""

    ref: ModelRef
    input: frozenset[str]

    def encode(self, group: Sequence[Message]) -> bytes:
        match group:
            case [AssistantMessage(stop_reason="error" | "aborted"), *_]:
                return b""
        return b",".join(_encode({"role": _role(message), "text": _text(message.content)}) for message in group)

    async def respond(self, request: ModelRequest, say: Say) -> Reply:
        await trio.lowlevel.checkpoint()
        is_title = request.system == TITLE_PROMPT
        answer = await (_titled if is_title else _answer)(request.input.turn, say)
        calls = isinstance(answer, ToolCallBlock)
        usage = Usage(
            input_tokens=_tokens(len(request.system) + len(request.input.encoded)),
            output_tokens=_tokens(len(_encode(answer))),
        )
        return Reply([answer], usage, "toolUse" if calls else "stop")


async def _answer(turn: Sequence[Message], say: Say) -> AssistantBlock:
    results = [message for message in turn if isinstance(message, ToolResultMessage)]
    if results:
        return await _speak(_WORD.findall(_told(results[-1].content)), say)
    match turn:
        case [UserMessage() as user, *_]:
            return await _obey(user, say)
    raise ModelError("refused", "practice/echo was asked nothing")


async def _titled(turn: Sequence[Message], say: Say) -> AssistantBlock:
    """The texts come as a JSON array, in one message."""
    asked = msgspec.json.decode("".join(_text(message.content) for message in turn), type=list[str])[-1].strip()
    if asked == "fail":
        raise ModelError("provider", "practice/echo fails, as it was asked to")
    if asked == "slow":
        await trio.sleep(SLOW_WORDS * SLOW_S)
    return await _speak(["Practice: ", " ".join(asked.split()[:TITLE_WORDS])], say)


async def _obey(user: UserMessage, say: Say) -> AssistantBlock:
    asked = _text(user.content).strip()
    if (call := _call(asked, user.index)) is not None:
        say(ToolCallDelta(call.id, call.name, _encode(call.arguments).decode()))
        return call
    if found := _STREAM.fullmatch(asked):
        return await _speak(_numbered(_allowed(int(found[1]))), say)
    if asked == "slow":
        return await _speak(_numbered(SLOW_WORDS), say, pause_s=SLOW_S)
    if asked == "fail":
        raise ModelError("provider", "practice/echo fails, as it was asked to")
    return await _speak(_WORD.findall(_told(user.content)), say)


def _call(asked: str, index: int) -> ToolCallBlock | None:
    # One call per user message, so its index makes the id unique in the conversation, and the same each time.
    call = partial(ToolCallBlock, f"practice_{index}")
    if found := _SHELL.fullmatch(asked):
        return call("bash", {"command": found[1]})
    if found := _ESCALATE.fullmatch(asked):
        return call("bash", {"command": found[1], "escalate": True, "justification": "practice/echo was asked to"})
    if found := _READ.fullmatch(asked):
        return call("read", {"path": found[1]})
    if found := _WRITE.fullmatch(asked):
        return call("write", {"path": found[1].rstrip(), "content": found[2]})
    if found := _EDIT.fullmatch(asked):
        return call("edit", {"path": found[1].rstrip(), "oldText": found[2], "newText": found[3] or ""})
    return None


async def _speak(words: Iterable[str], say: Say, *, pause_s: float = 0) -> TextBlock:
    said: list[str] = []
    for word in words:
        if pause_s and said:
            await trio.sleep(pause_s)
        elif len(said) % AT_ONCE == AT_ONCE - 1:
            await trio.lowlevel.checkpoint()
        say(TextDelta(word))
        said.append(word)
    return TextBlock("".join(said))


def _numbered(count: int) -> Iterator[str]:
    yield from (f"word{number} " for number in range(1, count))
    yield f"word{count}"


def _allowed(count: int) -> int:
    if not 1 <= count <= MOST_WORDS:
        raise ModelError("refused", f"practice/echo streams 1 to {MOST_WORDS} words")
    return count


def _text(content: Sequence[object]) -> str:
    return "\n".join(block.text for block in content if isinstance(block, TextBlock))


def _told(content: Sequence[object]) -> str:
    """The text verbatim, and how many images came with it."""
    images = sum(isinstance(block, ImageBlock) for block in content)
    counted = f"[{images} image{'s' * (images > 1)}]" if images else ""
    return "\n".join(part for part in (_text(content), counted) if part) or "(no text)"


def _role(message: Message) -> str:
    match message:
        case UserMessage():
            return "user"
        case AssistantMessage():
            return "assistant"
    return "tool"


def _tokens(characters: int) -> int:
    return characters // 4 + 1
