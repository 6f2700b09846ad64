"""One HTTP client for all providers: a POST out, server-sent events in, and every failure a :class:`ModelError`.

httpx2 is imported in a thread, with the first request or when the daemon has the time for it, never at its start.
Nothing is tried twice here; whether that may help is said. Cancelling closes the connection at once.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import trio

from .. import __version__
from ..agent import ModelError
from ..config import Provider
from . import credentials
from .refusal import quote, refusal
from .sse import Event, EventReader, EventTooLarge

if TYPE_CHECKING:
    import httpx2

CONNECT_S = 10
SILENCE_S = 300
# A body that shall only be quoted, and how long it may take to come.
BODY = 64 * 1024
BODY_S = 10
# How long a body of which enough was read may take to end, so that its connection can be used again.
END_S = 0.1
MESSAGE = 800
# What is shorter is no secret, and replacing it would make errors unreadable.
SECRET = 6

T = TypeVar("T")
# Takes one event and answers whether it was the last one.
Take = Callable[[Event], bool]
Headers = Callable[[str | None], Mapping[str, str]]


@dataclass(slots=True)
class Http:
    """The client, made with the first request. The proxies of the environment would capture loopback hosts too, so
    those get a client of their own without them."""

    _clients: dict[bool, httpx2.AsyncClient] = field(default_factory=dict)

    async def warm(self, url: str) -> None:
        with suppress(OSError, ValueError, ImportError):  # the first request says it
            await self.client(url)

    async def client(self, url: str) -> httpx2.AsyncClient:
        direct = is_loopback(url)
        if direct not in self._clients:
            made = await trio.to_thread.run_sync(_client, direct)
            # Two first requests may both have made one; the unused one has no connection to close.
            self._clients.setdefault(direct, made)
        return self._clients[direct]

    async def aclose(self) -> None:
        while self._clients:
            _, client = self._clients.popitem()
            await client.aclose()


def _client(direct: bool) -> httpx2.AsyncClient:
    import httpx2

    return httpx2.AsyncClient(
        trust_env=not direct,
        timeout=httpx2.Timeout(SILENCE_S, connect=CONNECT_S, pool=None),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=30),
    )


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bearer(key: str | None) -> Mapping[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


@dataclass(slots=True, frozen=True, repr=False)
class Endpoint:
    """One provider over HTTP."""

    provider: Provider
    environ: Mapping[str, str]
    http: Http

    async def post(self, path: str, *, body: bytes, take: Take, end: Callable[[], T], headers: Headers = bearer) -> T:
        """POST, give each event to ``take`` until it says that this was the last or the stream ends, answer ``end()``.

        ``headers`` are the API's own ones, for the key if there is one.

        A :class:`ModelError`, also one of these two, gets the provider's name and loses what is secret.
        """
        key = await credentials.key(self.provider, self.environ)
        secrets = [*self.provider.headers.values(), *([key] if key else [])]
        url = self.provider.base_url.rstrip("/") + path
        try:
            await self._post(url, headers=self._headers(headers(key)), body=body, take=take)
            return end()
        except ModelError as error:
            # First without secrets, then short: a cut secret would not be recognised.
            text = redacted(f"{self.provider.name} {error}", secrets)
            text = text if len(text) <= MESSAGE else text[:MESSAGE] + "…"
            raise ModelError(error.kind, text, retryable=error.retryable, retry_after_s=error.retry_after_s) from None

    async def _post(self, url: str, *, headers: dict[str, str], body: bytes, take: Take) -> None:
        try:
            client = await self.http.client(url)
        except (OSError, ValueError, ImportError) as error:
            # Proxy variables that cannot be used, an SSL_CERT_FILE that is not there.
            raise ModelError("unreachable", f"cannot be asked: {why(error)}", retryable=False) from None
        import httpx2

        started = False
        try:
            async with client.stream("POST", url, headers=headers, content=body) as response:
                await _require_stream(response)
                started = True
                await _read_events(response, take)
        except httpx2.TimeoutException as error:
            raise _timed_out(error, url, started=started) from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            if started:
                raise ModelError("incomplete", f"broke off its answer: {why(error)}", retryable=True) from None
            # The others, like a proxy's address that cannot be used, are wrong each time.
            passing = isinstance(error, httpx2.NetworkError | httpx2.RemoteProtocolError | httpx2.ProxyError)
            text = f"cannot be reached at {place(url)}: {why(error)}"
            raise ModelError("unreachable", text, retryable=passing) from None

    def _headers(self, own: Mapping[str, str]) -> dict[str, str]:
        return {
            "user-agent": f"loopd/{__version__}",
            "accept": "text/event-stream",
            "accept-encoding": "identity",  # compressed, a piece would wait in the server until more has come
            "content-type": "application/json",
            **own,
            **{name.lower(): value for name, value in self.provider.headers.items()},
        }


async def _require_stream(response: httpx2.Response) -> None:
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if response.status_code != 200:
        raise refusal(response.status_code, await _start_of_body(response), response.headers)
    if kind not in ("text/event-stream", ""):
        said = quote(await _start_of_body(response))
        raise ModelError("provider", f"answered with {kind} where an event stream was due: {said}")


async def _start_of_body(response: httpx2.Response) -> bytes:
    import httpx2

    body = bytearray()

    def take(piece: bytes) -> bool:
        body.extend(piece)
        return len(body) > BODY

    with trio.move_on_after(BODY_S), suppress(httpx2.HTTPError):
        await _read(response, take)
    return bytes(body[:BODY])


async def _read_events(response: httpx2.Response, take: Take) -> None:
    reader = EventReader()

    def take_piece(piece: bytes) -> bool:
        try:
            return any(take(event) for event in reader.feed(piece))
        except EventTooLarge as error:
            raise ModelError("provider", f"sent {error}") from None

    if not await _read(response, take_piece):
        any(take(event) for event in reader.close())


async def _read(response: httpx2.Response, take: Callable[[bytes], bool]) -> bool:
    """Give each piece of the body to ``take`` until it has enough; whether it ever had.

    A body is only left by its end or by a wait that is cancelled: where one breaks out of httpx2's iteration, it leaves
    generators to the garbage collector (2.16). One that ends right after what was enough keeps its connection usable.
    """
    import httpx2

    enough, problem = False, None
    with trio.CancelScope() as scope:
        try:
            async for piece in response.aiter_bytes():
                if not enough:
                    try:
                        enough = take(piece)
                    except ModelError as error:
                        enough, problem = True, error
                    scope.deadline = trio.current_time() + END_S if enough else math.inf
        except httpx2.HTTPError:
            if not enough:
                raise
    if problem is not None:
        raise problem
    return enough


def _timed_out(error: httpx2.TimeoutException, url: str, *, started: bool) -> ModelError:
    import httpx2

    if isinstance(error, httpx2.ConnectTimeout):
        return ModelError("unreachable", f"took no connection at {place(url)} within {CONNECT_S} s")
    if started:
        return ModelError("incomplete", f"fell silent for {SILENCE_S} s in the middle of its answer")
    # Once was long enough.
    return ModelError("unreachable", f"at {place(url)} gave no answer within {SILENCE_S} s", retryable=False)


def place(url: str) -> str:
    """The URL without what may be secret: user, password, query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def redacted(text: str, secrets: list[str]) -> str:
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= SECRET:
            text = text.replace(secret, "[secret]")
    return text


def why(error: BaseException) -> str:
    """What the error says. Texts can be empty or vague, so the first and the deepest of its causes speak."""
    texts = [text for cause in _causes(error) if (text := str(cause).strip())]
    if not texts:
        return type(error).__name__
    return texts[0] if texts[-1] in texts[0] else f"{texts[0]}: {texts[-1]}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        inside = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else None
        cause = inside or cause.__cause__ or cause.__context__
