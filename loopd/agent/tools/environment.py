"""The environment of a tool's processes: an allow-list, so that no key of a provider is ever in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

# fmt: off
# What programs need to find their way, and what a person has set up for building.
_ALLOWED = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "COLUMNS", "MANPATH",
    "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME",
    "VIRTUAL_ENV", "CONDA_PREFIX", "PYENV_ROOT", "NVM_DIR", "JAVA_HOME", "GOPATH", "GOROOT", "RUSTUP_HOME",
    "PKG_CONFIG_PATH",
})
# By name: ssh lets a client set any LC_*, and people hand secrets through that door.
_LOCALE = frozenset({
    "LC_ALL", "LC_ADDRESS", "LC_COLLATE", "LC_CTYPE", "LC_IDENTIFICATION", "LC_MEASUREMENT", "LC_MESSAGES",
    "LC_MONETARY", "LC_NAME", "LC_NUMERIC", "LC_PAPER", "LC_TELEPHONE", "LC_TIME",
})
# fmt: on
# Taken from the daemon where the caller did not say.
_BASIC = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "TMPDIR", "XDG_RUNTIME_DIR")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def tool_environment(
    caller_env: Mapping[str, str] | None, *, daemon_env: Mapping[str, str], extra_names: Collection[str] = ()
) -> dict[str, str]:
    """Built from the caller's variables, else from the daemon's; ``extra_names`` are those that the settings add."""
    names = _ALLOWED | _LOCALE | set(extra_names)
    source = daemon_env if caller_env is None else caller_env
    basic = {name: daemon_env[name] for name in _BASIC if name in daemon_env}
    chosen = basic | {name: value for name, value in source.items() if name in names and "\0" not in value}
    # Nothing of it is shown on a terminal, whatever the caller sits at.
    return chosen | {"PATH": chosen.get("PATH") or _PATH, "TERM": "dumb"}
