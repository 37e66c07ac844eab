"""Wake-ups are hints: if all of them are lost or duplicated, latency suffers but no job. Polling is always on.

Topics:

- ``queue:NAME``      a job of the queue may start on any worker that serves it
- ``worker:POOL/I``   a job in that worker's inbox may start
- ``session:ID``      the session should renew: a cancel was requested, or a turn was granted
- ``job:ID``          the job changed: state or progress
- ``place:QUEUE/LANE``  a job left the line of a limited lane, so that the jobs behind it moved up
- ``leader``          the leader resigned

A worker does not subscribe to topics: it gets a `Work`, and a store decides how work is announced to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ..model.job import Claimed, Priority
from ..model.session import Claim

LEADER = "leader"


def queue_topic(queue: str) -> str:
    """The topic of work in a queue."""
    return f"queue:{queue}"


def worker_topic(worker: str) -> str:
    """The topic of work in the inbox of ``pool/index``."""
    return f"worker:{worker}"


def session_topic(session: str) -> str:
    """The topic of news that a session should receive before its next renewal."""
    return f"session:{session}"


def job_topic(job: str) -> str:
    """The topic of changes of one job."""
    return f"job:{job}"


def place_topic(queue: str, lane: str) -> str:
    """The topic of movements in the line of a limited lane."""
    return f"place:{queue}/{lane}"


class Subscription(Protocol):
    """A subscription to topics. Used from the event loop it was created in."""

    async def wait(self, timeout: float | None = None) -> frozenset[str]:
        """Return the topics received since the last call. Waits for at least one; returns none after `timeout`."""

    def listen(self, topics: Iterable[str]) -> None:
        """Replace the subscribed topics."""

    def close(self) -> None:
        """End the subscription. Closing twice is harmless."""


class Work(Protocol):
    """Announces to one worker that it is worth claiming. Used from the event loop it was created in.

    The worker reports what it does, so that a store can wake one worker for a job instead of all.
    """

    @property
    def patience(self) -> float:
        """How many of its usual intervals the worker may wait before it polls: more than one while no hint is lost."""

    def listen(self, worker: str) -> None:
        """Announce work in the inbox of ``pool/index`` as well."""

    def offer(self, classes: frozenset[Priority]) -> None:
        """The worker waits now, and has room for jobs of these classes; none while it is full or stops."""

    def claiming(self) -> None:
        """The worker calls the store now, and may claim."""

    def claimed(self, claim: Claim, jobs: Sequence[Claimed]) -> None:
        """A claim was answered with these jobs."""

    async def wait(self, timeout: float) -> None:
        """Return after `timeout`, or earlier."""

    def close(self) -> None:
        """End it. Closing twice is harmless."""


class Wakeups(Protocol):
    """How processes notify each other that it is worth reading the store."""

    def publish(self, topics: Iterable[str]) -> None:
        """Notify all subscribers in all processes. Never blocks and never raises; notifications may be lost."""

    def subscribe(self, topics: Iterable[str], on_delivery: Callable[[], None] | None = None) -> Subscription:
        """Subscribe to `topics` from the running event loop. Notifications from now on are delivered, or lost.

        `on_delivery` is called in that loop when a notification arrives, before `wait` returns: that saves an iteration
        of the loop.
        """

    def work(self, queues: Iterable[str], on_delivery: Callable[[], None]) -> Work:
        """Announce work of queues to a worker of the running event loop, by calling `on_delivery` there."""
