"""What a tool's processes inherit: an allow-list, never a key."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loopd.agent.tools.environment import tool_environment

KEYS = {
    "OPENAI_API_KEY": "sk-1",
    "ANTHROPIC_API_KEY": "sk-2",
    "GITHUB_TOKEN": "t",
    "AWS_SECRET_ACCESS_KEY": "s",
    "LC_SECRET": "through the locale door",
    "LISTEN_FDS": "1",
    "BASH_ENV": "/evil",
}


def test_no_key_of_the_daemon_or_the_caller_passes() -> None:  # K-31
    daemon = {"PATH": "/bin", "HOME": "/home/me", "LC_ALL": "C"} | KEYS
    assert tool_environment(None, daemon_env=daemon) == {
        "PATH": "/bin", "HOME": "/home/me", "LC_ALL": "C", "TERM": "dumb",
    }  # fmt: skip
    assert not set(tool_environment(dict(KEYS), daemon_env=daemon)) & set(KEYS)


def test_the_caller_says_what_it_has_and_the_daemon_only_the_basics() -> None:
    daemon = {"PATH": "/daemon", "HOME": "/home/me", "VIRTUAL_ENV": "/daemon/venv"}
    chosen = tool_environment({"PATH": "/caller", "TERM": "xterm"}, daemon_env=daemon)
    assert chosen == {"PATH": "/caller", "HOME": "/home/me", "TERM": "dumb"}


def test_names_from_the_settings_are_added_even_if_they_look_like_keys() -> None:
    assert tool_environment(dict(KEYS), daemon_env={}, extra_names=["GITHUB_TOKEN"])["GITHUB_TOKEN"] == "t"


def test_there_is_always_a_path() -> None:
    assert "/usr/bin" in tool_environment({"PATH": ""}, daemon_env={})["PATH"]
    assert "/usr/bin" in tool_environment(None, daemon_env={})["PATH"]


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=8)))
def test_nothing_passes_that_a_process_cannot_be_given(caller: dict[str, str]) -> None:
    chosen = tool_environment({"HOME": "a\0b", **caller}, daemon_env={})
    assert not any("=" in name or "\0" in name + value for name, value in chosen.items())
