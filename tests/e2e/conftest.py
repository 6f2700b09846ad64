"""A fresh world per test; its daemon is gone afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from loopctl_world import World, made


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with made(tmp_path) as world:
        yield world
