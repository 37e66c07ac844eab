"""How the master of a service is found: sentinels are asked in turn, and whom they name is asked what it is.

During a failover they may still name the old master, or one that does not know yet that it has been promoted. Such an
answer is not taken, the next sentinel is asked, and in the end whoever wanted a connection tries again later.
"""

from __future__ import annotations

import asyncio

from ...errors import StoreError, StoreUnavailable
from .address import Address, Place
from .connection import Line, dial
from .driver_errors import Refusal, translate_connecting

ASKING_SECONDS = 1.0
"""For one sentinel. They are close by, and there are others."""


class Sentinels:
    """The sentinels of an address, in the order in which they are asked."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._places = list(address.places)

    async def dial(self) -> Line:
        """A line to the master. Raises `StoreUnavailable` if none of the sentinels leads to one."""
        told: list[str] = []
        for place in list(self._places):
            shown = f"{place[0]}:{place[1]}"
            try:
                async with asyncio.timeout(min(ASKING_SECONDS, self._address.connect_seconds)):
                    found = await self._ask(place)
            except Exception as exc:
                if isinstance(exc, Refusal) and (exc.code in ("NOAUTH", "WRONGPASS") or "AUTH" in exc.said):
                    raise StoreError(
                        f"the sentinels of {self._address} do not let us in ({exc.said}). "
                        "Check sentinel_user and sentinel_password in the URL."
                    ) from exc
                told.append(f"{shown}: {_words(exc)}")
                continue
            if found is None:
                told.append(f"{shown} knows no {self._address.service}")
                continue
            # Whoever could answer is asked first the next time.
            self._places.remove(place)
            self._places.insert(0, place)
            line = await self._master(found, told)
            if line is not None:
                return line
        raise StoreUnavailable(f"no sentinel of {self._address} leads to a master just now: {'; '.join(told)}")

    async def _ask(self, place: Place) -> Place | None:
        line = await dial(self._address, place, sentinel=True)
        try:
            answer = await line.demand("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._address.service or "")
        finally:
            line.close()
        return None if answer is None else (answer[0].decode(), int(answer[1]))

    async def _master(self, place: Place, told: list[str]) -> Line | None:
        """A line to whom a sentinel has named, if it says the same of itself."""
        shown = f"{place[0]}:{place[1]}"
        try:
            async with asyncio.timeout(self._address.connect_seconds):
                line = await dial(self._address, place)
                try:
                    if await _is_master(line):
                        return line
                except BaseException:
                    line.close()
                    raise
        except Exception as exc:
            error = translate_connecting(exc, self._address)
            if not isinstance(error, StoreUnavailable):
                # A password that is wrong is so on every server.
                raise error from exc
            told.append(f"{shown}: {_words(exc)}")
            return None
        line.close()
        told.append(f"{shown} is no master")
        return None


async def _is_master(line: Line) -> bool:
    try:
        role = await line.demand("ROLE")
    except Refusal as exc:
        if exc.code == "NOPERM":
            # Writing to one that is none is refused, and then looked for anew.
            return True
        raise
    return bool(role[0] == b"master")


def _words(exc: Exception) -> str:
    if isinstance(exc, Refusal):
        return exc.said
    if isinstance(exc, StoreError):
        return str(exc)
    return str(exc).partition("\n")[0] or "no answer in time"
