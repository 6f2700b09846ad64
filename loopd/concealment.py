"""What the daemon keeps from its tools, which run as the same user: its environment, which holds providers' keys, and
its own files (K-31, A-7)."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Mapping, Sequence

from loop_protocol import paths

from .config import Config

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


def own_files(
    settings: Config,
    *,
    socket: str,
    config: str,
    data_dir: str,
    rescue_roots: Sequence[str],
    log_file: str | None,
    environ: Mapping[str, str],
) -> list[str]:
    """Files and directories of the daemon, all that it stores and all that it gets its keys from; they need not exist.
    A directory ends in a slash.

    A socket or a settings file in a place of somebody's choice is meant alone: its directory may be a workspace.
    """
    usual = {paths.socket_path({**environ, "LOOPD_SOCKET": ""}), paths.config_path({**environ, "LOOPD_CONFIG": ""})}
    directories = [*map(os.path.dirname, usual), data_dir, *rescue_roots, paths.state_dir(environ)]
    if credentials := environ.get("CREDENTIALS_DIRECTORY"):
        directories.append(credentials)
    own = [os.path.join(directory, "") for directory in directories]
    own += [path for path in (socket, f"{socket}.lock", config) if path not in usual]
    own += [provider.api_key_file for provider in settings.providers.values() if provider.api_key_file]
    return [*own, log_file] if log_file else own


def _environment_block() -> tuple[int, int]:
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    return int(fields[_ENV_START]), int(fields[_ENV_END])
