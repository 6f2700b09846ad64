"""A TOML text as records: either all of it fits, or every problem is told with its line, key and what is allowed.

The records are the table: a field's type says what is allowed, the ``Meta`` of that type says it in words. Values are
never repeated in a complaint, since what stands at the wrong key may be a secret.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

Keys = tuple[str | int, ...]
MAX_PROBLEMS = 20


class TomlError(Exception):
    """The text cannot be used as it is: one line per problem."""


def parse(text: str, where: str) -> dict[str, Any]:
    """The document in ``text``; ``where`` is what complaints call it."""
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise TomlError(f"{where}: nested too deeply") from error
    except ValueError as error:  # TOMLDecodeError, and Python's own for a number of more digits than it converts
        found = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)\Z", str(error))
        line, column = (found[1], found[2]) if found else (None, None)
        reason = str(error)[: found.start()] if found else "a value that cannot be read"
        place = f"{line}:{column}" if line else str(text.rstrip("\n").count("\n") + 1)
        raise TomlError(f"{where}:{place}: not valid TOML: {reason}") from error


@dataclass(slots=True)
class Reading:
    """One walk over a document. It goes on after a problem, so that all of them are told at once.

    ``special`` reads the types that are more than their parts. What comes back after a problem is None, and not used.
    """

    document: dict[str, Any]
    special: Mapping[Any, Callable[[Reading, Any, Keys], Any]] = field(default_factory=dict)
    problems: list[tuple[Keys, str]] = field(default_factory=list)

    def finish(self, text: str, where: str) -> None:
        """Raise if anything was refused."""
        if self.problems:
            raise TomlError("\n".join(_complaints(self.problems, text, where)))

    def refuse(self, at: Keys, reason: str) -> Any:
        self.problems.append((at, reason))

    def record(self, kind: type[Struct], raw: object, at: Keys = (), **given: object) -> Any:
        """A record of ``kind``; the fields ``given`` are no keys of the file."""
        if not isinstance(raw, dict):
            return self.refuse(at, "must be a table")
        known = {each.encode_name: each for each in msgspec.structs.fields(kind) if each.name not in given}
        before = len(self.problems)
        for key in [key for key in raw if key not in known]:
            self.refuse((*at, key), f"unknown key; {nearest(key, known)}")
        for key, each in known.items():
            if key in raw:
                given[each.name] = self.value(each.type, raw[key], (*at, key))
            elif each.required:
                self.refuse(at, f"{key} is missing: {allowed(each.type)}")
        return None if len(self.problems) > before else kind(**given)

    def value(self, kind: Any, raw: object, at: Keys) -> Any:
        kind = _without_none(kind)
        if kind in self.special:
            return self.special[kind](self, raw, at)
        if _is_record(kind):
            return self.record(kind, raw, at)
        if get_origin(kind) is tuple and _is_record(get_args(kind)[0]):
            return self.records(get_args(kind)[0], raw, at)
        return self.plain(kind, raw, at)

    def records(self, kind: type[Struct], raw: object, at: Keys) -> Any:
        if not isinstance(raw, list):
            return self.refuse(at, "must be a list of tables")
        return tuple(self.record(kind, each, (*at, index)) for index, each in enumerate(raw))

    def plain(self, kind: Any, raw: object, at: Keys) -> Any:
        try:
            return msgspec.convert(raw, kind)
        except msgspec.ValidationError:
            return self.refuse(at, f"allowed: {allowed(kind)}")


# --- what is allowed, in words ----------------------------------------------------------------------------------------


def allowed(kind: Any) -> str:
    kind = _without_none(kind)
    if get_origin(kind) is Annotated:
        words = [meta.description for meta in get_args(kind)[1:] if isinstance(meta, Meta) and meta.description]
        return words[0] if words else allowed(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return " or ".join(json.dumps(each) for each in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list, each {allowed(get_args(kind)[0])}"
    return {bool: "true or false", str: "text"}.get(kind, "a table")


def nearest(wrong: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(wrong, known, n=1)
    return f"{f'did you mean {_quoted(near[0])}? ' if near else ''}allowed: {', '.join(map(_quoted, known))}"


def _without_none(kind: Any) -> Any:
    kinds = [each for each in get_args(kind) if each is not type(None)]
    return kinds[0] if type(None) in get_args(kind) and len(kinds) == 1 else kind


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Struct)


# --- where it stands --------------------------------------------------------------------------------------------------


def _complaints(problems: Sequence[tuple[Keys, str]], text: str, where: str) -> list[str]:
    line_of = lines(text)
    told = sorted((line_of(at), name(at), reason) for at, reason in problems[:MAX_PROBLEMS])
    more = [f"{where}: and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
    return [f"{where}:{line}: {key}: {reason}" for line, key, reason in told] + more


def name(at: Keys) -> str:
    """The key as it could be written, list positions counted from 1; what is not plain is quoted and escaped."""
    parts = [f"[{key + 1}]" if isinstance(key, int) else f".{_quoted(key)}" for key in at]
    return "".join(parts).removeprefix(".")


def _quoted(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def lines(text: str) -> Callable[[Keys], int]:
    """A function that finds the line on which the statement that defines a key begins; ``text`` is valid TOML.

    tomllib tells no lines. But a prefix of whole lines is valid TOML just where a statement ends, and a key is in such
    a prefix from its statement on: so the parser itself finds the line, however the key is written.
    """
    rows = text.replace("\r\n", "\n").split("\n")

    @cache
    def whole(count: int) -> tuple[int, dict[str, Any]]:
        """The longest valid prefix of at most ``count`` lines."""
        while True:
            try:
                return count, tomllib.loads("\n".join(rows[:count]) + "\n")
            except tomllib.TOMLDecodeError:
                count -= 1

    def line_of(at: Keys) -> int:
        last = bisect_left(range(len(rows)), True, key=lambda count: _holds(whole(count)[1], at))
        return min(whole(max(last - 1, 0))[0] + 1, len(rows))

    return line_of


def _holds(document: Any, at: Keys) -> bool:
    try:
        for key in at:
            document = document[key]
    except (KeyError, IndexError, TypeError):
        return False
    return True
