"""Which models there are, which can be used, what a new session gets, and where keys come from (P-4)."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import model_bench as bench
import pytest
import scripted_provider as scripted
import trio
from trio.testing import MockClock

from loop_protocol.v1.types import ModelRef
from loopd.agent import ModelError
from loopd.config import WELL_KNOWN, Config, Default, ModelConfig, Provider
from loopd.models import ADAPTERS, ECHO, Catalogue, ModelUnavailable, credentials
from loopd.models.vendors import VENDORS

URL = "http://127.0.0.1:1/v1"


def provider(name: str = "p", *models: str, **fields: Any) -> Provider:
    listed = tuple(ModelConfig(id=id) for id in models)
    return Provider(**{"name": name, "api": "openai-chat", "base_url": URL, "auth": "none", "models": listed, **fields})


def catalogue(*providers: Provider, default: ModelRef | None = None, **environ: str) -> Catalogue:
    config = Config(default=Default(model=default), providers={provider.name: provider for provider in providers})
    return Catalogue(config, environ)


def names(models: Catalogue) -> list[str]:
    return [f"{row.provider}/{row.id}{'*' * row.default}{'' if row.usable else ' -'}" for row in models.rows()]


def listed(models: Catalogue) -> list[str]:
    """Of the configured providers."""
    return [name for name in names(models) if not name.startswith(("openai/", "anthropic/", "practice/"))]


def refusal(models: Catalogue, ref: ModelRef) -> str:
    with pytest.raises(ModelUnavailable) as caught:
        models.resolve(ref)
    return str(caught.value)


def test_without_any_configuration_practice_is_the_default_and_the_vendors_say_what_they_lack() -> None:
    models = catalogue()
    assert names(models) == ["openai/* -", "anthropic/* -", "practice/echo*"]
    assert [(row.reason, row.key_env) for row in models.rows()] == [
        ("set OPENAI_API_KEY in the daemon's environment", "OPENAI_API_KEY"),
        ("set ANTHROPIC_API_KEY in the daemon's environment", "ANTHROPIC_API_KEY"),
        (None, None),
    ]
    assert models.default() == ECHO
    assert models.resolve(ECHO).ref == ECHO


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Every protocol spoken by the adapter that is always there."""
    speaking = dict.fromkeys(ADAPTERS, ADAPTERS["openai-chat"])
    monkeypatch.setattr("loopd.models.ADAPTERS", speaking)
    return speaking


@pytest.mark.parametrize("name", ["openai", "anthropic"])
@pytest.mark.usefixtures("adapters")
def test_a_key_in_the_environment_is_enough_for_a_vendor(name: str) -> None:
    models = catalogue(**{WELL_KNOWN[name]: "k"})
    vendor = VENDORS[name]
    rows = [row for row in models.rows() if row.provider == name]
    assert [row.id for row in rows] == [model.id for model in vendor.models]
    assert models.default() == ModelRef(name, vendor.models[0].id)
    for row in rows:
        assert row.usable
        assert row.input == ["text", "image"]
        assert row.reasoning
        assert row.context_window is not None
        assert row.max_output is not None
        assert 8192 <= row.max_output < row.context_window
    another = models.resolve(ModelRef(name, "another", "high"))
    assert (another.ref.id, sorted(another.input)) == ("another", ["image", "text"])
    assert names(models)[-1] == "practice/echo"


def test_the_vendors_speak_their_own_protocols_at_their_own_addresses() -> None:
    assert {name: (vendor.api, vendor.base_url) for name, vendor in VENDORS.items()} == {
        "openai": ("openai-responses", "https://api.openai.com/v1"),
        "anthropic": ("anthropic-messages", "https://api.anthropic.com"),
    }


@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_a_credential_of_systemd_is_enough_for_a_vendor(name: str, tmp_path: Path) -> None:
    nothing = names(catalogue())
    assert names(catalogue(CREDENTIALS_DIRECTORY=str(tmp_path))) == nothing
    (tmp_path / name).write_text("k")
    models = catalogue(CREDENTIALS_DIRECTORY=str(tmp_path))
    assert models.default() == ModelRef(name, VENDORS[name].models[0].id)
    assert all(row.key_env is None for row in models.rows() if row.provider == name)


def test_a_configured_vendor_is_the_only_one_of_its_name() -> None:
    models = catalogue(provider("openai", "own"), OPENAI_API_KEY="k")
    assert names(models) == ["openai/own*", "anthropic/* -", "practice/echo"]


def test_the_first_usable_model_is_the_default() -> None:
    models = catalogue(
        provider("locked", "x", auth=None, api_key_env="NO"),
        provider("bare"),
        provider("good", "x", "y"),
    )
    assert listed(models) == ["locked/x -", "bare/* -", "good/x*", "good/y"]
    assert [(row.reason, row.key_env) for row in models.rows()][:2] == [
        ("set NO in the daemon's environment", "NO"),
        ("no model is listed in [providers.bare]; any can be named as bare/ID", None),
    ]


def test_a_configured_default_stays_it_though_it_cannot_be_used_and_need_not_be_listed() -> None:
    locked = provider("locked", "x", auth=None, api_key_env="NO")
    models = catalogue(locked, provider("good", "x"), default=ModelRef("locked", "big"))
    assert models.default() == ModelRef("locked", "big")
    assert listed(models) == ["locked/x -", "good/x", "locked/big* -"]
    assert names(catalogue(locked, default=ModelRef("locked", "x", "high")))[0] == "locked/x* -"
    assert "practice/echo*" in names(catalogue(provider("good", "x"), default=ECHO))


def test_an_unlisted_model_gets_the_defaults() -> None:
    model = catalogue(provider("p", "listed")).resolve(ModelRef("p", "org/other:free"))
    assert (model.ref.id, sorted(model.input)) == ("org/other:free", ["text"])


@pytest.mark.parametrize(
    ("ref", "text"),
    [
        (ModelRef("nobody", "x"), "no provider 'nobody': add [providers.nobody] to the configuration"),
        (ModelRef("openai", "x"), "set OPENAI_API_KEY in the daemon's environment"),
        (ModelRef("anthropic", "x"), "set ANTHROPIC_API_KEY in the daemon's environment"),
        (ModelRef("practice", "parrot"), "practice has only practice/echo"),
        (ModelRef("practice", "echo", "high"), "leave 'high' out"),
        (ModelRef("p", "listed", "high"), "leave 'high' out"),
        (ModelRef("p", "listed", "utmost"), "only low, medium, high"),
        (ModelRef("p", "thinks", "utmost"), "only low, medium, high"),
        (ModelRef("p", ""), "any can be named as p/ID"),
        (ModelRef("env", "x"), "set MISSING in the daemon's environment"),
        (ModelRef("empty", "x"), "set EMPTY in the daemon's environment"),
        (ModelRef("file", "x"), "key file /nonexistent/key cannot be read"),
        (ModelRef("command", "x"), "key command no-such-program cannot be found"),
        (ModelRef("unsaid", "x"), "say where its key comes from"),
    ],
)
def test_what_cannot_be_used_says_what_to_do(ref: ModelRef, text: str) -> None:
    models = catalogue(
        provider("p", models=(ModelConfig(id="listed"), ModelConfig(id="thinks", reasoning=True))),
        provider("env", auth=None, api_key_env="MISSING"),
        provider("empty", auth=None, api_key_env="EMPTY"),
        provider("file", auth=None, api_key_file="/nonexistent/key"),
        provider("command", auth=None, api_key_command=("no-such-program",)),
        provider("unsaid", auth=None),
        EMPTY="",
        PATH=os.environ["PATH"],
    )
    assert text in refusal(models, ref)


def test_httpx2_is_not_imported_by_looking_at_the_models() -> None:
    code = (
        "import sys; from loopd.config import Config; from loopd.models import Catalogue;"
        "c = Catalogue(Config(), {'OPENAI_API_KEY': 'k'}); c.rows(); c.default();"
        "assert 'httpx2' not in sys.modules and 'loopd.models.openai_chat' not in sys.modules"
    )
    assert os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", code) == 0


async def test_warming_up_prepares_the_default_and_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    await catalogue().warm()
    monkeypatch.setenv("ALL_PROXY", "gopher://nowhere")
    models = catalogue(provider("p", "x", base_url="http://192.0.2.1"))
    await models.warm()
    await models.aclose()


# --- keys -------------------------------------------------------------------------------------------------------------


async def key_sent(
    server: scripted.ScriptedProvider, environ: dict[str, str] | None = None, **source: Any
) -> str | None:
    server.script = scripted.sends(scripted.delta(content="x"), scripted.delta("stop"))
    models = bench.catalogue(server.url, environ=environ, **source)
    try:
        await bench.ask(models.resolve(bench.M), [bench.user(0, "hi")], bench.Said())
    finally:
        await models.aclose()
    return server.asked[-1].headers.get("authorization")


SHELL = ("/bin/sh", "-c")
Server = scripted.ScriptedProvider


@pytest.fixture
def server(provider: Server) -> Server:
    return provider


async def test_a_key_comes_from_where_it_was_said_to_be(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\n")
    assert await key_sent(server) is None
    assert await key_sent(server, {"K": "from-env"}, api_key_env="K") == "Bearer from-env"
    assert await key_sent(server, api_key_file=str(file)) == "Bearer from-file"
    assert await key_sent(server, {"HOME": "/h"}, api_key_command=(*SHELL, "echo $HOME")) == "Bearer /h"


async def test_a_key_is_read_anew_for_each_request(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("old")
    server.script = scripted.sends(scripted.delta(content="x"), scripted.delta("stop"))
    models = bench.catalogue(server.url, api_key_file=str(file))
    model = models.resolve(bench.M)
    for key in ("old", "new"):
        file.write_text(key)
        await bench.ask(model, [bench.user(0, "hi")], bench.Said())
    assert [asked.headers["authorization"] for asked in server.asked] == ["Bearer old", "Bearer new"]
    await models.aclose()


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("echo secret-key; exit 3", "ended with status 3"),
        ("true", "the key is empty"),
        ("printf 'secret-key\\nsecret-key'", "characters that no key has"),
        ("printf 'secret-k\\344y'", "characters that no key has"),
        ("while :; do echo secret-key; done", "prints too much for a key"),
        ("cat; echo secret-key >&2", "the key is empty"),
        ("kill -9 $$", "ended with status -9"),
    ],
)
async def test_a_command_that_gives_no_key_is_an_auth_error_without_its_output(
    server: Server, script: str, text: str
) -> None:
    with trio.fail_after(5), pytest.raises(ModelError) as caught:
        await key_sent(server, api_key_command=(*SHELL, script))
    assert caught.value.kind == "auth"
    assert text in str(caught.value)
    assert "secret-k" not in str(caught.value)


async def test_a_key_file_that_is_a_silent_pipe_is_given_up(
    server: Server, tmp_path: Path, autojump_clock: MockClock
) -> None:
    os.mkfifo(tmp_path / "key")
    with pytest.raises(ModelError, match="took more than 10 s") as caught:
        await key_sent(server, api_key_file=str(tmp_path / "key"))
    assert caught.value.kind == "auth"
    assert autojump_clock.current_time() >= 10
    # Let the thread that was left behind go.
    os.close(os.open(tmp_path / "key", os.O_WRONLY))


async def test_a_cancelled_command_is_killed_with_its_children(server: Server, tmp_path: Path) -> None:
    told = tmp_path / "told"
    os.mkfifo(told)
    script = f"trap '' TERM; sleep 60 & echo $! > {told}; wait"
    async with trio.open_nursery() as asking:
        asking.start_soon(partial(key_sent, server, api_key_command=(*SHELL, script)))
        child = os.pidfd_open(int(await trio.Path(told).read_text()))
        asking.cancel_scope.cancel()
    with trio.fail_after(5):
        await trio.lowlevel.wait_readable(child)  # it has ended
    os.close(child)


async def test_a_command_that_hangs_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "PATIENCE_S", 0.1)  # not virtual time, which runs while a process ends
    with trio.fail_after(5), pytest.raises(ModelError, match=r"took more than 0\.1 s") as caught:
        await key_sent(server, api_key_command=(*SHELL, "exec sleep 60"))
    assert caught.value.kind == "auth"


async def test_a_key_file_that_went_away_is_an_auth_error(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("k")
    models = bench.catalogue(server.url, api_key_file=str(file))
    model = models.resolve(bench.M)
    file.unlink()
    with pytest.raises(ModelError, match="cannot read the key file") as caught:
        await bench.ask(model, [bench.user(0, "hi")], bench.Said())
    assert caught.value.kind == "auth"
