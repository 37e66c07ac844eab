"""Due times, schedulers and leaders."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import msgspec
import pytest

from fairlane.model.intervals import Intervals
from fairlane.model.job import JobState
from fairlane.model.session import SessionKind, Term
from tests.sizes import sized, strict

from . import figures, tasks
from .fleet import QUICK, Process
from .ledger import now
from .passes import Passes
from .world import Stage, World, play_on_all

RARE = Intervals(**{**{f: getattr(QUICK, f) for f in QUICK.__struct_fields__}, "promote": 5.0})
"""With a promoter that comes every five seconds: a service that sleeps between full passes is detected."""
LONG_TERM = Intervals(**{**{f: getattr(QUICK, f) for f in QUICK.__struct_fields__}, "leader_lease": 4.0})
BATCH = 1_000
BACKLOG = sized(5_000, 10_000)


@strict
async def test_nothing_starts_before_its_time_and_all_start_in_due_order(stage: Stage) -> None:
    """A client sends durations; the instant is made by the store, whatever the client's own clock says."""

    async def scenario(world: World) -> None:
        await world.ready(world.fleet.worker("-c", "1"))
        begun = now()
        delays = [1.5, 1.0, 0.5, 1.0]
        late = [(await world.send(tasks.noop.options(delay=delay).call())).id for delay in delays]
        sent = now()
        at_once = (await world.send(tasks.noop.call())).id
        await world.began(at_once)
        jobs = await world.final(*late, at_once)

        start = {entry.job: entry.at for entry in world.ledger.begins()}
        for id, delay in zip(late, delays, strict=True):
            waited = (start[id] - begun) / 1e9
            assert waited >= delay, f"a job due after {delay} s started after {waited} s"
            assert (start[id] - sent) / 1e9 <= delay + world.intervals.promote + figures.LATE
        assert start[at_once] < min(start[id] for id in late)
        assert (start[at_once] - sent) / 1e9 <= figures.LATE
        order = [entry.job for entry in world.ledger.begins(late)]
        assert order == [late[2], late[1], late[3], late[0]]
        assert {job.state for job in jobs} == {JobState.COMPLETED}
        assert set(world.ledger.starts().values()) == {1}

    await stage.play(scenario)


@strict
@pytest.mark.parametrize("count", [2, 3])
async def test_schedulers_without_a_leader_promote_each_job_once(stage: Stage, count: int) -> None:
    """Passes are made without a term, as several leaders at once would: what is promoted is counted by each of them."""

    async def scenario(world: World) -> None:
        calls = [tasks.noop.options(delay=0.3).call() for _ in range(1_000)]
        await world.client.enqueue_many(calls)
        due = time.monotonic() + 0.4
        go = world.file("go")
        answers = [world.file(f"answer-{n}") for n in range(count)]
        schedulers = [world.fleet.program("tests.e2e.passes", str(go), str(a)) for a in answers]
        await world.ready(world.fleet.worker("--no-manager", "-c", "50"))
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        go.touch()
        assert await world.gone(*schedulers) == [0] * count
        passes = [msgspec.json.decode(answer.read_bytes(), type=Passes) for answer in answers]
        assert sum(one.promoted for one in passes) == 1_000
        longest = max(one.longest for one in passes)
        figures.record("a scheduler's longest pass beside others", seconds=round(longest, 3))
        assert longest < figures.LATE

        async def done() -> bool:
            return (await world.counts()).completed == 1_000

        await world.until(done, "all jobs have run")
        assert world.ledger.starts() == {call.job.id: 1 for call in calls}

    await stage.play(scenario, at_once=2)


@strict
async def test_a_new_leader_follows_a_killed_one_and_takes_over_at_once_from_one_that_stops(
    stages: dict[str, Stage],
) -> None:
    async def scenario(world: World) -> None:
        managers = [world.fleet.manager(name=f"m{n}") for n in range(3)]
        worker = world.fleet.worker("--no-manager")
        await world.ready(*managers, worker)
        first = await leader(world)
        async with world.sampled(world.client.leader) as samples:
            # Due one after another while nobody leads, and some later.
            late = [(await world.send(tasks.noop.options(delay=0.2 * n).call())).id for n in range(1, 15)]
            process = await whose(world, first, managers)
            process.kill()
            killed = now()
            second = await leader(world, after=first)
            took = (now() - killed) / 1e9
            figures.record("a new leader after a kill", seconds=round(took, 2))
            longest = world.intervals.leader_lease + world.intervals.stand + figures.LATE
            assert took <= longest
            await world.final(*late)
            starts = {entry.job: entry.at for entry in world.ledger.begins(late)}
            assert set(world.ledger.starts().values()) == {1}
            for n, id in enumerate(late, start=1):
                assert (starts[id] - killed) / 1e9 <= max(longest, 0.2 * n) + world.intervals.promote + figures.LATE

            (await whose(world, second, managers)).stop()
            stopped = now()
            third = await leader(world, after=second)
            took = (now() - stopped) / 1e9
            figures.record("a new leader after a stop", seconds=round(took, 2))
            # A stop by itself is told from a lease that ran out by its speed.
            least = world.intervals.leader_lease - world.intervals.leader_renew
            assert took < sized(least, 1.0)
        assert first.number < second.number < third.number
        terms = [sample for sample in samples if sample is not None]
        assert all(a.number <= b.number for a, b in pairwise(terms)), "an old term came back"
        assert len({(term.number, term.session) for term in terms}) == len({term.number for term in terms})

    await play_on_all(stages, scenario, intervals=LONG_TERM)


@strict
async def test_a_backlog_of_due_jobs_does_not_hold_up_an_urgent_one(stage: Stage) -> None:
    """All of the backlog is overdue before a manager exists to promote it."""

    async def scenario(world: World) -> None:
        await world.client.enqueue_many([tasks.noop.options(delay=0.1, priority="low").call() for _ in range(BACKLOG)])
        await world.client.pause("default")
        await asyncio.sleep(0.2)
        urgent = await world.send(tasks.noop.options(delay=0.01, priority="high").call())
        worker = world.fleet.worker("-c", "2")
        begun = time.monotonic()

        async def promoted() -> int:
            return BACKLOG - (await world.counts()).scheduled

        async def first() -> bool:
            nonlocal begun
            looked = time.monotonic()
            if await promoted() > 0:
                return True
            begun = looked
            return False

        await world.until(first, "the promoter has begun")
        # The first pass takes it along, in front of everything that was due before.
        assert await urgent.state() is JobState.PENDING

        async def all_of_it() -> bool:
            return await promoted() >= BACKLOG

        await world.until(all_of_it, "the backlog is promoted")
        # Of the whole backlog, since the last look that found none of it promoted.
        rate = BACKLOG / (time.monotonic() - begun)
        figures.record("promotion of a backlog", jobs_per_second=round(rate))
        assert rate > sized(2, 5) * BATCH / world.intervals.promote
        await world.client.resume("default")
        await world.began(urgent.id)
        assert world.ledger.begins()[0].job == urgent.id
        worker.kill()

    await stage.play(scenario, at_once=2, intervals=RARE)


async def leader(world: World, after: Term | None = None) -> Term:
    """Wait for a leader, a later one than `after`."""

    async def term() -> Term | None:
        found = await world.client.leader()
        return found if found is not None and (after is None or found.number > after.number) else None

    found = await world.until(term, "a manager leads")
    assert found is not None
    return found


async def whose(world: World, term: Term, managers: list[Process]) -> Process:
    """The process of the manager that has a term."""
    sessions = {session.id: session for session in await world.client.sessions() if session.kind is SessionKind.MANAGER}
    pid = sessions[term.session].pid
    return next(process for process in managers if process.pid == pid)
