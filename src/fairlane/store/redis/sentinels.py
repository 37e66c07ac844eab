"""Finds the master of a service: asks the sentinels one after the other, and checks the role of the server they name.

During a failover a sentinel may still name the old master, or a replica that is not promoted yet. Such an answer is
discarded and the next sentinel is asked. If none leads to a master, the caller tries again later.
"""

from __future__ import annotations

import asyncio

from ...errors import StoreError, StoreUnavailable
from .address import Address, Endpoint
from .connection import Connection, connect
from .driver_errors import Refusal, translate_connecting

ASKING_SECONDS = 1.0
"""The deadline for one sentinel. It is short because there are others."""


class Sentinels:
    """The sentinels of an address; the last one that answered is asked first."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._endpoints = list(address.endpoints)

    async def connect(self) -> Connection:
        """Connect to the master. Raises `StoreUnavailable` if no sentinel leads to one."""
        failures: list[str] = []
        for endpoint in list(self._endpoints):
            shown = f"{endpoint[0]}:{endpoint[1]}"
            # Last until it has answered: a caller with a short deadline gives up here, and asks another one next time.
            self._endpoints.remove(endpoint)
            self._endpoints.append(endpoint)
            try:
                async with asyncio.timeout(min(ASKING_SECONDS, self._address.connect_seconds)):
                    found = await self._ask(endpoint)
            except Exception as exc:
                if isinstance(exc, Refusal) and (exc.code in ("NOAUTH", "WRONGPASS") or "AUTH" in exc.said):
                    raise StoreError(
                        f"the sentinels of {self._address} reject the login ({exc.said}). "
                        "Check sentinel_user and sentinel_password in the URL."
                    ) from exc
                failures.append(f"{shown}: {_reason_of(exc)}")
                continue
            if found is None:
                failures.append(f"{shown} does not know {self._address.service}")
                continue
            self._endpoints.remove(endpoint)
            self._endpoints.insert(0, endpoint)
            connection = await self._master(found, failures)
            if connection is not None:
                return connection
        raise StoreUnavailable(f"no sentinel of {self._address} leads to a master at the moment: {'; '.join(failures)}")

    async def _ask(self, endpoint: Endpoint) -> Endpoint | None:
        connection = await connect(self._address, endpoint, sentinel=True)
        try:
            answer = await connection.execute("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._address.service or "")
        finally:
            connection.close()
        return None if answer is None else (answer[0].decode(), int(answer[1]))

    async def _master(self, endpoint: Endpoint, failures: list[str]) -> Connection | None:
        """A connection to the server that a sentinel named, if its own role is master."""
        shown = f"{endpoint[0]}:{endpoint[1]}"
        try:
            async with asyncio.timeout(self._address.connect_seconds):
                connection = await connect(self._address, endpoint)
                try:
                    if await _is_master(connection):
                        return connection
                except BaseException:
                    connection.close()
                    raise
        except Exception as exc:
            error = translate_connecting(exc, self._address)
            if not isinstance(error, StoreUnavailable):
                # A wrong password is wrong on every server.
                raise error from exc
            failures.append(f"{shown}: {_reason_of(exc)}")
            return None
        connection.close()
        failures.append(f"{shown} is not a master")
        return None


async def _is_master(connection: Connection) -> bool:
    try:
        role = await connection.execute("ROLE")
    except Refusal as exc:
        if exc.code == "NOPERM":
            # The role is unknown. If it is a replica, the first write fails and the master is looked up again.
            return True
        raise
    return bool(role[0] == b"master")


def _reason_of(exc: Exception) -> str:
    if isinstance(exc, Refusal):
        return exc.said
    if isinstance(exc, StoreError):
        return str(exc)
    return str(exc).partition("\n")[0] or "no answer in time"
