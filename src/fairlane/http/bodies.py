"""Reads request bodies within limits of size, nesting, time and content type."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive

from .answers import Disconnected
from .problems import Problem, invalid_value
from .settings import HttpSettings

T = TypeVar("T")
# A string that does not end is one match too, up to the end: if each of its quotes were tried, the time would grow with
# the square of its length.
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
NESTED = "arrays and objects are nested more than {} levels deep"


async def chunks(receive: Receive, seconds: float) -> AsyncIterator[bytes]:
    """Yield the parts of a body as they arrive, each within `seconds`."""
    more = True
    while more:
        try:
            async with asyncio.timeout(seconds):
                message = await receive()
        except TimeoutError:
            raise Problem(408, f"no part of the body arrived for {seconds:g} s") from None
        if message["type"] == "http.disconnect":
            raise Disconnected
        more = message.get("more_body", False)
        body = message.get("body", b"")
        if body:
            yield body


async def read_body(receive: Receive, headers: dict[bytes, bytes], most: int, seconds: float) -> bytes:
    """Read the whole body."""
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > most:
        raise _too_large(most)
    # The common case: the whole body in one message.
    message = await _first(receive, seconds)
    if not message.get("more_body", False):
        body: bytes = message.get("body", b"")
        if len(body) > most:
            raise _too_large(most)
        return body
    parts = bytearray(message.get("body", b""))
    try:
        async with asyncio.timeout(seconds):
            async for part in chunks(receive, seconds):
                parts += part
                if len(parts) > most:
                    raise _too_large(most)
    except TimeoutError:
        raise Problem(408, f"the body took longer than {seconds:g} s to arrive") from None
    return bytes(parts)


async def _first(receive: Receive, seconds: float) -> Any:
    try:
        async with asyncio.timeout(seconds):
            message = await receive()
    except TimeoutError:
        raise Problem(408, f"no part of the body arrived for {seconds:g} s") from None
    if message["type"] == "http.disconnect":
        raise Disconnected
    return message


def _too_large(most: int) -> Problem:
    return Problem(413, f"the body is larger than {most} bytes")


def media_type(headers: dict[bytes, bytes]) -> str:
    """The content type without its parameters."""
    return headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()


def check_json(headers: dict[bytes, bytes]) -> None:
    """Reject other content types than JSON: browsers send those of HTML forms across sites without a preflight."""
    if media_type(headers) != "application/json":
        raise Problem(415, "send the body with Content-Type: application/json", field="Content-Type")


def check_nesting(raw: bytes, most: int) -> None:
    """Reject JSON whose arrays and objects are nested deeper than `most`."""
    if raw.count(b"[") + raw.count(b"{") <= most:
        return
    depth = 0
    for token in _TOKENS.finditer(raw):
        sign = raw[token.start()]
        if sign in b"[{":
            depth += 1
            if depth > most:
                raise Problem(400, NESTED.format(most))
        elif sign in b"]}":
            depth -= 1


async def read_json(
    decoder: msgspec.json.Decoder[T], receive: Receive, headers: dict[bytes, bytes], settings: HttpSettings
) -> T:
    """Decode the body. An empty body is an empty object."""
    raw = await read_body(receive, headers, settings.body_bytes, settings.body_seconds)
    if not raw:
        return decoder.decode(b"{}")
    check_json(headers)
    check_nesting(raw, settings.nesting)
    return decoded(decoder, raw)


def decoded(decoder: msgspec.json.Decoder[T], raw: bytes | msgspec.Raw) -> T:
    """Decode JSON. Raises a problem that names the field and, of an enum, the allowed values."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as exc:
        raise invalid_value(exc, decoder.type) from None
