"""The daemon's own files: in restricted presets tools neither read nor write them, whatever anybody approves (A-7)."""

from __future__ import annotations

from collections.abc import Sequence


class Protected:
    """``paths``: files and directories, which need not exist."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)


NOTHING = Protected(())
