"""Calls the functions of the library on the connections of the store, and raises what they answer as errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from ...errors import (
    Conflict,
    IndexTaken,
    InvalidInput,
    NotFound,
    SchemaMismatch,
    SessionLost,
    Stale,
    StoreError,
    TermLost,
)
from ..clock import Clock
from . import library
from .connection_pool import Connections
from .data_loss import Completed, DataLoss, Mark, Reported
from .driver_errors import NotAllowed, ServerError
from .encoding import decode, encode

BOOT_SECONDS = 1e9
"""Added per boot of a test clock: leases of an earlier boot have run out in any case."""
READING = frozenset(
    {
        *("get", "sessions", "leader", "scan", "queues", "lanes", "lane_line", "bindings", "declined", "schedules"),
        *("service", "positions", "tokens", "failures", "ended"),
    }
)
"""The functions flagged `no-writes`. They are called by FCALL_RO, which a user with read-only rights may use."""


class FullQueue(Exception):
    """A queue or a lane has reached its `max_pending`. The caller then asks when there will be room."""

    def __init__(self, message: str, where: dict[str, Any]) -> None:
        super().__init__(message)
        self.where = where


class Functions:
    """The functions of the library, for one namespace. `clock` replaces the server's clock in tests."""

    def __init__(self, connections: Connections, prefix: str, clock: Clock | None) -> None:
        self._connections = connections
        self._prefix = prefix
        self._clock = clock
        self._boots: list[str] = []
        self.data_loss = DataLoss(str(connections.address), self._report_loss)

    async def call(self, verb: str, *arguments: Any) -> dict[str, Any]:
        """The answer of a function; a list becomes ``{"parts": list}``. Raises the error that it holds."""
        before = self.data_loss.mark
        answer = await self.send(verb, *arguments)
        if isinstance(answer, list):
            return {"parts": answer}
        return await self._read(answer, before)

    async def call_for_signature(self, verb: str, *arguments: Any) -> dict[str, Any] | None:
        """`call` for a function whose answer is mostly the signature alone: then None."""
        before = self.data_loss.mark
        answer = await self.send(verb, *arguments)
        if isinstance(answer, list):
            generation, steps = answer[0].decode(), int(answer[1])
            if not self.data_loss.is_usual(generation, steps, before):
                await self.data_loss.check({"generation": generation, "steps": steps}, before)
            return None
        return await self._read(answer, before)

    async def call_for_parts(self, verb: str, *arguments: Any) -> tuple[dict[str, Any], list[bytes]]:
        """`call` for a function that answers with a record and parts."""
        before = self.data_loss.mark
        answer = await self.send(verb, *arguments)
        first, *parts = answer if isinstance(answer, list) else [answer]
        return await self._read(first, before), parts

    async def _read(self, raw: bytes, before: Mark) -> dict[str, Any]:
        """Decode an answer and check its signature for data loss. Raises the error that it holds."""
        found: dict[str, Any] = decode(raw)
        await self.data_loss.check(found, before)
        if "refused" in found:
            _refuse(**found["refused"])
        return found

    async def _report_loss(self, generation: str, what: str, completed: Sequence[Completed]) -> Reported:
        results = [each.result for each in completed if each.result is not None]
        places = iter(range(6, 6 + len(results)))
        again = [
            (each.session, each.held.id, each.held.fence, each.stamp.hex(), 0 if each.result is None else next(places))
            for each in completed
        ]
        answer = decode(await self.send("lost", generation, what, encode(again), *results))
        return Reported(Mark(answer["generation"], answer["steps"]), answer["completed"], answer["what"])

    async def send(self, verb: str, *arguments: Any) -> Any:
        """The raw answer of a function."""
        command = "FCALL_RO" if verb in READING else "FCALL"
        call = (command, library.function(verb), 1, self._prefix, *self._moments(), *arguments)
        try:
            return await self._connections.call(*call)
        except ServerError as exc:
            # A server that restarted without its data, or was replaced, does not have the library.
            if "Function not found" not in exc.said:
                raise
        await self._load()
        return await self._connections.call(*call)

    async def look(self, command: str, key: str, *arguments: Any) -> Any:
        """Read a key of the namespace."""
        return await self._connections.call(command, self._prefix + key, *arguments)

    def _moments(self) -> tuple[str, str]:
        if self._clock is None:
            return "", ""
        boot = self._clock.boot()
        if boot not in self._boots:
            self._boots.append(boot)
        return repr(self._clock.now()), repr(self._clock.monotonic() + BOOT_SECONDS * self._boots.index(boot))

    async def _load(self) -> None:
        try:
            await self._connections.call("FUNCTION", "LOAD", library.text())
        except ServerError as exc:
            # Another process was first.
            if "already exists" not in exc.said:
                raise
        except NotAllowed as exc:
            raise StoreError(
                f"{self._connections.address} does not have the functions of this version of Fairlane, and this user "
                "may not load them. Run `fairlane migrate` as a user with the owner role."
            ) from exc


def _refuse(code: str, message: Any, detail: Any = None) -> NoReturn:
    """Raise the error that a function answered with."""
    if code == "invalid":
        raise InvalidInput(detail, message)
    if code == "index_taken":
        raise IndexTaken(message, detail)
    if code == "newer":
        raise SchemaMismatch(f"{message}; upgrade Fairlane here, or use another namespace=…")
    if code == "not_allowed":
        raise StoreError(
            f"this user lacks rights that the functions need ({message}), and a step must not stop halfway. "
            "Grant the whole role with ACL SETUSER."
        )
    if code == "full":
        where = f"queue {detail['queue']!r}"
        if "lane" in detail:
            where = f"lane {detail['lane']!r} of {where}"
        raise FullQueue(f"{where} has {message} jobs waiting and takes at most {detail['most']}", detail)
    if code == "too_many":
        raise StoreError(
            f"{message:,} jobs are too many for a recount: it would block the server for seconds, and leases would "
            f"expire. Run it while at most {detail:,} jobs wait or run."
        )
    kinds = {
        "conflict": Conflict,
        "not_found": NotFound,
        "session_lost": SessionLost,
        "stale": Stale,
        "term_lost": TermLost,
    }
    raise kinds[code](message)
