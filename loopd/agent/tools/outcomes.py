"""What a model is told when a tool is done: plain text, and a refusal that says who can lift it."""

from __future__ import annotations

from loop_protocol.v1.types import Permission, TextBlock
from loopd.agent import ToolOutcome


def told(text: str, *, is_error: bool = False) -> ToolOutcome:
    return ToolOutcome([TextBlock(text)], is_error)


def forbidden(permission: Permission, *, what: str) -> ToolOutcome | None:
    """None where the preset allows to change things. Until approvals come only ``danger-full-access`` does."""
    if permission == "danger-full-access":
        return None
    return told(
        f"The permission preset of this session is {permission}, which forbids {what}. Only the person can change it, "
        "while the session is idle: loopctl prompt --permission danger-full-access",
        is_error=True,
    )
