"""What to claim: exactly the slots that are free, in the order of the dispatch rule, under a number that grows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random

import msgspec

from ..model.job import Claimed, Priority
from ..model.session import Claim
from ..model.slots import Floor, Slots, asks


class Fetcher:
    """Counts what runs here by class, and turns free slots into claims."""

    def __init__(self, slots: Slots, queues: Mapping[str, int]) -> None:
        self._slots = slots
        # The inbox is a source like the queues; it is asked as often as the one that is asked most.
        self._sources: dict[str | None, int] = {None: max(queues.values(), default=1)}
        self._sources.update(queues.items())
        self._running = [0, 0, 0]
        self._floor = Floor()
        self._rng = Random()
        self.number = 0
        """The number of the last claim that was made."""
        self.answered = 0
        """The number of the last claim whose answer is known."""
        self._ready: Claim | None = None

    def make_ready(self) -> None:
        """There is nothing to do: make the next claim now, so that it can be sent at once when there is."""
        if self._ready is None:
            self._ready = self.claim(told=True)

    def next(self, ending: Sequence[Priority] = (), *, told: bool) -> Claim | None:
        """The claim to send now; see `claim`."""
        ready, self._ready = self._ready, None
        if ready is None or ending:
            return self.claim(ending)
        # Under its number also for who only looks: a store may have answered it ahead, and the answer was lost.
        return ready if told else msgspec.structs.replace(ready, told=False)

    def claim(self, ending: Sequence[Priority] = (), *, told: bool = False) -> Claim | None:
        """A claim for the slots that are free, those of the jobs that end in the same call among them."""
        left = list(self._running)
        for priority in ending:
            left[priority] -= 1
        free = self._slots.total - sum(left)
        if free <= 0:
            return None
        wishes = asks(self._slots, left, self._floor.due(), self._sources, self._rng)
        if not wishes:
            return None
        self.number += 1
        return Claim(number=self.number, asks=tuple(wishes), total=free, told=told)

    def started(self, claimed: Iterable[Claimed]) -> None:
        """Jobs were claimed."""
        for job in claimed:
            self._running[job.priority] += 1
            self._floor.started(job.priority)

    def ended(self, priority: Priority) -> None:
        """The store knows that a job has ended."""
        self._running[priority] -= 1

    def begin_anew(self) -> None:
        """The session was lost; numbers of a new one start anew. Bodies that still run here count as before."""
        self.number = self.answered = 0
        self._ready = None
