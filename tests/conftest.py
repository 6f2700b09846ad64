"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# A loaded machine is no failure, and examples are not kept on disk.
settings.register_profile("loopd", deadline=None, database=None)
settings.load_profile("loopd")
