"""What a person sees of a session: the answer on stdout, tools and everything else on stderr; its title and marks."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from loop_protocol.v1.events import (
    ApprovalRequested,
    ApprovalResolved,
    EventParams,
    EventsLost,
    MessageEnd,
    MessageStart,
    MessageUpdate,
    RetryWait,
    RunSettled,
    RunStarted,
    SaveFailed,
    SessionClosed,
    SessionReplaced,
    SessionTitle,
    ToolExecutionEnd,
    ToolExecutionStart,
    ToolExecutionUpdate,
)
from loop_protocol.v1.types import (
    ApprovalRequest,
    AssistantMessage,
    ErrorInfo,
    Message,
    SessionRow,
    SessionState,
    TextBlock,
    ToolResultMessage,
    UserMessage,
)

from .approvals import became, how_to_answer, summary
from .terminal import err, is_terminal, note, one_line, out

ARGUMENTS = 300
# Of a chatty tool: so many lines as they come, and then the last ones when it has ended.
HEAD_LINES = 20
TAIL_LINES = 10
TAIL = 4096


class View:
    """Prints events as they come. ``prompts``: also what the user said, for somebody who only watches; of somebody
    else's words those that steer the run are shown in any case, since what comes then answers them. ``own``: the input
    of whoever looks. ``waits``: requests for approval wait for an answer, so how to give one is told."""

    def __init__(self, *, prompts: bool = False, own: str | None = None, waits: bool = True) -> None:
        self._prompts = prompts
        self._own = own
        self._waits = waits
        self._asked: dict[str, ApprovalRequest] = {}
        self._steering: set[str] = set()
        self._unsaved: str | None = None
        self._message: str | None = None
        self._shown = ""
        self._tools: dict[str, ToolOutput] = {}
        self._quiet_tools: set[str] = set()

    def show(self, params: EventParams) -> None:
        match params.event:
            case RunStarted(item_id=item):
                self._own = self._own or item
            case MessageStart(message_id=message, item_id=str() as item) if item != self._own:
                self._steering.add(message)
            case MessageUpdate(message_id=message, text_delta=str() as delta):
                self.continue_message(message, delta)
            case MessageEnd(message_id=message, message=msgspec.Raw() as raw):
                self._complete(message, raw, said=self._prompts or message in self._steering)
            case MessageEnd():
                self.end_line()
            case ToolExecutionStart() as start:
                self._tools[start.tool_call_id] = ToolOutput()
                self.end_line()
                err(f"→ {start.tool_name} {arguments_line(start.arguments)}\n", dim=True)
            case ToolExecutionUpdate(tool_call_id=call, output_delta=delta):
                self._tools.setdefault(call, ToolOutput()).add(delta)
            case ToolExecutionEnd(tool_call_id=call, is_error=failed):
                self._tool_ended(call, failed=failed)
            case ApprovalRequested(request=request):
                self.tell_request(request)
            case ApprovalResolved() as resolved:
                self.tell_resolved(resolved)
            case RetryWait(until_at=until, reason=reason):
                self.end_line()
                note(f"retrying in {max(0, until - params.at) / 1000:.0f} s: {reason}")
            case SaveFailed(reason=reason):
                self._unsaved = reason
                note(f"the conversation could not be saved: {reason}")
            case EventsLost():
                note("some events were lost, the answer below may have a gap; `loopctl messages` shows it whole")
            case SessionReplaced(new=new):
                self.end_line()
                note(f"another session is current now: {new.path or new.session_id}")
            case SessionClosed(reason=reason, rescue=rescue):
                self.end_line()
                lost = f"; `loopd rescue apply {rescue}` puts back what was unsaved" if rescue else ""
                note(f"the session was closed: {reason}{lost}")
            case SessionTitle(title=titled, error=failed) if self._prompts:
                if titled is not None:
                    self.aside(f"the title is now: {titled.text}")
                if failed is not None:
                    self.aside(f"no title came by itself: {failed.message}")
            case RunSettled() as settled if self._prompts:
                self.end_line()
                told = settled.error is not None and settled.error.message == self._unsaved
                outcome(settled.outcome, None if told else settled.error)

    def tell_request(self, request: ApprovalRequest) -> None:
        self._asked[request.approval_id] = request
        if self._waits:
            self.end_line()
            note(f"waits for an approval: {summary(request)}\n{how_to_answer(request)}")

    def tell_resolved(self, resolved: ApprovalResolved) -> None:
        self.end_line()
        note(became(resolved, self._asked.pop(resolved.approval_id, None)))
        if resolved.outcome == "unavailable":
            note("`--approvals wait` lets it wait for an answer, from any terminal")

    def continue_message(self, message: str, text: str) -> None:
        if message != self._message:
            self.end_line()
            self._message, self._shown = message, ""
        self._shown += text
        out(text)

    def aside(self, text: str) -> None:
        """Something beside the answer, which goes on after it."""
        if self._shown and not self._shown.endswith("\n") and is_terminal(sys.stdout):
            err("\n")
        note(text)

    def end_line(self) -> None:
        """What comes next begins in a line of its own."""
        if self._shown and not self._shown.endswith("\n"):
            out("\n")
        self._shown, self._message = "", None

    def _complete(self, message_id: str, raw: msgspec.Raw, *, said: bool) -> None:
        try:
            message = msgspec.json.decode(raw, type=Message)
        except msgspec.ValidationError:  # a block type from the future; its text was streamed
            return self.end_line()
        match message:
            case AssistantMessage():
                self._complete_text(message_id, text_of(message))
            case ToolResultMessage(is_error=True) if message.tool_call_id in self._quiet_tools:
                err(_tail(text_of(message)), dim=True)  # nothing was streamed, and it says why it failed
            case UserMessage() if said:
                err("".join(f"> {line}\n" for line in _lines(text_of(message))))
        return None

    def _complete_text(self, message_id: str, text: str) -> None:
        shown = self._shown if message_id == self._message else ""
        if text.startswith(shown):
            self.continue_message(message_id, text[len(shown) :])
        else:  # deltas were lost in the middle
            self.end_line()
            note("the answer again, whole:")
            self.continue_message(message_id, text)
        self.end_line()

    def _tool_ended(self, call: str, *, failed: bool) -> None:
        output = self._tools.pop(call, ToolOutput())
        self._quiet_tools = set() if output.printed else {call}
        output.end()
        if failed:
            err("  (failed)\n", dim=True)


class ToolOutput:
    """What a running tool prints: its first lines as they come, of the rest the last ones at its end."""

    def __init__(self) -> None:
        self.printed = False
        self._line = ""
        self._shown = 0
        self._kept = ""
        self._left_out = 0

    def add(self, text: str) -> None:
        self.printed = True
        *lines, self._line = (self._line + text).split("\n")
        self._line = self._line[-TAIL:]
        fresh = lines[: HEAD_LINES - self._shown] if self._shown < HEAD_LINES else []
        self._shown += len(fresh)
        err("".join(f"  {line}\n" for line in fresh), dim=True)
        later = lines[len(fresh) :]
        self._left_out += len(later)
        self._kept = (self._kept + "".join(line + "\n" for line in later))[-TAIL:]

    def end(self) -> None:
        last = _lines(self._kept + self._line)[-TAIL_LINES:]
        before = self._left_out + bool(self._line) - len(last)
        cut = [f"  … {before} more lines\n"] if before > 0 else []
        err("".join(cut + [f"  {line}\n" for line in last]), dim=True)


def outcome(outcome: str, error: ErrorInfo | None) -> None:
    """How a run ended, if it did not end well."""
    if outcome == "cancelled":
        note("the run was stopped")
    if error is not None:
        what = "the run failed" if outcome == "error" else "error"
        note("\n".join([f"{what}: {error.message}", *(f"  {one.kind}: {one.message}" for one in error.errors or [])]))


def title_of(session: SessionRow | SessionState) -> str:
    """An empty session has no title (T-4)."""
    return session.title.text if session.title else "New session"


def marks_of(session: SessionRow | SessionState) -> list[str]:
    unsaved = isinstance(session, SessionState) and session.has_pending_save
    marks = {"unread": session.unread, "pinned": session.pinned_at is not None, "not saved": unsaved}
    return [mark for mark, is_so in marks.items() if is_so]


def arguments_line(arguments: dict[str, Any]) -> str:
    return one_line(msgspec.json.encode(arguments).decode(), ARGUMENTS)


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if isinstance(block, TextBlock))


def _tail(text: str) -> str:
    lines = _lines(text.rstrip("\n"))
    cut = [f"  … {len(lines) - TAIL_LINES} lines before\n"] if len(lines) > TAIL_LINES else []
    return "".join(cut + [f"  {line}\n" for line in lines[-TAIL_LINES:]])


def _lines(text: str) -> list[str]:
    """Ended by newlines only: a carriage return is a character that is shown."""
    lines = text.split("\n")
    return lines if lines[-1] else lines[:-1]
