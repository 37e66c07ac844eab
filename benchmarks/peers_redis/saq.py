"""SAQ on its Redis queue: its own command line; a finished job stays for ten minutes."""

# The peers need not be installed, and some have no types.
# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator"

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, ClassVar

from benchmarks.board import Board
from benchmarks.side import SLOTS, Side, module_command, worker_url


class Sender:
    """Sends through the queue, which knows no bulk: a hundred are sent at once."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    async def send(self, number: int) -> None:
        await self._queue.enqueue("noop", number=number)

    async def send_many(self, numbers: Sequence[int]) -> None:
        for start in range(0, len(numbers), 100):
            await asyncio.gather(*(self.send(number) for number in numbers[start : start + 100]))


class Saq(Side):
    """With as many concurrent jobs as there are slots."""

    package = "saq"
    settings: ClassVar[Mapping[str, str]] = {"": f"saq, concurrency {SLOTS}"}
    stored = "return redis.call('ZCARD', 'saq:default:incomplete')"
    recorded = "return ARGV[1] - redis.call('ZCARD', 'saq:default:incomplete')"
    share = 0.25

    async def install(self, url: str) -> None:
        """Nothing has to be there."""

    @asynccontextmanager
    async def producer(self, url: str, setting: str) -> AsyncIterator[Sender]:
        from saq import Queue

        queue = Queue.from_url(url)
        await queue.connect()
        yield Sender(queue)
        await queue.disconnect()

    def command(self, url: str, setting: str) -> list[str]:
        return module_command("saq", f"{__name__}.worker")


SIDE = Saq()


async def noop(context: object, *, number: int) -> None:
    """What the worker runs."""
    _board().ran(number)


@cache
def _board() -> Board:
    return Board.mine()


def __getattr__(name: str) -> dict[str, Any]:
    """`worker`: the settings that its command reads."""
    if name != "worker":
        raise AttributeError(name)
    from saq import Queue

    _board().wait()
    return {"queue": Queue.from_url(worker_url()), "functions": [noop], "concurrency": SLOTS}
