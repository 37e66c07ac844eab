"""Random interleavings, a thousand in a full run: no stale write is ever taken, and every job ends exactly once.

There are a few jobs, and a few sessions that are slow, die, leave or repeat calls. The suite's own record of the
holder of each (job, fence) says what must happen; the store is compared with it after every step.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random

import pytest

from fairlane.errors import SessionLost
from fairlane.model import states
from fairlane.model.job import Acceptance, Held, Reason
from fairlane.model.retry import Backoff
from fairlane.model.states import Transition, complete, fail, hand_back, retry, snooze
from tests.sizes import FULL, sized

from .holders import Holders, Holding
from .kit import Kit, Worker

BLOCKS, INTERLEAVINGS, STEPS = sized(2, 20), 50, 16
JOBS, SESSIONS = 4, 3
LEASE = 15.0


class Interleaving:
    """One run of random steps over its own queue, each compared with the record."""

    def __init__(self, kit: Kit, name: str) -> None:
        self.kit = kit
        self.name = name
        self.rng = Random(name)
        self.workers: list[Worker] = []
        self.log: list[str] = []
        new = [
            kit.new(
                id=f"{name}/job-{n}",
                queue=name,
                retries=self.rng.randrange(3),
                backoff=Backoff(base=5.0, factor=1.0, jitter=False),
            )
            for n in range(JOBS)
        ]
        self.holders = Holders({job.id: Holding(job) for job in new})

    @property
    def now(self) -> float:
        return self.kit.clock.now()

    async def run(self) -> None:
        """All steps, and then the end of every job."""
        await self.kit.store.enqueue([job.new for job in self.holders.jobs.values()])
        for _ in range(SESSIONS):
            await self.join()
        steps: dict[Callable[[], Awaitable[None]], int] = {
            self.claim: 5,
            self.finish: 6,
            self.renew: 3,
            self.cancel: 1,
            self.rescue: 3,
            self.promote: 2,
            self.leave: 1,
            self.report: 1,
        }
        for _ in range(STEPS):
            if self.rng.random() < 0.3:
                self.kit.clock.advance(self.rng.uniform(0.5, LEASE))
            [step] = self.rng.choices(list(steps), weights=list(steps.values()))
            await step()
            await self.check()
        await self.end()

    async def check(self) -> None:
        self.holders.check(await self.kit.store.get(list(self.holders.jobs)))

    async def join(self) -> Worker:
        worker = await self.kit.worker(self.name, lease=LEASE)
        self.workers.append(worker)
        self.holders.leases[worker.id] = self.now + LEASE
        return worker

    def any_worker(self) -> Worker:
        """Any session of this run; those that are over still send late writes."""
        return self.rng.choice(self.workers)

    def alive(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.id in self.holders.leases]

    async def claim(self) -> None:
        worker, total = self.any_worker(), self.rng.randint(1, 2)
        self.log.append(f"{worker.name} claims {total}")
        if worker.id not in self.holders.leases:
            with pytest.raises(SessionLost):
                await worker.claim(total)
            return
        claimed = await worker.claim(total)
        self.holders.claimed(worker.id, worker.last_claim, total, claimed)

    async def finish(self) -> None:
        """Write something about a job: mostly as its holder, sometimes late, twice, or as another session."""
        worker = self.any_worker()
        own = self.holders.of(worker.id)
        if own and self.rng.random() < 0.5:
            held = self.rng.choice(own)
        elif self.holders.claims and self.rng.random() < 0.9:
            writer, held = self.rng.choice(self.holders.claims)
            if self.rng.random() < 0.8:
                [worker] = [each for each in self.workers if each.id == writer]
        else:
            job = self.rng.choice(list(self.holders.jobs.values()))
            held = Held(job.new.id, job.fence + self.rng.choice([-1, 0, 1]))
        move = self.decide(held)
        self.log.append(f"{worker.name} {worker.id} writes {move.move.name} of {held}")
        for _ in range(self.rng.randint(1, 2)):
            [verdict] = (await worker.finish(move)).verdicts
            self.holders.finished(worker.id, move, self.now, verdict)

    def decide(self, held: Held) -> Transition:
        return self.rng.choice(
            [
                complete(held, b"1"),
                fail(held, Reason.ERROR, "boom"),
                retry(held, self.rng.choice([0.0, 5.0]), Reason.ERROR, "boom"),
                snooze(held, self.rng.choice([0.0, 5.0])),
                hand_back(held),
                states.cancel(held),
            ]
        )

    async def renew(self) -> None:
        """Renew; sometimes as if the last reply was lost, sometimes naming claims that were lost long ago."""
        worker = self.any_worker()
        held = self.holders.of(worker.id)
        known = [each for each in held if self.rng.random() < 0.8]
        past = [each for writer, each in self.holders.claims if writer == worker.id and each not in held]
        past = [each for each in past if self.rng.random() < 0.3]
        claim = max(0, worker.last_claim - self.rng.randint(0, 1))
        self.log.append(f"{worker.name} renews {known}, names {past}, has claim {claim}")
        if worker.id not in self.holders.leases:
            with pytest.raises(SessionLost):
                await worker.renew(*known, *past, claim=claim)
            return
        renewal = await worker.renew(*known, *past, claim=claim)
        self.holders.leases[worker.id] = self.now + LEASE
        unnamed = [each for each in held if each not in known and self.holders.jobs[each.id].claim <= claim]
        asked = [each.id for each in known if self.holders.jobs[each.id].cancel_requested]
        assert set(renewal.lost) == set(past)
        assert set(renewal.taken_back) == {each.id for each in unnamed}
        assert set(asked) <= set(renewal.cancel) <= {each.id for each in held}
        for each in unnamed:
            self.holders.give_back(each, self.now)

    async def cancel(self) -> None:
        id = self.rng.choice(list(self.holders.jobs))
        self.log.append(f"a client cancels {id}")
        [answer] = await self.kit.store.cancel([id])
        self.holders.cancelled(id, answer)

    async def rescue(self) -> None:
        declare = self.rng.random() < 0.8
        self.log.append(f"a pass rescues, declare={declare}")
        expired = {id for id, end in self.holders.leases.items() if declare and end < self.now}
        rescued = await self.kit.store.rescue(declare=declare)
        assert set(rescued.declared) == expired
        for id in expired:
            self.holders.over(id, self.holders.of(id), self.now)
            await self.join()

    async def promote(self) -> None:
        self.log.append("time passes")
        promoted = await self.kit.store.promote()
        assert promoted.promoted == self.holders.promote(self.now)

    async def leave(self) -> None:
        alive = self.alive()
        worker = self.rng.choice(alive)
        begun = [held for held in self.holders.of(worker.id) if self.rng.random() < 0.5]
        self.log.append(f"{worker.name} leaves, having begun {begun}")
        await worker.leave(*begun)
        self.holders.over(worker.id, begun, self.now)
        await self.join()

    async def report(self) -> None:
        if not self.holders.claims:
            return
        writer, held = self.rng.choice(self.holders.claims)
        self.log.append(f"{writer} reports progress of {held}")
        [verdict] = await self.kit.store.progress(writer, [(held, b"1")])
        assert verdict.accepted == (held in self.holders.of(writer)), verdict
        assert verdict.acceptance is not Acceptance.REPEATED

    async def end(self) -> None:
        """All sessions leave, one worker finishes the rest, and every job is final once and for all."""
        for worker in self.alive():
            held = self.holders.of(worker.id)
            await worker.leave(*held)
            self.holders.over(worker.id, held, self.now)
        last = await self.join()
        while self.holders.unfinished():
            self.kit.clock.advance(6.0)
            await self.promote()
            claimed = await last.claim(JOBS)
            assert claimed, f"nothing runs any more, and {self.holders.unfinished()} are not final"
            self.holders.claimed(last.id, last.last_claim, JOBS, claimed)
            finished = await last.complete(*claimed)
            for job, verdict in zip(claimed, finished.verdicts, strict=True):
                self.holders.finished(last.id, complete(job.held), self.now, verdict)
        await last.leave()
        self.holders.over(last.id, [], self.now)
        for writer, old in self.holders.claims:
            [verdict] = (await self.kit.store.finish(writer, [complete(old, b"2")])).verdicts
            assert verdict.acceptance is not Acceptance.APPLIED
        await self.check()


@pytest.mark.parametrize("block", range(BLOCKS))
async def test_no_interleaving_lets_a_stale_write_through(kit: Kit, block: int) -> None:
    for number in range(INTERLEAVINGS):
        interleaving = Interleaving(kit, f"run-{block}-{number}")
        try:
            await interleaving.run()
        except AssertionError as failure:
            failure.add_note("\n".join([f"{interleaving.name}:", *interleaving.log]))
            raise

    assert (await kit.store.recount()).differences == ()


def test_there_are_a_thousand_interleavings_in_a_full_run() -> None:
    assert (1_000 if FULL else 100) == BLOCKS * INTERLEAVINGS
