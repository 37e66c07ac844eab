"""Dramatiq: its own command line, one process with 16 threads; bodies are functions. A finished job leaves nothing."""

# The peers need not be installed, and some have no types.
# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator, no-untyped-call"

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.board import Board
from benchmarks.side import Side, module_command, worker_url

if TYPE_CHECKING:
    from dramatiq.brokers.redis import RedisBroker

THREADS = 16


class Sender:
    """Sends through the actor, which knows no bulk."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def send(self, number: int) -> None:
        self._actor.send(number)

    async def send_many(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._actor.send(number)


class Dramatiq(Side):
    """A thread runs one job at a time, so there are as many slots as threads."""

    package = "dramatiq"
    settings: ClassVar[Mapping[str, str]] = {f"{THREADS} threads": f"dramatiq --processes 1 --threads {THREADS}"}
    stored = "return redis.call('HLEN', 'dramatiq:default.msgs')"
    recorded = "return ARGV[1] - redis.call('HLEN', 'dramatiq:default.msgs')"

    async def install(self, url: str) -> None:
        """Nothing has to be there."""

    @asynccontextmanager
    async def producer(self, url: str, setting: str) -> AsyncIterator[Sender]:
        yield Sender(_made(url).get_actor("noop"))

    def command(self, url: str, setting: str) -> list[str]:
        return module_command("dramatiq", f"{__name__}:worker", "--processes", "1", "--threads", str(THREADS))


SIDE = Dramatiq()
LOCK = Lock()


def _made(url: str) -> RedisBroker:
    import dramatiq
    from dramatiq.brokers.redis import RedisBroker

    broker = RedisBroker(url=url)

    @dramatiq.actor(actor_name="noop", broker=broker)
    def noop(number: int) -> None:
        with LOCK:
            _board().ran(number)

    return broker


@cache
def _board() -> Board:
    return Board.mine()


@cache
def _worker() -> RedisBroker:
    _board().wait()
    return _made(worker_url())


def __getattr__(name: str) -> RedisBroker:
    """`worker`: the broker that its command names."""
    if name != "worker":
        raise AttributeError(name)
    return _worker()
