"""Requests to an HTTP service, repeated while that is safe. Problem documents become Fairlane errors.

A job is sent with its id or with a generated ``Idempotency-Key``, so that repeating the request after a lost response
creates no second job.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from functools import partial
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from ..errors import (
    Conflict,
    FairlaneError,
    InvalidInput,
    NotFound,
    NotSupported,
    QueueFull,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from ..model.names import check_seconds

REPEATED = frozenset({502, 503, 504})
"""Status codes that do not depend on the request itself."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Seconds between two attempts, if the service sends no Retry-After."""
SILENCE = 60.0
"""Seconds without any data, not even a heartbeat, after which a stream counts as broken."""
MOST_EVENT_BYTES = 4 * 1024 * 1024


class AccessDenied(FairlaneError):
    """The service does not accept the token, or the token does not allow this."""


class ServerEvent(msgspec.Struct, frozen=True):
    """One event of a stream."""

    event: str
    data: str
    id: str | None = None
    retry: float | None = None
    """The seconds to wait before a reconnect, as requested by the server."""


class Transport:
    """Sends requests to one service."""

    def __init__(
        self,
        url: str,
        token: str | None,
        *,
        timeout: float,
        patience: float,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        try:
            parts = httpx.URL(url)
        except (TypeError, httpx.InvalidURL):
            parts = httpx.URL("")
        if parts.scheme not in ("http", "https") or not parts.host:
            raise InvalidInput("url", "must be the URL of a service, such as http://127.0.0.1:8000")
        self.timeout = check_seconds("timeout", timeout, least=0.001)
        self.patience = check_seconds("patience", patience)
        # The URL without user name and password.
        self.shown = str(parts.copy_with(userinfo=b"", query=None))
        headers = {"Accept": "application/json"}
        if token is not None:
            if not token or not token.isascii() or not token.isprintable():
                raise InvalidInput("token", "must be a token as printed by `fairlane tokens new`")
            headers["Authorization"] = f"Bearer {token}"
        base = str(parts).rstrip("/")
        self._make = partial(
            httpx.AsyncClient,
            base_url=base if base.endswith("/api/v1") else f"{base}/api/v1",
            headers=headers,
            timeout=self.timeout,
            transport=transport,
        )
        self._client: httpx.AsyncClient | None = None
        self._owner: tuple[int, asyncio.AbstractEventLoop] | None = None

    @property
    def _http(self) -> httpx.AsyncClient:
        """The HTTP client of this process and event loop: connections cannot be shared between them."""
        owner = os.getpid(), asyncio.get_running_loop()
        if self._client is None or self._owner != owner:
            self._client, self._owner = self._make(), owner
        return self._client

    async def close(self) -> None:
        """Close the connections. The next request opens new ones."""
        client, self._client = self._client, None
        if client is not None and self._owner == (os.getpid(), asyncio.get_running_loop()):
            await client.aclose()

    async def get(self, path: str, *, wait: float | None = None) -> httpx.Response:
        """Send a GET request. With `wait` the service may take that many more seconds."""
        query = {} if wait is None else {"wait": f"{wait:.3f}"}
        return await self._request("GET", path, params=query, timeout=self.timeout + (wait or 0.0))

    async def post(
        self, path: str, body: bytes | None = None, *, key: str | None = None, repeat: bool = True
    ) -> httpx.Response:
        """Send a POST request. One that must not run twice has a key, or `repeat=False`."""
        headers = {} if key is None else {"Idempotency-Key": key}
        if body is not None:
            headers["Content-Type"] = "application/json"
        return await self._request("POST", path, repeat=repeat, content=body, headers=headers)

    async def _request(self, method: str, path: str, *, repeat: bool = True, **options: Any) -> httpx.Response:
        until = time.monotonic() + self.patience
        backoff = FIRST_PAUSE
        while True:
            wanted: float | None = None
            try:
                response = await self._http.request(method, path, **options)
            except httpx.TransportError as exc:
                error: FairlaneError = self._unreachable(exc)
            else:
                if response.status_code < 400:
                    return response
                error = error_of(response)
                if response.status_code not in REPEATED:
                    raise error
                wanted = retry_after(response)
            if not repeat:
                raise error
            pause = max(backoff if wanted is None else wanted, backoff) * random.uniform(0.8, 1.2)
            if time.monotonic() + pause > until:
                raise error
            await asyncio.sleep(pause)
            backoff = min(backoff * 2, LONGEST_PAUSE)

    @contextlib.asynccontextmanager
    async def events(self, path: str, last_id: str | None) -> AsyncIterator[AsyncGenerator[ServerEvent, None]]:
        """The events of a stream until it ends. Raises `StoreUnavailable` if the connection breaks."""
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        if last_id is not None:
            headers["Last-Event-ID"] = last_id
        timeout = httpx.Timeout(self.timeout, read=SILENCE)
        try:
            async with self._http.stream("GET", path, headers=headers, timeout=timeout) as response:
                if response.status_code >= 400:
                    await response.aread()
                    raise error_of(response)
                events = parse_events(response.aiter_lines())
                try:
                    yield events
                finally:
                    await events.aclose()
        except httpx.HTTPError as exc:
            raise self._unreachable(exc) from exc

    def _unreachable(self, exc: httpx.HTTPError) -> StoreUnavailable:
        return StoreUnavailable(f"cannot reach the service at {self.shown} ({type(exc).__name__}: {exc})")


async def parse_events(lines: AsyncIterator[str]) -> AsyncGenerator[ServerEvent, None]:
    """Parse server-sent events. An incomplete event at the end is dropped."""
    event, data, size = "message", list[str](), 0
    id: str | None = None
    retry: float | None = None
    async for line in lines:
        if not line:
            if data:
                yield ServerEvent(event, "\n".join(data), id, retry)
            event, data, size = "message", [], 0
            continue
        size += len(line)
        if size > MOST_EVENT_BYTES:
            raise StoreError("the service sent an event that is too large")
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            event = value
        elif field == "data":
            data.append(value)
        elif field == "id" and "\0" not in value:
            id = value
        elif field == "retry" and value.isdecimal():
            retry = int(value) / 1_000


def path_of(*parts: str) -> str:
    """Build a path from parts that may contain any character."""
    return "/" + "/".join(quote(part, safe="") for part in parts)


def retry_after(response: httpx.Response) -> float | None:
    """The Retry-After header in seconds; None if it is missing or no number."""
    try:
        return max(0.0, float(response.headers["Retry-After"]))
    except (KeyError, ValueError):
        return None


def error_of(response: httpx.Response) -> FairlaneError:
    """Convert a response to an error."""
    return problem_error(response.status_code, _problem(response.content), retry_after(response))


def event_error(event: ServerEvent) -> FairlaneError:
    """Convert a problem event of a stream to an error."""
    problem = _problem(event.data.encode())
    status = problem.get("status")
    return problem_error(status if isinstance(status, int) else 503, problem)


def problem_error(status: int, problem: Mapping[str, Any], wanted: float | None = None) -> FairlaneError:
    """Convert a problem document to the error that a local call would have raised."""
    detail = str(problem.get("detail") or problem.get("title") or f"the service responded with status {status}")
    field = problem.get("field")
    again = problem.get("retry_after")
    if isinstance(again, int | float):
        wanted = float(again)
    match status:
        case 401 | 403:
            return AccessDenied(detail)
        case 404:
            return NotFound(detail)
        case 409 if field is None:
            return Conflict(detail)
        case 429:
            return QueueFull(detail, wanted)
        case 501:
            return NotSupported(detail)
        case 502 | 503 | 504:
            return StoreUnavailable(detail)
        case 507:
            return StoreFull(detail)
        case _ if status < 500:
            return InvalidInput("request" if field is None else str(field).replace("options.", ""), detail)
    return StoreError(detail)


def _problem(content: bytes) -> Mapping[str, Any]:
    try:
        found = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}
