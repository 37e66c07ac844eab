"""The bare loop: what Redis alone gives for claiming and finishing jobs by Lua, with a task for each job.

A list, and a string for each job; a claim moves jobs into a hash, so that they outlive their worker, and a finish takes
them out of it. No lanes, no classes, no fair order, no limits, no fence, no retries, no sessions, no wake-ups. Who
sends calls one script that writes the string and the place in the list.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import uuid_utils
from redis.asyncio import Redis

from benchmarks.board import Board
from benchmarks.side import Side, module_command, worker_url

BATCH = 100
MOST = 1_000
"""Jobs in one call of a script: it may be called with 8,000 arguments or so, and each job is two."""
INSERT = """
for place = 1, #ARGV, 2 do
    redis.call('SET', 'job:' .. ARGV[place], ARGV[place + 1])
    redis.call('RPUSH', 'ready', ARGV[place])
end
"""
CLAIM = """
local ids = redis.call('LPOP', 'ready', ARGV[2])
if not ids then return {} end
local found = {}
for place, id in ipairs(ids) do
    redis.call('HSET', 'running', id, ARGV[1])
    found[place] = {id, redis.call('GET', 'job:' .. id)}
end
return found
"""
FINISH = """
local ended = 0
for place = 1, #ARGV do
    if redis.call('HDEL', 'running', ARGV[place]) == 1 then
        redis.call('DEL', 'job:' .. ARGV[place])
        ended = ended + 1
    end
end
redis.call('INCRBY', 'ended', ended)
return ended
"""


class Scripts:
    """The scripts on one connection."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._known: dict[str, str] = {}

    async def call(self, script: str, *arguments: Any) -> Any:
        """One EVALSHA, but for the first time."""
        if script not in self._known:
            self._known[script] = await self._client.script_load(script)
        return await self._client.evalsha(self._known[script], 0, *arguments)


class Sender:
    """Sends over one connection."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    async def send(self, number: int) -> None:
        await self._scripts.call(INSERT, str(uuid_utils.uuid7()), number)

    async def send_many(self, numbers: Sequence[int]) -> None:
        for start in range(0, len(numbers), MOST):
            arguments: list[str | int] = []
            for number in numbers[start : start + MOST]:
                arguments += (str(uuid_utils.uuid7()), number)
            await self._scripts.call(INSERT, *arguments)


class Bare(Side):
    """A hundred in a claim, and a task for each of them."""

    package = "redis"
    settings: ClassVar[Mapping[str, str]] = {"": f"claim {BATCH}, a task for each, finish {BATCH}, over one connection"}
    stored = "return redis.call('LLEN', 'ready') + redis.call('HLEN', 'running') + (redis.call('GET', 'ended') or 0)"
    recorded = "return tonumber(redis.call('GET', 'ended') or 0)"
    waits = False

    async def install(self, url: str) -> None:
        """Nothing has to be there."""

    @asynccontextmanager
    async def producer(self, url: str, setting: str) -> AsyncIterator[Sender]:
        async with _connected(url) as scripts:
            yield Sender(scripts)

    def command(self, url: str, setting: str) -> list[str]:
        return module_command(__name__)


SIDE = Bare()


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Scripts]:
    client: Redis = Redis.from_url(url, protocol=2, single_connection_client=True)
    yield Scripts(client)
    await client.aclose()


async def work() -> None:
    """A worker process: ends its work when nothing is left, and itself when it is told to."""
    board = Board.mine()
    ran = board.ran

    async def noop(number: int) -> None:
        ran(number)

    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    board.wait()
    async with _connected(worker_url()) as scripts:
        while claimed := await scripts.call(CLAIM, "worker", BATCH):
            await asyncio.gather(*[asyncio.create_task(noop(int(payload))) for _, payload in claimed])
            await scripts.call(FINISH, *[id for id, _ in claimed])
        await stopped.wait()


if __name__ == "__main__":
    # As our own workers do, when it is installed.
    try:
        import uvloop
    except ImportError:
        asyncio.run(work())
    else:
        uvloop.run(work())
    sys.exit()
