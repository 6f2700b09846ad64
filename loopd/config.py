"""The settings: one TOML file, read once, frozen; a wrong one is refused with line, key and what is allowed."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from loop_protocol.v1.types import ModelRef, Permission

from . import tomlfile
from .tomlfile import Keys, Reading

MAX_BYTES = 1 << 20
INT32 = 2147483647
PRACTICE = "practice"
# Providers that exist without being configured, and the variables that hold their keys.
WELL_KNOWN = {"openai": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY"}
KEY_SOURCES = ("auth", "api_key_env", "api_key_file", "api_key_command")

# --- what is allowed --------------------------------------------------------------------------------------------------

Count = Annotated[int, Meta(ge=1, le=INT32, description=f"a whole number from 1 to {INT32}")]
# D-4: a TERM ends the daemon within 10 s, and what is stopped at the deadline must still be saved or rescued.
DrainSeconds = Annotated[float, Meta(ge=0, le=8, description="seconds from 0 to 8")]
IdleSeconds = Annotated[float, Meta(ge=0, le=INT32, description="seconds, or 0 to stay")]
ToolSeconds = Annotated[float, Meta(gt=0, le=86400, description="seconds, more than 0 and at most 86400")]
Text = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f]+\Z", description="text on one line, not empty")]
Variable = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z", description="the name of an environment variable")]
Variables = tuple[Variable, ...]
# The daemon's own directory is nobody's idea of "here", so a relative path would surprise.
KeyFile = Annotated[str, Meta(pattern=r"^(/|~/)[^\x00]+\Z", description="a path that begins with / or ~/")]
Command = Annotated[tuple[Text, ...], Meta(min_length=1, description="a list of a program and its arguments")]
BaseUrl = Annotated[str, Meta(description="an http or https address, without user, query and fragment")]
HeaderName = Annotated[str, Meta(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")]
HeaderValue = Annotated[str, Meta(pattern=r"^[\t\x20-\x7e]*\Z")]
Headers = Annotated[dict[HeaderName, HeaderValue], Meta(description="a table of HTTP headers, each printable ASCII")]
Input = Annotated[tuple[Literal["text", "image"], ...], Meta(min_length=1, description='a list of "text" and "image"')]


# --- the records: their fields are the keys of the file ---------------------------------------------------------------


class TitlePolicy(Struct, frozen=True, kw_only=True, rename="camel"):
    """How sessions get their titles (T-1)."""

    mode: Literal["off", "first-prompt", "all-prompts"] = "off"
    model: ModelRef | None = None
    max_input_bytes: Count = 16384
    max_output_tokens: Count = 256
    timeout_ms: Count = 15000


class Default(Struct, frozen=True, kw_only=True):
    """What a session gets that does not say otherwise."""

    model: ModelRef | None = None
    permission: Permission = "read-only"
    title: TitlePolicy = TitlePolicy()


class DaemonSettings(Struct, frozen=True, kw_only=True):
    durability: Literal["power-loss", "process"] = "power-loss"
    drain_deadline_s: DrainSeconds = 8.0
    idle_exit_s: IdleSeconds = 0.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class ToolSettings(Struct, frozen=True, kw_only=True):
    """``env``: the names that a tool's environment gets besides the fixed allow-list."""

    env: Variables = ()
    bash_timeout_s: ToolSeconds = 600.0


class ModelConfig(Struct, frozen=True, kw_only=True):
    id: Text
    context_window: Count | None = None
    max_output: Count | None = None
    input: Input = ("text",)
    reasoning: bool = False


class Provider(Struct, frozen=True, kw_only=True):
    """Where models are reached. Exactly one of ``auth`` and the three ``api_key_*`` is set."""

    name: str
    api: Literal["openai-chat", "openai-responses", "anthropic-messages"]
    base_url: BaseUrl
    auth: Literal["none"] | None = None
    api_key_env: Variable | None = None
    api_key_file: KeyFile | None = None
    api_key_command: Command | None = None
    headers: Headers = {}
    models: tuple[ModelConfig, ...] = ()

    def __repr__(self) -> str:
        """Without headers and command: they may hold secrets, and a repr ends up in logs."""
        return f"Provider(name={self.name!r}, api={self.api!r}, base_url={self.base_url!r})"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("name", self.name), ("api", self.api), ("base_url", self.base_url)]


class Config(Struct, frozen=True, kw_only=True):
    default: Default = Default()
    daemon: DaemonSettings = DaemonSettings()
    tools: ToolSettings = ToolSettings()
    providers: dict[str, Provider] = {}


class ConfigError(Exception):
    """The settings cannot be used as they are: one line per problem."""


# --- reading ----------------------------------------------------------------------------------------------------------


def load(path: str | None) -> Config:
    """Read ``path``, else ``$LOOPD_CONFIG``, else the default place, where no file is as good as an empty one."""
    asked = path or os.environ.get("LOOPD_CONFIG")
    where = asked or default_path()
    if not asked and not os.path.lexists(where):
        return Config()
    try:
        with open(where, "rb") as file:
            return parse(file.read(MAX_BYTES + 1), where)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror or error}") from error


def default_path() -> str:
    base = os.environ.get("XDG_CONFIG_HOME", "")
    # XDG: a relative value is invalid and counts as unset.
    return os.path.join(base if base.startswith("/") else os.path.expanduser("~/.config"), "loopd", "config.toml")


def parse(raw: bytes, where: str) -> Config:
    """The settings in ``raw``; ``where`` is what complaints call the file."""
    try:
        text = _text(raw, where)
        reading = Reading(tomlfile.parse(text, where), _SPECIAL)
        config: Config = reading.record(Config, reading.document)
        reading.finish(text, where)
    except tomlfile.TomlError as error:
        raise ConfigError(str(error)) from error
    return config


def _text(raw: bytes, where: str) -> str:
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{where}: larger than {MAX_BYTES} bytes")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{where}:{line}: not UTF-8") from error


# --- what the types alone cannot say ----------------------------------------------------------------------------------


def _model(reading: Reading, raw: Any, at: Keys) -> Any:
    """``provider/id``, split at the first slash: ids have slashes of their own."""
    provider, slash, model = raw.partition("/") if isinstance(raw, str) else ("", "", "")
    if not (provider and slash and model):
        return reading.refuse(at, 'allowed: "PROVIDER/MODEL"')
    known = sorted({*_provider_tables(reading), *WELL_KNOWN, PRACTICE})
    if provider not in known:
        return reading.refuse(at, f"no such provider; {tomlfile.nearest(provider, known)}")
    return ModelRef(provider, model)


def _tool_env(reading: Reading, raw: Any, at: Keys) -> Any:
    """No provider's key ever reaches a tool, not even by configuration."""
    names = reading.plain(Variables, raw, at)
    keys = [*WELL_KNOWN.values(), *(table.get("api_key_env") for table in _provider_tables(reading).values())]
    for name in names or ():
        if name in keys:
            reading.refuse(at, f"{name} holds a provider's key, and no key reaches a tool")
    return names


def _provider_tables(reading: Reading) -> dict[str, dict[str, Any]]:
    tables = reading.document.get("providers")
    tables = tables if isinstance(tables, dict) else {}
    return {name: table for name, table in tables.items() if isinstance(table, dict)}


def _providers(reading: Reading, raw: Any, at: Keys) -> Any:
    if not isinstance(raw, dict):
        return reading.refuse(at, "must be a table")
    return {name: _provider(reading, table, (*at, name), name) for name, table in raw.items()}


def _provider(reading: Reading, raw: Any, at: Keys, name: str) -> Any:
    if name == PRACTICE:
        reading.refuse(at, "this name is the built-in practice model's")
    elif not re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", name):
        reading.refuse(at, "allowed as a name: a-z 0-9 _ . - and a letter or digit first")
    if isinstance(raw, dict):
        _one_key_source(reading, [key for key in KEY_SOURCES if key in raw], at)
    provider = reading.record(Provider, raw, at, name=name)
    if provider and provider.api_key_file:
        return msgspec.structs.replace(provider, api_key_file=os.path.expanduser(provider.api_key_file))
    return provider


def _one_key_source(reading: Reading, sources: list[str], at: Keys) -> None:
    if not sources:
        reading.refuse(at, f'allowed: auth = "none" if it takes no key, else one of {", ".join(KEY_SOURCES[1:])}')
    for extra in sources[1:]:
        reading.refuse((*at, extra), f"only one of {', '.join(KEY_SOURCES)} is allowed, and {sources[0]} is there")


def _base_url(reading: Reading, raw: Any, at: Keys) -> Any:
    """Credentials in the address would be shown wherever the address is."""
    try:
        url = urlsplit(raw) if isinstance(raw, str) and raw.isprintable() and " " not in raw else None
        fits = url and url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError:  # a port above 65535, a broken IPv6 address
        url, fits = None, False
    if not fits or not url or "@" in url.netloc or url.query or url.fragment:
        return reading.refuse(at, f"allowed: {tomlfile.allowed(BaseUrl)}")
    return str(raw).rstrip("/")


def _models(reading: Reading, raw: Any, at: Keys) -> Any:
    models = reading.records(ModelConfig, raw, at) or ()
    seen = set()
    for index, model in enumerate(models):
        if model and model.id in seen:
            reading.refuse((*at, index, "id"), "this model is there already")
        if model and (model.max_output or 0) > (model.context_window or INT32):
            reading.refuse((*at, index, "max_output"), "allowed: at most the context_window")
        seen.add(model and model.id)
    return models


_SPECIAL = {
    ModelRef: _model,
    Variables: _tool_env,
    BaseUrl: _base_url,
    tuple[ModelConfig, ...]: _models,
    dict[str, Provider]: _providers,
}
