"""Jobs stored in a user's transaction: their tokens come with the commit where the driver tells of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from fairlane import Fairlane
from fairlane.model.job import Priority
from fairlane.store.postgresql import user_connections
from fairlane.task import Task
from tests.store.own_connections import DRIVERS, Own, opened

from .bench import Bench

TELLS_OF_ITS_COMMIT = (
    "sqlalchemy-async-session",
    "sqlalchemy-session",
    "sqlalchemy-scoped-session",
    "django",
    "django-proxy",
)


@pytest.fixture
async def app(bench: Bench) -> AsyncIterator[Fairlane]:
    """An application on the same servers, without a leader."""
    async with Fairlane(bench.url) as made:
        yield made


@pytest.fixture
def note(app: Fairlane) -> Task[[int], None]:
    @app.task(name="note")
    async def note(number: int) -> None:
        """Nothing."""

    return note


@pytest.mark.parametrize("kind", [DRIVERS[name] for name in TELLS_OF_ITS_COMMIT], ids=TELLS_OF_ITS_COMMIT)
async def test_a_commit_that_the_driver_reports_pushes_the_tokens(
    bench: Bench, app: Fairlane, note: Task[[int], None], kind: Callable[[], Own]
) -> None:
    await bench.kit.worker(slots=10)
    async with opened(kind, bench.store._address.dsn) as own:
        handles = await own.enqueue(app, note.call(1), note.call(2))
        later = note.options(delay=60).call(3)
        urgent = note.options(priority="high").call(4)
        await own.enqueue(app, later, urgent)
        assert bench.tokens() == []
        await own.commit()
        await bench.has_tokens(2)
        assert await bench.has_tokens(1, "default", Priority.HIGH) == [urgent.job.id]
    waiting = await bench.waiting()
    waiting.work.offer(frozenset(Priority))
    await waiting.wakes(1)
    assert {job.id for job in await waiting.claim(10)} == {*(handle.id for handle in handles), urgent.job.id}


async def test_a_transaction_of_django_that_is_rolled_back_pushes_nothing(
    bench: Bench, app: Fairlane, note: Task[[int], None]
) -> None:
    async with opened(DRIVERS["django"], bench.store._address.dsn) as own:
        await own.enqueue(app, note.call(1))
        await own.rollback()
    await app.client.queues()
    await bench.settled()
    assert bench.tokens() == []


async def test_a_session_keeps_nothing_of_a_transaction_that_is_over(
    bench: Bench, app: Fairlane, note: Task[[int], None]
) -> None:
    async with opened(DRIVERS["sqlalchemy-session"], bench.store._address.dsn) as own:
        for number, end in enumerate((own.rollback, own.commit, own.rollback)):
            await own.enqueue(app, note.call(number))
            assert len(user_connections._after_commit[own.connection]) == 1
            await end()
            assert user_connections._after_commit[own.connection] == []
        assert len(list(own.connection.dispatch.after_transaction_end)) == 1


async def test_what_the_user_keeps_in_info_of_a_session_does_not_matter(
    bench: Bench, app: Fairlane, note: Task[[int], None]
) -> None:
    await bench.kit.worker(slots=10)
    async with (
        opened(DRIVERS["sqlalchemy-session"], bench.store._address.dsn) as own,
        opened(DRIVERS["sqlalchemy-session"], bench.store._address.dsn) as other,
    ):
        await own.enqueue(app, note.call(1))
        other.connection.info.update(own.connection.info)
        await other.enqueue(app, note.call(2))
        own.connection.info.clear()
        await own.commit()
        await bench.has_tokens(1)
        await other.commit()
        await bench.has_tokens(2)


async def test_a_job_for_one_worker_gets_no_token_with_the_commit(
    bench: Bench, app: Fairlane, note: Task[[int], None]
) -> None:
    """A worker that was woken would find nothing: the leader has to admit the job first."""
    waiting = await bench.waiting(pool="default", index=0)
    async with opened(DRIVERS["sqlalchemy-session"], bench.store._address.dsn) as own:
        await own.enqueue(app, note.options(sticky="plan").call(1), note.options(worker=0).call(2))
        assert own.connection not in user_connections._after_commit
        await own.commit()
    await bench.settled()
    assert bench.tokens() == []
    await bench.sweep()
    await waiting.wakes(1)


async def test_a_savepoint_that_ends_pushes_nothing_yet(bench: Bench, app: Fairlane, note: Task[[int], None]) -> None:
    async with opened(DRIVERS["sqlalchemy-async-session"], bench.store._address.dsn) as own:
        async with own.connection.begin_nested():
            await own.enqueue(app, note.call(1))
        await bench.settled()
        assert bench.tokens() == []
        await own.commit()
        await bench.has_tokens(1)
