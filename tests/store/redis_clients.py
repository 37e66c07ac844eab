"""Connections of tests to the shared Redis server, and its list of clients."""

from __future__ import annotations

import asyncio

import pytest

from fairlane.errors import FairlaneError
from fairlane.store.redis.connection_pool import Connections
from tests.servers import valkey

NOTHING = "a list that stays empty"


def url(*options: str, db: int = 0) -> str:
    """The shared server. Tests that read its list of clients recognise theirs by the database."""
    return f"{valkey.server().url}/{db}?{'&'.join(options)}"


def connected(db: int) -> list[str]:
    """The connections that use a database."""
    return [line for line in valkey.server().ask("CLIENT", "LIST").splitlines() if f" db={db} " in line]


async def gone(db: int) -> None:
    """Wait until no client uses a database any more."""
    async with asyncio.timeout(30):
        while connected(db):
            await asyncio.sleep(0.02)


async def blocked(db: int, number: int = 1) -> None:
    """Wait until so many connections wait on the server."""
    async with asyncio.timeout(30):
        while sum(" flags=b " in line for line in connected(db)) < number:
            await asyncio.sleep(0.01)


async def ids(connections: Connections, number: int) -> set[int]:
    """The connections behind so many calls at once."""
    return set(await asyncio.gather(*(connections.call("CLIENT", "ID") for _ in range(number))))


async def failure(connections: Connections, *command: str | int) -> FairlaneError:
    """The error that a call raises; by default the call is a PING."""
    with pytest.raises(FairlaneError) as caught:
        await connections.call(*(command or ("PING",)))
    return caught.value
