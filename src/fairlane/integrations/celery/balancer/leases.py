"""Leases: which messages wait and which executions run, by queue. Typed access to the scripts.

A *pending* lease belongs to one published message. A *run* is one execution, known by its lease, the host and a number
that the host gives to each delivery. Loads are the sizes of these sets; there is no counter that could drift.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

import msgspec

from ....store.per_process import PerProcess
from .connection import Address, ScriptConnection, script

CLOSED_MS = 60_000
"""For how long a start is ignored after the end of its run."""
REVOKE_MS = 10_800_000
"""As long as a Celery worker remembers a revoke."""
PAGE = 5_000
"""The most messages in one call of a script: it blocks the server for some milliseconds."""

_OPEN, _START, _FINISH = script("open"), script("start"), script("finish")


class Lease(msgspec.Struct, frozen=True):
    """The pending lease of one message."""

    name: str
    id: str
    """The id of the task."""
    expires_in: float | None = None
    """Seconds."""

    @classmethod
    def new(cls, id: str, retries: int, expires_in: float | None = None) -> Lease:
        """A lease for a message that is about to be published: another publish of the same task gets another one."""
        return cls(f"{id}:{retries}:{os.urandom(6).hex()}", id, expires_in)

    @classmethod
    def of_message(cls, name: str | None, id: str, retries: int) -> Lease:
        """The lease of a message that was read; one whose publisher does not use the balancer has a fixed name."""
        return cls(name or f"{id}:{retries}:-", id)


class Run(msgspec.Struct, frozen=True):
    """One execution of a message."""

    queue: int
    lease: Lease
    host: str
    number: int
    """Increases with each delivery to the host."""

    @property
    def name(self) -> str:
        """Its name in the store."""
        return f"{self.lease.name}|{self.host}|{self.number}"


class Load(msgspec.Struct, frozen=True):
    """The load of a queue."""

    pending: int
    """Messages that wait."""
    running: int
    """Executions."""

    @property
    def total(self) -> int:
        """What the choice of a queue compares."""
        return self.pending + self.running


class LeaseStore:
    """The leases of one namespace. Every method is one round trip at most and raises `StoreUnavailable`.

    Methods whose docstring says "does not wait" return before the server has replied.
    """

    def __init__(
        self, address: Address, namespace: str, queues: int, lifetime: float, recovered: Callable[[], None]
    ) -> None:
        self.address = address
        self.queues = queues
        self._prefix = f"{{{namespace}}}:balancer:"
        self._lifetime_ms = int(lifetime * 1000)
        self._connections = PerProcess(lambda: ScriptConnection(address, self._prefix, recovered))

    def separate(self) -> LeaseStore:
        """The same leases over a connection of its own, for a thread that must not wait for others."""
        return LeaseStore(
            self.address, self._prefix[1:].partition("}")[0], self.queues, self._lifetime_ms / 1000, lambda: None
        )

    @property
    def failing(self) -> bool:
        """Whether the last command of this process failed."""
        return self._connection.failing

    def close(self) -> None:
        """Close the connection of this process."""
        existing = self._connections.existing()
        if existing is not None:
            existing.close()

    @property
    def _connection(self) -> ScriptConnection:
        return self._connections.get()

    def open(self, leases: Sequence[Lease], queue: int | None = None) -> list[int]:
        """Open pending leases in `queue`, or each in the least loaded one. Returns their queues."""
        wanted = -1 if queue is None else queue
        chosen: list[int] = []
        for first in range(0, len(leases), PAGE):
            flat: list[str | int] = []
            for lease in leases[first : first + PAGE]:
                seconds = lease.expires_in
                flat += (lease.name, lease.id, "" if seconds is None else max(0, int(seconds * 1000)))
            chosen += self._connection.call(_OPEN, self.queues, wanted, *flat)
        return chosen

    def drop(self, leases: Iterable[tuple[int, Lease]]) -> int:
        """Close pending leases by queue: their messages do not exist any more. Returns how many were open."""
        flat: list[str | int] = []
        for queue, lease in leases:
            flat += (queue, lease.name, lease.id)
        page = 3 * PAGE
        return sum(
            int(self._connection.call(script("drop"), *flat[first : first + page]))
            for first in range(0, len(flat), page)
        )

    def start(self, run: Run) -> None:
        """Turn the pending lease of a run into a running one. Does not wait."""
        lease = run.lease
        self._connection.send(_START, run.queue, lease.name, lease.id, run.name, run.host, self._lifetime_ms)

    def finish(self, run: Run) -> None:
        """Close a running lease; a repeated call changes nothing. Does not wait."""
        self._connection.send(_FINISH, run.queue, run.name, run.host, run.lease.name, self._lifetime_ms, CLOSED_MS)

    def revoke(self, ids: Sequence[str]) -> int:
        """Close the pending leases of revoked tasks. Returns how many were open."""
        return int(self._connection.call(script("revoke"), REVOKE_MS, *ids)) if ids else 0

    def gone(self, leases: Sequence[Lease]) -> set[str]:
        """Names of those among these leases that are not to be opened again: revoked, or ended a moment ago."""
        names: set[str] = set()
        for first in range(0, len(leases), PAGE):
            flat = [text for lease in leases[first : first + PAGE] for text in (lease.name, lease.id)]
            names.update(bytes(name).decode() for name in self._connection.call(script("gone"), *flat))
        return names

    def beat(
        self, host: str, consumed: Sequence[int], newest: int, begun: Sequence[str], held: Sequence[str]
    ) -> set[str]:
        """Report what a worker consumes and runs. Returns the runs that have begun and are not counted.

        `newest` is the number of its last delivery. Runs of the host that are not reported and not newer are closed.
        """
        queues = ",".join(map(str, consumed))
        missing = self._connection.call(
            script("beat"), host, self._lifetime_ms, queues, newest, len(begun), *begun, *held
        )
        return {bytes(run).decode() for run in missing}

    def leave(self, host: str) -> int:
        """Remove a worker that has stopped. Returns how many runs it left open."""
        return int(self._connection.call(script("leave"), host))

    def reap(self, host: str, seconds: float) -> tuple[int, bool]:
        """Close the runs of dead workers. Returns how many, and whether `host` alone reconciles for `seconds`.

        With 0 seconds it does not ask to.
        """
        closed, granted = self._connection.call(script("reap"), host, int(seconds * 1000))
        return int(closed), bool(granted)

    def loads(self) -> tuple[list[Load], list[int]]:
        """The load of each queue, and the queues with a live consumer."""
        found: list[int] = self._connection.call(script("loads"), self.queues)
        loads = [Load(found[2 * k], found[2 * k + 1]) for k in range(self.queues)]
        return loads, sorted(queue for queue in found[2 * self.queues :] if queue < self.queues)

    def pending(self, queue: int) -> set[str]:
        """The names of the pending leases of a queue."""
        names: set[str] = set()
        first = 0
        while True:
            page = self._connection.call(script("leases"), queue, first, first + PAGE - 1)
            names.update(bytes(name).decode() for name in page)
            if len(page) < PAGE:
                return names
            first += PAGE

    def running(self, queue: int) -> set[str]:
        """The names of the leases of a queue that have a run."""
        return {bytes(run).decode().rsplit("|", 2)[0] for run in self._connection.call(script("running"), queue)}

    def stale(self, queue: int, seconds: float) -> list[str]:
        """The pending leases of a queue that are older than this."""
        found = self._connection.call(script("stale"), queue, int(seconds * 1000))
        return [bytes(name).decode() for name in found]


def id_of(name: str) -> str:
    """The id of the task in the name of a lease."""
    return name.rsplit(":", 2)[0]
