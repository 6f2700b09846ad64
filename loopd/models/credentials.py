"""Where a provider's key comes from: whether it is there, and what it is. A key is in no error, log or repr."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress

import trio

from ..agent import ModelError
from ..config import Provider

LIMIT = 64 * 1024
PATIENCE_S = 10
# What was killed may hang in the kernel, as on a dead mount; the request does not.
REAP_S = 5


def missing(provider: Provider, environ: Mapping[str, str]) -> str | None:
    """Why no key can be had, as far as it shows without fetching it (P-4); None when there is no such reason."""
    match provider:
        case Provider(auth="none"):
            return None
        case Provider(api_key_env=str(name)):
            return None if environ.get(name) else f"set {name} in the daemon's environment"
        case Provider(api_key_file=str(path)):
            return None if os.access(_expanded(path), os.R_OK) else f"its key file {path} cannot be read"
        case Provider(api_key_command=(program, *_)):
            found = shutil.which(program, path=environ.get("PATH"))
            return None if found else f"its key command {program} cannot be found"
    return (
        f"say where its key comes from: api_key_env, api_key_file or api_key_command in [providers.{provider.name}], "
        'or auth = "none"'
    )


async def key(provider: Provider, environ: Mapping[str, str]) -> str | None:
    """The key, fetched anew for each request, since it may have been changed. Raises :class:`ModelError` ``auth``."""
    if provider.auth == "none":
        return None
    with trio.move_on_after(PATIENCE_S):
        return _checked(await _fetch(provider, environ), provider)
    raise ModelError("auth", f"{provider.name}: fetching the key took more than {PATIENCE_S} s")


async def _fetch(provider: Provider, environ: Mapping[str, str]) -> str:
    match provider:
        case Provider(api_key_env=str(name)):
            return environ.get(name, "")
        case Provider(api_key_file=str(path)):
            # A pipe or a dead network mount may block for ever: the thread is left behind then, not the request.
            return await trio.to_thread.run_sync(_read, provider.name, path, abandon_on_cancel=True)
        case Provider(api_key_command=tuple(command)):
            return await _run(provider.name, command, environ)
    raise ModelError("auth", f"{provider.name}: {missing(provider, environ)}")


def _read(name: str, path: str) -> str:
    try:
        with open(_expanded(path), "rb") as file:
            return file.read(LIMIT).decode("ascii", "replace")
    except OSError as error:
        raise ModelError("auth", f"{name}: cannot read the key file {path}: {error.strerror}") from None


async def _run(name: str, command: tuple[str, ...], environ: Mapping[str, str]) -> str:
    try:
        process = await trio.lowlevel.open_process(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what it says may hold the key
            env=dict(environ),
            # Its own group, to be killed by; but our session, or the clean-up of a tool call would take it for a stray.
            process_group=0,
        )
    except OSError as error:
        raise ModelError("auth", f"{name}: cannot run the key command {command[0]}: {error.strerror}") from None
    try:
        output = await _printed(process)
    finally:
        # Nothing of it is left, whether it ended, printed on or was cancelled.
        _kill(process)
        with trio.move_on_after(REAP_S, shield=True):
            await process.wait()
    if len(output) > LIMIT:
        raise ModelError("auth", f"{name}: the key command {command[0]} prints too much for a key")
    if process.returncode != 0:
        raise ModelError("auth", f"{name}: the key command {command[0]} ended with status {process.returncode}")
    return output.decode("ascii", "replace")


async def _printed(process: trio.Process) -> bytearray:
    output = bytearray()
    assert process.stdout is not None
    async with process.stdout:
        async for piece in process.stdout:
            output += piece
            if len(output) > LIMIT:
                return output
    await process.wait()
    return output


def _kill(process: trio.Process) -> None:
    if process.returncode is None:
        # Not reaped yet, so the number is still its own; it leads its group, and KILL cannot be refused.
        with suppress(PermissionError):  # it became somebody else, like sudo
            os.killpg(process.pid, signal.SIGKILL)


def _checked(text: str, provider: Provider) -> str:
    found = text.strip()
    if not found:
        raise ModelError("auth", f"{provider.name}: the key is empty")
    if not (found.isascii() and found.isprintable()):
        raise ModelError("auth", f"{provider.name}: the key has characters that no key has; is it the right one?")
    return found


def _expanded(path: str) -> str:
    return os.path.expanduser(path)
