"""The conversation as the lines that are stored, with the few facts about them that are kept up to date per line.

A page, a commit and a rescue copy are joins of lines; records are decoded when the file is opened, and on demand.
Nothing here loops over the history, except reading it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from loop_protocol.v1.types import (
    AssistantMessage,
    ErrorInfo,
    ImageBlock,
    Message,
    Outcome,
    PromptTiming,
    RunResult,
    Title,
    ToolCallBlock,
    ToolResultMessage,
    Usage,
    UserMessage,
)

from .titles import fallback_of, is_eligible

# A message must fit one page of session/messages, and that one frame (storage rule 12).
LINE = 24 * 1024 * 1024


class Malformed(ValueError):
    """A line that is no valid record at its place; the text says why."""


class Request(Struct, frozen=True, rename="camel"):
    """What a client sent under an id of its own, so that a repeat is found."""

    request_id: str
    digest: str


class RunRecord(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True, tag_field="type", tag="run"):
    """What is kept of a finished run: its timing (P-1), and the requests that started and steered it, so that a repeat
    finds them."""

    run_id: str
    outcome: Outcome
    timing: PromptTiming
    error: ErrorInfo | None = None
    request_id: str | None = None
    digest: str | None = None
    steered: list[Request] = []

    def result(self, *, saved: bool) -> RunResult:
        return RunResult(run_id=self.run_id, outcome=self.outcome, saved=saved, error=self.error)


class TimingRecord(Struct, frozen=True, tag_field="type", tag="timing"):
    """A timing of an earlier version, as it was: nothing else of its run was kept, and nothing is inferred (P-6)."""

    timing: PromptTiming


class InstructionsRecord(Struct, frozen=True, tag_field="type", tag="instructions"):
    """The sections of the system prompt that a run began with, as far as they were others than before (S-19); one
    without text is gone. ``messages``: how many the conversation had then."""

    messages: int
    sections: dict[str, str]


class _Kind(Struct):
    role: str | None = None
    type: str | None = None


_kind = msgspec.json.Decoder(_Kind)
_message: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)
_run = msgspec.json.Decoder(RunRecord)
_timing = msgspec.json.Decoder(TimingRecord)
_instructions = msgspec.json.Decoder(InstructionsRecord)
_encoder = msgspec.json.Encoder()


def encode(record: Message | RunRecord | InstructionsRecord) -> bytes:
    """One line, newline included. A lone surrogate must have become U+FFFD where the text entered."""
    return _encoder.encode(record) + b"\n"


def decode_message(line: bytes) -> Message:
    return _message.decode(line)


@dataclass(slots=True)
class History:
    """``lines`` only ever grows. ``places[i]`` is the line number of message ``i``. ``fallback`` is the title that the
    first eligible message gave (T-2), ``texts`` are all eligible ones. ``requests`` are runs and digests by the ids of
    requests. ``sections`` is the system prompt of the last run."""

    lines: list[bytes] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    timings: list[PromptTiming] = field(default_factory=list)
    requests: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    runs: dict[str, RunRecord] = field(default_factory=dict)
    sections: dict[str, str] = field(default_factory=dict)
    usage: Usage = field(default_factory=lambda: Usage(0, 0))
    user_messages: int = 0
    last_user: int | None = None
    last_message: Message | None = None
    fallback: Title | None = None
    texts: list[int] = field(default_factory=list)
    unanswered: Counter[str] = field(default_factory=Counter)

    @property
    def messages(self) -> int:
        return len(self.places)

    def read(self, line: bytes) -> None:
        """Validate a stored line and add it, byte for byte. Raises :class:`Malformed`."""
        try:
            kind = _kind.decode(line)
            if kind.role is not None:
                self._fold_message(_message.decode(line))
                self.places.append(len(self.lines))
            elif kind.type == "run":
                self._fold_run(_run.decode(line))
            elif kind.type == "timing":
                self._fold_timing(_timing.decode(line).timing)
            elif kind.type == "instructions":
                self._fold_instructions(_instructions.decode(line))
            elif kind.type is None:
                raise Malformed("a record has neither role nor type")
            # Any other type is a newer writer's record that minReader lets us skip; it stays in place (S-27).
        except msgspec.DecodeError as error:
            raise Malformed(str(error)) from None
        except RecursionError:
            raise Malformed("nested too deep") from None
        self.lines.append(line)

    def append(self, message: Message, line: bytes | None = None) -> bytes:
        """Add a new message, encoded once: as ``line`` where that is done already; answers its line."""
        line = line or encode(message)
        self._fold_message(message)
        self.places.append(len(self.lines))
        self.lines.append(line)
        return line

    def append_run(self, record: RunRecord) -> None:
        line = encode(record)
        self._fold_run(record)
        self.lines.append(line)

    def checkpoint(self, sections: dict[str, str]) -> None:
        """A run begins with this system prompt: keep what changed of it, beside the messages (S-19)."""
        changed = {name: text for name, text in sections.items() if self.sections.get(name) != text}
        changed |= {name: "" for name in self.sections if name not in sections}
        if changed:
            record = InstructionsRecord(self.messages, changed)
            line = encode(record)
            self._fold_instructions(record)
            self.lines.append(line)

    def line(self, index: int) -> bytes:
        """Message ``index`` as it is stored, without the newline, which would end a frame."""
        return self.lines[self.places[index]][:-1]

    @property
    def resumable(self) -> int | None:
        """The user message to whose work a model would return, None where the conversation ends with a whole answer
        (Q-4). Attempts at the same work share it, also when inputs steered them (P-3)."""
        match self.last_message:
            case None | AssistantMessage(stop_reason="stop" | "length" | "toolUse"):
                return None
        if self.timings and self.timings[-1].message_end_index == self.messages:
            return self.timings[-1].user_message_index
        return self.last_user

    def require_paired(self) -> None:
        """Every call of every assistant message has its result (I-8). Raises :class:`Malformed`."""
        if self.unanswered:
            raise Malformed(f"no result for tool call {next(iter(self.unanswered))!r}")

    def require_range(self, timing: PromptTiming) -> None:
        """It is about messages that there are, whether it names their range or not (P-6). Raises :class:`Malformed`."""
        start, end = timing.message_start_index or 0, timing.message_end_index
        end = self.messages if end is None else end
        if not (0 <= timing.user_message_index < self.messages and 0 <= start <= end <= self.messages):
            raise Malformed("a timing about messages that are not there")

    def _fold_message(self, message: Message) -> None:
        if message.index != len(self.places):
            raise Malformed(f"message index {message.index} where {len(self.places)} was due")
        match message:
            case UserMessage():
                self.require_paired()
                _require_data(message.content)
                self.user_messages += 1
                self.last_user = message.index
                if is_eligible(message):
                    self.texts.append(message.index)
                    self.fallback = self.fallback or fallback_of(message)
            case AssistantMessage():
                self.require_paired()
                self.unanswered.update(block.id for block in message.content if isinstance(block, ToolCallBlock))
                self.usage = self.usage + message.usage
            case ToolResultMessage():
                if message.tool_call_id not in self.unanswered:
                    raise Malformed(f"a result for {message.tool_call_id!r}, which no call waits for")
                _require_data(message.content)
                self.unanswered[message.tool_call_id] -= 1
                self.unanswered += Counter()  # drops the zero
        self.last_message = message

    def _fold_timing(self, timing: PromptTiming) -> None:
        self.require_range(timing)
        self.timings.append(timing)

    def _fold_instructions(self, record: InstructionsRecord) -> None:
        if not 0 <= record.messages <= self.messages:
            raise Malformed(f"instructions of {record.messages} messages where there are {self.messages}")
        for name, text in record.sections.items():
            if text:
                self.sections[name] = text
            else:
                self.sections.pop(name, None)

    def _fold_run(self, record: RunRecord) -> None:
        self._fold_timing(record.timing)
        self.runs[record.run_id] = record
        if record.request_id is not None:
            self.requests[record.request_id] = (record.run_id, record.digest)
        for request in record.steered:
            self.requests[request.request_id] = (record.run_id, request.digest)


def _require_data(content: Sequence[object]) -> None:
    if any(isinstance(block, ImageBlock) and block.data is None for block in content):
        raise Malformed("an image without data")
