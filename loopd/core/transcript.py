"""What an agent says and finishes: the draft and running tools that people see, the messages that become history."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw

from loop_protocol.v1 import events as ev
from loop_protocol.v1.types import (
    AssistantBlock,
    AssistantMessage,
    ErrorInfo,
    Message,
    ModelRef,
    Outcome,
    StopReason,
    TextBlock,
    Title,
    ToolCallBlock,
    ToolResultMessage,
    Usage,
    UserBlock,
)

from .announce import Announce
from .history import History
from .messages import INTERRUPTED, NOT_ALLOWED, NOT_STARTED, RunningOutput, Streaming, as_shown, fitting
from .timings import Clock


@dataclass(slots=True)
class Transcript:
    """``open_calls`` are the calls of the last assistant message that have no result yet."""

    history: History
    announce: Announce
    clock: Clock
    streaming: Streaming | None = None
    tools: dict[str, RunningOutput] = field(default_factory=dict)
    open_calls: list[ToolCallBlock] = field(default_factory=list)

    def say_text(self, text: str) -> None:
        message_id = self._stream("text", text)
        key = ("text", message_id)
        self.announce.stream(key, text, lambda joined: ev.MessageUpdate(message_id=message_id, text_delta=joined))

    def say_thinking(self, text: str) -> None:
        message_id = self._stream("thinking", text)
        key = ("thinking", message_id)
        self.announce.stream(key, text, lambda joined: ev.MessageUpdate(message_id=message_id, thinking_delta=joined))

    def _stream(self, kind: str, text: str) -> str:
        draft = self._draft()
        draft.add(kind, text)
        return draft.message_id

    def say_call(self, id: str, name: str, arguments: str) -> None:
        message_id = self._draft().message_id

        def build(joined: str) -> ev.Event:
            delta = ev.ToolCallDelta(id=id, name=name, arguments_delta=joined)
            return ev.MessageUpdate(message_id=message_id, tool_call_delta=delta)

        self.announce.stream(("call", id), arguments, build)

    def begin_tool(self, call: ToolCallBlock) -> None:
        self.tools[call.id] = RunningOutput(call)
        self.announce.publish(ev.ToolExecutionStart(call.id, call.name, call.arguments))

    def say_output(self, call_id: str, text: str) -> None:
        self.tools[call_id].add(text)
        self.announce.stream(("output", call_id), text, lambda joined: ev.ToolExecutionUpdate(call_id, joined))

    def complete_tool(self, call_id: str, *, is_error: bool) -> None:
        del self.tools[call_id]
        self.announce.publish(ev.ToolExecutionEnd(call_id, is_error))

    def announce_retry(self, wait_s: float, reason: str) -> None:
        self.announce.publish(ev.RetryWait(until_at=self.clock.now_ms() + round(wait_s * 1000), reason=reason))

    def reply(
        self,
        content: list[AssistantBlock],
        usage: Usage,
        reason: StopReason,
        *,
        model: ModelRef,
        error_message: str | None = None,
    ) -> AssistantMessage:
        """A finished assistant message as it will be history."""
        message = AssistantMessage(
            index=self.history.messages,
            content=content,
            timestamp=self.clock.now_ms(),
            provider=model.provider,
            model=model.id,
            usage=usage,
            stop_reason=reason,
            error_message=error_message,
        )
        return fitting(message)

    def append_reply(self, message: AssistantMessage, line: bytes | None = None) -> None:
        """It becomes history; its calls are open until each has its result. ``line`` is the message encoded."""
        message_id = self._draft().message_id
        self.history.append(message, line)
        self.open_calls = [block for block in message.content if isinstance(block, ToolCallBlock)]
        self.streaming = None
        self._announce_end(message_id, message)

    def result(self, call: ToolCallBlock, content: list[UserBlock], *, is_error: bool) -> ToolResultMessage:
        """The result of a call as it will be history."""
        message = ToolResultMessage(
            index=self.history.messages,
            content=content,
            timestamp=self.clock.now_ms(),
            tool_call_id=call.id,
            tool_name=call.name,
            is_error=is_error,
        )
        return fitting(message)

    def append_result(self, message: ToolResultMessage, line: bytes | None = None) -> None:
        """It becomes history; the first open call with its id is answered."""
        self.history.append(message, line)
        self.open_calls.remove(next(call for call in self.open_calls if call.id == message.tool_call_id))
        self.announce_message(message)

    def _draft(self) -> Streaming:
        if self.streaming is None:
            self.streaming = Streaming(str(uuid.uuid4()))
            start = {"role": "assistant", "content": [], "timestamp": self.clock.now_ms()}
            self.announce.publish(
                ev.MessageStart(message_id=self.streaming.message_id, message=Raw(msgspec.json.encode(start)))
            )
        return self.streaming

    def announce_message(self, message: Message, *, title: Title | None = None, item_id: str | None = None) -> None:
        """Start and end of a message that does not stream, and between them the title that it gave the session.
        ``item_id``: it was queued."""
        index, message_id = message.index, str(uuid.uuid4())
        body = as_shown(message, self.history.line(index))
        self.announce.publish(ev.MessageStart(message_id=message_id, message=body, index=index, item_id=item_id))
        if title is not None:
            self.announce.publish(ev.SessionTitle(title=title))
        self.announce.publish(ev.MessageEnd(message_id=message_id, index=index, message=body))

    def _announce_end(self, message_id: str, message: Message) -> None:
        body = as_shown(message, self.history.line(message.index))
        self.announce.publish(ev.MessageEnd(message_id=message_id, index=message.index, message=body))

    # --- the end of a run ---------------------------------------------------------------------------------------------

    def keep_partial_text(self, outcome: Outcome, error: ErrorInfo | None, *, model: ModelRef) -> None:
        if self.streaming is None:
            return
        message_id, kept = self.streaming.message_id, self.streaming.visible()
        if kept:
            reason: StopReason = "aborted" if outcome == "cancelled" else "error"
            text = error.message if error and reason == "error" else None
            self.append_reply(self.reply(kept, Usage(0, 0), reason, model=model, error_message=text))
        else:
            self.streaming = None
            self.announce.publish(ev.MessageEnd(message_id=message_id, discarded=True))

    def answer_open_calls(self, otherwise: str = NOT_STARTED) -> None:
        """Every call of a finished assistant message gets exactly one result, started or not (S-12). ``otherwise`` is
        what is said of a call that is not at work here."""
        for call in tuple(self.open_calls):
            text = otherwise
            if call.id in self.tools:
                text = INTERRUPTED if self.tools[call.id].allowed else NOT_ALLOWED
                self.complete_tool(call.id, is_error=True)
            self.append_result(self.result(call, [TextBlock(text)], is_error=True))
