"""A provider on loopback, and a catalogue that knows it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import model_bench
import pytest
import scripted_provider
import trio

from loopd.models import Catalogue


@pytest.fixture
async def provider(nursery: trio.Nursery) -> scripted_provider.ScriptedProvider:
    return await scripted_provider.start(nursery)


@pytest.fixture
def api() -> str:
    """What the provider speaks; a test file may say something else."""
    return "openai-chat"


@pytest.fixture
async def models(provider: scripted_provider.ScriptedProvider, api: str) -> AsyncIterator[Catalogue]:
    catalogue = model_bench.catalogue(provider.url, api=api, api_key_env="KEY", environ={"KEY": model_bench.KEY})
    yield catalogue
    await catalogue.aclose()
