"""``loopd``: reads options and settings, makes the socket, and serves in the foreground until a signal or a drain."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence

import click
import trio

from loop_protocol import paths

from . import __version__, commands, systemd
from .agent.protected import Protected
from .agent.tools import session_tools
from .agent.tools.process import become_subreaper
from .agent.tools.sandbox import Sandbox
from .concealment import conceal_environment, own_files
from .config import Config, ConfigError, load
from .core.timings import Clock
from .daemon import ENDING, Daemon
from .models import Catalogue
from .server import CannotServe, Listener, inherited, listen
from .services import Services
from .storage.catalog import Catalog
from .storage.fs import FileSystem
from .storage.rescue import rescue_roots

EX_CONFIG = 78
EX_UNAVAILABLE = 69
EX_SOFTWARE = 70
# Two threads' worth of pure Python must not keep the loop waiting for the default 5 ms.
SWITCH_INTERVAL_S = 0.0005

log = logging.getLogger("loopd")


@click.group(
    cls=commands.Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="loopd")
@commands.socket
@commands.data_dir
@commands.config
@click.option("--log-file", metavar="FILE", help="Log here instead of to stderr.")
@commands.rescue_dir
@click.option("--check", is_flag=True, help="Read the settings, say what is wrong with them, and end.")
@click.option("--on-demand", is_flag=True, hidden=True, help="Somebody starts it again when it is needed.")
@click.pass_context
def main(
    ctx: click.Context,
    socket: str | None,
    data_dir: str | None,
    config: str | None,
    log_file: str | None,
    rescue_dir: str | None,
    check: bool,
    on_demand: bool,
) -> None:
    """The session daemon: serves in the foreground until it gets a TERM or is drained, unless a command is named."""
    if ctx.invoked_subcommand is not None:
        ctx.default_map = commands.given_before(socket=socket, data_dir=data_dir, config=config, rescue_dir=rescue_dir)
        return
    umask = os.umask(0o077)
    # Until the daemon listens to them: killed in between it would leave its socket behind.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        settings = load(config)
        if check:
            return
        _log_to(log_file, settings.daemon.log_level)
        sockets = systemd.listen_fds()
        listener = inherited(sockets[0]) if sockets else listen(_absolute(socket or paths.socket_path(os.environ)))
        services = services_for(
            settings,
            data_dir=_absolute(data_dir or paths.data_dir(os.environ)),
            umask=umask,
            rescue_dir=_absolute(rescue_dir) if rescue_dir else None,
            socket=listener.path,
            config=config,
            log_file=log_file,
        )
    except (ConfigError, ValueError) as error:
        _fail(str(error), EX_CONFIG)
    except (CannotServe, paths.PathProblem, OSError) as error:
        _fail(str(error), EX_UNAVAILABLE)
    sys.exit(_run(services, listener, on_demand=on_demand or bool(sockets)))


def services_for(
    settings: Config,
    *,
    data_dir: str,
    umask: int,
    socket: str,
    rescue_dir: str | None = None,
    config: str | None = None,
    log_file: str | None = None,
) -> Services:
    """What a real daemon's sessions share. ``umask`` is what the daemon was started with, for what tools make."""
    fs, roots = FileSystem(), rescue_roots(data_dir, os.environ, rescue_dir)
    own = own_files(
        settings,
        socket=socket,
        config=os.path.abspath(config or paths.config_path(os.environ)),
        data_dir=data_dir,
        rescue_roots=roots,
        log_file=os.path.abspath(log_file) if log_file else None,
        environ=os.environ,
    )
    protected = Protected(own)
    sandbox = Sandbox(protected)
    return Services(
        config=settings,
        clock=Clock(),
        models=Catalogue(settings, os.environ),
        tools=session_tools(bash_timeout_s=settings.tools.bash_timeout_s, protected=protected, sandbox=sandbox),
        fs=fs,
        catalog=Catalog(fs, data_dir),
        data_dir=data_dir,
        rescue_roots=roots,
        environ=dict(os.environ),
        umask=umask,
        protected=protected,
        sandbox=sandbox,
    )


def _run(services: Services, listener: Listener, *, on_demand: bool) -> int:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.freeze()  # what was imported stays: to look at it again held the loop for 15 ms in each full collection
    become_subreaper()
    conceal_environment()
    daemon = Daemon(services, listener, on_demand=on_demand)
    try:
        return trio.run(daemon.serve)
    except Exception:  # boundary: process; its end is a line in the log
        log.critical("the daemon fails", exc_info=True)
        return EX_SOFTWARE


def _log_to(path: str | None, level: str) -> None:
    handlers: Sequence[logging.Handler] | None = None
    if path is not None:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        handlers = [logging.StreamHandler(os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace"))]
    logging.basicConfig(
        level=level.upper(), handlers=handlers, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # httpx's own lines name addresses, headers and, at debug level, bodies.
    for noisy in ("httpx2", "httpcore2"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _absolute(path: str) -> str:
    if not _is_utf8(path):
        raise ValueError(f"{os.fsencode(path)!r} is not UTF-8, and the protocol has to name it; choose another path")
    return os.path.abspath(path)


def _is_utf8(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _fail(text: str, code: int) -> None:
    click.echo(f"loopd: {text}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
