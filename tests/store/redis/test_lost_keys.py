"""Keys that are lost one by one: an operator deletes one, or a restored copy lacks it. Calls may fail then, but no
script goes on for ever: one that does stops the server for everybody."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fairlane.errors import FairlaneError, StoreUnavailable
from fairlane.model.job import JobState, Priority
from fairlane.model.maintenance import Retention
from fairlane.model.reading import Filter
from fairlane.model.settings import LaneRule
from fairlane.store.clock import ManualClock
from fairlane.store.redis.store import RedisStore
from tests.conformance.kit import Kit, Worker
from tests.servers import valkey
from tests.store.damage import redis_of

pytestmark = pytest.mark.anyio
LONGEST = 5.0
"""Seconds for a call of a few jobs, on a busy machine."""


def _drop_first(client: Any, key: bytes) -> None:
    match client.type(key):
        case b"zset":
            client.zpopmin(key)
        case b"set":
            client.srem(key, min(client.smembers(key)))
        case b"hash":
            client.hdel(key, min(client.hkeys(key)))


def _add_first(client: Any, key: bytes, member: str) -> None:
    match client.type(key):
        case b"zset":
            client.zadd(key, {member: client.zrange(key, 0, 0, withscores=True)[0][1] - 1})
        case b"set":
            client.sadd(key, member)


Damage = Callable[[Any, bytes, str], Any]
"""Does something to one key: the client, the key, and the number of a job that is final."""

DAMAGES: dict[str, Damage] = {
    "a lost key": lambda client, key, _: client.delete(key),
    "a lost member": lambda client, key, _: _drop_first(client, key),
    "a left over member": _add_first,
}


class Original:
    """A namespace with work of every kind in it, of which damaged copies can be made."""

    def __init__(self, url: str) -> None:
        with redis_of(url) as (client, prefix):
            self._name = prefix[1:-2]
            found = sorted(client.scan_iter(f"*{self._name}*", count=1000))
            self.keys = {key: client.dump(key) for key in found}
            [self._final, *_] = client.hkeys(prefix + "outcome")

    def copy(self, damage: Damage, damaged: bytes) -> str:
        """The URL of a copy with one damaged key."""
        url = valkey.server().fresh_namespace()
        with redis_of(url) as (client, prefix):
            for key, value in self.keys.items():
                name = key.replace(self._name.encode(), prefix[1:-2].encode())
                client.restore(name, 0, value)
                if key == damaged:
                    damage(client, name, self._final.decode())
        return url


async def _fill(kit: Kit) -> Worker:
    """Jobs that wait, run, retry, expire and have ended: with lanes, limits, keys, copies and turns."""
    await kit.settings("default", LaneRule(pattern="one:*", limit=1), LaneRule(pattern="heavy:*", weight=3))
    await kit.settings("limited", limit=2)
    worker = await kit.worker("default", "limited", slots=20)
    for priority in Priority:
        for lane in (None, "one:a", "one:b", "heavy:a", "plain"):
            for _ in range(2):
                await kit.enqueue(priority=priority, lane=lane)
        await kit.enqueue(queue="limited", priority=priority, unique=f"u{priority}")
    for n in range(2):
        await kit.enqueue(sticky="key", expires=30 + n)
        await kit.enqueue(lane="one:a", expires=30 + n)
    await kit.enqueue(delay=20)
    first = await worker.claim(12)
    await worker.complete(*first[:3])
    await worker.fail(first[3])
    await worker.retry(first[4], delay=20)
    await worker.retry(first[5])
    return worker


def _calls(kit: Kit, worker: Worker) -> list[Callable[[], Awaitable[object]]]:
    store = kit.store

    async def work() -> None:
        claimed = await worker.claim(6)
        await worker.complete(*claimed[:2])
        await worker.retry(*claimed[2:3])
        await worker.hand_back(*claimed[3:4])

    async def wait_for_it() -> None:
        kit.clock.advance(25)

    return [
        work,
        lambda: kit.enqueue(id="new-1", lane="one:a"),
        lambda: kit.enqueue(id="new-2", sticky="key"),
        lambda: store.configure([]),
        wait_for_it,
        worker.renew,
        store.promote,
        store.admit,
        work,
        store.queues,
        lambda: store.lanes("default"),
        lambda: store.find(Filter(state=JobState.PENDING)),
        lambda: store.positions(["job-1", "job-5", "job-30"]),
        wait_for_it,
        store.rescue,
        worker.leave,
        lambda: kit.worker("default", "limited"),
        lambda: store.prune(Retention()),
    ]


@pytest.mark.parametrize("what", DAMAGES)
async def test_no_damage_lets_a_script_go_on_for_ever(what: str) -> None:
    url = valkey.server().fresh_namespace()
    clock = ManualClock()
    store = await RedisStore.open(url, clock=clock)
    worker = await _fill(Kit(store, clock))
    await store.close()
    original = Original(url)
    for key in original.keys:
        clock = ManualClock()
        store = await RedisStore.open(original.copy(DAMAGES[what], key), clock=clock)
        kit = Kit(store, clock)
        for call in _calls(kit, Worker(kit, worker.session)):
            await _answered(call, f"{what}: {key!r}")
        # What repairs a store works on a damaged one.
        await store.recount()
        await store.close()


async def _answered(call: Callable[[], Awaitable[object]], damage: str) -> None:
    """Make a call, which may fail, but not because a script goes on."""
    try:
        async with asyncio.timeout(LONGEST):
            await call()
    except (TimeoutError, StoreUnavailable):
        valkey.server().ask("FUNCTION", "KILL")
        pytest.fail(f"a script went on for ever after {damage}")
    except FairlaneError:
        pass
