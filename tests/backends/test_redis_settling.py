"""Lanes whose limit changes, job by job in many steps: what happens to them, and to others, in between."""

from __future__ import annotations

from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest
import redis

from fairlane.backends.redis import settings
from fairlane.backends.redis.store import RedisStore
from fairlane.clock import ManualClock
from fairlane.job import Claimed, JobState, Priority, Reason
from fairlane.settings import LaneRule
from fairlane.states import complete, fail, hand_back, retry
from fairlane.upkeep import Retention
from tests.conformance.kit import Kit, Worker
from tests.conformance.runs import bulk, drain, everything
from tests.servers import valkey

PAUSED, FREE = LaneRule(pattern="slow", paused=True), LaneRule(pattern="slow")
RULES = (
    FREE,
    PAUSED,
    LaneRule(pattern="slow", limit=1),
    LaneRule(pattern="slow", limit=2),
    LaneRule(pattern="slow", limit=2, ordered=True),
    LaneRule(pattern="slow", limit=3),
)


class DiedError(Exception):
    """Whoever changes the rules is gone after the first step."""


class Settling:
    """A store in which the jobs of a lane change one by one, and only when the test says so."""

    def __init__(self, store: RedisStore, kit: Kit, patch: pytest.MonkeyPatch) -> None:
        self.store = store
        self.kit = kit
        self._version = 0
        self._patch = patch
        self._call = store._functions.call
        patch.setattr(store._functions, "call", self._dying)

    def let_live(self) -> None:
        """Whoever changes the rules lives on from now on."""
        self._patch.setattr(self.store._functions, "call", self._call)

    async def _dying(self, verb: str, *arguments: Any) -> Any:
        if verb == "settle":
            raise DiedError
        return await self._call(verb, *arguments)

    async def change(self, *rules: LaneRule) -> bool:
        """Change the rules, and die after the first step. Returns whether that was not the last."""
        self._version += 1
        try:
            await self.kit.settings("default", *rules, version=self._version)
        except DiedError:
            return True
        return False

    async def go_on(self, most: int = 1) -> bool:
        """One step more. Returns whether that was not the last."""
        return bool((await self._call("settle", most))["more"])

    async def end(self) -> None:
        while await self.go_on(3):
            pass


@pytest.fixture
async def settling(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Settling]:
    monkeypatch.setattr(settings, "MOST_MOVED", 1)
    clock = ManualClock()
    store = await RedisStore.open(valkey.server().fresh_namespace(), clock=clock)
    yield Settling(store, Kit(store, clock), monkeypatch)
    await store.close()


@pytest.fixture
def kit(settling: Settling) -> Kit:
    return settling.kit


async def test_a_lane_that_settles_starts_nothing_and_all_others_go_on(settling: Settling, kit: Kit) -> None:
    worker = await kit.worker(slots=50)
    slow = [await kit.enqueue(lane="slow") for _ in range(6)]
    [first] = await worker.claim(1)
    for rule, starts in ((PAUSED, []), (FREE, slow[1:4])):
        assert await settling.change(rule)
        for _ in range(3):
            other = await kit.enqueue(lane="other")
            assert await worker.claim_ids(50) == [other]
            assert await settling.go_on()
        await settling.end()
        assert await worker.claim_ids(len(starts)) == starts
    await worker.complete(first)
    assert await drain(worker) == slow[4:]


async def test_the_leader_goes_on_where_whoever_changed_the_rules_has_died(settling: Settling, kit: Kit) -> None:
    slow = [await kit.enqueue(lane="slow") for _ in range(5)]
    worker = await kit.worker(slots=50)
    assert await settling.change(LaneRule(pattern="slow", limit=2))
    assert not await worker.claim(50)
    assert not (await kit.store.admit()).more
    assert await worker.claim_ids(50) == slow[:2]


async def test_whoever_changes_the_rules_waits_until_they_hold(settling: Settling, kit: Kit) -> None:
    slow = [await kit.enqueue(lane="slow") for _ in range(5)]
    settling.let_live()
    worker = await kit.worker(slots=50)
    await kit.settings("default", LaneRule(pattern="slow", limit=2), version=1)
    assert await worker.claim_ids(50) == slow[:2]


async def test_a_lane_that_is_freed_keeps_its_order_for_those_who_come_meanwhile(settling: Settling, kit: Kit) -> None:
    await settling.change(LaneRule(pattern="slow", limit=1))
    worker = await kit.worker(slots=50)
    slow = [await kit.enqueue(lane="slow", priority=Priority.LOW) for _ in range(7)]
    [first] = await worker.claim(50)
    assert await settling.change(FREE)
    assert await settling.go_on(3)
    # One that is late, with a number that was passed already, and others that have just come.
    await worker.hand_back(first)
    late = bulk(kit, "slow", 2, priority=Priority.LOW)
    slow += [await kit.enqueue(lane="slow", priority=Priority.LOW), *[job.id for job in await kit.enqueue_all(late)]]
    assert not await worker.claim(50)
    assert [standing.place for standing in await kit.store.standing(slow) if standing] == list(range(1, 11))
    await settling.end()
    assert await worker.claim_ids(50) == slow


async def test_the_turn_of_a_lane_is_not_lost_when_its_record_is_forgotten_meanwhile(
    settling: Settling, kit: Kit
) -> None:
    worker = await kit.worker(slots=50)
    slow = [await kit.enqueue(lane="slow") for _ in range(3)]
    assert await settling.change(LaneRule(pattern="slow", limit=3, ordered=True))
    await kit.store.prune(Retention(), limit=1_000)
    await settling.end()
    assert await worker.claim_ids(50) == slow


async def test_who_remembers_that_a_lane_settles_is_told_when_it_has(settling: Settling, kit: Kit) -> None:
    """Another version of the functions, or another server, remembers rules for as long as their number stays."""
    prefix = settling.store._functions._prefix
    with redis.Redis(port=valkey.server().port) as client:

        def number() -> int:
            return int(client.hget(f"{prefix}counter", "settings") or 0)

        for lane in ("slow", "slower"):
            await kit.enqueue_all(bulk(kit, lane, 3))
        assert await settling.change(LaneRule(pattern="slow*", limit=1))
        told, more = 0, True
        while more:
            before, left = number(), client.hlen(f"{prefix}settling:1")
            more = await settling.go_on()
            assert (number() > before) == (client.hlen(f"{prefix}settling:1") < left)
            told += number() > before
        assert told == 2
        assert not client.exists(f"{prefix}settling:1", f"{prefix}unsettled")


async def test_workers_are_told_when_a_lane_has_settled(settling: Settling, kit: Kit) -> None:
    await kit.enqueue_all(bulk(kit, "slow", 3))
    for rule in (PAUSED, FREE):
        assert await settling.change(rule)
        with redis.Redis(port=valkey.server().port) as client, client.pubsub() as heard:
            heard.subscribe(f"{settling.store._functions._prefix}topics")
            assert heard.get_message(timeout=5)
            await settling.end()
            told = heard.get_message(timeout=0.2)
        assert (told is not None and told["data"] == b"queue:default") == (rule is FREE)


async def test_a_lane_that_begins_to_settle_and_stays_as_it_was_stays_closed_for_its_head(
    settling: Settling, kit: Kit
) -> None:
    ordered = LaneRule(pattern="slow", limit=1)
    await settling.change(ordered)
    worker = await kit.worker()
    slow = [await kit.enqueue(lane="slow") for _ in range(4)]
    await worker.complete(*await worker.claim())
    await worker.retry(*await worker.claim(), delay=5.0)
    assert await settling.change(FREE)
    await settling.change(ordered)
    await settling.end()
    assert not await worker.claim()
    kit.clock.advance(6)
    await kit.store.promote()
    assert await drain(worker, batch=1) == slow[1:]


class Crowd:
    """Jobs of all kinds in one lane and beside it, and workers who do with them whatever comes to their minds."""

    def __init__(self, rng: Random, settling: Settling, workers: list[Worker]) -> None:
        self.rng = rng
        self.settling = settling
        self.kit = settling.kit
        self.workers = workers
        self.held: list[tuple[Worker, Claimed]] = []
        self.ids: list[str] = []
        self.rule = FREE
        self.settles = False

    def slow(self) -> int:
        return sum(job.lane == "slow" for _, job in self.held)

    async def send(self) -> None:
        lane = self.rng.choice(["slow", "slow", "slow", "other", None])
        kind = self.rng.randrange(8)
        more: dict[str, Any] = {"sticky": "a"} if kind == 0 else {"delay": 3.0} if kind == 1 else {}
        jobs = bulk(self.kit, lane, self.rng.choice([1, 1, 4]), priority=self.rng.choice(list(Priority)), **more)
        self.ids += [job.id for job in await self.kit.enqueue_all(jobs)]

    async def claim(self) -> None:
        worker, before = self.rng.choice(self.workers), self.slow()
        self.held += [(worker, job) for job in await worker.claim(self.rng.choice([1, 3, 10]))]
        started = self.slow() - before
        assert not started or not self.settles, "a lane that settles has started something"
        most = 0 if self.rule.paused else self.rule.limit
        assert not started or most is None or self.slow() <= most, f"{self.slow()} run in a lane with a limit of {most}"

    async def decide(self) -> None:
        if self.held:
            worker, job = self.held.pop(self.rng.randrange(len(self.held)))
            ways = [
                complete(job.held),
                complete(job.held),
                hand_back(job.held),
                *(retry(job.held, delay, Reason.ERROR, "boom") for delay in (0.0, 2.0)),
                fail(job.held, Reason.ERROR, "boom"),
            ]
            await worker.finish(self.rng.choice(ways))

    async def cancel(self) -> None:
        if self.ids:
            id = self.rng.choice(self.ids)
            if await self.kit.state(id) in (JobState.PENDING, JobState.SCHEDULED):
                await self.kit.store.cancel([id])

    async def change(self) -> None:
        self.rule = self.rng.choice(RULES)
        self.settles = await self.settling.change(self.rule)

    async def go_on(self) -> None:
        self.settles = await self.settling.go_on(self.rng.choice([1, 2, 5]))

    async def wait(self) -> None:
        self.kit.clock.advance(1)
        await self.kit.store.promote()
        await self.kit.store.prune(Retention(), limit=100)
        for worker in self.workers:
            await worker.renew(*[job for held_by, job in self.held if held_by is worker])

    async def look(self) -> None:
        await self.kit.store.standing(self.ids)
        assert (await self.settling.store.recount()).differences == ()


@pytest.mark.parametrize("seed", range(16))
async def test_whatever_happens_while_a_lane_settles_its_limit_holds_and_nothing_is_lost(
    settling: Settling, kit: Kit, seed: int
) -> None:
    rng = Random(seed)
    crowd = Crowd(rng, settling, [await kit.worker(slots=20), await kit.worker(slots=20)])
    acts = [crowd.send] * 4 + [crowd.claim] * 3 + [crowd.decide] * 3 + [crowd.go_on] * 4
    for _ in range(250):
        await rng.choice([*acts, crowd.cancel, crowd.change, crowd.wait, crowd.look])()
    await settling.change(FREE)
    await settling.end()
    crowd.rule, crowd.settles = FREE, False
    for _ in range(200):
        for worker, job in crowd.held:
            await worker.complete(job)
        crowd.held.clear()
        await crowd.wait()
        await crowd.claim()
    await crowd.look()
    left = [job.id for job in await everything(kit) if job.state in (JobState.PENDING, JobState.RUNNING)]
    assert left == []
