"""Transactions of bodies on PostgreSQL: what belongs to them, and what happens when the server fails."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from fairlane import Backoff, Fairlane, Handle, JobFailed, JobState, NewJob, Settings, StoreUnavailable, current_job
from fairlane.model.settings import LaneRule, QueueSettings, SettingsChange
from fairlane.model.states import complete
from fairlane.store.postgresql import database, transactions
from fairlane.store.wakeups import job_topic, queue_topic
from tests.client.conftest import eventually, kit_of
from tests.client.ledger import Ledger, ledger_in, working
from tests.servers.postgresql import own_server, server
from tests.worker.yard import QUICK

from ..own_connections import asyncpg, connected

pytestmark = pytest.mark.anyio


@pytest.fixture
def url() -> Iterator[str]:
    databases = server()
    fresh = databases.fresh_database()
    yield fresh
    databases.done(fresh)


@pytest.fixture
async def app(url: str) -> AsyncIterator[Fairlane]:
    async with Fairlane(settings=Settings(url=url, intervals=QUICK)) as app:
        yield app


@pytest.fixture
async def ledger(app: Fairlane, url: str) -> AsyncIterator[Ledger]:
    made = await ledger_in(url)
    yield made
    await made.close()


async def test_a_transaction_must_see_what_others_have_committed(app: Fairlane) -> None:
    @app.task(retries=0)
    async def effect() -> None:
        connection = await current_job().transaction()
        await connection.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")

    handle = await effect.enqueue()
    async with working(app):
        with pytest.raises(JobFailed, match="read committed"):
            await handle.result(timeout=30)


async def test_a_savepoint_of_the_bodys_own_is_its_own(app: Fairlane, ledger: Ledger) -> None:
    @app.task
    async def effect() -> None:
        connection = await current_job().transaction()
        await ledger.write(connection, "kept")
        with contextlib.suppress(ZeroDivisionError):
            async with connection.transaction():
                await ledger.write(connection, "dropped")
                raise ZeroDivisionError

    handle = await effect.enqueue()
    async with working(app):
        await handle.result(timeout=30)
    assert await ledger.effects() == [("kept", 1)]


async def test_transactions_of_jobs_wait_for_each_other_and_store_calls_do_not_wait_for_them(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "WAIT_SECONDS", 1.0)
    app = Fairlane(settings=Settings(url=f"{url}?pool=2", intervals=QUICK))
    asking = 0

    @app.task(retries=0)
    async def effect() -> int:
        nonlocal asking
        asking += 1
        connection = await current_job().transaction()
        asking -= 1
        return int(await connection.fetchval("SELECT 1 FROM pg_sleep(0.8)"))

    async with app:
        handles = [await effect.enqueue() for _ in range(6)]
        async with working(app):
            await eventually(lambda: _is(asking > 0))
            await asyncio.gather(*(app.client.queues() for _ in range(2)))
            assert [await handle.result(timeout=30) for handle in handles] == [1] * 6


async def test_what_a_body_changed_of_its_session_is_not_left_to_the_next(app: Fairlane) -> None:
    @app.task
    async def effect() -> str:
        connection = await current_job().transaction()
        before = str(await connection.fetchval("SHOW statement_timeout"))
        await connection.execute("SET statement_timeout = '77s'")
        return before

    async with working(app):
        first = await (await effect.enqueue()).result(timeout=30)
        assert await (await effect.enqueue()).result(timeout=30) == first


async def _is(condition: bool) -> bool:
    return condition


async def test_a_process_that_freezes_right_before_its_commit_is_cut_off(
    app: Fairlane, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "LAST_MOMENT", transactions.LAST_MOMENT.replace("'5000'", "'300'"))
    frozen = asyncio.Event()
    commit = asyncpg.transaction.Transaction.commit

    async def hang(self: Any) -> None:
        if not frozen.is_set():
            frozen.set()
            await asyncio.sleep(2)
        await commit(self)

    monkeypatch.setattr(asyncpg.transaction.Transaction, "commit", hang)

    @app.task(retries=1)
    async def effect() -> int:
        await ledger.write(await current_job().transaction(), current_job().id, current_job().attempt)
        return current_job().attempt

    handle = await effect.enqueue()
    async with working(app):
        await asyncio.wait_for(frozen.wait(), 30)
        began = time.monotonic()
        # This call needs the store lock exclusively, so it waits for every call that finishes jobs.
        change = SettingsChange(queue="default", declared=QueueSettings(limit=5), version=1)
        await (await app.connection.store()).configure([change])
        assert time.monotonic() - began < 1.5
        assert await handle.result(timeout=30) == 2
    assert await ledger.effects() == [(handle.id, 2)]


async def test_a_connection_that_is_ended_under_the_body_costs_the_attempt_and_nothing_else(
    app: Fairlane, ledger: Ledger, url: str
) -> None:
    @app.task(retries=1)
    async def effect() -> int:
        connection = await current_job().transaction()
        await ledger.write(connection, current_job().id, current_job().attempt)
        if current_job().attempt == 1:
            pid = await connection.fetchval("SELECT pg_backend_pid()")
            async with connected(url) as other:
                await other.execute("SELECT pg_terminate_backend($1)", pid)
        return current_job().attempt

    handle = await effect.enqueue()
    async with working(app):
        assert await handle.result(timeout=30) == 2
    assert await ledger.effects() == [(handle.id, 2)]


async def test_what_the_server_refuses_at_the_commit_is_the_bodys_error(app: Fairlane, url: str) -> None:
    async with connected(url) as connection:
        await connection.execute("CREATE TABLE strict (id integer UNIQUE DEFERRABLE INITIALLY DEFERRED)")

    @app.task(retries=0)
    async def effect() -> None:
        connection = await current_job().transaction()
        await connection.execute("INSERT INTO strict VALUES (1), (1)")

    handle = await effect.enqueue()
    async with working(app):
        with pytest.raises(JobFailed, match="UniqueViolationError"):
            await handle.result(timeout=30)
    async with connected(url) as connection:
        assert await connection.fetchval("SELECT count(*) FROM strict") == 0
        await connection.execute("DROP TABLE strict")


async def test_a_body_that_swallowed_an_error_of_the_server_cannot_commit(app: Fairlane, ledger: Ledger) -> None:
    @app.task(retries=0)
    async def effect() -> None:
        connection = await current_job().transaction()
        await ledger.write(connection, current_job().id)
        with pytest.raises(asyncpg.UndefinedTableError):
            await connection.execute("SELECT * FROM nowhere")

    handle = await effect.enqueue()
    async with working(app):
        with pytest.raises(JobFailed, match="aborted"):
            await handle.result(timeout=30)
    assert await ledger.effects() == []


async def test_workers_and_watchers_are_notified_after_the_commit(app: Fairlane) -> None:
    store: Any = await app.connection.store()
    lanes = (LaneRule(pattern="narrow", limit=1),)
    await store.configure([SettingsChange(queue="default", declared=QueueSettings(lanes=lanes))])
    await store.enqueue([NewJob(id=id, task="task", lane="narrow") for id in "ab"])
    worker = await (await kit_of(app)).worker()
    [held] = await worker.claim()
    opened = await store.inner.transactions.begin()
    subscription = store.wakeups.subscribe([queue_topic("default"), job_topic("a")])
    assert await opened.commit(worker.id, complete(held.held, b"1"), None)
    received: set[str] = set()
    async with asyncio.timeout(5):
        while len(received) < 2:
            received |= await subscription.wait(5)
    subscription.close()
    assert [job.id for job in await worker.claim()] == ["b"]


async def _all_are_final(handles: list[Handle[None]]) -> bool:
    try:
        return all([(await handle.state()).final for handle in handles])
    except StoreUnavailable:
        return False


async def test_a_server_restart_during_transactions_doubles_and_loses_nothing() -> None:
    with own_server(durable=True) as mine:
        url = mine.fresh_database()
        app = Fairlane(settings=Settings(url=url, intervals=QUICK))

        @app.task(retries=20, backoff=Backoff(base=0.1, factor=1))
        async def effect() -> None:
            connection = await current_job().transaction()
            await table.write(connection, current_job().id)
            await asyncio.sleep(0.02)

        async with app:
            table = await ledger_in(url)
            handles = await app.enqueue_many([effect.call() for _ in range(60)])
            async with working(app):
                for how in (mine.stop, mine.kill):
                    await asyncio.sleep(0.3)
                    await asyncio.to_thread(how)
                    await asyncio.to_thread(mine.start)
                await eventually(lambda: _all_are_final(handles), 60)
            assert sorted(job for job, _ in await table.effects()) == sorted(handle.id for handle in handles)
            assert {await handle.state() for handle in handles} == {JobState.COMPLETED}
            assert not (await app.client.recount()).differences
