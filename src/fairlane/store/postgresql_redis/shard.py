"""One Redis of the deployment: the priorities it serves, and whether it answers.

A call has a short deadline. After a failure the circuit is open: for a growing pause, calls fail at once and without
touching the server, then one call tries again. A caller has nothing to repeat: a token that was not pushed costs a
poll.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterable, Sequence

import msgspec

from ...errors import FairlaneError, StoreUnavailable
from ...model.job import Priority
from ..redis.address import Address, parse
from ..redis.connection import Argument
from ..redis.connection_pool import Connections
from ..redis.driver_errors import ServerError, translate
from . import scripts

CALL_SECONDS = 1.0
"""For a whole call, the opening of a connection included."""
ANSWER_SECONDS = 0.9
"""For its answer: less, so that it is the pool that gives up, and closes its other connections to this server too."""
CONNECT_SECONDS = 2.0
SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
WARN_SECONDS = 60.0
"""Least seconds between two warnings: a server may answer some calls and fail others, in turn."""
logger = logging.getLogger("fairlane.store.tokens")


class Keys:
    """The keys of one schema on a server."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.state = f"{prefix}state"
        self.lists = f"{prefix}lists"
        self.alive = f"{prefix}alive"
        self.jobs = f"{prefix}jobs"
        """The channel of topics about jobs and queues."""
        self.topics = f"{prefix}topics"
        """The channel of all other topics."""

    def list(self, queue: str, priority: Priority) -> str:
        """The tokens of a queue and class."""
        return f"{self.prefix}work:{priority.label}:{queue}"

    def interruption(self, id: str) -> str:
        """The list by which a worker ends its own wait."""
        return f"{self.prefix}interruption:{id}"


class Shard:
    """A server, and the circuit breaker in front of it. Used from any event loop and thread of a process."""

    def __init__(self, address: Address, priorities: Iterable[Priority], suffix: str) -> None:
        self.address = msgspec.structs.replace(address, connect_seconds=min(CONNECT_SECONDS, address.connect_seconds))
        self.priorities = tuple(priorities)
        # Its priorities are in all keys: a server under two names is two, and neither may trim the tokens of the other.
        served = "+".join(priority.label for priority in self.priorities)
        self.keys = Keys(f"{address.prefix}{suffix}:{served}:")
        self.lost = 0
        """Tokens that could not be pushed, and were not reported to the server yet."""
        self.seen: tuple[str, int] = ("", 0)
        """The generation and its sweeps, as this process last saw them."""
        self._connections = Connections(self.address)
        self._failures = 0
        self._open_until = 0.0
        self._warned_at = -WARN_SECONDS
        self._warned = False

    @property
    def name(self) -> str:
        """Its priorities, for messages."""
        return " and ".join(priority.label for priority in self.priorities)

    @property
    def is_well(self) -> bool:
        """Whether the last call was answered."""
        return not self._failures

    async def call(self, *arguments: Argument, repeats: bool = False) -> object:
        """Send one command. Raises `FairlaneError` if it is not answered in time, or at once while the circuit is open.

        With `repeats` the caller deals with an error reply, which is then no sign of a server that does not work.
        """
        if self._failures and time.monotonic() < self._open_until:
            raise StoreUnavailable(f"{self.address} did not answer a moment ago")
        if self._failures:
            # One call tries; the others fail until it is answered.
            self._open_until = time.monotonic() + CALL_SECONDS
        try:
            async with asyncio.timeout(CALL_SECONDS):
                answer: object = await self._connections.call(*arguments, timeout=ANSWER_SECONDS)
        except ServerError as exc:
            # An error is an answer too: where the caller knows what to do, the next call must get through.
            self.worked() if repeats else self.failed(exc)
            raise
        except FairlaneError as exc:
            self.failed(exc)
            raise
        except TimeoutError as exc:
            error = translate(exc, self.address, str(arguments[0]))
            self.failed(error)
            raise error from exc
        self.worked()
        return answer

    async def run(self, script: str, keys: Sequence[str], arguments: Sequence[Argument]) -> object:
        """Run a script of `lua/`; a server that does not know it yet gets its text."""
        rest = (len(keys), *keys, *arguments)
        try:
            return await self.call("EVALSHA", scripts.digest(script), *rest, repeats=True)
        except ServerError as exc:
            if exc.code != "NOSCRIPT":
                self.failed(exc)
                raise
        return await self.call("EVAL", scripts.text(script), *rest)

    def failed(self, exc: Exception) -> None:
        """Open the circuit for a pause that doubles with each failure."""
        now = time.monotonic()
        if not self._failures and now >= self._warned_at + WARN_SECONDS:
            self._warned_at, self._warned = now, True
            logger.warning(
                "Redis for %s priority does not work; workers find its jobs by polling PostgreSQL (%s)", self.name, exc
            )
        self._failures += 1
        pause = min(LONGEST_PAUSE, SHORTEST_PAUSE * 2.0 ** min(self._failures - 1, 10))
        self._open_until = now + pause * random.uniform(0.5, 1)

    def worked(self) -> None:
        """Close the circuit."""
        self._failures = 0
        if self._warned:
            self._warned = False
            logger.info("Redis for %s priority works again", self.name)

    def report_reset(self) -> None:
        """The generation has changed since this process saw it."""
        logger.warning(
            "Redis for %s priority was flushed, replaced or rolled back; its tokens were restored from PostgreSQL",
            self.name,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._connections.close()


def shards_of(urls: Sequence[str], suffix: str) -> list[Shard]:
    """The servers of the three priorities, high first; equal URLs are one server."""
    priorities: dict[str, list[Priority]] = {}
    for priority, url in zip(Priority, urls, strict=True):
        priorities.setdefault(url, []).append(priority)
    return [Shard(parse(url), served, suffix) for url, served in priorities.items()]
