"""Jobs that are stored in a transaction of the user's, on every store that has transactions."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from fairlane import Conflict, Fairlane, InvalidInput, JobState, NotSupported, Settings
from fairlane.model.job import Job
from tests.servers.stores import TRANSACTIONAL, empty_stores
from tests.worker.yard import QUICK

from .ledger import Ledger, ledger_in, task_of, working


@pytest.fixture(params=TRANSACTIONAL)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty store of each kind."""
    with empty_stores(request.param, tmp_path) as stores:
        yield stores.next()


@pytest.fixture
async def app(url: str) -> AsyncIterator[Fairlane]:
    app = Fairlane(settings=Settings(url=url, intervals=QUICK))
    async with app:
        yield app


@pytest.fixture
async def ledger(app: Fairlane, url: str) -> AsyncIterator[Ledger]:
    """A table of the user's beside the store's."""
    made = await ledger_in(url)
    yield made
    await made.close()


async def job(app: Fairlane, id: str) -> Job | None:
    [found] = await (await app.connection.store()).get([id])
    return found


async def test_a_burst_runs_what_was_committed_before_it_began(app: Fairlane, ledger: Ledger) -> None:
    @app.task(name="double")
    async def double(number: int) -> int:
        return 2 * number

    connection = await ledger.begin()
    [handle] = await app.enqueue_on(connection, double.call(4))
    await ledger.end(connection, commit=True)
    # Without a leader, which would admit the job within a second.
    await app.worker(burst=True, manager=False).run()
    assert await handle.result(timeout=0) == 8


async def test_what_is_committed_exists_and_what_is_rolled_back_never_did(app: Fairlane, ledger: Ledger) -> None:
    task = task_of(app, ledger)
    for commit in (False, True):
        connection = await ledger.begin()
        await ledger.write(connection, "order")
        [handle] = await app.enqueue_on(connection, task.options(lane="ann", priority="high").call(4))
        assert handle.created
        assert await job(app, handle.id) is None, "nobody sees it before the commit"
        await ledger.end(connection, commit=commit)
        assert await ledger.effects() == [("order", 1)] * commit
        found = await job(app, handle.id)
        assert (found is not None) == commit
    assert found is not None
    assert (found.state, found.lane, found.priority.label) == (JobState.PENDING, "ann", "high")
    assert await handle.why() == "waiting to be admitted to its queue"
    async with working(app):
        assert await handle.result(timeout=30) == 8
    assert not (await app.client.recount()).differences


async def test_the_same_call_again_is_answered_and_other_content_refused(app: Fairlane, ledger: Ledger) -> None:
    task = task_of(app, ledger).options(id="order-7")
    connection = await ledger.begin()
    assert [handle.created for handle in await app.enqueue_on(connection, task.call(1), task.call(1))] == [True, False]
    await ledger.end(connection, commit=True)
    connection = await ledger.begin()
    assert [handle.created for handle in await app.enqueue_on(connection, task.call(1))] == [False]
    with pytest.raises(Conflict, match="order-7"):
        await app.enqueue_on(connection, task.options(id="other").call(1), task.call(2))
    # A refusal is for the whole call, and leaves the transaction as it was.
    await ledger.write(connection, "mine")
    await ledger.end(connection, commit=True)
    assert await ledger.effects() == [("mine", 1)]
    assert await job(app, "other") is None


async def test_a_unique_value_is_taken_with_the_commit(app: Fairlane, ledger: Ledger) -> None:
    task = task_of(app, ledger, unique="once")
    connection = await ledger.begin()
    [first] = await app.enqueue_on(connection, task.call(1))
    [second] = await app.enqueue_on(connection, task.call(2))
    assert (second.id, second.created) == (first.id, False)
    await ledger.end(connection, commit=True)
    assert (await task.enqueue(3)).id == first.id
    async with working(app):
        assert await first.result(timeout=30) == 2
        assert (await task.enqueue(3)).created, "its end gives the value back"


async def test_more_than_a_thousand_go_together(app: Fairlane, ledger: Ledger) -> None:
    task = task_of(app, ledger)
    calls = [task.call(n) for n in range(1_100)]
    connection = await ledger.begin()
    handles = await app.enqueue_on(connection, *calls)
    assert [handle.id for handle in handles] == [call.job.id for call in calls]
    assert await app.enqueue_on(connection) == []
    await ledger.end(connection, commit=True)
    assert (await (await app.connection.store()).admit(limit=2_000)).admitted == 1_100


async def test_a_closed_lane_is_refused_by_name(url: str) -> None:
    app = Fairlane(settings=Settings(url=url, intervals=QUICK))
    app.queue("default", lanes=["ann"])
    async with app:
        ledger = await ledger_in(url)
        task = task_of(app, ledger)
        connection = await ledger.begin()
        with pytest.raises(InvalidInput, match="bob") as refusal:
            await app.enqueue_on(connection, task.options(lane="bob").call(1))
        assert refusal.value.field == "lane"
        await app.enqueue_on(connection, task.options(lane="ann").call(1))
        await ledger.end(connection, commit=True)
        await ledger.close()
        assert [found.lane for found in (await app.client.find()).jobs] == ["ann"]


async def test_a_store_without_transactions_names_the_stores_that_have_them(
    app: Fairlane, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    store: Any = await app.connection.store()
    monkeypatch.delattr(store.inner, "transactions")
    with pytest.raises(NotSupported, match="PostgreSQL or SQLite"):
        await app.enqueue_on(object(), task_of(app, ledger).call(1))


async def test_only_calls_can_be_stored(app: Fairlane, ledger: Ledger) -> None:
    connection = await ledger.begin()
    with pytest.raises(InvalidInput, match=r"render\.call"):
        await app.enqueue_on(connection, task_of(app, ledger))  # type: ignore[arg-type]  # the mistake: no call
    await ledger.end(connection, commit=False)


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
async def test_sqlite_takes_connections_of_sqlite_alone(app: Fairlane, ledger: Ledger) -> None:
    call = task_of(app, ledger).call(1)
    with pytest.raises(InvalidInput, match=r"sqlite3\.Connection") as refusal:
        await app.enqueue_on(object(), call)
    assert refusal.value.field == "connection"
    connection = sqlite3.connect(":memory:")
    with pytest.raises(InvalidInput, match="no open transaction"):
        await app.enqueue_on(connection, call)
    connection.close()


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_blocking_code_stores_jobs_in_a_transaction_of_its_own(url: str) -> None:
    app = Fairlane(settings=Settings(url=url, intervals=QUICK))

    @app.task
    def double(number: int) -> int:
        return 2 * number

    with app.blocking as client:
        client.queues()
        connection = sqlite3.connect(url.removeprefix("sqlite:///"))
        connection.execute("BEGIN")
        handles = client.enqueue_on(connection, double.call(1), double.call(2))
        connection.commit()
        connection.close()
        assert [handle.created for handle in handles] == [True, True]
        assert [handle.why() for handle in handles] == ["waiting to be admitted to its queue"] * 2
        assert client.enqueue_on(object()) == []
