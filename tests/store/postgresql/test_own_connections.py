"""Jobs stored on connections of the user's, of every driver: they and the user's rows commit together or not at all,
and nobody waits for a transaction that is open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from fairlane import (
    Backoff,
    Busy,
    Conflict,
    Fairlane,
    InvalidInput,
    JobState,
    QueueSettings,
    Release,
    Settings,
    SettingsChange,
)
from fairlane.model.maintenance import Retention
from fairlane.model.settings import LaneRule
from fairlane.store.wakeups import queue_topic
from fairlane.task import Task
from tests.client.conftest import kit_of
from tests.servers.postgresql import server
from tests.servers.stores import second_postgresql
from tests.worker.yard import QUICK

from ..own_connections import DRIVERS, Asyncpg, Own, Psycopg, SqlalchemySession, connected, ids, opened, orders

VERSIONS = ("any",) if second_postgresql() is None else ("any", "system")
ASYNC = [name for name in DRIVERS if "async" in name]
pytestmark = pytest.mark.anyio


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What is said to the server is the same with every driver, so one of them will do for a second version of it."""
    if "url" in metafunc.fixturenames:
        many = {"own", "kind"} & set(metafunc.fixturenames)
        metafunc.parametrize("url", VERSIONS[:1] if many else VERSIONS, indirect=True)


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A database with a schema and a table of the user's."""
    databases = server(request.param)
    fresh = databases.fresh_database()
    yield fresh
    databases.done(fresh)


@pytest.fixture
async def app(url: str) -> AsyncIterator[Fairlane]:
    """An application, and a table of the user's beside it."""
    app = Fairlane(settings=Settings(url=url, intervals=QUICK))
    async with app, connected(url) as connection:
        await connection.execute("CREATE TABLE orders (id text)")
        yield app
        await connection.execute("DROP TABLE orders")


@pytest.fixture
def double(app: Fairlane) -> Task[[int], int]:
    @app.task(name="double")
    async def double(number: int) -> int:
        return 2 * number

    return double


@pytest.fixture(params=DRIVERS)
async def own(request: pytest.FixtureRequest, app: Fairlane, url: str) -> AsyncIterator[Own]:
    """A connection of each kind, inside a transaction."""
    async with opened(DRIVERS[request.param], url) as own:
        yield own


# -- with every driver -------------------------------------------------------------------------------------------------


async def test_what_is_committed_exists_with_the_users_rows(
    app: Fairlane, double: Task[[int], int], own: Own, url: str
) -> None:
    call = double.options(
        lane="ann:é\U0001f600", priority="low", cost=2.5, retries=7, backoff=Backoff(base=3), timeout=9, expires=60
    ).call(4)
    await own.execute("INSERT INTO orders VALUES ('tea')")
    [handle] = await own.enqueue(app, call)
    assert (handle.id, handle.created) == (call.job.id, True)
    assert await ids(app) == set(), "nobody sees it before the commit"
    await own.commit()
    assert await orders(url) == ["tea"]
    job = await app.client.job(call.job.id)
    assert job.as_new(job.id).payload == call.job.payload
    assert (job.lane, job.priority.label, job.cost, job.retries) == ("ann:é\U0001f600", "low", 2.5, 7)
    assert (job.backoff, job.timeout, job.state, job.attempts) == (Backoff(base=3), 9.0, JobState.PENDING, ())
    assert job.expires_at is not None
    assert 50 < job.expires_at - job.enqueued_at <= 60
    assert await app.handle(job.id).why() == "waiting to be admitted to its queue"
    worker = await (await kit_of(app)).worker()
    [claimed] = await worker.claim()
    assert claimed.id == job.id
    await worker.complete(claimed, result=b"8")
    assert await app.handle(job.id, double).result(timeout=30) == 8
    assert not (await app.client.recount()).differences


async def test_what_is_rolled_back_never_existed(app: Fairlane, double: Task[[int], int], own: Own, url: str) -> None:
    call = double.options(id="a", unique="once").call(1)
    await own.execute("INSERT INTO orders VALUES ('tea')")
    await own.enqueue(app, call)
    await own.rollback()
    assert (await ids(app), await orders(url)) == (set(), [])
    assert (await app.enqueue(call)).created
    assert not (await app.client.recount()).differences


async def test_a_refusal_leaves_the_transaction_as_it_was(
    app: Fairlane, double: Task[[int], int], own: Own, url: str
) -> None:
    settings = QueueSettings(closed=("ann",))
    await (await app.connection.store()).configure([SettingsChange(queue="closed", declared=settings)])
    known = double.options(id="known").call(1)
    await app.enqueue(known)
    await own.execute("INSERT INTO orders VALUES ('tea')")
    [again] = await own.enqueue(app, known)
    assert not again.created
    fresh = double.options(id="fresh").call(1)
    with pytest.raises(Conflict, match="'known' exists already with other content"):
        await own.enqueue(app, fresh, double.options(id="known").call(2))
    with pytest.raises(InvalidInput, match="'bob' is not one of the lanes of queue 'closed'") as refusal:
        await own.enqueue(app, fresh, double.options(queue="closed", lane="bob").call(1))
    assert refusal.value.field == "lane"
    await own.enqueue(app, double.options(id="good", queue="closed", lane="ann").call(1))
    await own.commit()
    assert await orders(url) == ["tea"]
    assert await ids(app) == {"known", "good"}, "of a call that was refused, nothing is stored"


async def test_every_driver_reports_that_another_transaction_holds_an_id(
    app: Fairlane, double: Task[[int], int], url: str
) -> None:
    held = double.options(id="held").call(1)

    async def enqueue(kind: Callable[[], Own]) -> None:
        async with opened(kind, url) as own:
            with pytest.raises(Busy, match="open transaction"):
                await own.enqueue(app, held)
            await own.rollback()
            # The connection can be used as before.
            await own.begin()
            await own.execute("INSERT INTO orders VALUES ('after')")
            await own.commit()

    async def enqueue_as_usual() -> None:
        with pytest.raises(Busy):
            await app.enqueue(held)

    async with opened(Asyncpg, url) as holder:
        await holder.enqueue(app, held)
        began = time.monotonic()
        async with asyncio.timeout(20):
            await asyncio.gather(enqueue_as_usual(), *(enqueue(kind) for kind in DRIVERS.values()))
        assert time.monotonic() - began > 1.5
        await holder.rollback()
    assert await orders(url) == ["after"] * len(DRIVERS)
    assert await ids(app) == set()


@pytest.mark.parametrize("kind", DRIVERS)
async def test_a_connection_without_a_transaction_is_refused(
    app: Fairlane, double: Task[[int], int], url: str, kind: str
) -> None:
    async with opened(DRIVERS[kind], url, autocommit=True) as own:
        with pytest.raises(InvalidInput, match="no open transaction; begin one") as refusal:
            await own.enqueue(app, double.call(1))
        assert refusal.value.field == "connection"
    assert await ids(app) == set()


@pytest.mark.parametrize("kind", DRIVERS)
async def test_a_connection_of_the_other_kind_raises_an_error_that_names_the_right_call(
    app: Fairlane, double: Task[[int], int], url: str, kind: str
) -> None:
    async with opened(DRIVERS[kind], url) as own:
        if kind in ASYNC:
            with pytest.raises(InvalidInput, match=r"use await app\.enqueue_on"):
                await asyncio.to_thread(app.blocking.enqueue_on, own.connection, double.call(1))
        else:
            with pytest.raises(InvalidInput, match=r"use app\.blocking\.enqueue_on"):
                await app.enqueue_on(own.connection, double.call(1))
        await own.rollback()
    assert await ids(app) == set()


# -- what others wait for --------------------------------------------------------------------------------------------


async def test_an_open_transaction_blocks_no_other_call(app: Fairlane, double: Task[[int], int], url: str) -> None:
    """Jobs of a queue that is new, of a limited lane, of a sticky key and with a unique value are in it."""
    store = await app.connection.store()
    lanes = (LaneRule(pattern="narrow", limit=1),)
    await store.configure([SettingsChange(queue="default", declared=QueueSettings(lanes=lanes))])
    kit = await kit_of(app)
    worker = await kit.worker()
    first = await double.options(lane="narrow", unique="mine", id="first").enqueue(1)
    second = await double.options(lane="narrow", id="second").enqueue(1)
    [running] = await worker.claim()
    async with opened(Asyncpg, url) as own:
        [duplicate] = await own.enqueue(app, double.options(unique="mine").call(1))
        assert duplicate.id == first.id
        await own.enqueue(
            app,
            double.options(queue="novel").call(1),
            double.options(lane="narrow").call(1),
            double.options(sticky="plan").call(1),
            double.options(unique="theirs").call(1),
            double.options(delay=60).call(1),
        )
        held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
        assert await own.connection.fetchval(held) == 0
        async with asyncio.timeout(1.9):
            # A finish hands its place on, gives its unique value back, and the claim behind it takes the next.
            await worker.complete(running)
            [running] = await worker.claim()
            assert running.id == second.id
            await double.options(queue="novel").enqueue(1)
            await double.options(lane="narrow").enqueue(1)
            await double.options(sticky="plan").enqueue(1)
            await double.options(unique="other").enqueue(1)
            await app.enqueue_many([double.call(n) for n in range(50)])
            await store.renew(worker.id, [running.held], claim=2)
            await store.progress(worker.id, [(running.held, b"1")])
            await kit.worker()
            assert await app.release("plan") is Release.DRAINING
            await store.cancel([(await double.enqueue(1)).id])
            await store.configure([SettingsChange(queue="default", declared=QueueSettings(), version=1)])
            await store.promote()
            await store.admit()
            await store.rescue()
            await store.prune(Retention())
            assert not (await store.recount()).differences
            assert await store.lead("me", lease=10) is not None
            await worker.complete(running)
            await store.leave(worker.id)
        await own.commit()
    assert (await store.admit()).admitted >= 4
    assert not (await store.recount()).differences


async def test_the_same_unique_value_waits_for_the_end_of_the_transaction(
    app: Fairlane, double: Task[[int], int], url: str
) -> None:
    once = double.options(unique="once")
    for commit in (True, False):
        async with opened(Asyncpg, url) as own:
            [handle] = await own.enqueue(app, once.call(1))
            waiting = asyncio.ensure_future(once.enqueue(2))
            await asyncio.sleep(0.3)
            assert not waiting.done()
            await (own.commit() if commit else own.rollback())
            other = await asyncio.wait_for(waiting, 5)
        assert (other.id == handle.id) == commit
        await app.client.cancel([other.id])


async def test_a_unique_value_whose_time_is_over_can_be_taken(
    app: Fairlane, double: Task[[int], int], url: str
) -> None:
    worker = await (await kit_of(app)).worker()
    brief = await double.options(unique="once", unique_for=2.0).enqueue(1)
    await worker.complete(*await worker.claim())
    async with opened(Asyncpg, url) as own:
        [duplicate] = await own.enqueue(app, double.options(unique="once").call(1))
        assert (duplicate.id, duplicate.created) == (brief.id, False)
        await asyncio.sleep(2.1)
        [fresh] = await own.enqueue(app, double.options(unique="once").call(1))
        assert fresh.created
        await own.commit()
    assert (await double.options(unique="once").enqueue(1)).id == fresh.id


async def test_pruning_unique_values_does_not_wait_for_one_that_is_taken_again(
    app: Fairlane, double: Task[[int], int], url: str
) -> None:
    worker = await (await kit_of(app)).worker()
    for value in ("taken", "left"):
        await double.options(unique=value, unique_for=0.1).enqueue(1)
    await worker.complete(*await worker.claim(2))
    await asyncio.sleep(0.2)
    store = await app.connection.store()
    async with opened(Asyncpg, url) as own:
        [fresh] = await own.enqueue(app, double.options(unique="taken").call(1))
        async with asyncio.timeout(1.9):
            assert (await store.prune(Retention())).other
        await own.commit()
    assert (await double.options(unique="taken").enqueue(1)).id == fresh.id


async def test_two_transactions_with_different_jobs_do_not_wait_for_each_other(
    app: Fairlane, double: Task[[int], int], url: str
) -> None:
    async with opened(Asyncpg, url) as one, opened(Psycopg, url) as two:
        async with asyncio.timeout(1.9):
            for own in (one, two, one, two):
                await own.enqueue(app, double.options(queue="new", lane="ann").call(1))
        await two.commit()
        await one.commit()
    assert len(await ids(app)) == 4


async def test_a_transaction_that_sees_only_the_past_can_use_a_queue_that_is_new(
    app: Fairlane, double: Task[[int], int], url: str
) -> None:
    async with connected(url) as connection, connection.transaction(isolation="repeatable_read"):
        await connection.execute("SELECT 1 FROM orders")
        await app.enqueue_on(connection, double.options(queue="made-later", id="a").call(1))
    assert await ids(app) == {"a"}


# -- hints -----------------------------------------------------------------------------------------------------------


async def test_only_the_commit_notifies_listeners(app: Fairlane, double: Task[[int], int], url: str) -> None:
    other = Fairlane(settings=Settings(url=url, intervals=QUICK))
    async with other:
        for kind in (Asyncpg, SqlalchemySession):
            # Queues of its own: hints about those of the other kind may still arrive.
            queues = [f"{name}-{kind.__name__}" for name in ("orders", "mail")]
            orders, mail = [double.options(queue=queue) for queue in queues]
            subscription = (await other.connection.store()).wakeups.subscribe(map(queue_topic, queues))
            async with opened(kind, url) as own:
                await own.enqueue(app, orders.call(1))
                await own.rollback()
                await own.begin()
                await own.enqueue(app, orders.call(1), mail.call(1))
                await own.enqueue(app, orders.call(2))
                assert await subscription.wait(0.3) == frozenset()
                await own.commit()
                async with asyncio.timeout(30):
                    received: set[str] = set()
                    while len(received) < 2:
                        received |= await subscription.wait(5)
            subscription.close()


async def test_a_worker_starts_a_committed_job_at_once(app: Fairlane, double: Task[[int], int], url: str) -> None:
    slow = Fairlane(settings=Settings(url=url, intervals=QUICK.scaled(100)))
    slow.registry.add(double)
    worker = slow.worker(slots=2)
    async with slow:
        running = asyncio.ensure_future(worker.run())
        await asyncio.wait_for(worker.ready.wait(), 30)
        try:
            async with opened(Asyncpg, url) as own:
                await double.enqueue(0)
                [handle] = await own.enqueue(app, double.call(4))
                await own.commit()
                # By polling, the worker would claim after 10 s.
                assert await handle.result(timeout=5) == 8
        finally:
            worker.stop(now=True)
            await asyncio.wait_for(running, 30)


# -- other schemas ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", ["jobs", "My-Jobs.2"])
async def test_a_schema_of_another_name_will_do(url: str, schema: str) -> None:
    app = Fairlane(settings=Settings(url=f"{url}?schema={schema}", intervals=QUICK))

    @app.task(name="double")
    async def double(number: int) -> int:
        return 2 * number

    async with app:
        for kind in DRIVERS.values():
            async with opened(kind, url) as own:
                await own.enqueue(app, double.call(1))
                await own.commit()
        assert len(await ids(app)) == len(DRIVERS)
        async with connected(url) as connection:
            await connection.execute(f'DROP SCHEMA "{schema}" CASCADE')
