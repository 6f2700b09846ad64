"""The settings file: what it means, and how a wrong one is refused."""

from __future__ import annotations

import json
import os
import re
import tomllib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loop_protocol.v1.types import ModelRef
from loopd import tomlfile
from loopd.config import MAX_BYTES, Config, ConfigError, ModelConfig, Provider, TitlePolicy, default_path, load, parse

FULL = """\
[default]
model = "ollama/qwen3/coder"
permission = "workspace-write"
title = { mode = "first-prompt", model = "openai/gpt", maxInputBytes = 1, maxOutputTokens = 2147483647, timeoutMs = 3 }

[daemon]
durability = "process"
drain_deadline_s = 2
idle_exit_s = 90.5
log_level = "debug"

[tools]
env = ["CARGO_HOME"]
bash_timeout_s = 5

[providers.ollama]
api = "openai-chat"
base_url = "http://127.0.0.1:11434/v1/"
auth = "none"
headers = { X-Team = "blue" }
[[providers.ollama.models]]
id = "qwen3/coder"
context_window = 262144
max_output = 32768
input = ["text", "image"]
reasoning = true

[providers.openai]
api = "openai-responses"
base_url = "https://api.openai.com/v1"
api_key_file = "~/keys/openai"
"""
OLLAMA = '[providers.ollama]\napi = "openai-chat"\nbase_url = "http://127.0.0.1:11434/v1"\n'


@pytest.fixture(autouse=True)
def _nobodys_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("LOOPD_CONFIG", raising=False)


def read(text: str) -> Config:
    return parse(text.encode(), "c.toml")


def refusal(text: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        read(text)
    return str(refused.value).split("\n")


def test_every_documented_key_is_read(tmp_path):
    config = read(FULL)
    assert config.default.model == ModelRef("ollama", "qwen3/coder")
    assert config.default.permission == "workspace-write"
    assert config.default.title == TitlePolicy(
        mode="first-prompt",
        model=ModelRef("openai", "gpt"),
        max_input_bytes=1,
        max_output_tokens=2147483647,
        timeout_ms=3,
    )
    assert (config.daemon.durability, config.daemon.drain_deadline_s) == ("process", 2.0)  # S-21
    assert (config.daemon.idle_exit_s, config.daemon.log_level) == (90.5, "debug")
    assert (config.tools.env, config.tools.bash_timeout_s) == (("CARGO_HOME",), 5.0)
    assert config.providers == {
        "ollama": Provider(
            name="ollama",
            api="openai-chat",
            base_url="http://127.0.0.1:11434/v1",
            auth="none",
            headers={"X-Team": "blue"},
            models=(
                ModelConfig(
                    id="qwen3/coder",
                    context_window=262144,
                    max_output=32768,
                    input=("text", "image"),
                    reasoning=True,
                ),
            ),
        ),
        "openai": Provider(
            name="openai",
            api="openai-responses",
            base_url="https://api.openai.com/v1",
            api_key_file=f"{tmp_path}/keys/openai",
        ),
    }


def test_an_empty_file_means_the_defaults():
    config = read("")
    assert config == Config()
    assert (config.default.model, config.default.permission) == (None, "read-only")
    assert config.default.title == TitlePolicy(  # T-1
        mode="off", model=None, max_input_bytes=16384, max_output_tokens=256, timeout_ms=15000
    )
    assert (config.daemon.durability, config.daemon.drain_deadline_s, config.daemon.idle_exit_s) == ("power-loss", 8, 0)
    assert (config.tools.env, config.tools.bash_timeout_s) == ((), 600)


# --- where the file is ------------------------------------------------------------------------------------------------


def test_no_file_at_the_default_place_means_the_defaults():
    assert load(None) == Config()


def test_a_missing_file_that_was_asked_for_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"gone\.toml: No such file"):
        load(f"{tmp_path}/gone.toml")
    monkeypatch.setenv("LOOPD_CONFIG", f"{tmp_path}/gone2.toml")
    with pytest.raises(ConfigError, match=r"gone2\.toml: No such file"):
        load(None)


def test_a_dangling_link_at_the_default_place_is_refused():
    os.makedirs(os.path.dirname(default_path()))
    os.symlink("nowhere", default_path())
    with pytest.raises(ConfigError, match="No such file"):
        load(None)


def test_a_directory_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="Is a directory"):
        load(str(tmp_path))


def test_the_default_place_follows_xdg_and_a_relative_one_counts_as_unset(tmp_path, monkeypatch):
    assert default_path() == f"{tmp_path}/.config/loopd/config.toml"
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    assert default_path() == f"{tmp_path}/.config/loopd/config.toml"
    monkeypatch.setenv("XDG_CONFIG_HOME", "/else")
    assert default_path() == "/else/loopd/config.toml"


def test_the_option_wins_over_the_variable_and_the_variable_over_the_default_place(tmp_path, monkeypatch):
    os.makedirs(os.path.dirname(default_path()))
    names = {default_path(): "debug", f"{tmp_path}/variable": "warning", f"{tmp_path}/option": "error"}
    for path, level in names.items():
        with open(path, "w") as file:
            file.write(f'[daemon]\nlog_level = "{level}"\n')
    assert load(None).daemon.log_level == "debug"
    monkeypatch.setenv("LOOPD_CONFIG", f"{tmp_path}/variable")
    assert load(None).daemon.log_level == "warning"
    assert load(f"{tmp_path}/option").daemon.log_level == "error"


# --- refusals ---------------------------------------------------------------------------------------------------------

WRONG = {
    '[daemon]\n\ndurability = "fast"': '3: daemon.durability: allowed: "power-loss" or "process"',
    "[daemon]\ndurabilty = 1": "2: daemon.durabilty: unknown key; did you mean durability? allowed: "
    "durability, drain_deadline_s, idle_exit_s, log_level",
    "[demon]\n": "1: demon: unknown key; did you mean daemon? allowed: default, daemon, tools, providers",
    "daemon = 3": "1: daemon: must be a table",
    "[daemon]\ndrain_deadline_s = 8.5": "2: daemon.drain_deadline_s: allowed: seconds from 0 to 8",
    "[daemon]\ndrain_deadline_s = nan": "2: daemon.drain_deadline_s: allowed: seconds from 0 to 8",
    "[daemon]\ndrain_deadline_s = true": "2: daemon.drain_deadline_s: allowed: seconds from 0 to 8",
    "[daemon]\nidle_exit_s = -1": "2: daemon.idle_exit_s: allowed: seconds, or 0 to stay",
    "[daemon]\nidle_exit_s = inf": "2: daemon.idle_exit_s: allowed: seconds, or 0 to stay",
    "[tools]\nbash_timeout_s = 0": "2: tools.bash_timeout_s: allowed: seconds, more than 0 and at most 86400",
    '[tools]\nenv = "HOME"': "2: tools.env: allowed: a list, each the name of an environment variable",
    '[tools]\nenv = ["A=B"]': "2: tools.env: allowed: a list, each the name of an environment variable",
    '[tools]\nenv = ["OPENAI_API_KEY"]': "2: tools.env: OPENAI_API_KEY holds a provider's key, "
    "and no key reaches a tool",  # K-31
    OLLAMA + 'api_key_env = "MINE"\n[tools]\nenv = ["MINE"]': "6: tools.env: MINE holds a provider's key, "
    "and no key reaches a tool",
    '[default]\nmodel = "gpt"': '2: default.model: allowed: "PROVIDER/MODEL"',
    '[default]\nmodel = "/gpt"': '2: default.model: allowed: "PROVIDER/MODEL"',
    '[default]\nmodel = "openai/"': '2: default.model: allowed: "PROVIDER/MODEL"',
    "[default]\nmodel = 1": '2: default.model: allowed: "PROVIDER/MODEL"',
    '[default]\nmodel = "openay/gpt"': "2: default.model: no such provider; did you mean openai? "
    "allowed: anthropic, openai, practice",
    '[default]\ntitle = "off"': "2: default.title: must be a table",
    "[default.title]\ntimeoutMs = 0": "2: default.title.timeoutMs: allowed: a whole number from 1 to 2147483647",
    "[default.title]\ntimeoutMs = 2147483648": "2: default.title.timeoutMs: allowed: "
    "a whole number from 1 to 2147483647",
    "[default.title]\ntimeoutMs = 1.0": "2: default.title.timeoutMs: allowed: a whole number from 1 to 2147483647",
    '[default.title]\nmode = "on"': '2: default.title.mode: allowed: "off" or "first-prompt" or "all-prompts"',
    "providers = []": "1: providers: must be a table",
    "[providers]\nollama = 1": "2: providers.ollama: must be a table",
    OLLAMA: '1: providers.ollama: allowed: auth = "none" if it takes no key, '
    "else one of api_key_env, api_key_file, api_key_command",
    OLLAMA + 'auth = "none"\napi_key_env = "KEY"': "5: providers.ollama.api_key_env: only one of auth, api_key_env, "
    "api_key_file, api_key_command is allowed, and auth is there",
    OLLAMA + "auth = false": '4: providers.ollama.auth: allowed: "none"',
    OLLAMA + 'api_key_file = "key"': "4: providers.ollama.api_key_file: allowed: a path that begins with / or ~/",
    OLLAMA + "api_key_command = []": "4: providers.ollama.api_key_command: allowed: a list of a program and its "
    "arguments",
    OLLAMA + 'auth = "none"\nheaders = { a = "b\\r\\nc" }': "5: providers.ollama.headers: allowed: "
    "a table of HTTP headers, each printable ASCII",
    OLLAMA + 'auth = "none"\nheaders = { "a:" = "b" }': "5: providers.ollama.headers: allowed: "
    "a table of HTTP headers, each printable ASCII",
    OLLAMA + 'auth = "none"\nmodels = [{ name = "x", id = "x" }]': "5: providers.ollama.models[1].name: unknown key; "
    "allowed: id, context_window, max_output, input, reasoning",
    OLLAMA + 'auth = "none"\n[[providers.ollama.models]]\n': "5: providers.ollama.models[1]: id is missing: "
    "text on one line, not empty",
    OLLAMA + 'auth = "none"\nmodels = { id = "x" }': "5: providers.ollama.models: must be a list of tables",
    OLLAMA + 'auth = "none"\nmodels = [{ id = "x" },\n{ id = "x" }]': "5: providers.ollama.models[2].id: "
    "this model is there already",
    OLLAMA + 'auth = "none"\nmodels = [{ id = "x", context_window = 8, max_output = 9 }]': "5: "
    "providers.ollama.models[1].max_output: allowed: at most the context_window",
    OLLAMA + 'auth = "none"\nmodels = [{ id = "x", input = [] }]': "5: providers.ollama.models[1].input: allowed: "
    'a list of "text" and "image"',
    '[providers.Ollama]\napi = "openai-chat"\nbase_url = "http://x"\nauth = "none"': "1: providers.Ollama: "
    "allowed as a name: a-z 0-9 _ . - and a letter or digit first",
    '[providers.practice]\napi = "openai-chat"\nbase_url = "http://x"\nauth = "none"': "1: providers.practice: "
    "this name is the built-in practice model's",
}


@pytest.mark.parametrize(("text", "complaint"), WRONG.items(), ids=range(len(WRONG)))
def test_a_wrong_file_is_refused_with_line_key_and_what_is_allowed(text, complaint):
    assert refusal(text) == [f"c.toml:{complaint}"]


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:11434",
        "ftp://x/v1",
        "http://",
        "http:///v1",
        "http://x:99999",
        "http://x:0",
        "http://x:port",
        "http://[::1",
        "http://me:pass@x/v1",
        "http://x/v1?a=b",
        "http://x/v1#a",
        "http://x /v1",
        "http://x\\n/v1",
        "",
    ],
)
def test_an_address_that_cannot_be_a_base_url_is_refused(url):
    [complaint] = refusal(f'[providers.a]\napi = "openai-chat"\nauth = "none"\nbase_url = "{url}"')
    assert complaint == (
        "c.toml:4: providers.a.base_url: allowed: an http or https address, without user, query and fragment"
    )


@pytest.mark.parametrize("url", ["http://x", "https://x:8080/a/v1", "http://[::1]:8080/v1", "HTTP://X/v1"])
def test_an_address_that_can_be_a_base_url_is_kept(url):
    config = read(f'[providers.a]\napi = "openai-chat"\nauth = "none"\nbase_url = "{url}"')
    assert config.providers["a"].base_url == url


def test_all_problems_are_told_at_once_in_the_order_of_the_file():
    complaints = refusal('[tools]\nenv = 1\n[daemon]\nlog_level = 1\nx = 1\n[default]\nmodel = "x"\n' + OLLAMA)
    assert [complaint.split(": ")[:2] for complaint in complaints] == [
        ["c.toml:2", "tools.env"],
        ["c.toml:4", "daemon.log_level"],
        ["c.toml:5", "daemon.x"],
        ["c.toml:7", "default.model"],
        ["c.toml:8", "providers.ollama"],
    ]


def test_a_hundred_problems_are_twenty_lines_and_a_count():
    complaints = refusal("\n".join(f"key{number} = 1" for number in range(100)))
    assert len(complaints) == 21
    assert complaints[-1] == "c.toml: and 80 more"


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        ("a = 1\nb = = 2\n", "c.toml:2:5: not valid TOML: "),
        ("a = 1\na = 2\n", "c.toml:2:6: not valid TOML: "),
        ('a = 1\nb = """x\n', "c.toml:2: not valid TOML: "),
        ("a = [" * 5000, "c.toml"),
        ("a = " + "9" * 5000, "c.toml:1: not valid TOML: "),
    ],
)
def test_a_file_that_is_not_toml_is_refused_with_its_place(text, begin):
    [complaint] = refusal(text)
    assert complaint.startswith(begin)


def test_bytes_that_are_not_utf8_are_refused_with_their_line():
    with pytest.raises(ConfigError, match=r"^c\.toml:2: not UTF-8$"):
        parse(b"a = 1\nb = '\xff'\n", "c.toml")


def test_a_huge_file_is_refused_unread():
    with pytest.raises(ConfigError, match=r"^/dev/zero: larger than \d+ bytes$"):
        load("/dev/zero")
    with pytest.raises(ConfigError, match="larger than"):
        parse(b"#" * (MAX_BYTES + 1), "c.toml")


def test_a_key_that_could_drive_a_terminal_is_shown_escaped():
    [complaint] = refusal('"a\\u001b[2K\\n\\u202e" = 1')
    assert complaint.startswith('c.toml:1: "a\\u001b[2K\\n\\u202e": unknown key')
    assert complaint.isprintable()


# --- secrets ----------------------------------------------------------------------------------------------------------


def test_headers_and_commands_are_in_no_repr():
    config = read(OLLAMA + 'api_key_command = ["echo", "SECRET"]\nheaders = { authorization = "SECRET" }\n')
    assert config.providers["ollama"].api_key_command == ("echo", "SECRET")
    assert "SECRET" not in f"{config!r} {config} {config.providers['ollama'].__rich_repr__()}"


@pytest.mark.parametrize(
    "key", ["api_key", "api_key_env", "api_key_file", "auth", "api", "headers", "base_url", "models"]
)
def test_no_complaint_repeats_a_value(key):
    complaints = refusal(f'[providers.ollama]\n{key} = "sk-SECRET"\n[default]\nmodel = "sk-SECRET"')
    assert "SECRET" not in "\n".join(complaints)


# --- lines ------------------------------------------------------------------------------------------------------------

LAYOUT = """\
# a comment
top = 1

[a.b]   # a = 5
"quoted key" = '''
c = 1
[a.c]
'''
list = [
  1,
  2, # list = 3
]
d.e = { f = 1, g = { h = 2 } }
[[a.many]]
x = 1
[[a.many]]

x = 2
y = 3
[a.c]
"""


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("at", "line"),
    {
        ("top",): 2,
        ("a",): 4,
        ("a", "b"): 4,
        ("a", "b", "quoted key"): 5,
        ("a", "b", "list"): 9,
        ("a", "b", "list", 1): 9,
        ("a", "b", "d", "e", "f"): 13,
        ("a", "b", "d", "e", "g", "h"): 13,
        ("a", "many"): 14,
        ("a", "many", 0, "x"): 15,
        ("a", "many", 1): 16,
        ("a", "many", 1, "x"): 18,
        ("a", "many", 1, "y"): 19,
        ("a", "c"): 20,
    }.items(),
)
def test_the_line_of_a_key_is_the_one_where_its_statement_begins(at, line, newline):
    assert tomlfile.lines(LAYOUT.replace("\n", newline))(at) == line


KEYS = st.text(st.characters(codec="utf-8"), max_size=4)
LEAVES = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3)


@given(st.dictionaries(KEYS, LEAVES.filter(lambda leaf: leaf is not None), max_size=8), st.text("\n# ", max_size=5))
def test_whatever_the_keys_are_their_lines_are_found(table, gap):
    gap = "".join(f"\n{row}" for row in gap.split("\n") if not row.strip() or row.strip().startswith("#"))
    text, expected = "", {}
    for key, leaf in table.items():
        text += gap.removeprefix("\n") + "\n"
        expected[(key,)] = text.count("\n") + 1
        text += f"{_toml(key)} = {_toml(leaf)}\n"
    assert tomllib.loads(text) == table
    line_of = tomlfile.lines(text)
    assert {at: line_of(at) for at in expected} == expected


def _toml(value: object) -> str:
    """JSON's spelling is TOML's for these, but for DEL and for what lies outside the BMP."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


NAMES = st.sampled_from([*dict.fromkeys(re.findall(r"[a-z_]+", FULL)), "practice", "api_key_env"])
VALUES = st.recursive(
    st.booleans() | st.integers(-1, 9) | st.floats() | st.sampled_from(["", "openai-chat", "none", "a/b", "http://x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
)


@settings(max_examples=300)
@given(st.dictionaries(NAMES, VALUES, max_size=5))
@example({"providers": {"ollama": {"api_key_env": []}}, "tools": {"env": ["A"]}})
def test_any_toml_is_read_or_refused_and_never_crashes(document):
    text = "".join(f"{key} = {_inline(value)}\n" for key, value in document.items())
    try:
        read(text)
    except ConfigError as error:
        complaints = str(error).split("\n")
    else:
        complaints = []
    assert all(complaint.startswith("c.toml:") and complaint.isprintable() for complaint in complaints)


def _inline(value: object) -> str:
    match value:
        case bool() | str() | int():
            return _toml(value)
        case float():
            return repr(value)
        case list():
            return f"[{', '.join(map(_inline, value))}]"
        case dict():
            return "{ " + ", ".join(f"{key} = {_inline(inner)}" for key, inner in value.items()) + " }"
    raise AssertionError(value)
