"""What tools of a real daemon get from whoever started it."""

from __future__ import annotations

import os
import resource
import stat

from loopctl_world import World


def test_a_command_has_the_umask_and_the_limits_that_the_daemon_was_started_with(world: World) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = os.umask(0o027)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(500, limits[0]), limits[1]))
    try:
        ran = world.loopctl("prompt", "shell: touch made; umask; ulimit -Sn", "--permission", "danger-full-access")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.umask(before)
    assert ran.stdout.split() == ["0027", str(min(500, limits[0]))], ran.stderr
    assert stat.S_IMODE((world.workspace / "made").stat().st_mode) == 0o640
    # The daemon's own files are private all the same.
    assert stat.S_IMODE(world.log.stat().st_mode) == 0o600
