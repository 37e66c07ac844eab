"""Bodies that write in the transaction in which their job is completed, on every store that has transactions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fairlane import Fairlane, Handle, JobFailed, JobState, Retry, Settings, current_job, testing
from fairlane.events import Event, Finished, Refused
from fairlane.model.states import complete
from fairlane.store.sqlite import transactions as sqlite_transactions
from tests.servers.stores import TRANSACTIONAL, empty_stores
from tests.worker.yard import QUICK

from .conftest import eventually, kit_of
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


async def history(handle: Handle[Any]) -> list[tuple[str | None, int]]:
    """How each claim of a job ended, and how many writes were rejected after it."""
    return [(attempt.outcome, attempt.refused) for attempt in (await handle.job()).attempts]


async def test_a_body_and_its_effects_commit_together(app: Fairlane, ledger: Ledger) -> None:
    seen: list[Any] = []

    @app.task
    async def effect() -> str:
        connection = await current_job().transaction()
        await ledger.write(connection, current_job().id)
        current_job().progress("half")
        seen.append(await ledger.effects())
        current_job().progress("done")
        return "written"

    handle = await effect.enqueue()
    async with working(app):
        assert await handle.result(timeout=30) == "written"
        assert await ledger.effects() == [(handle.id, 1)]
        assert seen == [[]], "nobody else sees it before the end"
        assert await handle.progress() == "done"
        assert await history(handle) == [("completed", 0)]


async def test_watchers_are_notified_once_as_of_any_other_job(app: Fairlane, ledger: Ledger) -> None:
    told: list[Event] = []
    app.events.subscribe(told.append)
    handle = await task_of(app, ledger).enqueue(1)
    async with working(app):
        await handle.result(timeout=30)
        await eventually(lambda: _is(any(isinstance(each, Finished) for each in told)))
    assert [(each.state, each.task) for each in told if isinstance(each, Finished)] == [(JobState.COMPLETED, "double")]
    assert not [each for each in told if isinstance(each, Refused)]


async def test_all_code_of_a_run_gets_the_same_connection(app: Fairlane, ledger: Ledger) -> None:
    @app.task
    async def effect() -> bool:
        async def ask() -> Any:
            return await current_job().transaction()

        first, *others = await asyncio.gather(ask(), ask(), ask())
        return all(other is first for other in [*others, await ask()])

    handle = await effect.enqueue()
    async with working(app):
        assert await handle.result(timeout=30) is True


async def test_many_jobs_at_once_all_get_their_transaction(app: Fairlane, ledger: Ledger) -> None:
    """Also when other code has taken all shared threads."""
    handles = await app.enqueue_many([task_of(app, ledger).call(n) for n in range(60)])
    busy = [asyncio.ensure_future(asyncio.to_thread(time.sleep, 0.3)) for _ in range(20)]
    async with working(app, slots=40):
        assert [await handle.result(timeout=30) for handle in handles] == [2 * n for n in range(60)]
    assert sorted(job for job, _ in await ledger.effects()) == sorted(handle.id for handle in handles)
    await asyncio.gather(*busy)


async def test_what_a_body_wrote_before_it_raised_is_rolled_back(app: Fairlane, ledger: Ledger) -> None:
    @app.task(retries=1)
    async def effect() -> int:
        connection = await current_job().transaction()
        await ledger.write(connection, current_job().id, current_job().attempt)
        if current_job().attempt == 1:
            raise Retry(delay=0)
        return current_job().attempt

    handle = await effect.enqueue()
    async with working(app):
        assert await handle.result(timeout=30) == 2
    assert await ledger.effects() == [(handle.id, 2)]


async def test_a_result_that_cannot_be_stored_takes_the_effects_with_it(app: Fairlane, ledger: Ledger) -> None:
    @app.task(retries=0)
    async def effect() -> object:
        await ledger.write(await current_job().transaction(), current_job().id)
        return object()

    handle = await effect.enqueue()
    async with working(app):
        with pytest.raises(JobFailed, match="result"):
            await handle.result(timeout=30)
    assert await ledger.effects() == []


async def test_a_run_that_lost_its_job_leaves_nothing_behind(app: Fairlane, ledger: Ledger) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    @app.task(retries=3)
    async def effect() -> int:
        fence = current_job().fence
        if fence == 1:
            begun.set()
            with contextlib.suppress(asyncio.CancelledError):
                await go_on.wait()
        connection = await current_job().transaction()
        await ledger.write(connection, current_job().id, fence)
        return fence

    handle = await effect.enqueue()
    async with working(app):
        await asyncio.wait_for(begun.wait(), 30)
        [session] = await app.client.sessions()
        # As a rescuer that considers the worker dead does; the worker is not notified, or ignores it.
        store = await app.connection.store()
        await store.leave(session.id)
        go_on.set()
        assert await handle.result(timeout=30) == 2
    assert await ledger.effects() == [(handle.id, 2)]


async def test_a_lost_claim_commits_nothing(app: Fairlane, ledger: Ledger) -> None:
    handle = await task_of(app, ledger).enqueue(1)
    worker = await (await kit_of(app)).worker()
    [claimed] = await worker.claim()
    store: Any = await app.connection.store()
    await store.leave(worker.id)
    opened = await store.inner.transactions.begin()
    await ledger.write(opened.connection, handle.id)
    assert await opened.commit(worker.id, complete(claimed.held, b"2"), None) is False
    assert await ledger.effects() == []
    assert await handle.state() is JobState.PENDING


async def test_a_body_that_is_stopped_leaves_nothing_behind(app: Fairlane, ledger: Ledger) -> None:
    begun = asyncio.Event()

    @app.task(timeout=0.3, retries=0)
    async def slow() -> None:
        await ledger.write(await current_job().transaction(), current_job().id)
        await asyncio.sleep(60)

    @app.task
    async def patient() -> None:
        await ledger.write(await current_job().transaction(), current_job().id)
        begun.set()
        await asyncio.sleep(60)

    late = await slow.enqueue()
    async with working(app):
        with pytest.raises(JobFailed, match="timeout"):
            await late.result(timeout=30)
    unwanted = await patient.enqueue()
    async with working(app):
        await asyncio.wait_for(begun.wait(), 30)
    assert await unwanted.state() is JobState.PENDING, "handed back by a worker that stopped"
    assert await ledger.effects() == []


async def test_jobs_that_a_body_stores_in_its_transaction_commit_with_it(app: Fairlane, ledger: Ledger) -> None:
    task = task_of(app, ledger)

    @app.task(retries=1)
    async def parent() -> None:
        connection = await current_job().transaction()
        await app.enqueue_on(connection, task.options(id=f"child-{current_job().attempt}").call(1))
        if current_job().attempt == 1:
            raise Retry(delay=0)

    handle = await parent.enqueue()
    async with working(app):
        await handle.result(timeout=30)
        assert await app.handle("child-2").result(timeout=30) == 2
    assert await (await app.connection.store()).get(["child-1"]) == [None]


@pytest.mark.parametrize("word", ["COMMIT", "ROLLBACK"])
async def test_a_transaction_that_the_body_ends_itself_is_an_error_that_says_so(
    app: Fairlane, ledger: Ledger, word: str
) -> None:
    @app.task(retries=0)
    async def effect() -> None:
        connection = await current_job().transaction()
        answer = connection.execute(word)
        if asyncio.iscoroutine(answer):
            await answer

    handle = await effect.enqueue()
    async with working(app):
        with pytest.raises(JobFailed, match="do not commit or roll back"):
            await handle.result(timeout=30)


async def test_the_error_in_a_plain_function_asks_for_a_coroutine_function(app: Fairlane) -> None:
    @app.task(retries=0)
    def plain() -> None:
        current_job().transaction()

    handle = await plain.enqueue()
    async with working(app):
        with pytest.raises(JobFailed, match="async def"):
            await handle.result(timeout=30)


async def test_what_a_body_left_behind_cannot_have_a_transaction(app: Fairlane) -> None:
    told: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    @app.task
    async def effect(asked: bool) -> None:
        async def late() -> None:
            await asyncio.sleep(0.2)
            try:
                await current_job().transaction()
            except Exception as exc:
                told.set_result(exc)

        if asked:
            await current_job().transaction()
        background.append(asyncio.ensure_future(late()))

    background: list[asyncio.Future[None]] = []
    for asked, words in ((False, "while they run"), (True, "has ended")):
        told = asyncio.get_running_loop().create_future()
        handle = await effect.enqueue(asked)
        async with working(app):
            await handle.result(timeout=30)
            assert words in str(await asyncio.wait_for(told, 30))


async def test_a_job_without_a_transaction_costs_none(
    app: Fairlane, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    store: Any = await app.connection.store()
    monkeypatch.setattr(store.inner.transactions, "begin", None)

    @app.task
    async def nothing() -> int:
        return 1

    handle = await nothing.enqueue()
    async with working(app):
        assert await handle.result(timeout=30) == 1


async def test_a_transaction_that_cannot_begin_is_the_bodys_to_handle(
    app: Fairlane, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    store: Any = await app.connection.store()
    begin, calls = store.inner.transactions.begin, 0

    async def fail_once() -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise OSError("no more connections")
        return await begin()

    monkeypatch.setattr(store.inner.transactions, "begin", fail_once)

    @app.task
    async def effect() -> int:
        try:
            connection = await current_job().transaction()
        except OSError:
            connection = await current_job().transaction()
        await ledger.write(connection, current_job().id)
        return calls

    handle = await effect.enqueue()
    async with working(app):
        assert await handle.result(timeout=30) == 2
    assert await ledger.effects() == [(handle.id, 1)]


@pytest.mark.parametrize(
    ("heartbeat", "refused"), [(30.0, 1), (0.05, 0)], ids=["received of first", "after the renewal"]
)
async def test_a_commit_whose_answer_is_lost_is_not_repeated(
    app: Fairlane, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, heartbeat: float, refused: int
) -> None:
    """The worker writes a retry, which is rejected; or a renewal has reported the loss, and it writes nothing."""
    app.settings = msgspec.structs.replace(
        app.settings, intervals=msgspec.structs.replace(QUICK, heartbeat=heartbeat, lease=40.0)
    )
    store: Any = await app.connection.store()
    begin, lost = store.inner.transactions.begin, 0

    async def lossy() -> Any:
        nonlocal lost
        opened = await begin()
        commit = opened.commit

        async def lose(*args: Any) -> bool:
            nonlocal lost
            await commit(*args)
            if not refused:
                await asyncio.sleep(20 * heartbeat)
            lost += 1
            raise ConnectionError("the answer was lost")

        opened.commit = lose
        return opened

    monkeypatch.setattr(store.inner.transactions, "begin", lossy)
    handle = await task_of(app, ledger).enqueue(3)
    async with working(app):
        assert await handle.result(timeout=30) == 6

        async def told() -> bool:
            return lost == 1 and await history(handle) == [("completed", refused)]

        await eventually(told)
    # At its end the worker has written everything.
    assert lost == 1
    assert await ledger.effects() == [(handle.id, 1)]
    assert await history(handle) == [("completed", refused)]


async def test_a_lab_runs_a_body_with_its_transaction(url: str, tmp_path: Path) -> None:
    app = Fairlane(settings=Settings(url=url, intervals=QUICK))

    @app.task(retries=1)
    async def effect() -> int:
        connection = await current_job().transaction()
        connection.execute("CREATE TABLE IF NOT EXISTS effect (attempt INTEGER)")
        connection.execute("INSERT INTO effect VALUES (?)", (current_job().attempt,))
        current_job().progress("written")
        if current_job().attempt == 1:
            raise Retry(delay=0)
        return int(connection.execute("SELECT count(*) FROM effect").fetchone()[0])

    # A lab is on SQLite, whatever the store of the application is.
    async with testing.embedded(app) as inside:
        handle = await effect.enqueue()
        done = await inside.drain()
        assert (done.completed, done.retried) == (1, 1)
        assert await handle.result() == 1
        assert await handle.progress() == "written"
        assert await history(handle) == [("retry", 0), ("completed", 0)]
    await app.close()


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
async def test_a_body_that_waits_for_the_store_inside_its_transaction_is_freed_with_an_error(
    app: Fairlane, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_transactions, "LONGEST_SECONDS", 0.5)
    task = task_of(app, ledger)

    @app.task(retries=0)
    async def stuck() -> None:
        connection = await current_job().transaction()
        await ledger.write(connection, current_job().id)
        await task.enqueue(1)

    handle = await stuck.enqueue()
    async with working(app):
        with pytest.raises(JobFailed, match=r"app\.enqueue_on"):
            await handle.result(timeout=30)
        await eventually(lambda: _count(ledger, 1))
    assert handle.id not in dict(await ledger.effects())


async def _count(ledger: Ledger, wanted: int) -> bool:
    return len(await ledger.effects()) == wanted


async def _is(condition: bool) -> bool:
    return condition
