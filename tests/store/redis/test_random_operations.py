"""Whatever workers, waiters and operators do while lanes settle and keys are lost: limits hold, no job is lost, and a
recount agrees."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from random import Random
from typing import Any

import pytest

from fairlane.errors import FairlaneError, QueueFull
from fairlane.model.job import Held, Job, JobKind, JobState, Priority, Reason
from fairlane.model.lanes import terms
from fairlane.model.maintenance import Retention
from fairlane.model.settings import LaneRule, QueueSettings
from fairlane.model.states import complete, fail, hand_back, retry
from tests.conformance.kit import Kit, Worker
from tests.conformance.runs import bulk, everything
from tests.sizes import sized

from ..settling import Settling

QUEUES = ("default", "second")
LANES = ("slow", "slow", "slow", "slower", "s-3")
OPEN_STATES = (JobState.SCHEDULED, JobState.PENDING, JobState.RUNNING)


def random_rules(rng: Random) -> tuple[LaneRule, ...]:
    ways: list[dict[str, Any]] = [
        {},
        {"paused": True},
        {"limit": 1},
        {"limit": 1, "ordered": False},
        {"limit": 2},
        {"limit": 2, "ordered": True},
        {"limit": 3, "weight": 2.0},
        {"limit": 3, "ordered": True, "paused": True},
        {"limit": 2, "max_pending": 20},
    ]
    return tuple(LaneRule(pattern=pattern, **rng.choice(ways)) for pattern in ("slow", "s*", "*") if rng.random() < 0.6)


class Crowd:
    """Three workers, a waiter and an operator that do random things."""

    def __init__(self, rng: Random, settling: Settling) -> None:
        self.rng = rng
        self.settling = settling
        self.kit: Kit = settling.kit
        self.store = settling.store
        self.workers: list[Worker] = []
        self.held: list[tuple[Worker, Held]] = []
        self.ids: list[str] = []
        self.rules: dict[str, tuple[LaneRule, ...]] = dict.fromkeys(QUEUES, ())

    async def come(self) -> None:
        for _ in range(3):
            self.workers.append(await self.kit.worker(*QUEUES, slots=self.rng.choice([1, 1, 3, 20])))
        self.waiter = await self.kit.waiter()

    async def act(self, name: str) -> None:
        """One deed; what it starts must be allowed to start."""
        before, settled = await self.running(), self.settling.lanes()
        await getattr(self, name)()
        after, settles = await self.running(), settled & self.settling.lanes()
        for (queue, lane), jobs in after.items():
            started = [job for name, job in jobs.items() if name not in before[queue, lane]]
            # Turns are never claimed: those of a lane that loses its limit start one by one.
            claimed = [job for job in started if job.kind is not JobKind.TURN]
            assert not claimed or (queue, lane) not in settles, f"{lane} settles, and {name} has started {claimed}"
            limit = terms(QueueSettings(lanes=self.rules[queue]), lane).limit
            assert not started or limit is None or len(jobs) <= limit, f"{name}: {len(jobs)} of {limit} run in {lane}"

    async def running(self) -> dict[tuple[str, str], dict[tuple[str, int], Job]]:
        found: dict[tuple[str, str], dict[tuple[str, int], Job]] = defaultdict(dict)
        for job in await everything(self.kit, state=JobState.RUNNING):
            if job.lane:
                found[job.queue, job.lane][job.id, job.fence] = job
        return found

    async def send(self) -> None:
        more: dict[str, Any] = {}
        for chance, name, values in (
            (0.2, "sticky", "abc"),
            (0.1, "delay", (3.0,)),
            (0.15, "expires", (1.5, 4.0)),
            (0.1, "unique", "uvw"),
            (0.15, "cost", (0.5, 2.5)),
            (0.3, "retries", (0,)),
        ):
            if self.rng.random() < chance:
                more[name] = self.rng.choice(values)
        more |= {"queue": self.rng.choice(QUEUES), "priority": self.rng.choice(list(Priority))}
        jobs = bulk(self.kit, self.rng.choice([*LANES, None]), self.rng.choice([1, 1, 2, 8]), **more)
        with suppress(QueueFull):  # a lane has `max_pending`
            self.ids += [job.id for job in await self.kit.enqueue_all(jobs)]

    async def turn(self) -> None:
        more = {"expires": 2.0} if self.rng.random() < 0.3 else {}
        queue, lane, priority = self.rng.choice(QUEUES), self.rng.choice(LANES), self.rng.choice(list(Priority))
        new = self.kit.new(
            "turn", kind=JobKind.TURN, waiter=self.waiter.id, queue=queue, lane=lane, priority=priority, **more
        )
        with suppress(FairlaneError):  # the lane has no limit, or `max_pending`
            self.ids += [job.id for job in await self.store.enqueue([new])]

    async def claim(self) -> None:
        worker = self.rng.choice(self.workers)
        self.held += [(worker, job.held) for job in await worker.claim(self.rng.choice([1, 3, 10]))]

    async def decide(self) -> None:
        if self.held:
            worker, held = self.held.pop(self.rng.randrange(len(self.held)))
            ways = [
                complete(held),
                complete(held),
                hand_back(held),
                *(retry(held, delay, Reason.ERROR, "boom") for delay in (0.0, 2.0)),
                fail(held, Reason.ERROR, "boom"),
            ]
            await worker.finish(self.rng.choice(ways))

    async def complete_all(self) -> None:
        worker = self.rng.choice(self.workers)
        await worker.complete(*[held for by, held in self.held if by is worker])
        self.held = [(by, held) for by, held in self.held if by is not worker]

    async def forget(self) -> None:
        """A worker renews without naming some of its jobs: those are taken back."""
        worker = self.rng.choice(self.workers)
        self.held = [(by, held) for by, held in self.held if by is not worker or self.rng.random() < 0.5]
        await worker.renew(*[held for by, held in self.held if by is worker])

    async def end_turns(self) -> None:
        for job in await everything(self.kit, state=JobState.RUNNING):
            if job.session == self.waiter.id:
                await self.waiter.complete(Held(job.id, job.fence))

    async def cancel(self) -> None:
        if self.ids:
            await self.store.cancel([self.rng.choice(self.ids)])

    async def release(self) -> None:
        new = self.kit.new("tidy", kind=JobKind.CLEANUP, queue=self.rng.choice(QUEUES))
        await self.store.release("default", self.rng.choice("abc"), new if self.rng.random() < 0.7 else None)

    async def broadcast(self) -> None:
        await self.kit.enqueue("all", kind=JobKind.BROADCAST, queue=self.rng.choice(QUEUES), ttl=3.0)

    async def leave(self) -> None:
        """A worker or the waiter goes, and another comes."""
        if self.rng.random() < 0.3:
            await self.waiter.leave()
            self.waiter = await self.kit.waiter()
            return
        number = self.rng.randrange(len(self.workers))
        gone = self.workers[number]
        self.held = [(by, held) for by, held in self.held if by is not gone]
        if self.rng.random() < 0.5:
            await gone.leave()
        else:
            for seconds in (10, 6):
                self.kit.clock.advance(seconds)
                await self.renew(gone)
            await self.store.rescue()
        self.workers[number] = await self.kit.worker(*QUEUES, slots=self.rng.choice([1, 1, 3, 20]))

    async def renew(self, besides: Worker | None = None) -> None:
        for worker in self.workers:
            if worker is not besides:
                await worker.renew(*[held for by, held in self.held if by is worker])
        turns = await everything(self.kit, state=JobState.RUNNING)
        await self.waiter.renew(*[Held(job.id, job.fence) for job in turns if job.session == self.waiter.id])

    async def wait(self) -> None:
        self.kit.clock.advance(self.rng.choice([0.5, 1.0, 2.5]))
        await self.renew()
        await self.store.promote()

    async def admit(self) -> None:
        await self.store.admit()

    async def rescue(self) -> None:
        await self.store.rescue()

    async def prune(self) -> None:
        await self.store.prune(Retention(), limit=100)

    async def change(self) -> None:
        queue = self.rng.choice(QUEUES)
        self.rules[queue] = random_rules(self.rng)
        await self.settling.change(*self.rules[queue], queue=queue)

    async def go_on(self) -> None:
        await self.settling.go_on(self.rng.choice([1, 2, 5]))

    async def look(self) -> None:
        await self.store.positions(self.ids[-30:])
        assert (await self.store.recount()).differences == ()

    async def free_all(self) -> None:
        for queue in QUEUES:
            self.rules[queue] = ()
            await self.settling.change(queue=queue)
        await self.settling.end()

    async def go_home(self) -> None:
        """Nothing is enqueued any more, and all open jobs run."""
        idle = 0
        while [job for state in OPEN_STATES for job in await everything(self.kit, state=state)]:
            for worker in self.workers:
                self.held += [(worker, job.held) for job in await worker.claim(20)]
            idle = 0 if self.held else idle + 1
            assert idle < 20, "there are jobs that cannot start"
            for worker, held in self.held:
                await worker.complete(held)
            self.held.clear()
            await self.end_turns()
            await self.wait()
            await self.admit()
            await self.rescue()


ACTS = (
    *(["send"] * 10 + ["claim"] * 8 + ["go_on"] * 8 + ["decide"] * 6 + ["change"] * 4 + ["wait"] * 4 + ["look"] * 4),
    *(["turn", "complete_all", "end_turns", "cancel", "release", "broadcast", "prune", "admit", "rescue"] * 2),
    *["forget", "forget", "leave", "leave"],
)


@pytest.mark.parametrize("seed", range(sized(4, 120)))
async def test_whatever_happens_while_lanes_settle_limits_hold_and_nothing_is_lost(
    settling: Settling, seed: int
) -> None:
    crowd = Crowd(Random(seed), settling)
    await crowd.come()
    for _ in range(200):
        await crowd.act(crowd.rng.choice(ACTS))
    await crowd.free_all()
    await crowd.look()
    await crowd.go_home()
    await crowd.look()
