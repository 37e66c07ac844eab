"""What to claim, and when: exactly the free slots, in the order of the dispatch rule, under growing claim numbers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from random import Random, uniform

import msgspec

from ..model.job import Claimed, Priority
from ..model.session import Claim
from ..model.slots import Floor, Slots, asks

_CLASSES = frozenset(Priority)


class Fetcher:
    """Counts running jobs by priority, and turns free slots into claims."""

    def __init__(self, slots: Slots, queues: Mapping[str, int], poll: float) -> None:
        self._slots = slots
        self._poll = poll
        # The inbox is a source like the queues, with the highest of their weights.
        self._sources: dict[str | None, int] = {None: max(queues.values(), default=1)}
        self._sources.update(queues.items())
        self._running = [0, 0, 0]
        self._floor = Floor()
        self._rng = Random()
        self.hinted = True
        """Whether there may be new jobs, so that the next claim must not wait for a poll."""
        self.next_poll = 0.0
        """When to claim without a hint, by the monotonic clock."""
        self.number = 0
        """The number of the last claim that was made."""
        self.answered = 0
        """The number of the last claim that was answered."""
        self.patience = 1.0
        """How many intervals to wait before a claim without a hint."""
        self._ready: Claim | None = None

    def is_due(self, now: float) -> bool:
        """Whether to claim although no job has ended."""
        return self.hinted or now >= self.next_poll

    def make_ready(self) -> None:
        """Make the next claim while there is nothing else to do, so that it can be sent without delay."""
        if self._ready is None:
            self._ready = self.claim(notified=True)

    def next(self, ending: Sequence[Priority] = ()) -> Claim | None:
        """The claim to send now, None when no slot is free. Answers the hint, and puts off the next poll."""
        ready, self._ready = self._ready, None
        if ready is None or ending:
            claim = self.claim(ending)
        else:
            # A poll keeps the number too: a store may have answered this claim in advance, and the answer was lost.
            claim = ready if self.hinted else msgspec.structs.replace(ready, notified=False)
        if claim is not None:
            self.hinted = False
            self.next_poll = time.monotonic() + self._poll * self.patience * uniform(0.9, 1.1)
        return claim

    def claim(self, ending: Sequence[Priority] = (), *, notified: bool = False) -> Claim | None:
        """A claim for the free slots, including those of the jobs that end in the same call."""
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
        return Claim(number=self.number, asks=tuple(wishes), total=free, notified=notified)

    def room(self) -> frozenset[Priority]:
        """The classes of which another job could start."""
        return (
            _CLASSES
            if not any(self._running)
            else frozenset(priority for priority in Priority if self._slots.room(self._running, priority) > 0)
        )

    def started(self, claimed: Iterable[Claimed]) -> None:
        """Count jobs that were claimed."""
        for job in claimed:
            self._running[job.priority] += 1
            self._floor.started(job.priority)

    def ended(self, priority: Priority) -> None:
        """Count a job whose end the store has confirmed."""
        self._running[priority] -= 1

    def begin_session(self) -> None:
        """Restart the claim numbers for a new session. Jobs that still run here count as before."""
        self.number = self.answered = 0
        self._ready = None
