"""The rules of the tree that no type checker knows. The order of the modules is held here, once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A module imports what stands in a lower row, never its own row or a higher one; a package is one entry.
ORDER = (
    {"__main__"},
    {"commands"},
    {"daemon"},
    {"server"},
    {"connection"},
    {"api"},
    {"runtime"},
    {"opening", "outbox", "saved", "seat"},
    {"session", "restoring"},
    {"runs"},
    {"run"},
    {"run_context"},
    {"title_worker"},
    {"saving", "job"},
    {"services", "concealment"},
    {"watch"},
    {"event_log"},
    {"models"},
    {"agent", "storage"},
    {"config", "systemd"},
    {"tomlfile"},
    {"core", "threads"},
    {"loop_protocol"},
)
RANK = {name: rank for rank, row in enumerate(ORDER) for name in row}

# Who may touch the disk, and what for. The store does it through `storage/fs.py` alone, the seam for faults.
DISK = {
    "loopd/storage/fs.py": "the store",
    "loopd/server.py": "the socket and its lock",
    "loopd/config.py": "the settings",
    "loopd/__main__.py": "the log",
    "loopd/concealment.py": "where its own environment lies in memory",
    "loopd/opening.py": "the workspace: does it exist, what is its real path",
    "loopd/models/": "credentials",
    "loopd/agent/": "what tools and instructions are about",
}
DISK_CALL = re.compile(
    r"open|trio\.open_file|trio\.Path"
    r"|os\.path\.(exists|getmtime|getsize|isdir|isfile|islink|lexists|realpath|samefile)"
    r"|os\.(access|chdir|chmod|chown|fchmod|fdatasync|fsync|ftruncate|link|listdir|lstat|makedirs|mkdir|open|pread"
    r"|pwrite|read|readlink|remove|removedirs|rename|renames|replace|rmdir|scandir|stat|statvfs|symlink|sync|truncate"
    r"|unlink|utime|walk|write|writev)"
)
FILE_MODULES = {"glob", "io", "pathlib", "shutil", "tempfile"}
# Long, because it is one table: a row per method.
TABLES = {"protocol/loop_protocol/v1/methods.py"}
VAGUE = ("manager", "handler", "helper", "utils")


def sources(*tops: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for top in tops for path in (ROOT / top).rglob("*.py"))


OURS = sources("loopd", "loopctl", "protocol")


def imports(path: str, tree: ast.AST) -> Iterator[str]:
    """Every imported name in full, wherever the statement stands: ``loopd.core.guards.Refused``."""
    package = path.removeprefix("protocol/").removesuffix(".py").split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = [*base, *([node.module] if node.module else [])]
            yield from (".".join([*origin, alias.name]) for alias in node.names)


def entry(name: str) -> str | None:
    """The entry of ORDER to which an imported name belongs; None for a constant of ``loopd`` and for the libraries."""
    parts = name.split(".")
    if parts[0] == "loopd":
        return parts[1] if len(parts) > 1 and not parts[1].startswith("__version") else None
    return "loop_protocol" if parts[0] == "loop_protocol" else None


def faults(path: str, text: str) -> Iterator[str]:
    """What is wrong with one file of the packages."""
    tree = ast.parse(text)
    names = set(imports(path, tree))
    tops = {name.split(".")[0] for name in names}
    if not ast.get_docstring(tree):
        yield "has no docstring, whose first sentence is the module's promise"
    if text.count("\n") > 320 and path not in TABLES:
        yield "is over 320 lines"
    if path.startswith("loopd/") and path != "loopd/__init__.py":
        yield from _upward(path, names)
        if not path.startswith(tuple(DISK)):
            yield from _on_disk(tree, tops)
    pure = path.startswith(("loopd/core/", "loopctl/", "protocol/")) and not path.endswith("/trio_client.py")
    if pure and tops & {"trio", "trio_jsonrpc"}:
        yield "imports trio"
    if path.startswith(("loopctl/", "protocol/")) and "loopd" in tops:
        yield "imports loopd"
    if path.startswith("protocol/") and "loopctl" in tops:
        yield "imports loopctl"
    yield from _vague(path, tree)
    yield from _unbounded(tree, text.split("\n"))


def _upward(path: str, names: set[str]) -> Iterator[str]:
    own = path.split("/")[1].removesuffix(".py")
    if own not in RANK:
        yield "has no place in ORDER"
        return
    for name in sorted(names):
        other = entry(name)
        if other is not None and other != own and RANK.get(other, -1) <= RANK[own]:
            yield f"imports {name}, which does not stand below it"


def _on_disk(tree: ast.AST, tops: set[str]) -> Iterator[str]:
    yield from (f"imports {name}, which is about files" for name in sorted(tops & FILE_MODULES))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if DISK_CALL.fullmatch(called):
                yield f"calls {called} on line {node.lineno}: only {', '.join(DISK)} touch the disk"


def _vague(path: str, tree: ast.AST) -> Iterator[str]:
    named = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    for name in [path, *named]:
        if any(word in name.lower() for word in VAGUE):
            yield f"calls something {name}, which says nothing"


def _unbounded(tree: ast.AST, lines: list[str]) -> Iterator[str]:
    """Whoever catches everything says why, unless it travels on."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and ast.unparse(node.body[-1]) != "raise":
            caught = {getattr(part, "id", None) for part in ast.walk(node.type)} if node.type else {"BaseException"}
            reasons = lines[node.lineno - 1 : node.body[0].lineno]
            if caught & {"Exception", "BaseException"} and not any("# boundary:" in line for line in reasons):
                yield f"catches everything on line {node.lineno} without a `# boundary:` that says why"


@pytest.mark.parametrize("path", OURS)
def test_every_file_keeps_the_rules(path):
    assert list(faults(path, (ROOT / path).read_text())) == []


@pytest.mark.parametrize("path", [*OURS, *sources("tests")])
def test_the_protocol_is_imported_under_one_name(path):
    tree = ast.parse((ROOT / path).read_text())
    assert not [name for name in imports(path, tree) if name.startswith("protocol.loop_protocol")]


def test_what_ci_runs_is_what_the_readme_says():
    command = "python3 -m venv .venv && .venv/bin/pip install -q '.[dev]' && .venv/bin/pytest"
    for name in ("README.md", ".ci/run"):
        assert command in (ROOT / name).read_text(), name


BAD = [
    ("loopd/core/state.py", "import trio", "imports trio"),
    (
        "loopd/core/state.py",
        "from ..storage import Store",
        "imports loopd.storage.Store, which does not stand below it",
    ),
    ("loopd/session.py", "def f():\n    from .runtime import X", "imports loopd.runtime.X, which does not stand below"),
    ("loopd/session.py", "import loopd.daemon", "imports loopd.daemon, which does not stand below it"),
    ("loopd/agent/loop.py", "from ..storage import fs", "imports loopd.storage.fs, which does not stand below it"),
    (
        "loopd/agent/tools/shell.py",
        "from ...session import X",
        "imports loopd.session.X, which does not stand below it",
    ),
    ("loopd/session.py", "from . import novelty", "imports loopd.novelty, which does not stand below it"),
    ("loopd/novelty.py", "", "has no place in ORDER"),
    ("loopd/session.py", "import os\nos.open('a', 0)", "calls os.open on line 3"),
    ("loopd/session.py", "open('a')", "calls open on line 2"),
    ("loopd/storage/files.py", "import os\nos.path.exists('a')", "calls os.path.exists on line 3"),
    ("loopd/storage/files.py", "from pathlib import Path", "imports pathlib, which is about files"),
    ("loopctl/__main__.py", "from loopd import config", "imports loopd"),
    ("loopctl/__main__.py", "import trio", "imports trio"),
    ("protocol/loop_protocol/client.py", "import trio.socket", "imports trio"),
    ("protocol/loop_protocol/client.py", "import loopctl", "imports loopctl"),
    ("loopd/session.py", "class RunManager: pass", "calls something RunManager, which says nothing"),
    ("loopd/session.py", "try: pass\nexcept (OSError, Exception): pass", "catches everything on line 3"),
    ("loopd/session.py", "try: pass\nexcept: pass", "catches everything on line 3"),
    ("loopd/session.py", "\n" * 320, "is over 320 lines"),
]


@pytest.mark.parametrize(("path", "text", "fault"), BAD)
def test_a_file_that_breaks_a_rule_is_found(path, text, fault):
    [found] = faults(path, f'"""A promise."""\n{text}')
    assert found.startswith(fault)


def test_a_file_that_keeps_the_rules_is_left_alone():
    text = (
        '"""A promise."""\nimport trio\nfrom loop_protocol.v1.types import Wire\nfrom . import __version__, event_log\n'
        "try: pass\nexcept Exception:  # boundary: a bug ends this session only\n    pass\n"
        "try: pass\nexcept BaseException:\n    print()\n    raise\n"
    )
    assert list(faults("loopd/session.py", text)) == []
    assert list(faults("loopd/session.py", "")) == ["has no docstring, whose first sentence is the module's promise"]
