"""What of a command line a person could allow for the session."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rules:
    rules: tuple[str, ...]
    refused: str | None


def rules_of(_: str) -> Rules:
    return Rules((), "commands are allowed one by one")
