"""What holds for all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# A loaded machine is no failure, and examples are not kept on disk. Every run has the same ones, so that what fails was
# changed; with LOOPD_TEST_LIVES it looks for others.
settings.register_profile("loopd", deadline=None, database=None, derandomize="LOOPD_TEST_LIVES" not in os.environ)
settings.load_profile("loopd")
