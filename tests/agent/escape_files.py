"""Files that `read`, `write` and `edit` are led to: the second half of the table that `test_escapes.py` walks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["asks", "denied", "fails"]


@dataclass(frozen=True, slots=True)
class Reach:
    """``path`` from the workspace, with the variables of the other table; ``before`` is a command by which somebody
    prepared it. ``outcome`` is that of workspace-write; in read-only what could be done asks. ``works``:
    whether it gets through where nothing stands in the way."""

    tool: Literal["read", "write", "edit"]
    name: str
    path: str
    outcome: Outcome
    before: str = ""
    works: bool = True


def _all(name: str, path: str, outcome: Outcome, before: str = "", *, works: bool = True) -> list[Reach]:
    return [Reach(tool, name, path, outcome, before, works) for tool in ("write", "edit")]


def _own(name: str, path: str, before: str = "", *, works: bool = True) -> list[Reach]:
    return [Reach(tool, name, path, "denied", before, works) for tool in ("read", "write", "edit")]


REACHES = [
    *_all("absolute", "{O}/file", "asks"),
    *_all("..", "../out/file", "asks"),
    *_all(".. through a directory that is there", "own/../../out/file", "asks"),
    *_all("//", "/{O}//file", "asks"),
    *_all("~", "~/.bashrc", "asks"),
    *_all("/proc/self/root", "/proc/self/root{O}/file", "asks"),
    *_all("/proc/PID/root", "/proc/{V}/root{O}/file", "asks"),
    *_all("/proc/PID/cwd", "/proc/{V}/cwd/out/file", "asks"),
    *_all("/proc/PID/fd", "/proc/{V}/fd/2", "asks"),
    *_all("symbolic link", "s/link", "asks", "mkdir s; ln -s $O/file s/link"),
    *_all("chain of links", "s/3", "asks", "mkdir s; cd s; ln -s $O/file 1; ln -s 1 2; ln -s $PWD/2 3"),
    *_all("link to a directory", "s/link/file", "asks", "mkdir s; ln -s ../../out/dir s/link"),
    *_all("link and ..", "s/link/../file", "asks", "mkdir s; ln -s $O/dir s/link"),
    *_all("loop of links", "s/a", "fails", "mkdir s; ln -s b s/a; ln -s a s/b", works=False),
    *_all("git: a hook", ".git/hooks/sample", "asks"),
    *_all("git: config", ".git/config", "asks"),
    *_all("git: config by a link", "s/link/config", "asks", "mkdir s; ln -s ../.git s/link"),
    *_all("git: a FIFO", "../out/fifo", "fails", works=False),
    *_all("a socket", "../out/sock", "fails", works=False),
    *_all("a device", "/dev/null", "fails", works=False),
    *_all("the kernel's settings", "/proc/sys/kernel/hostname", "fails", works=False),
    *_all("memory of a process", "/proc/{V}/mem", "fails", works=False),
    Reach("write", "dangling link", "s/link", "asks", "mkdir s; ln -s $O/new s/link"),
    Reach("write", "dangling directory", "../out/new/deep/file", "asks"),
    Reach("write", "git: a new hook", ".git/hooks/pre-commit", "asks"),
    Reach("write", "git: below the workspace", "s/.git/hooks/pre-commit", "asks", works=False),
    Reach("write", "git: other case", "s/.GiT/config", "asks", works=False),
    Reach("write", "git: invisible character", "s/.g\u200cit/config", "asks", works=False),
    Reach("write", "git: FAT's name", "s/GIT~1/config", "asks", works=False),
    *_own("settings", "{P}/conf/loopd/config.toml"),
    *_own("key", "{P}/key"),
    *_own("credentials", "{P}/creds/key"),
    *_own("session", "{P}/data/sessions/one/history.jsonl"),
    *_own("log", "{P}/log"),
    *_own("lock", "{P}/run/loopd/sock.lock"),
    *_own("in the workspace", "own/deep/key"),
    *_own("key by ..", "../own/data/../key"),
    *_own("key by /proc/self/root", "/proc/self/root{P}/key"),
    *_own("key by /proc/PID/root", "/proc/{V}/root{P}/key"),
    *_own("key by /proc/PID/cwd", "/proc/{V}/cwd/own/key"),
    *_own("key by a link", "s/link", "mkdir s; ln -s $P/key s/link"),
    *_own("key by a directory's link", "s/link/key", "mkdir s; ln -s ../../own s/link"),
    Reach("read", "key by a hard link", "before-key", "denied"),  # a rename of it leaves the other name as it was
    *_own("other case", "own/DEEP/KEY", works=False),
    *_own("full width letters", "own/ｄｅｅｐ/key", works=False),
    *_own("decomposed", "own/de\u0301ep/key", works=False),
    *_own("invisible character", "own/de\u200bep/key", works=False),
    Reach("read", "environment of a process", "/proc/{V}/environ", "fails", works=False),
    Reach("read", "one's own memory", "/proc/self/mem", "fails", works=False),
    Reach("write", "new settings", "{P}/absent/config.toml", "denied"),
    Reach("write", "new settings in the workspace", "own/later/config.toml", "denied"),
    Reach("write", "new session", "{P}/data/sessions/two/meta.json", "denied"),
    Reach("write", "the socket", "{P}/run/loopd/sock", "denied", works=False),
]
