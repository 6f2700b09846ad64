"""Where the scripted peers of these tests listen."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture
def path() -> Iterator[str]:
    # Not below tmp_path: a Unix socket's path may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="loop") as directory:
        yield str(pathlib.Path(directory) / "s")
