"""Which failures of a provider may be gone a moment later, and how long it wants to be left alone."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from email.utils import formatdate
from time import time

import model_bench as bench
import pytest
import scripted_provider as scripted

from loopd.agent import ModelError
from loopd.models import Catalogue
from loopd.models.refusal import refusal, retry_after, stream_error

Server = scripted.ScriptedProvider


async def failure(provider: Server, models: Catalogue, script: scripted.Script) -> ModelError:
    provider.script = script
    with pytest.raises(ModelError) as caught:
        await bench.ask(models.resolve(bench.M), [bench.user(0, "hi")], bench.Said())
    return caught.value


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 529])
def test_a_status_about_the_moment_passes(status: int) -> None:
    assert refusal(status, b"{}").retryable


@pytest.mark.parametrize("status", [301, 400, 401, 402, 403, 404, 413, 422, 501])
def test_a_status_about_the_request_does_not(status: int) -> None:
    assert not refusal(status, b"{}", {"retry-after": "1"}).retryable
    assert refusal(status, b"{}", {"retry-after": "1"}).retry_after_s is None


def test_the_vendors_word_on_it_counts_more_than_the_status() -> None:
    assert refusal(400, b"{}", {"x-should-retry": "true"}).retryable
    assert not refusal(503, b"{}", {"x-should-retry": "false"}).retryable


def test_an_account_without_money_does_not_pass() -> None:
    body = b'{"error":{"message":"You exceeded your current quota","code":"insufficient_quota"}}'
    assert not refusal(429, body).retryable


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "1400000"}, 1_400_000),
        ({"retry-after": "9", "retry-after-ms": "250"}, 0.25),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "1e9"}, None),
        ({"retry-after": "9" * 400}, None),
        ({"retry-after": formatdate(0, usegmt=True)}, 0),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "1m30s"}, 90),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "20ms"}, 0.02),
        ({"x-ratelimit-remaining-tokens": "5", "x-ratelimit-reset-tokens": "6m0s"}, None),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "later"}, None),
    ],
)
def test_how_long_it_wants_to_be_left_alone(headers: Mapping[str, str], seconds: float | None) -> None:
    assert retry_after(headers) == seconds


def test_a_date_says_it_too() -> None:
    seconds = retry_after({"retry-after": formatdate(time() + 40, usegmt=True)})
    assert seconds is not None
    assert 38 <= seconds <= 40


async def test_the_header_of_an_answer_gets_to_whoever_asked(provider: Server, models: Catalogue) -> None:
    head = b"HTTP/1.1 429 X\r\nRetry-After: 1400000\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    error = await failure(provider, models, scripted.says(head))
    assert (error.kind, error.retryable, error.retry_after_s) == ("rate_limit", True, 1_400_000)


async def test_a_broken_connection_passes(provider: Server, models: Catalogue) -> None:
    for script in (
        scripted.resets(),
        scripted.resets(scripted.STREAM),
        scripted.says(b"", close=True),
        scripted.says(scripted.STREAM, close=True),
        scripted.sends(scripted.delta(role="assistant"), done=False),
    ):
        assert (await failure(provider, models, script)).retryable


async def test_a_server_that_is_not_there_may_come(provider: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    absent = bench.catalogue(f"http://127.0.0.1:{port}/v1")
    error = await failure(provider, absent, scripted.says(b""))
    assert (error.kind, error.retryable) == ("unreachable", True)
    await absent.aclose()


async def test_an_answer_that_is_none_does_not_pass(provider: Server, models: Catalogue) -> None:
    for script in (
        scripted.answers(200, b"<html>hello</html>", "text/html"),
        scripted.sends(scripted.delta("stop")),
        scripted.sends(scripted.delta("content_filter")),
        scripted.sends(b"data: {oops\n\n"),
        scripted.answers(401, b"{}"),
    ):
        assert not (await failure(provider, models, script)).retryable


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        ({"type": "overloaded_error"}, True),
        ({"code": "rate_limit_exceeded"}, True),
        ({"type": "server_error"}, True),
        ({"type": "api_error"}, True),
        ({"code": 503}, True),
        ({"code": 400}, False),
        ({"code": 500}, True),
        ({"type": "invalid_request_error"}, False),
        ("text", False),
    ],
)
def test_an_error_in_mid_stream_passes_by_its_name(error: object, passes: bool) -> None:
    assert stream_error(error).retryable is passes
