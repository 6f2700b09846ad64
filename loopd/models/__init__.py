"""The models: which ones there are, which of them can be used and why the others cannot; a name becomes a Model."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping

from loop_protocol.v1.methods import ModelRow
from loop_protocol.v1.types import ModelRef

from ..agent import Model
from ..config import PRACTICE, Config, ModelConfig, Provider
from . import credentials, vendors
from .http import Endpoint, Http
from .practice import Practice

# Who speaks which protocol, made with (ref, config, endpoint); imported with the first use, so that nobody pays for
# what nobody uses.
ADAPTERS = {
    "openai-chat": "openai_chat:OpenAIChat",
    "openai-responses": "openai_responses:OpenAIResponses",
    "anthropic-messages": "anthropic:AnthropicMessages",
}

ECHO = ModelRef(PRACTICE, "echo")
ECHO_CONFIG = ModelConfig(id=ECHO.id, input=("text", "image"))
# What every reasoning model understands. Others that a vendor has would be refused by the other vendors.
EFFORTS = ("low", "medium", "high")
# The id in the row of a provider that lists no models.
ANY = "*"


class ModelUnavailable(Exception):
    """No request can be sent to that model as things are; the text says what to do."""


class Catalogue:
    """All models of the configuration, of the environment, and ``practice/echo``. Owns the HTTP client."""

    def __init__(self, config: Config, environ: Mapping[str, str]) -> None:
        self._chosen = config.default.model
        self._environ = environ
        known = vendors.providers(environ)
        self._providers = config.providers | {name: known[name] for name in known if name not in config.providers}
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
        provider = self._providers[ref.provider]
        adapter = pkgutil.resolve_name(f"{__package__}.{ADAPTERS[provider.api]}")
        model: Model = adapter(ref, self._config(ref), Endpoint(provider, self._environ, self._http))
        return model

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
            reasoning=model.reasoning,
            key_env=self._missing_variable(ref),
        )

    def _missing_variable(self, ref: ModelRef) -> str | None:
        """The name of the variable that a key would be read from, where it has none."""
        match self._providers.get(ref.provider):
            case Provider(api_key_env=str(name)) if not self._environ.get(name):
                return name
        return None

    def _config(self, ref: ModelRef) -> ModelConfig:
        """As it is listed, else a provider's defaults."""
        provider = self._providers.get(ref.provider)
        if provider is None:
            return ECHO_CONFIG if ref.id == ECHO.id else ModelConfig(id=ref.id)
        listed = next((model for model in provider.models if model.id == ref.id), None)
        return listed or vendors.unlisted(provider, ref.id)

    def _reason(self, ref: ModelRef) -> str | None:
        """Why it cannot be used, and what would help."""
        if ref.provider == PRACTICE:
            return self._no_effort(ref) if ref.id == ECHO.id else f"{PRACTICE} has only {ECHO}"
        provider = self._providers.get(ref.provider)
        if provider is None:
            return f"there is no provider {ref.provider!r}: add [providers.{ref.provider}] to the configuration"
        if (missing := credentials.missing(provider, self._environ)) is not None:
            return missing
        if ref.id in ("", ANY):
            return f"no model is listed in [providers.{provider.name}]; any can be named as {provider.name}/ID"
        return self._no_effort(ref)

    def _no_effort(self, ref: ModelRef) -> str | None:
        if ref.effort is None:
            return None
        if ref.effort not in EFFORTS:
            return f"there is no reasoning effort {ref.effort!r}, only {', '.join(EFFORTS)}"
        if self._config(ref).reasoning:
            return None
        return f"it has no reasoning effort; leave {ref.effort!r} out, or list it with reasoning = true if it has"


def _same(one: ModelRef, other: ModelRef) -> bool:
    return (one.provider, one.id) == (other.provider, other.id)
