"""The models: which ones there are, which of them can be used and why the others cannot; a name becomes a Model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping

from loop_protocol.v1.methods import ModelRow
from loop_protocol.v1.types import ModelRef

from ..agent import Model
from ..config import PRACTICE, WELL_KNOWN, Config, ModelConfig, Provider
from . import credentials
from .anthropic import AnthropicMessages
from .http import Endpoint, Http
from .openai_chat import OpenAIChat
from .openai_responses import OpenAIResponses
from .practice import Practice

ECHO = ModelRef(PRACTICE, "echo")
ECHO_CONFIG = ModelConfig(id=ECHO.id, input=("text", "image"))
OPENAI = "openai"
OPENAI_URL = "https://api.openai.com/v1"
# Later ones (5.5, 5.6) refuse function tools on Chat Completions, and this one takes them only without reasoning.
OPENAI_MODEL = ModelConfig(id="gpt-5.4", context_window=1_050_000, max_output=128_000, input=("text", "image"))
ADAPTERS: dict[str, Callable[[ModelRef, ModelConfig, Endpoint], Model]] = {
    "openai-chat": OpenAIChat,
    "openai-responses": OpenAIResponses,
    "anthropic-messages": AnthropicMessages,
}
# The id in the row of a provider that lists no models.
ANY = "*"


class ModelUnavailable(Exception):
    """No request can be sent to that model as things are; the text says what to do."""


class Catalogue:
    """All models of the configuration, of the environment, and ``practice/echo``. Owns the HTTP client."""

    def __init__(self, config: Config, environ: Mapping[str, str]) -> None:
        self._chosen = config.default.model
        self._environ = environ
        self._providers = config.providers if OPENAI in config.providers else config.providers | _from_environ(environ)
        self._http = Http()

    def rows(self) -> list[ModelRow]:
        """Every listed model, the default one even where it is not listed, practice last."""
        default = self.default()
        return [self._row(ref, default=_same(ref, default)) for ref in self._refs()]

    def default(self) -> ModelRef:
        """What a new session gets. A configured one stays it when it cannot be used, so that the reason shows."""
        if self._chosen is not None:
            return self._chosen
        return next(ref for ref in self._refs() if self._reason(ref) is None)

    def resolve(self, ref: ModelRef) -> Model:
        """The model, when all is well that can be checked without asking it (P-4). Raises :class:`ModelUnavailable`."""
        if (reason := self._reason(ref)) is not None:
            raise ModelUnavailable(f"the model {ref} cannot be used: {reason}")
        if ref.provider == PRACTICE:
            return Practice(ref, frozenset(ECHO_CONFIG.input))
        endpoint = Endpoint(self._providers[ref.provider], self._environ, self._http)
        return ADAPTERS[endpoint.provider.api](ref, self._config(ref), endpoint)

    async def warm(self) -> None:
        """Make what the default model's first request needs, off the loop, once there is time for it."""
        default = self.default()
        if default.provider in self._providers and self._reason(default) is None:
            await self._http.warm(self._providers[default.provider].base_url)

    async def aclose(self) -> None:
        await self._http.aclose()

    def _refs(self) -> Iterator[ModelRef]:
        listed = [
            ModelRef(provider.name, model.id)
            for provider in self._providers.values()
            for model in provider.models or (ModelConfig(id=ANY),)
        ]
        yield from listed
        if self._chosen is not None and not any(_same(self._chosen, ref) for ref in (*listed, ECHO)):
            yield self._chosen
        yield ECHO

    def _row(self, ref: ModelRef, *, default: bool) -> ModelRow:
        model, reason = self._config(ref), self._reason(ref)
        return ModelRow(
            provider=ref.provider,
            id=ref.id,
            usable=reason is None,
            input=list(model.input),
            default=default,
            reason=reason,
            context_window=model.context_window,
            max_output=model.max_output,
        )

    def _config(self, ref: ModelRef) -> ModelConfig:
        """As it is listed, else a provider's defaults."""
        provider = self._providers.get(ref.provider)
        listed = provider.models if provider is not None else (ECHO_CONFIG,)
        return next((model for model in listed if model.id == ref.id), ModelConfig(id=ref.id))

    def _reason(self, ref: ModelRef) -> str | None:
        """Why it cannot be used, and what would help."""
        if ref.provider == PRACTICE:
            return self._no_effort(ref) if ref.id == ECHO.id else f"{PRACTICE} has only {ECHO}"
        provider = self._providers.get(ref.provider)
        if provider is None:
            return _unknown(ref.provider)
        if ref.id in ("", ANY):
            return f"no model is listed in [providers.{provider.name}]; any can be named as {provider.name}/ID"
        return credentials.missing(provider, self._environ) or self._no_effort(ref)

    def _no_effort(self, ref: ModelRef) -> str | None:
        if ref.effort is None or self._config(ref).reasoning:
            return None
        return f"it has no reasoning effort; leave {ref.effort!r} out, or list it with reasoning = true if it has"


def _unknown(name: str) -> str:
    variable = WELL_KNOWN[OPENAI]
    also = f", or set {variable} in the daemon's environment" if name == OPENAI else ""
    return f"there is no provider {name!r}: add [providers.{name}] to the configuration{also}"


def _from_environ(environ: Mapping[str, str]) -> dict[str, Provider]:
    """The provider that needs no configuration: its key is in the environment, or in systemd's credentials."""
    variable, directory = WELL_KNOWN[OPENAI], environ.get("CREDENTIALS_DIRECTORY", "")
    file = os.path.join(directory, OPENAI)
    if environ.get(variable):
        provider = Provider(
            name=OPENAI, api="openai-chat", base_url=OPENAI_URL, api_key_env=variable, models=(OPENAI_MODEL,)
        )
    elif directory and os.path.exists(file):
        provider = Provider(
            name=OPENAI, api="openai-chat", base_url=OPENAI_URL, api_key_file=file, models=(OPENAI_MODEL,)
        )
    else:
        return {}
    return {OPENAI: provider}


def _same(one: ModelRef, other: ModelRef) -> bool:
    return (one.provider, one.id) == (other.provider, other.id)
