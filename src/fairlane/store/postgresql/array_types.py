"""Caches what the driver reads about PostgreSQL's own array types, once per process instead of once per connection.

asyncpg queries the server about each array type that is new to a connection, which takes the server 3 to 7 ms: much
longer than a claim. A new connection of a worker uses three such types one after the other. The answer is the same on
every connection, because a type with an OID below `FIRST_OWN_OID` is part of PostgreSQL itself.

May assume: a method of the driver that is not public. If a later version no longer calls it, each connection queries
again, which is slower but still correct; `tests/store/postgresql/test_array_types.py` would fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .address import driver

FIRST_OWN_OID = 16_384
"""The lowest OID of types that users or extensions create. A lower one means the same type on every server."""

_driver_connection: Any = driver().Connection
_known: dict[int, Sequence[Any]] = {}
"""By the OID of a type: its row and those of the types it is composed of, as the driver read them."""


class _NoStatement(NamedTuple):
    """Returned in place of the statement of a query that was not sent. Its name is not empty: an empty one would mean
    that the query has replaced the unnamed statement of the connection."""

    name: str = "none"


class TypedConnection(_driver_connection):  # type: ignore[misc]  # the driver is optional: its class is not known here
    """A connection of asyncpg that does not query again about a type that this process knows."""

    __slots__ = ()

    async def _introspect_types(self, typeoids: Iterable[int], *args: Any) -> tuple[Sequence[Any], Any]:
        oids = list(typeoids)
        if all(oid in _known for oid in oids):
            return [row for oid in oids for row in _known[oid]], _NoStatement()
        rows, statement = await super()._introspect_types(oids, *args)
        if all(row["oid"] < FIRST_OWN_OID for row in rows):
            for oid in oids:
                _known[oid] = rows
        return rows, statement
