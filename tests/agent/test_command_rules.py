"""What is allowed for the session with a command: the rules that a person is shown, and nothing that is more (A-2)."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopd.agent.tools.commands import MOST_BYTES, MOST_PARTS, RULE_LENGTH, rules_of

ALLOWED: list[tuple[str, list[str]]] = [
    ("ls", ["ls"]),
    ("ls -la", ["ls -la"]),
    ("ls  -la\tsrc", ["ls -la src"]),
    ("git status", ["git status …"]),
    ("git commit -m 'x'", ["git commit …"]),
    ('git commit -m "x; rm -rf /"', ["git commit …"]),
    ('git commit -m "first\n\nsecond"', ["git commit …"]),
    ("git commit -m 'costs $5 `now`'", ["git commit …"]),
    (r'git commit -m "costs \$5 \`now\`"', ["git commit …"]),
    ("git", ["git"]),
    ("git push origin main", ["git push origin main"]),
    ("git branch", ["git branch …"]),
    ("git show HEAD~1", ["git show …"]),
    ("a;b", ["a", "b"]),
    ("a\nb", ["a", "b"]),
    ("a ; b;", ["a", "b"]),
    ("a && b || c x", ["a", "b", "c x"]),
    ("a &&\n  b", ["a", "b"]),
    ("a\n\n# and then\n\nb\n", ["a", "b"]),
    ("a a", ["a a"]),
    ("a; a; a", ["a"]),
    ("ls # rm -rf /", ["ls"]),
    ("ls #$(rm)", ["ls"]),
    ("# first\nls", ["ls"]),
    ("ls; # one\npwd", ["ls", "pwd"]),
    ("ls a#b", ["ls 'a#b'"]),
    ("ls '#' b", ["ls '#' b"]),
    ("ls | head -5", ["ls", "head -5"]),
    ("ls |\nsort | wc", ["ls", "sort", "wc"]),
    ("a 2>&1", ["a"]),
    ("a >/dev/null 2>&1 && b 2> /dev/null", ["a", "b"]),
    ("a &>/dev/null", ["a"]),
    ("git status \\\n  -s", ["git status …"]),
    ('"git" status', ["git status …"]),
    (r"g\it status", ["git status …"]),
    ("gi't' sta\"tus\"", ["git status …"]),
    ("echo 'it'\"'\"'s'", ["echo 'it'\"'\"'s'"]),
    ("echo ''", ["echo ''"]),
    (r"echo a\ b", ["echo 'a b'"]),
    (r"echo \;", ["echo ';'"]),
    (r"echo \~", ["echo '~'"]),
    (r'echo "\n"', ["echo '\\n'"]),
    ("echo '…'", ["echo '…'"]),
    ("a '…'", ["a '…'"]),
    ("cat grün.txt", ["cat 'grün.txt'"]),
    ("cat 日本", ["cat '日本'"]),
    ("rm -rf build", ["rm -rf build"]),
    ("./run.sh a b", ["./run.sh a b"]),
    ("/usr/bin/git status", ["/usr/bin/git status"]),
    ("python tools/x.py a", ["python tools/x.py a"]),
    ("python3.11 -m pytest -x", ["python3.11 -m pytest -x"]),
    ("pytest tests -x", ["pytest tests -x"]),
    ("docker container ls", ["docker container ls"]),
    ("hg log -l 3", ["hg log -l 3"]),
    ("kubectl get pods", ["kubectl get pods"]),
    ("git push -u origin main", ["git push -u origin main"]),
    ("git log -1 --oneline", ["git log …"]),
    ("cargo test --package x", ["cargo test …"]),
    ("npm run test -- -u", ["npm run test -- -u"]),
    ("git submodule--helper foreach id", ["git submodule--helper foreach id"]),
    ("make test", ["make test"]),
    ("npm run test", ["npm run test"]),
    ("npm install left-pad", ["npm install left-pad"]),
    ("cargo test --all", ["cargo test …"]),
    ("go test -count=1 ./...", ["go test …"]),
    ("cargo +nightly test", ["cargo +nightly test"]),
    ("find . -name x", ["find . -name x"]),
    ("sed -n 1,5p x", ["sed -n 1,5p x"]),
    ("sleep 1", ["sleep 1"]),
    ("echo a=b", ["echo a=b"]),
]

REFUSED: list[tuple[str, str]] = [
    ("", "no command"),
    ("  \n", "no command"),
    ("# ls", "no command"),
    ("echo $HOME", "a variable"),
    ('echo "$HOME"', "a variable"),
    ("echo ${x:-$(id)}", "a variable"),
    ("$CMD x", "a variable"),
    ("echo $(id)", "a command for its output"),
    ('echo "a $(id)"', "variable or a substitution"),
    ("echo `id`", "a command for its output"),
    ('echo "`id`"', "a command for its output"),
    ("cat <(id)", "a command for its output"),
    ("echo $((1+1))", "arithmetic"),
    ("echo $'a\\nb'", "string with escapes"),
    ('echo $"a"', "variable or a substitution|no plain"),
    ("ls *.py", "a pattern"),
    ("ls a?", "a pattern"),
    ("ls [ab]", "a pattern"),
    ("echo {a,b}", "braces"),
    ("ls ~", "~"),
    ("ls ~root/x", "~"),
    ("ls a=~", "~"),
    ("! ls", "a !"),
    ("ls &", "in the background"),
    ("a & b", "in the background"),
    ("a |& b", "no plain command"),
    ("a ;; b", "no plain command|syntax"),
    ("(ls)", "a subshell"),
    ("{ ls; }", "no plain command"),
    ("if a; then b; fi", "no plain command"),
    ("for i in a; do b; done", "no plain command"),
    ("while true; do b; done", "no plain command"),
    ("f() { ls; }", "a function"),
    ("function ls { a; }", "a function"),
    ("[[ -f x ]]", "no plain command"),
    ("[ -f x ]", "no plain command"),
    ("test -v 'a[$(id)]'", "test changes"),
    ("A=1 ls", "a variable"),
    ("A=1", "a variable"),
    ("export A=1", "a variable"),
    ("PATH=x; git status", "a variable"),
    ("ls > x", "to a file"),
    ("ls >> x", "to a file"),
    ("ls 2>/dev/null x", "to a file"),
    ("ls >/dev/null/../x", "to a file"),
    ("a < x", "to a file"),
    ("ls 3>&1", "to a file"),
    (">/dev/null ls", "no plain command"),
    ("cat <<E\nx\nE", "here-document"),
    ("cat <<< x", "here-string"),
    ("echo 'a", "no plain|syntax"),
    ('echo "a', "no plain|syntax"),
    ('echo """', "no plain|syntax"),
    ("ls \\", "no plain|syntax"),
    ("git sta\\\ntus", "no plain command"),
    ("ls\\\n-la", "no plain command"),
    ("ls\0", "control or invisible"),
    ("ls\r", "control or invisible"),
    ("ls \x1b[31m", "control or invisible"),
    ("ls \u202e", "control or invisible"),
    ("ls \u200b", "control or invisible"),
    ("ls \u3164", "control or invisible"),
    ("ls\u00a0-la", "control or invisible"),
    ("ls \ud800", "control or invisible"),
    ("g\u0456t status", "letters that may look like others"),
    ("''", "no program"),
    ("cat 'a\nb'", "on a line"),
    ("cat " + "a" * RULE_LENGTH, "on a line"),
    ("a;" * MOST_PARTS + "a", "too many parts"),
    ("ls " + "a" * 100_000, "too long"),
    *((f"{program} x", "runs other programs") for program in ("sh", "bash", "/bin/zsh", "env", "sudo", "doas", "su")),
    *((f"{program} x", "runs other programs") for program in ("xargs", "nohup", "time", "timeout", "nice", "setsid")),
    *((f"{program} x", "runs other programs") for program in ("ssh", "awk", "eval", "exec", "source", ".", "command")),
    *((f"{program} x", "runs other programs") for program in ("builtin", "watch", "parallel", "busybox", "npx")),
    (r"e\nv ls", "env runs"),
    ("'time' ls", "time runs"),
    ("cd /tmp && ls", "cd changes"),
    ("set -e; ls", "set changes"),
    ("alias ls=rm; ls", "alias changes"),
    ("python -c 'x'", "python runs"),
    ("python3.11 -c x", "python3.11 runs"),
    ("python -m timeit x", "python runs"),
    ("python", "python runs"),
    ("echo x | python", "python runs"),
    ("echo x | python /dev/stdin", "python runs"),
    ("perl -e x", "perl runs"),
    ("ruby -e x", "ruby runs"),
    ("node -e x", "node runs"),
    ("node --eval=x", "node runs"),
    ("echo x | sh", "sh runs"),
    ("echo x | sqlite", "what is piped into sqlite"),
    ("ls | tee x", "what is piped into tee"),
    (r"find . -exec rm x \;", "find with -exec"),
    ("find . -delete", "find with -delete"),
    ("rg --pre=x y", "rg with --pre"),
    ("sort -o x y", "sort with -o"),
    ("sort --compress-prog=x", "sort with --compress-prog"),
    ("printf -v x y", "printf with -v"),
    ("docker run x", "docker run"),
    ("podman exec x", "podman exec"),
    ("git -c alias.x='!ls' x", "option before"),
    ("/usr/bin/git -C /x status", "option before"),
    ("npm --prefix x test", "option before"),
    ("git log --output=x", "git with --output"),
    ("git log --outp x", "git with --outp"),
    ("git grep -Ols x", "git with -O"),
    ("git config core.pager x", "git config"),
    ("git bisect run x", "git bisect"),
    ("go test -exec x", "go with -exec"),
    ("go build --ldflags=-extld=x", "go with --ldflags"),
    ("go build -o x", "go with -o"),
    # A rule made of a harmless call of the same command would cover these.
    ("git clone -u 'sh -c id' file:///r x", "git with -u"),
    ("git archive -o x HEAD", "git with -o"),
    ("git send-email --sendmail-cmd=id x", "git send-email"),
    ("git merge-index id -a", "git merge-index"),
    ("git remote-ext x id", "git remote-ext"),
    ("go test -C /x ./...", "go with -C"),
    ("go test -test.coverprofile=x", "go with -test.coverprofile"),
    ("cargo rustc -- -Clinker=id", "cargo rustc"),
    ("cargo watch -s id", "cargo watch"),
    ("cargo install --path /x", "cargo with --path"),
    ("npm test --prefix /x", "npm with --prefix"),
    ("npm run x --script-shell=id", "npm with --script-shell"),
    ("npm set script-shell id", "npm set"),
    ("npm exe -c id", "npm exe"),
    ("pip list --log x", "pip with --log"),
    ("npm init x", "npm init"),
    ("node inspect x.js", "node inspect"),
    *((f"echo x | python {way}", "python runs") for way in ("../../dev/stdin", "//dev/fd/0", "./../proc/self/fd/0")),
    ("go run x", "go run"),
    ("cargo test --config x", "cargo with --config"),
    ("make SHELL=x", "make runs"),
    ("make -f x", "make runs"),
    ("ls\\\n#; rm x", "no plain command"),  # to bash no comment: the line goes on in the middle of a word
    ("'a=b' ls", "no program"),
    ("ls; echo $(id)", "for its output"),
    ("ls\nsudo ls", "sudo runs"),
]


@pytest.mark.parametrize(("command", "rules"), ALLOWED)
def test_what_is_plain_has_a_rule_for_each_part(command: str, rules: list[str]) -> None:
    found = rules_of(command)
    assert (list(found.rules), found.refused) == ([f"bash: {rule}" for rule in rules], None)


@pytest.mark.parametrize(("command", "reason"), REFUSED, ids=range(len(REFUSED)))
def test_anything_else_has_none_and_says_why(command: str, reason: str) -> None:
    found = rules_of(command)
    assert found.rules == ()
    assert found.refused
    assert any(part in found.refused for part in reason.split("|")), found.refused
    assert len(found.refused) < 100


@pytest.mark.parametrize(
    "command",
    [
        one * (MOST_BYTES // len(one))
        for one in ("(", "a;", "a &&", '"$(', "<<a ", "'", '"', "\\", "'a'", "a\\\n", "# ")
    ],
    ids=lambda command: command[:4],
)
def test_no_command_takes_long(command: str) -> None:
    rules_of("ls")  # the grammar is there
    started = time.process_time()
    rules_of(command)
    rules_of(command * 1000)
    assert time.process_time() - started < 0.5


def test_the_grammar_is_not_loaded_before_it_is_needed() -> None:
    script = "import sys, loopd.__main__; sys.exit(any('tree_sitter' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


# --- no more than that ------------------------------------------------------------------------------------------------

PROGRAMS = ("alpha", "beta", "ls", "git", "cat", "rm")

_names = st.sampled_from(PROGRAMS)
_words = st.sampled_from(
    ["a", "-x", "status", "'b c'", '"d;e"', r"f\ g", "''", "h=i", "a#j", "é", r'"\$k"', "'#l'", "m~"]
)
_part = st.builds(lambda name, words: " ".join([name, *words]), _names, st.lists(_words, max_size=4))
_joint = st.sampled_from([";", "\n", " && ", " || ", " | ", " 2>&1; ", " # x\n", " >/dev/null && ", " &&\n"])
_plain = st.builds(
    lambda first, rest: first + "".join(joint + part for joint, part in rest),
    _part,
    st.lists(st.tuples(_joint, _part), max_size=4),
)
_WILD = ["$x", "${x}", "$(id)", "`id`", "<(id)", "*", "{a,b}", "$((1))", '"$x"', '"$(id)"', "$'x'", "~", "?"]
_PIECES = [
    "alpha",
    "beta",
    "cat",
    " ",
    " ",
    "\n",
    ";",
    "|",
    "&",
    "<",
    ">",
    "(",
    ")",
    "'",
    '"',
    "\\",
    "#",
    "=",
    "a",
    "-x",
    "1",
]
_PIECES += ["2>&1", "/dev/null", "{", "}", "[", "]", "!", "~", ":", "é", "\t", ",", "^", "%", "@", "then", "in", "\\\n"]


@given(_plain, st.sampled_from(_WILD), st.sampled_from(["; alpha ", " && cat a ", "\nls "]))
def test_no_expansion_is_ever_covered(command: str, wild: str, joint: str) -> None:
    assert rules_of(command + joint + wild).rules == ()


@given(_plain, st.sampled_from([";", "\n", " && ", " || "]), _part)
def test_a_further_part_needs_its_own_rule(command: str, joint: str, part: str) -> None:
    before, alone, after = rules_of(command), rules_of(part), rules_of(command + " #\n" + part)
    joined = rules_of(command + joint + part)
    for found in (joined, after):
        if found.rules:
            assert set(found.rules) == {*before.rules, *alone.rules}
            assert before.rules
            assert alone.rules


class Stubs:
    """A directory with nothing but programs that note how they are called, as the whole of PATH."""

    def __init__(self, root: Path) -> None:
        self.bin, self.cwd, self.log = root / "bin", root / "cwd", root / "log"
        self.bin.mkdir()
        self.cwd.mkdir()
        for name in PROGRAMS:
            stub = self.bin / name
            stub.write_text(f'#!/bin/sh\nprintf "%s\\0" "$#" {name} "$@" >> {self.log}\n')
            stub.chmod(0o755)

    def called(self, command: str) -> list[list[str]]:
        self.log.write_bytes(b"")
        env = {"PATH": str(self.bin), "LC_ALL": "C.UTF-8"}
        argv = ["/bin/bash", "-c", "--", command]
        subprocess.run(
            argv, env=env, cwd=self.cwd, capture_output=True, check=False, stdin=subprocess.DEVNULL, timeout=10
        )
        assert os.listdir(self.cwd) == []
        return list(self._calls(self.log.read_bytes().decode().split("\0")))

    def _calls(self, fields: list[str]) -> Iterator[list[str]]:
        at = 0
        while at < len(fields) - 1:
            count = int(fields[at]) + 1
            yield fields[at + 1 : at + 1 + count]
            at += 1 + count


@contextmanager
def stubs() -> Iterator[Stubs]:
    with tempfile.TemporaryDirectory(prefix="loopd-") as root:
        yield Stubs(Path(root))


def covers(rule: str, call: list[str]) -> bool:
    words = shlex.split(rule.removeprefix("bash: ").removesuffix(" …"))
    return call[: len(words)] == words if rule.endswith(" …") else call == words


def check_with_bash(place: Stubs, command: str) -> bool:
    """Whether there were rules."""
    rules = rules_of(command).rules
    if not rules:
        return False
    calls = place.called(command)
    for call in calls:
        assert any(covers(rule, call) for rule in rules), (command, rules, call)
    if "||" not in command and all(shlex.split(rule)[1] in PROGRAMS for rule in rules):
        for rule in rules:
            assert any(covers(rule, call) for call in calls), (command, rules, calls)
    return True


def test_bash_runs_exactly_what_the_rules_of_plain_commands_name() -> None:
    accepted = 0

    with stubs() as place:

        @settings(max_examples=80, deadline=None)
        @given(_plain)
        def check(command: str) -> None:
            nonlocal accepted
            accepted += check_with_bash(place, command)

        check()
        for command, _ in ALLOWED:
            if shlex.split(command, comments=True)[0] in PROGRAMS:
                accepted += check_with_bash(place, command)
    assert accepted > 60


def test_bash_runs_nothing_else_whatever_the_command_is_made_of() -> None:
    accepted = 0

    with stubs() as place:

        @settings(max_examples=1500, deadline=None)
        @given(st.lists(st.sampled_from(_PIECES), max_size=12).map("".join))
        def check(rest: str) -> None:
            nonlocal accepted
            accepted += check_with_bash(place, "alpha " + rest)

        check()
    assert accepted > 20
