"""Wake-ups are hints: losing or doubling every one of them costs latency, never a job. Polling is always on.

Topics:

- ``queue:NAME``      a job of the queue may start on any worker that serves it
- ``worker:POOL/I``   a job in that worker's inbox may start
- ``session:ID``      the session should renew: a cancel was requested, or a turn was granted
- ``job:ID``          the job changed: state or progress
- ``place:QUEUE/LANE``  somebody in front left the line of a limited lane, so the others moved up
- ``leader``          the leader resigned
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

LEADER = "leader"


def queue_topic(queue: str) -> str:
    """Work in a queue."""
    return f"queue:{queue}"


def worker_topic(worker: str) -> str:
    """Work in the inbox of ``pool/index``."""
    return f"worker:{worker}"


def session_topic(session: str) -> str:
    """Something a session should hear of before its next renewal."""
    return f"session:{session}"


def job_topic(job: str) -> str:
    """A change of one job."""
    return f"job:{job}"


def place_topic(queue: str, lane: str) -> str:
    """The line of a limited lane moved."""
    return f"place:{queue}/{lane}"


class Subscription(Protocol):
    """One listener's ear. Used from the event loop it was made in."""

    async def wait(self, timeout: float | None = None) -> frozenset[str]:
        """The topics heard since the last call; waits for one, and returns nothing when `timeout` passes."""

    def listen(self, topics: Iterable[str]) -> None:
        """Hear these topics, instead of those before."""

    def close(self) -> None:
        """Hear nothing more. Closing twice is harmless."""


class Wakeups(Protocol):
    """How processes tell each other to look at the store."""

    def publish(self, topics: Iterable[str]) -> None:
        """Tell everybody who listens, in any process. Never blocks and never raises; may lose anything."""

    def subscribe(self, topics: Iterable[str], ring: Callable[[], None] | None = None) -> Subscription:
        """Listen to `topics`, from the running event loop. What is published from now on is heard or lost.

        `ring` is called in that loop when something was heard, before whoever waits: it spares a turn of the loop.
        """
