"""The vendors that need no configuration: where they are, which models they have, where their keys are looked for.

The ids, windows and limits are those of the vendors' own pages in November 2026. Any other model can be named too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ..config import WELL_KNOWN, ModelConfig, Provider


@dataclass(slots=True, frozen=True)
class Vendor:
    """``models``: the first is what a new session gets, where nothing else is said."""

    api: Literal["openai-responses", "anthropic-messages"]
    base_url: str
    models: tuple[ModelConfig, ...]


def _models(*ids: str, context_window: int, max_output: int) -> tuple[ModelConfig, ...]:
    return tuple(
        ModelConfig(
            id=id, context_window=context_window, max_output=max_output, input=("text", "image"), reasoning=True
        )
        for id in ids
    )


VENDORS = {
    "openai": Vendor(
        "openai-responses",
        "https://api.openai.com/v1",
        _models("gpt-6.2-sol", "gpt-6.1-sol", "gpt-5.6-luna", context_window=1_050_000, max_output=128_000),
    ),
    "anthropic": Vendor(
        "anthropic-messages",
        "https://api.anthropic.com",
        _models(
            "claude-opus-5-5",
            "claude-sonnet-5-5",
            "claude-haiku-5-5",
            context_window=1_000_000,
            max_output=128_000,
        ),
    ),
}


def providers(environ: Mapping[str, str]) -> dict[str, Provider]:
    """All of them; those without a key have no models, and say which variable it would be read from."""
    return {provider.name: provider for provider in _providers(environ)}


def _providers(environ: Mapping[str, str]) -> Iterator[Provider]:
    directory = environ.get("CREDENTIALS_DIRECTORY", "")  # systemd's, with a file for each credential
    for name, vendor in VENDORS.items():
        variable, file = WELL_KNOWN[name], os.path.join(directory, name)
        if environ.get(variable):
            yield Provider(
                name=name, api=vendor.api, base_url=vendor.base_url, api_key_env=variable, models=vendor.models
            )
        elif directory and os.path.exists(file):
            yield Provider(name=name, api=vendor.api, base_url=vendor.base_url, api_key_file=file, models=vendor.models)
        else:
            yield Provider(name=name, api=vendor.api, base_url=vendor.base_url, api_key_env=variable)


def unlisted(provider: Provider, id: str) -> ModelConfig:
    """What is assumed of a model that is not listed: the least, but of a vendor's own what all of its models can."""
    if any(provider.base_url == vendor.base_url for vendor in VENDORS.values()):
        return ModelConfig(id=id, input=("text", "image"), reasoning=True)
    return ModelConfig(id=id)
