"""What a person would allow for the session with a bash command: rules made of its words, or the reason why there are
none (A-2).

A rule is text, shown and compared as it is: ``bash: git commit …`` is any such call, ``bash: rm -rf build`` this one
alone. ``…`` follows a short list of commands, of which further arguments do nothing of another kind; what runs other
programs, or code that comes with the call, has no rule. Two
readings must agree: the grammar says where commands begin, and every word and every gap has a form of which it is plain
what bash makes of it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from loopd.agent.tools import programs

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

# Bounds: of what a person reads, and of the time that this takes.
MOST_BYTES = 8 * 1024
MOST_PARTS = 20
RULE_LENGTH = 200
# How each rule begins.
BASH = "bash: "

# A word without expansion: plain characters, and those that are quoted.
_WORD = re.compile(
    r"""(?: [\w@%+=:,./^\]#~-] | \\[!-~ ] | '[^']*' | "(?:[^"\\$`]|\\[\s\S])*" | [^\x00-\x7f] )+""",
    re.VERBOSE | re.ASCII,
)
_PIECE = re.compile(r"""\\(?P<one>[\s\S]) | '(?P<raw>[^']*)' | "(?P<text>(?:[^"\\]|\\[\s\S])*)" """, re.VERBOSE)
_IN_QUOTES = re.compile(r'\\([$`"\\\n])')
_TILDE = re.compile(r"(?:^|[:=])~")
_LINES = re.compile(r"(?:[ \t\n]|\\\n)*")
_HARMLESS = re.compile(r"2>&1|1?>&2|(?:[12]?>>?|&>|<)[ \t]*/dev/null")
# Printable to Python, and nothing to see all the same.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)

_WORDS = {"word", "number", "string", "raw_string", "concatenation"}
_INSIDE = {"program", "list", "pipeline", "redirected_statement", "command", "command_name"}
_JOINTS = {"&&", "||", ";", "|"}
_REASONS = {
    "file_redirect": "it redirects to a file",
    "heredoc_redirect": "it has a here-document",
    "herestring_redirect": "it has a here-string",
    "variable_assignment": "it sets a variable",
    "variable_assignments": "it sets a variable",
    "declaration_command": "it sets a variable",
    "command_substitution": "it runs a command for its output",
    "process_substitution": "it runs a command for its output",
    "simple_expansion": "it has a variable",
    "expansion": "it has a variable",
    "arithmetic_expansion": "it has arithmetic",
    "ansi_c_string": "it has a string with escapes",
    "subshell": "it has a subshell",
    "negated_command": "it has a !",
    "&": "it runs something in the background",
    "function_definition": "it defines a function",
}
_CHARACTERS = {
    "$": "it has a variable or a substitution",
    "`": "it runs a command for its output",
    "*": "it has a pattern of file names",
    "?": "it has a pattern of file names",
    "[": "it has a pattern of file names",
    "{": "it has braces, which may be expanded",
    "}": "it has braces, which may be expanded",
    "~": "it has a ~, which stands for another directory",
    "!": "it has a !",
}
_UNCLEAR = "it is no plain command"


@dataclass(frozen=True, slots=True)
class Rules:
    """All of ``rules`` together allow the command; where there are none, ``refused`` says why in a few words."""

    rules: tuple[str, ...]
    refused: str | None


class _Refused(Exception):
    pass


def rules_of(command: str) -> Rules:
    """Never raises. As a rule it takes less than a ms, of a text made for it half a second: call it in a thread."""
    try:
        rules = tuple(dict.fromkeys(_rules(command)))
    except _Refused as refused:
        return Rules((), str(refused))
    return Rules(rules, None)


def _rules(command: str) -> Iterator[str]:
    _require_readable(command)
    parts = list(_parts(command.encode()))
    if not parts:
        raise _Refused("there is no command in it")
    for words, piped in parts:
        reading = programs.reading(words)
        if reading.refused is not None:
            raise _Refused(reading.refused)
        if piped and not reading.fed:
            raise _Refused(f"what is piped into {os.path.basename(words[0])} decides what it does")
        rule = f"{BASH}{shlex.join(words[: reading.shown])}" + (" …" if reading.open_ended else "")
        if len(rule) > RULE_LENGTH or not rule.isprintable():
            raise _Refused("its rule would not fit on a line")
        yield rule


def _require_readable(command: str) -> None:
    if len(command) > MOST_BYTES:  # before anything that takes time
        raise _Refused("it is too long to be read")
    plain = command.replace("\n", "").replace("\t", "")
    if not plain.isprintable() or _INVISIBLE.search(plain):
        raise _Refused("it has control or invisible characters")
    if len(command.encode()) > MOST_BYTES:
        raise _Refused("it is too long to be read")


# --- where commands begin, by the grammar -----------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class _Token:
    """``kind``: word, redirect, comment, or the joint itself. ``command``: where the command that it is of begins."""

    kind: str
    start: int
    end: int
    command: int


@cache
def _parser() -> Parser:
    # Not before the first command is asked about: most daemons never are.
    import tree_sitter
    import tree_sitter_bash

    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


def _tokens(source: bytes) -> list[_Token]:
    root = _parser().parse(source).root_node
    tokens: list[_Token] = []
    waiting: list[tuple[Node, int]] = [(root, 0)]
    while waiting:
        node, command = waiting.pop()
        if node.type in _INSIDE and node.is_named:
            if node.type in ("command", "redirected_statement"):
                command = node.start_byte
            waiting.extend((child, command) for child in reversed(node.children))
        elif node.type == "file_redirect" and _HARMLESS.fullmatch(source[node.start_byte : node.end_byte].decode()):
            tokens.append(_Token("redirect", node.start_byte, node.end_byte, command))
        elif node.type in _WORDS or node.type == "comment" or node.type in _JOINTS:
            kind = "word" if node.type in _WORDS else node.type
            tokens.append(_Token(kind, node.start_byte, node.end_byte, command))
        else:
            raise _Refused(_REASONS.get(node.type, _UNCLEAR))
    if root.has_error:
        raise _Refused("it has a syntax error")
    return tokens


# --- and by its characters --------------------------------------------------------------------------------------------


def _parts(source: bytes) -> Iterator[tuple[list[str], bool]]:
    """The words of each command, and whether it reads what the one before writes."""
    words: list[str] = []
    at, count, piped = 0, 0, False
    before: _Token | None = None
    for token in _tokens(source):
        gap, text = source[at : token.start].decode(), source[token.start : token.end].decode()
        ends = _ends_command(gap, before, token)
        if (ends or token.kind in _JOINTS) and words:
            count += 1
            if count >= MOST_PARTS:
                raise _Refused("it has too many parts to be read")
            yield words, piped
            words, piped = [], False
        elif token.kind in _JOINTS:
            raise _Refused(_UNCLEAR)
        if token.kind in _JOINTS:
            piped = token.kind == "|"
        elif token.kind == "word":
            words.append(_value(text))
        elif not words if token.kind == "redirect" else "\n" in text:
            raise _Refused(_UNCLEAR)
        at, before = token.end, token
    if not _LINES.fullmatch(source[at:].decode()):
        raise _Refused(_UNCLEAR)
    if words:
        yield words, piped


def _ends_command(gap: str, before: _Token | None, token: _Token) -> bool:
    """Whether a line ends here, as both readings have it."""
    joins = before is None or before.kind in _JOINTS
    if not _LINES.fullmatch(gap):
        raise _Refused(_UNCLEAR)
    breaks = "\n" in gap.replace("\\\n", "")
    blank = breaks or gap.replace("\\\n", "") != ""
    if token.kind == "comment":
        if before is not None and not blank:
            raise _Refused(_UNCLEAR)
        return breaks and not joins
    if joins or token.kind in _JOINTS:
        if breaks and token.kind in _JOINTS:
            raise _Refused(_UNCLEAR)
        return False
    assert before is not None
    if before.kind == "comment":
        if not breaks:
            raise _Refused(_UNCLEAR)
        return True
    if token.kind == "redirect":  # of a whole list, says the grammar; of its last command, says bash
        if breaks or not blank:
            raise _Refused(_UNCLEAR)
        return False
    if not blank or breaks != (before.command != token.command):
        raise _Refused(_UNCLEAR)
    return breaks


def _value(text: str) -> str:
    """What bash makes of the word."""
    plain = _WORD.match(text)
    rest = text[plain.end() :] if plain else text
    if rest:
        first = next((character for character in rest if character in _CHARACTERS), "")
        raise _Refused(_CHARACTERS.get(first, _UNCLEAR))
    if _TILDE.search(_PIECE.sub("x", text)):
        raise _Refused(_CHARACTERS["~"])
    return _PIECE.sub(_unquoted, text)


def _unquoted(found: re.Match[str]) -> str:
    if found["one"] is not None:
        return found["one"]
    if found["raw"] is not None:
        return found["raw"]
    return _IN_QUOTES.sub(lambda escape: "" if escape[1] == "\n" else escape[1], found["text"])
