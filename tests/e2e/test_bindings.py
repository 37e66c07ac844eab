"""Sticky work, clean-ups, broadcasts and direct work, on the workers of one pool."""

from __future__ import annotations

import asyncio
from collections import Counter

from fairlane.events import Released
from fairlane.model.binding import Binding, BindingState, Release
from fairlane.model.job import JobKind, JobState
from fairlane.model.session import SessionState
from fairlane.task import PriorityWord
from tests.sizes import sized

from . import tasks
from .ledger import Entry
from .world import Stage, World, play_on_all

ORG = ("--pool", "org", "-c", "1", "--reserved", "high=0")


async def step(world: World, plan: str, seconds: float = 0.0) -> str:
    """Send one step of a plan."""
    return (await world.send(tasks.plan_step.options(pool="org", sticky=plan).call(plan, seconds))).id


async def bindings(world: World) -> list[Binding]:
    """All bindings of the pool."""
    return await world.client.bindings("org")


async def test_a_plan_goes_to_the_first_of_the_least_loaded_workers_and_stays(stage: Stage) -> None:
    async def scenario(world: World) -> None:
        await world.workers("w0", "w1", "w2", options=ORG)
        first = [await step(world, plan) for plan in "ABCD"]
        placed = [(await world.client.job(id)).worker for id in first]
        assert placed == ["org/0", "org/1", "org/2", "org/0"]
        assert {binding.index for binding in await bindings(world)} == {0, 1, 2}

        more = [await step(world, "A", 0.1) for _ in range(5)]
        # Worker 1 has nothing to do, and still none of them goes there.
        assert {(await world.client.job(id)).worker for id in more} == {"org/0"}
        jobs = await world.final(*first, *more)
        assert {job.state for job in jobs} == {JobState.COMPLETED}
        assert {entry.worker for entry in world.ledger.begins(more)} == {"w0"}
        assert [e.worker for e in sorted(world.ledger.begins(first), key=lambda e: first.index(e.job))] == [
            "w0",
            "w1",
            "w2",
            "w0",
        ]
        assert set(world.ledger.starts().values()) == {1}

    await stage.play(scenario)


async def test_a_released_plan_is_bound_anew_and_its_history_is_kept(stage: Stage) -> None:
    async def scenario(world: World) -> None:
        await world.workers("w0", "w1", "w2", options=ORG)
        async with world.sampled(lambda: bindings(world), every=0.05) as samples:
            await world.final(*[await step(world, plan) for plan in "ABCD"])
            before = await bindings(world)
            answer = await world.client.release("A", cleanup=tasks.tidy.call("A"), pool="org")
            assert answer is Release.DRAINING

            async def closed() -> bool:
                return [b.state for b in await world.client.bindings("org", "A")] == [BindingState.RELEASED]

            await world.until(closed, "the binding of A is released")
            after = await bindings(world)
            [row] = await world.client.bindings("org", "A")
            assert row.closed_at is not None
            assert row.index == 0
            assert {b for b in after if b.key != "A"} == {b for b in before if b.key != "A"}, "another row has changed"

            assert await world.client.release("A", cleanup=tasks.tidy.call("A"), pool="org") is Release.NOTHING
            assert await bindings(world) == after, "a second release changes nothing"

            await world.final(await step(world, "A"))
            rows = await world.client.bindings("org", "A")
            assert [(b.state, b.index) for b in rows] == [(BindingState.OPEN, 0), (BindingState.RELEASED, 0)]
            assert rows[1] == row
        assert samples
        for sample in samples:
            most = Counter(b.key for b in sample if b.closed_at is None).most_common(1)
            assert not most or most[0][1] == 1, "a plan has two open bindings"

    await stage.play(scenario)


async def test_a_clean_up_runs_once_or_is_nothing_to_do(stage: Stage) -> None:
    """The answers to the two cases differ, and a subscriber to the events can count them."""

    async def scenario(world: World) -> None:
        await world.workers("w0", "w1", options=ORG)
        told: list[tuple[str, Release]] = []
        world.app.events.subscribe(lambda e: told.append((e.key, e.answer)) if isinstance(e, Released) else None)
        assert await world.client.release("never", cleanup=tasks.tidy.call("never"), pool="org") is Release.NOTHING
        assert await world.jobs() == []
        assert await bindings(world) == []

        await world.final(await step(world, "P"))
        answers = await asyncio.gather(
            *(world.client.release("P", cleanup=tasks.tidy.call("P"), pool="org") for _ in range(3))
        )
        assert set(answers) <= {Release.DRAINING, Release.RELEASED, Release.NOTHING}
        assert Release.DRAINING in answers
        assert told[0] == ("never", Release.NOTHING)
        assert sorted(told[1:]) == sorted(("P", answer) for answer in answers)

        async def closed() -> bool:
            return all(b.closed_at is not None for b in await bindings(world))

        await world.until(closed, "the binding of P is released")
        [row] = await bindings(world)
        assert (row.state, row.cleanup_failed) == (BindingState.RELEASED, False)
        cleanups = [job for job in await world.jobs() if job.kind is JobKind.CLEANUP]
        assert [job.state for job in cleanups] == [JobState.COMPLETED]
        assert [entry.worker for entry in world.ledger.begins([cleanups[0].id])] == ["w0"]

    await stage.play(scenario)


async def test_broadcast_generic_and_direct_jobs_reach_the_intended_workers(stage: Stage) -> None:
    async def scenario(world: World) -> None:
        *_, last = await world.workers("w0", "w1", "w2", "w3", options=ORG)
        await world.final((await world.send(tasks.noop.options(pool="org", worker=3).call())).id)
        last.stop()
        assert await world.gone(last) == [0]
        assert (await world.session_of(last)).state is SessionState.ENDED

        sent = await world.client.broadcast(tasks.purge.call("m"), pool="org", ttl=60)
        generic = await world.send(tasks.noop.options(pool="org").call())
        direct = await world.send(tasks.noop.options(pool="org", worker=2).call())
        await world.final(generic.id, direct.id)

        def copies() -> list[Entry]:
            return [entry for entry in world.ledger.begins() if entry.task == tasks.purge.name]

        async def three() -> bool:
            return len(copies()) >= 3

        await world.until(three, "three workers have run the broadcast")
        assert sorted(entry.worker for entry in copies()) == ["w0", "w1", "w2"]
        assert len(world.ledger.begins([generic.id])) == 1
        assert [entry.worker for entry in world.ledger.begins([direct.id])] == ["w2"]

        again = world.fleet.worker("--index", "3", *ORG, name="w3 again")
        await world.ready(again)

        async def four() -> bool:
            return len(copies()) >= 4

        await world.until(four, "the late worker has run the broadcast")
        # Nobody runs it again: once these are through, whatever else was waiting would have been, too.
        await world.final(*[(await world.send(tasks.noop.options(pool="org", worker=i).call())).id for i in range(4)])
        assert sorted(entry.worker for entry in copies()) == ["w0", "w1", "w2", "w3 again"]
        assert {await copy.state() for copy in (await sent.children()).values()} == {JobState.COMPLETED}

    await stage.play(scenario)


async def test_affinity_load_and_slots_are_one_decision(stage: Stage) -> None:
    async def scenario(world: World) -> None:
        options = ("--pool", "org", "-c", "3", "--reserved", "high=1")
        await world.workers("w0", "w1", options=options)
        go = str(world.file("go"))

        async def held(plan: str, priority: PriorityWord) -> str:
            task = tasks.hold.options(pool="org", sticky=plan, priority=priority)
            return (await world.send(task.call(go))).id

        # A first plan takes worker 0, so that P is bound to worker 1; then worker 0 is idle again.
        await world.final(await step(world, "first"))
        long = [await held("P", "low") for _ in range(2)]
        await world.began(*long)
        assert {entry.worker for entry in world.ledger.begins(long)} == {"w1"}
        assert await world.client.release("first", pool="org") is Release.RELEASED

        low = await held("P", "low")
        high = await held("P", "high")
        other = await held("Q", "low")
        await world.began(high, other)
        assert [entry.worker for entry in world.ledger.begins([high, other])].count("w1") == 1
        assert world.ledger.of(high)[0].worker == "w1"
        assert world.ledger.of(other)[0].worker == "w0"
        waiting = await world.client.job(low)
        assert (waiting.state, waiting.worker) == (JobState.PENDING, "org/1")
        assert not world.ledger.of(low)
        sessions = {s.index: s for s in await world.client.sessions() if s.pool == "org"}
        assert sessions[1].running == (1, 0, 2)
        # Routing counts the waiting job too: the key is bound, so a new key goes to the worker that has less.
        assert {(b.key, b.index) for b in await bindings(world) if b.closed_at is None} == {("P", 1), ("Q", 0)}

        world.file("go").touch()
        await world.final(low, high, other, *long)
        assert {entry.worker for entry in world.ledger.begins([low, high, *long])} == {"w1"}
        assert world.ledger.most_at_once(lambda e: e.worker == "w1" and e.priority == "low") == 2

    await stage.play(scenario)


async def test_plans_of_a_killed_worker_move_to_another_one(stages: dict[str, Stage]) -> None:
    async def scenario(world: World) -> None:
        _, victim = await world.workers("w0", "w1", options=ORG)
        go = world.file("go")
        bound = tasks.hold.options(pool="org", sticky="P")
        await world.final(await step(world, "other"))
        running = (await world.send(bound.call(str(go)))).id
        waiting = [await step(world, "P") for _ in range(3)]
        await world.began(running)
        victim.kill()
        await world.began(running, times=2)
        go.touch()
        jobs = await world.final(running, *waiting)
        assert [job.attempt for job in jobs] == [2, 1, 1, 1]
        assert {job.state for job in jobs} == {JobState.COMPLETED}
        assert {entry.worker for entry in world.ledger.begins(waiting)} == {"w0"}
        rows = await world.client.bindings("org", "P")
        assert [(row.state, row.index) for row in rows] == [(BindingState.OPEN, 0), (BindingState.LOST, 1)]

    await play_on_all(stages, scenario, times=sized(1, 3))
