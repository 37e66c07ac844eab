"""What the driver learns about PostgreSQL's own array types, once for a process instead of on every connection.

asyncpg asks the server about each array type that it meets on a connection, with a query that takes the server 3 to 7
ms: much longer than a claim. A new connection of a worker met three such types one after the other. The answer is the
same on every connection, because a type with an OID below `FIRST_OWN_OID` is part of PostgreSQL itself.

May assume: an attribute of the driver that is not public. If a later version no longer calls it, the driver asks again
each time, which is slower and as correct; `tests/store/postgresql/test_array_types.py` would notice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .address import driver

FIRST_OWN_OID = 16_384
"""Types that a user or an extension has created begin here. Below, an OID means the same type on every server."""

_driver_connection: Any = driver().Connection
_known: dict[int, Sequence[Any]] = {}
"""By the OID of a type: its row and those of the types that it is made of, as the driver read them."""


class _NoStatement(NamedTuple):
    """In place of the statement that asked: none was sent, so none has displaced an unnamed statement of the driver."""

    name: str = "none"


class TypedConnection(_driver_connection):  # type: ignore[misc]  # the driver is optional: its class is not known here
    """A connection of asyncpg that does not ask again about a type that this process knows."""

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
