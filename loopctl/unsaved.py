"""A conversation that could not be saved: a terminal asks for ``/flush``, and does not let go at once (S-25)."""

from __future__ import annotations

import os
import select
import sys
from dataclasses import dataclass

from loop_protocol.client import Client
from loop_protocol.v1.errors import RpcError
from loop_protocol.v1.events import SessionClosed, SessionSaved

from .exits import REFUSED, Failure, of_kind
from .interrupts import Interrupts
from .reach import ANSWER
from .terminal import err, is_terminal, note

_PROMPT = "/flush or /quit> "
_HOW = """\
the conversation is not saved, the daemon keeps it in memory.
Repair the cause, then /flush saves it; /quit leaves it there"""
_NOT_YET = """\
not yet: only the daemon's memory has the conversation, and /flush saves
it. Another /quit leaves all the same; `loopctl flush` then tries again"""
_LATER = """\
the conversation is not saved, the daemon keeps it in memory;
`loopctl flush` tries again"""
_WISH = "\x03"  # Ctrl-C or Ctrl-D: a wish to leave, but not the word


def until_saved(client: Client, session_id: str, interrupts: Interrupts) -> bool:
    """Ask until it is saved, here or by another client. False: the person left, or nobody can be asked.

    Raises :class:`RpcError` and :class:`Failure` when the session is not there any more.
    """
    if not (is_terminal(sys.stdin) and is_terminal(sys.stdout)):
        note(_LATER)
        return False
    note(_HOW)
    interrupts.asked, interrupts.farewell = False, _LATER
    return _Asking(client, session_id, interrupts).until_saved()


@dataclass(slots=True)
class _Asking:
    client: Client
    session_id: str
    interrupts: Interrupts
    refused: bool = False
    saved: bool = False

    def until_saved(self) -> bool:
        while not self.saved:
            line = self._line()
            if line is None:
                return False
            if line == "/flush":
                self._flush()
            elif line == "/quit" and self.refused:
                note(_LATER)
                return False
            elif line in ("/quit", _WISH):
                self.refused = True
                note(_NOT_YET)
            elif line:
                note("/flush saves the conversation, /quit leaves")
        note("saved")
        return True

    def _line(self) -> str | None:
        """What was typed, empty if it was saved meanwhile. None: the terminal is gone."""
        err(_PROMPT)
        while not (self.interrupts.asked or _has_input()):
            self._take_news()
            if self.saved:
                err("\n")
                return ""
            self.interrupts.wait(self.client, sys.stdin, timeout=None)
        if not self.interrupts.asked:
            return _typed()
        self.interrupts.asked = False
        err("\n")
        return _WISH

    def _flush(self) -> None:
        """Whatever keeps it from being saved now may be over at the next try."""
        try:
            self.client.call("session/flush", {"sessionId": self.session_id}, timeout=ANSWER)
            self.saved = True
        except RpcError as error:
            if of_kind(error.kind) != REFUSED:
                raise
            note(error.message)
        except TimeoutError as error:
            note(str(error))

    def _take_news(self) -> None:
        while (notification := self.client.next_notification(timeout=0)) is not None:
            params = notification.params
            if params is None or params.session_id != self.session_id:
                continue
            match params.event:
                case SessionSaved():
                    self.saved = True
                case SessionClosed(reason=reason, rescue=rescue):
                    kept = f"; what was unsaved is in {rescue}" if rescue else ""
                    raise Failure(f"the session was closed: {reason}{kept}", REFUSED)


def _has_input() -> bool:
    poll = select.poll()
    poll.register(sys.stdin, select.POLLIN)
    return bool(poll.poll(0))


def _typed() -> str | None:
    """One line: a terminal gives no more at a time. Nothing is Ctrl-D, unless the terminal was closed."""
    try:
        raw = os.read(sys.stdin.fileno(), 4096)
    except OSError:
        return None
    if raw:
        return raw.decode("utf-8", "replace").strip()
    if not is_terminal(sys.stdin):
        return None
    err("\n")
    return _WISH
