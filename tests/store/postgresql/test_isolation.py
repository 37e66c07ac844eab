"""Servers, databases and roles whose transactions run at another level than read committed: the store's own do not."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import psycopg
import pytest

from fairlane import Fairlane, JobState, Settings
from fairlane.model.job import Held, NewJob, Priority
from fairlane.model.session import Claim, NewSession, SessionKind
from fairlane.model.settings import LaneRule, QueueSettings, SettingsChange
from fairlane.model.slots import Ask, Slots
from fairlane.model.states import complete
from fairlane.store.diagnosis import Level
from fairlane.store.postgresql.address import driver
from fairlane.store.postgresql.store import PostgresqlStore
from tests.servers.pooler import pooled
from tests.servers.postgresql import server
from tests.worker.yard import QUICK

LEVELS = ("repeatable read", "serializable")
WHERE = {
    "database": "ALTER DATABASE {database}",
    "role": "ALTER ROLE {role} IN DATABASE {database}",
}
asyncpg = driver()


def set_level(url: str, level: str | None, where: str = "database") -> None:
    """Let every new transaction of a database run at a level, unless it says another; None: as before."""
    parts = urlsplit(url)
    change = WHERE[where].format(database=parts.path.strip("/"), role=parts.username)
    with psycopg.connect(server().url, autocommit=True) as connection:
        value = "RESET default_transaction_isolation"
        if level is not None:
            value = f"SET default_transaction_isolation = '{level}'"
        connection.execute(f"{change} {value}".encode())


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(level: str) -> Iterator[str]:
    made = server().fresh_database()
    set_level(made, level)
    yield made
    set_level(made, None)
    server().done(made)


async def level_of_calls(store: PostgresqlStore) -> str:
    row = await store._database.fetchrow("SELECT current_setting('transaction_isolation')")
    assert row is not None
    return str(row[0])


@pytest.mark.parametrize("where", WHERE)
async def test_calls_run_at_read_committed_wherever_another_level_is_set(url: str, level: str, where: str) -> None:
    set_level(url, level, where)
    store = await PostgresqlStore.open(url)
    try:
        assert await level_of_calls(store) == "read committed"
        async with store._database.transaction() as connection:
            assert await connection.fetchval("SELECT current_setting('transaction_isolation')") == "read committed"
    finally:
        await store.close()
        set_level(url, None, where)


async def test_behind_a_pooler_they_do_too_and_no_session_of_the_server_is_changed(url: str, level: str) -> None:
    with pooled(url) as pooler:
        store = await PostgresqlStore.open(pooler.url + "?listen=off")
        try:
            assert [await level_of_calls(store) for _ in range(5)] == ["read committed"] * 5
            connection = await asyncpg.connect(pooler.url, statement_cache_size=0)
            for _ in range(5):
                told = await connection.fetchval("SELECT current_setting('default_transaction_isolation')")
                assert told == level
            await connection.close()
            with pytest.raises(Exception, match="there is no job"):
                await store.cancel(["unknown"])
            assert await level_of_calls(store) == "read committed"
        finally:
            await store.close()


async def _work(store: PostgresqlStore, number: int, jobs: int) -> None:
    """Enqueue into limited lanes and run all jobs to their ends."""
    session = await store.register(
        NewSession(
            id=f"worker-{number}", kind=SessionKind.WORKER, host="h", pid=1, queues=("default",), slots=Slots(total=4)
        )
    )
    for k in range(jobs):
        await store.enqueue([NewJob(task="t", id=f"job-{number}-{k}", lane=f"lane:{k % 3}", payload=b"[]")])
    claims = 0
    idle = 0
    while idle < 40:
        claims += 1
        asks = tuple(Ask(queue="default", priority=each, most=4) for each in Priority)
        claimed = await store.claim(session.id, Claim(number=claims, asks=asks, total=4))
        if claimed:
            idle = 0
            await store.finish(session.id, [complete(Held(job.id, job.fence)) for job in claimed])
        else:
            idle += 1
            await asyncio.sleep(0.01)


async def test_no_job_is_left_behind_by_processes_that_use_the_same_lanes(url: str) -> None:
    async with AsyncExitStack() as stack:
        stores = []
        for _ in range(4):
            stores.append(await PostgresqlStore.open(url))
            stack.push_async_callback(stores[-1].close)
        rules = QueueSettings(lanes=(LaneRule(pattern="lane:*", limit=1),))
        await stores[0].configure([SettingsChange(queue="default", version=1, declared=rules)])
        await asyncio.gather(*(_work(store, number, 30) for number, store in enumerate(stores)))
        ids = [f"job-{number}-{k}" for number in range(4) for k in range(30)]
        states = [job and job.state for job in await stores[0].get(ids)]
        assert states == [JobState.COMPLETED] * len(ids)
        assert (await stores[0].recount()).differences == ()


@pytest.mark.parametrize("chosen", ["read committed", *LEVELS])
async def test_stores_that_open_an_empty_database_at_once_all_come_up(chosen: str) -> None:
    for _ in range(3):
        url = server().fresh_database(migrated=False)
        set_level(url, chosen)
        opened = await asyncio.gather(*(PostgresqlStore.open(url) for _ in range(4)), return_exceptions=True)
        for store in opened:
            assert isinstance(store, PostgresqlStore), store
            await store.close()
        set_level(url, None)
        server().done(url)


async def test_processes_that_open_an_empty_database_at_once_all_come_up() -> None:
    url = server().fresh_database(migrated=False)
    started = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", "fairlane", "migrate", "--url", url,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )
        for _ in range(3)
    ]  # fmt: skip
    for process in started:
        told, _ = await process.communicate()
        assert process.returncode == 0, told.decode()
    server().done(url)


async def test_a_job_stored_in_a_transaction_of_the_users_at_that_level_runs_once_it_is_committed(url: str) -> None:
    app = Fairlane(settings=Settings(url=url, intervals=QUICK))

    @app.task(name="double", queue="default", lane="one:{number}")
    async def double(number: int) -> int:
        return 2 * number

    store = await PostgresqlStore.open(url)
    async with app:
        users = await asyncpg.connect(url)
        transaction = users.transaction()
        await transaction.start()
        # The snapshot is taken here: it does not see what other transactions store from now on.
        assert await users.fetchval("SELECT current_setting('transaction_isolation')") in LEVELS
        await double.enqueue(1)
        [handle] = await app.enqueue_on(users, double.call(2))
        assert await store.get([handle.id]) == [None]
        await transaction.commit()
        await store.admit()
        [job] = await store.get([handle.id])
        assert job is not None
        assert job.state is JobState.PENDING
        position = await handle.position()
        assert position is not None
        assert (position.place, position.of) == (1, 1)

        # The same id was stored since: the transaction must be repeated, as after any conflict at this level.
        transaction = users.transaction()
        await transaction.start()
        await users.fetchval("SELECT 1 FROM pg_class LIMIT 1")
        other = await double.options(id="same").enqueue(7)
        with pytest.raises(asyncpg.SerializationError):
            await app.enqueue_on(users, double.options(id="same").call(7))
        await transaction.rollback()
        async with users.transaction():
            [again] = await app.enqueue_on(users, double.options(id="same").call(7))
        assert (again.id, again.created) == (other.id, False)
        assert (await store.recount()).differences == ()
        await users.close()
    await store.close()


async def test_the_doctor_names_the_level_and_where_it_is_set(url: str, level: str) -> None:
    store = await PostgresqlStore.open(url)
    [finding] = [each for each in await store.findings() if each.topic == "isolation"]
    assert finding.level is Level.WARN
    assert f"default_transaction_isolation is {level}" in finding.what
    assert finding.advice is not None
    assert finding.advice.startswith("ALTER DATABASE")
    await store.close()
    set_level(url, None)
    store = await PostgresqlStore.open(url)
    [finding] = [each for each in await store.findings() if each.topic == "isolation"]
    assert finding.level is Level.OK
    await store.close()
