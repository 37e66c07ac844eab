"""PostgreSQL remembers, Redis dispatches: each line of the failure table of docs/postgresql-redis.md.

Real processes run while servers are killed, flushed and frozen. Whatever happens, each job runs once, and jobs go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from fairlane.model.job import JobState, Priority
from fairlane.model.session import SessionState
from fairlane.store import open_store
from fairlane.store.port import Store
from tests.servers.valkey import ValkeyServer
from tests.sizes import FULL, sized

from . import tasks
from .conftest import deployments
from .deployment import PostgresqlRedisDeployment
from .fleet import Process
from .ledger import END
from .world import PATIENCE, Stage, World

KIND = "postgresql_redis"
FIRST_CLAIM = 3.0 if FULL else PATIENCE
"""Seconds from an outage until a job starts that was sent after it; by default a busy machine may take longer."""
BOTH = (Priority.HIGH, Priority.LOW)


@pytest.fixture
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    """A database with a Redis for high priority and one for the others."""
    with deployments(KIND) as make:
        yield Stage(request.node.name, tmp_path, make)


def redis_of(world: World) -> list[ValkeyServer]:
    """The servers of the tokens: for high, and for the others."""
    assert isinstance(world.deployment, PostgresqlRedisDeployment)
    return world.deployment.redis


async def send(world: World, priority: Priority, seconds: float = 0.0) -> str:
    """Store a job."""
    return (await world.send(tasks.sleep.options(priority=priority).call(seconds))).id


async def started_soon(world: World, *priorities: Priority) -> list[str]:
    """Store a job of each priority, and see it start in time."""
    began = time.monotonic()
    ids = [await send(world, priority) for priority in priorities]
    await world.began(*ids)
    took = time.monotonic() - began
    assert took < FIRST_CLAIM, f"{took:.1f} s until jobs of {[p.label for p in priorities]} priority started"
    return ids


@contextlib.asynccontextmanager
async def load(world: World, pause: float = 0.02) -> AsyncIterator[list[str]]:
    """Send jobs of both priorities all the time. A call that fails is repeated, with the same job."""
    sent: list[str] = []
    over = asyncio.Event()

    async def sender(priority: Priority) -> None:
        while not over.is_set():
            call = tasks.sleep.options(priority=priority).call(0.01)
            while True:
                with contextlib.suppress(Exception):
                    await world.send(call)
                    break
                await asyncio.sleep(0.1)
            sent.append(call.job.id)
            await asyncio.sleep(pause)

    senders = [asyncio.ensure_future(sender(priority)) for priority in BOTH]
    try:
        yield sent
    finally:
        over.set()
        await asyncio.gather(*senders)


async def all_once(world: World, ids: Sequence[str]) -> None:
    """Every job is completed, by one run."""
    jobs = await world.final(*ids)
    assert {job.state for job in jobs} == {JobState.COMPLETED}
    ends = [entry.job for entry in world.ledger.entries() if entry.event == END]
    assert sorted(ends) == sorted(ids), "each body ended once"
    assert (await world.client.recount()).differences == ()


async def trusted(world: World) -> None:
    """Wait until a leader reconciles tokens."""

    async def reconciled() -> bool:
        return all("generation" in _state(server) for server in redis_of(world))

    await world.until(reconciled, "a leader reconciles tokens")


def _state(server: ValkeyServer) -> dict[str, str]:
    found: dict[str, str] = {}
    for key in server.ask("KEYS", "*:state"):
        told = server.ask("HGETALL", key)
        found |= told if isinstance(told, dict) else dict(zip(told[::2], told[1::2], strict=True))
    return found


@pytest.mark.parametrize("which", [0, 1], ids=["high", "low"])
async def test_a_redis_killed_under_load_loses_nothing_doubles_nothing_and_stops_nothing(
    stage: Stage, which: int
) -> None:
    async with stage.world() as world:
        await world.workers("w0", "w1", options=("-c", "8"))
        await trusted(world)
        ids: list[str] = []
        async with load(world) as sent:
            for _ in range(sized(2, 30)):
                server = redis_of(world)[which]
                server.kill()
                ids += await started_soon(world, *BOTH)
                server.start()
                ids += await started_soon(world, *BOTH)
        await all_once(world, [*sent, *ids])


async def test_both_redis_killed_leave_postgresql_alone(stage: Stage) -> None:
    async with stage.world() as world:
        await world.workers("w0", "w1", options=("-c", "8"))
        await trusted(world)
        for server in redis_of(world):
            server.kill()
        ids = [identity for _ in range(3) for identity in await started_soon(world, *BOTH)]
        counters = await world.client.counters()
        assert counters["redis_down"] == 2
        for server in redis_of(world):
            server.start()
        ids += await started_soon(world, *BOTH)
        await all_once(world, ids)


async def test_a_frozen_redis_is_like_a_dead_one_and_its_jobs_wait_for_a_poll_only(stage: Stage) -> None:
    async with stage.world() as world:
        await world.workers("w0", options=("-c", "8"))
        await trusted(world)
        with redis_of(world)[1].frozen():
            ids = await started_soon(world, Priority.LOW)
            ids += await started_soon(world, Priority.HIGH)
            ids += await started_soon(world, Priority.LOW)
        ids += await started_soon(world, *BOTH)
        await all_once(world, ids)


async def test_a_redis_replaced_by_an_empty_one_is_filled_again(stage: Stage) -> None:
    async with stage.world() as world:
        await world.workers("w0", options=("-c", "4"))
        await trusted(world)
        before = [_state(server)["generation"] for server in redis_of(world)]
        ids = await started_soon(world, *BOTH)
        for server in redis_of(world):
            server.kill()
            # It keeps nothing: what starts on its port is another one.
            server.start()
        ids += await started_soon(world, *BOTH)
        await trusted(world)
        assert all(_state(server)["generation"] not in before for server in redis_of(world))
        await all_once(world, ids)


async def test_a_flush_with_a_backlog_loses_nothing_and_the_tokens_come_back(stage: Stage) -> None:
    backlog = sized(600, 100_000)
    async with stage.world() as world:
        # No worker runs yet, and one manager leads.
        await world.ready(world.fleet.manager())
        # All slots are held until the flush: a small backlog would otherwise be done before anything was flushed.
        gate = world.file("gate")
        calls = [tasks.hold.options(priority=BOTH[n % 2]).call(str(gate)) for n in range(backlog)]
        ids = [handle.id for handle in await world.client.enqueue_many(calls)]
        await world.workers("w0", "w1", options=("-c", "4"))
        await trusted(world)
        await world.until(lambda: _begun(world, 2 * 4), "workers are at work")
        for server in redis_of(world):
            server.ask("FLUSHALL")
        flushed = time.monotonic()
        gate.touch()
        await trusted(world)
        took = time.monotonic() - flushed
        assert took < (5.0 if FULL else PATIENCE), f"{took:.1f} s until the tokens were back"
        await world.until(lambda: _begun(world, 2 * 4 + 1), "workers go on")
        patience = sized(PATIENCE, 3_000.0)
        await world.until(lambda: _ended(world, backlog), "all jobs have ended", patience=patience)
        assert world.ledger.starts() == dict.fromkeys(ids, 1)
        assert (await world.client.recount()).differences == ()


async def _begun(world: World, count: int) -> bool:
    return len(world.ledger.begins()) >= count


async def _ended(world: World, count: int) -> bool:
    counts = await world.counts()
    return counts.completed >= count


async def test_postgresql_restarted_under_load_loses_nothing_and_doubles_nothing(stage: Stage) -> None:
    async with stage.world() as world:
        await world.workers("w0", "w1", options=("-c", "8"))
        await trusted(world)
        assert isinstance(world.deployment, PostgresqlRedisDeployment)
        ids: list[str] = []
        async with load(world) as sent:
            for _ in range(sized(1, 10)):
                await asyncio.to_thread(world.deployment.restart)
                await world.until(lambda: _answers(world), "PostgreSQL answers")
                ids += await started_soon(world, *BOTH)
        jobs = await world.final(*sent, *ids)
        assert {job.state for job in jobs} == {JobState.COMPLETED}
        # A body whose completion was on its way may run again, but only one end is stored.
        assert all(sum(a.outcome == "completed" for a in job.attempts) == 1 for job in jobs)
        assert SessionState.DEAD not in {session.state for session in await world.client.sessions()}
        assert (await world.client.recount()).differences == ()


async def _answers(world: World) -> bool:
    try:
        return bool(await world.client.queues())
    except Exception:
        return False


async def test_a_worker_killed_with_a_token_in_its_hand_delays_the_job_until_the_next_pass(stage: Stage) -> None:
    async with stage.world() as world:
        [first] = await world.workers("w0", options=("-c", "4"))
        await trusted(world)
        first.pause()
        # The kernel answers for the suspended worker: its connection receives the token, and nothing is claimed.
        ids = [await send(world, Priority.LOW)]
        first.kill()
        second = world.fleet.worker("--index", "1", "-c", "4", name="w1")
        await world.ready(second)
        await world.began(*ids)
        await all_once(world, ids)


async def test_jobs_of_a_killed_worker_run_again_after_its_lease_and_end_once(stage: Stage) -> None:
    async with stage.world() as world:
        [first] = await world.workers("w0", options=("-c", "4"))
        await trusted(world)
        gate = world.file("gate")
        ids = [(await world.send(tasks.hold.options(priority=BOTH[n % 2]).call(str(gate)))).id for n in range(3)]
        await world.began(*ids)
        first.kill()
        # There is no other worker yet to claim them.
        await world.ready(world.fleet.worker("--index", "1", "-c", "4", name="w1"))
        await world.began(*ids, times=2)
        gate.touch()
        jobs = await world.final(*ids)
        assert {job.state for job in jobs} == {JobState.COMPLETED}
        assert all(sum(a.outcome == "completed" for a in job.attempts) == 1 for job in jobs)
        assert world.ledger.starts() == dict.fromkeys(ids, 2)
        assert (await world.client.recount()).differences == ()


async def test_a_leader_killed_leaves_the_tokens_of_new_jobs_to_their_senders(stage: Stage) -> None:
    async with stage.world() as world:
        managers: list[Process] = [world.fleet.manager(name=f"m{n}") for n in range(2)]
        await world.ready(*managers)
        await world.workers("w0", "w1", options=("-c", "8", "--no-manager"))
        await trusted(world)
        leader = await world.client.leader()
        assert leader is not None
        ids: list[str] = []
        for manager in managers:
            session = await world.session_of(manager)
            if session.id == leader.session:
                manager.kill()
        ids += await started_soon(world, *BOTH)
        await all_once(world, ids)


@pytest.mark.parametrize("managers", [2, 3])
async def test_managers_that_all_act_as_leader_run_every_job_once(stage: Stage, managers: int) -> None:
    """Leadership is disabled: it saves work, and is not what keeps jobs from running twice."""

    async def act(store: Store) -> None:
        while True:
            await store.promote(limit=50)
            await store.admit(limit=50)
            await store.rescue(limit=50)
            await asyncio.sleep(0.01)

    async with stage.world() as world, contextlib.AsyncExitStack() as stores:
        await world.workers("w0", "w1", options=("-c", "8", "--no-manager"))
        count = sized(100, 1_000)
        calls = [tasks.noop.options(delay=0.5, priority=BOTH[n % 2]).call() for n in range(count)]
        ids = [handle.id for handle in await world.client.enqueue_many(calls)]
        acting = []
        for _ in range(managers):
            store = await open_store(world.deployment.url)
            stores.push_async_callback(store.close)
            acting.append(asyncio.ensure_future(act(store)))
        jobs = await world.final(*ids)
        assert {job.state for job in jobs} == {JobState.COMPLETED}
        assert world.ledger.starts() == dict.fromkeys(ids, 1)
        for task in acting:
            assert not task.done(), "no pass failed"
            task.cancel()
        await asyncio.gather(*acting, return_exceptions=True)


async def test_a_redis_that_is_down_from_the_start_keeps_no_process_from_starting(stage: Stage) -> None:
    async with stage.world() as world:
        for server in redis_of(world):
            server.kill()
        await world.workers("w0", options=("-c", "4"))
        ids = await started_soon(world, *BOTH)
        await all_once(world, ids)
