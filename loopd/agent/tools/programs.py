"""How much of a call of a program a rule has to show, so that it covers nothing that the person did not see."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_OTHERS = "runs other programs, or code that comes with the call"
# Named by what makes them so. A list of these can never be whole: what is not known is shown whole instead.
_RUNNERS = _names(
    # shells, and what starts programs in another way, place or time
    "sh ash bash dash zsh ksh mksh fish csh tcsh rbash rksh pwsh powershell xonsh nu elvish busybox toybox env "
    "sudo doas su runuser pkexec run0 gosu su-exec xargs parallel nohup time timeout nice ionice chrt taskset "
    "numactl setsid setpriv setarch linux32 linux64 prlimit choom capsh stdbuf unbuffer script expect flock watch "
    "watchexec entr ssh sshpass mosh rsh telnet nc ncat netcat socat chroot unshare nsenter bwrap firejail "
    "flatpak fakeroot proot systemd-run systemd-nspawn start-stop-daemon run-parts tini dumb-init "
    "dbus-run-session xvfb-run xdg-open open strace ltrace gdb lldb perf valgrind at batch crontab tmux screen "
    "dtach nodemon hyperfine direnv mise npx pnpx bunx uvx pipx nix nix-shell "
    # code in an argument or on standard input
    "awk gawk mawk nawk deno bun luajit tclsh wish guile racket sbcl ghci runghc R Rscript julia octave scala "
    "groovy jshell osascript erl elixir iex ipython vi vim nvim ex view vimdiff ed emacs emacsclient nano less "
    "more man sqlite3 psql mysql mariadb dc m4 "
    # builtins and keywords that run something
    "eval exec source . command builtin coproc jobs time then else elif do done fi if for while until case esac "
    "select function in { } ! [[ ]]"
)
# Builtins that change what the rest of the command means, or that evaluate what they are given.
_STATEFUL = _names(
    "cd pushd popd dirs export declare typeset local readonly set unset shopt alias unalias trap enable hash read "
    "readarray mapfile let getopts bind complete compgen compopt umask ulimit fc history test [ wait shift break "
    "continue return exit logout bg fg disown suspend"
)
_INTERPRETERS = _names("python pypy perl ruby node nodejs php lua")

# What reads, so that what is piped into it is only data.
_READERS = _names(
    "ls cat head tail wc grep egrep fgrep rg diff cmp stat file du df realpath dirname basename readlink echo "
    "printf pwd true false which type uname id whoami cut tr nl rev md5sum sha1sum sha256sum sha512sum cksum "
    "strings seq sleep jq find sort"
)
# Programs of many commands, with those that a rule may leave open: their work is the repository's or the project's own,
# and their options that do more are below. Nothing that reads any file is among them: the sandbox lets that happen
# unasked, and outside of it one file would stand for all.
_OPEN_COMMANDS: dict[str, frozenset[str]] = {
    "git": _names("add branch checkout commit log mv reset restore rm show stash status switch tag"),
    "cargo": _names("build check clippy fmt test"),
    "go": _names("build fmt test vet"),
    "npm": _names("test"),
}
_MANY = frozenset(_OPEN_COMMANDS) | {"pip"}
# Commands that run other programs, or code.
_RUNNING_COMMANDS: dict[str, frozenset[str]] = {
    name: _names(commands)
    for name, commands in {
        "git": "config bisect submodule filter-branch difftool mergetool daemon instaweb for-each-repo credential "
        "credential-store send-email merge-index remote-ext remote-fd fast-import",
        "cargo": "rustc rustdoc watch script",
        "go": "run generate tool env",
        "docker": "run exec create compose buildx",
        "podman": "run exec create compose",
        "kubectl": "run exec debug",
        "npm": "exec exe x explore expl config conf c set init create innit edit",
        "pip": "config",
        "pnpm": "exec dlx config",
        "yarn": "exec dlx node config",
        "uv": "run tool",
        "poetry": "run shell",
        "conda": "run",
        "bundle": "exec",
        "rustup": "run",
        "gh": "alias extension",
        "node": "inspect debug",
    }.items()
}
# Options that run something, work on another directory's code, or write where only reading was shown; of a long one any
# beginning counts, as it does for the program. Those of one command of a program stand under both.
_UNLEASHING: dict[str, tuple[str, ...]] = {
    "find": ("-exec", "-execdir", "-ok", "-okdir", "-delete", "-fprint", "-fprint0", "-fprintf", "-fls"),
    "rg": ("--pre", "--hostname-bin"),
    "sort": ("-o", "--output", "--compress-program", "-T", "--temporary-directory"),
    "printf": ("-v",),
    "file": ("-C", "--compile"),
    "git": (
        *("--ext-diff", "--textconv", "--output", "--open-files-in-pager", "-O", "--exec", "-x", "--filters", "-c"),
        *("--upload-pack", "--receive-pack", "--config", "--template", "-t", "--file", "-F", "--pathspec-from-file"),
    ),
    "git clone": ("-u",),
    "git archive": ("-o",),
    "cargo": ("--config", "--manifest-path", "-Z", "-C", "--path"),
    "go": (
        *("-exec", "-toolexec", "-vettool", "-ldflags", "-gccgoflags", "-compiler", "-modfile", "-overlay", "-o"),
        *("-C", "-gcflags", "-asmflags", "-coverprofile", "-cpuprofile", "-memprofile", "-blockprofile"),
        *("-mutexprofile", "-trace", "-outputdir", "-pkgdir", "-fixtool"),
    ),
    "npm": (
        *("--script-shell", "--node-options", "--prefix", "-C", "--userconfig", "--globalconfig", "--git", "--shell"),
        *("--editor", "--viewer", "--browser", "--init-module", "--call", "-c"),
    ),
    "pip": ("--log",),
}
# Their options are words of their own, with one dash or two.
_LONG_OPTIONS = ("find", "go")
# Of python's modules: those that are the project's tests and checks. A rule shows the whole call.
_MODULES = _names("pytest unittest mypy ruff black")
_VERSION = re.compile(r"-?[0-9][0-9.]*$")
# A file that is standard input, however the way there is spelled.
_INPUT = re.compile(r"(?:^|/)(?:dev/(?:stdin|fd)|proc/[^/]+/)")


@dataclass(frozen=True, slots=True)
class Reading:
    """A rule has the first ``shown`` words; ``open_ended``: whatever follows them. ``fed``: what is piped into it is
    only data. ``refused``: why it has none."""

    shown: int = 0
    open_ended: bool = False
    fed: bool = False
    refused: str | None = None


def reading(words: Sequence[str]) -> Reading:
    """``words``: the program and its arguments."""
    base = os.path.basename(words[0])
    name = _VERSION.sub("", base)
    if reason := next(_reasons(words[0], base, name, words[1:]), None):
        return Reading(refused=reason)
    # A path may be any program's: it is shown whole.
    shown, open_ended = _shown(name, words) if base == words[0] else (len(words), False)
    return Reading(shown, open_ended, fed=words[0] in _READERS)


def _reasons(program: str, base: str, name: str, arguments: Sequence[str]) -> Iterator[str]:
    first = arguments[0] if arguments else ""
    if not base or "=" in program or program.startswith("~"):
        yield "it names no program"
    if not program.isascii():
        yield "its program has letters that may look like others"
    if base in _RUNNERS or name in _RUNNERS:
        yield f"{base} {_OTHERS}"
    if base in _STATEFUL:
        yield f"{base} changes what the rest of the command means"
    if name in _INTERPRETERS and not _names_script(name, arguments):
        yield f"{base} {_OTHERS}"
    if name in _MANY and first.startswith("-"):
        yield f"{base} has an option before its command"
    if first in _RUNNING_COMMANDS.get(name, ()):
        yield f"{base} {first} {_OTHERS}"
    unleashing = _UNLEASHING.get(name, ()) + _UNLEASHING.get(f"{name} {first}", ())
    for argument in arguments:
        if any(_is_option(argument, option, whole=name in _LONG_OPTIONS) for option in unleashing):
            yield f"{base} with {argument.split('=')[0]} does more than it says"
    if name in ("make", "gmake") and any("=" in one or one.startswith("-") for one in arguments):
        yield f"{base} {_OTHERS}"


def _names_script(name: str, arguments: Sequence[str]) -> bool:
    match arguments:
        case ["-m", module, *_]:
            return name == "python" and module in _MODULES
        case [script, *_]:
            return not script.startswith("-") and not _INPUT.search(os.path.normpath(script))
    return False


def _is_option(argument: str, option: str, *, whole: bool) -> bool:
    given = argument.split("=")[0]
    if whole:
        # What go hands on to a test has this before it.
        return given.startswith("-") and given.lstrip("-").removeprefix("test.") == option.lstrip("-")
    if option.startswith("--"):
        return len(given) > 2 and option.startswith(given)
    # It may have its value in the same word, and others before it.
    return argument[:1] == "-" != argument[1:2] and option[1] in argument


def _shown(name: str, words: Sequence[str]) -> tuple[int, bool]:
    if len(words) > 1 and words[1] in _OPEN_COMMANDS.get(name, ()):
        return 2, True
    return len(words), False
