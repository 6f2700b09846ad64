"""The daemon's environment holds providers' keys: its tools, which run as the same user, must not read it (K-31)."""

from __future__ import annotations

import ctypes
import logging
import os

_PR_SET_DUMPABLE = 4
# Fields of /proc/self/stat after the command's name, see proc_pid_stat(5): where the environment came in.
_ENV_START, _ENV_END = 47, 48

log = logging.getLogger("loopd.concealment")


def conceal_environment() -> None:
    """Close ``/proc/<pid>`` to processes of the same user, and wipe the block that its ``environ`` shows.

    The first does not hold against root, the second does. Variables stay readable for the daemon itself.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        start, end = _environment_block()
    except (OSError, ValueError, IndexError) as error:
        log.warning("the environment cannot be concealed from tools: %s", error)
    else:
        kept = dict(os.environ)
        # libc's own pointers lead into the block, so every variable is set anew, elsewhere, once it is wiped.
        os.environ.clear()
        ctypes.memset(start, 0, end - start)
        os.environ.update(kept)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _environment_block() -> tuple[int, int]:
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    return int(fields[_ENV_START]), int(fields[_ENV_END])
