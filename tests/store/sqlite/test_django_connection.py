"""Jobs stored on Django's connection to the store's file: they and its rows commit together, or not at all."""

from __future__ import annotations

import importlib
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from fairlane import Fairlane, Settings
from fairlane.errors import InvalidInput
from fairlane.task import Task

from ...worker.yard import QUICK
from ..own_connections import DjangoOnSqlite, DjangoProxyOnSqlite, Own, ids, opened

pytestmark = pytest.mark.anyio

KINDS = [DjangoOnSqlite, DjangoProxyOnSqlite]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'site.db'}"


@pytest.fixture
async def app(url: str) -> AsyncIterator[Fairlane]:
    """An application, and a table of the user's in its file."""
    made = Fairlane(settings=Settings(url=url, intervals=QUICK))
    async with made:
        await made.connection.store()
        connection = sqlite3.connect(url.removeprefix("sqlite:///"))
        connection.execute("CREATE TABLE orders (id TEXT PRIMARY KEY)")
        connection.close()
        yield made


@pytest.fixture
def double(app: Fairlane) -> Task[[int], int]:
    @app.task(name="double")
    def double(number: int) -> int:
        return 2 * number

    return double


def orders(url: str) -> list[str]:
    connection = sqlite3.connect(url.removeprefix("sqlite:///"))
    found = [id for (id,) in connection.execute("SELECT id FROM orders")]
    connection.close()
    return found


@pytest.mark.parametrize("kind", KINDS)
async def test_a_job_commits_with_the_rows(
    app: Fairlane, double: Task[[int], int], url: str, kind: Callable[[], Own]
) -> None:
    async with opened(kind, url) as own:
        await own.execute("INSERT INTO orders VALUES ('tea')")
        [job] = await own.enqueue(app, double.call(4))
        assert await ids(app) == set()
        await own.commit()
    assert orders(url) == ["tea"]
    assert await ids(app) == {job.id}
    assert (await (await app.connection.store()).admit()).admitted == 1
    await app.worker(burst=True).run()
    assert (await app.handle(job.id).job()).result == b"8"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_rolled_back_job_never_existed(
    app: Fairlane, double: Task[[int], int], url: str, kind: Callable[[], Own]
) -> None:
    async with opened(kind, url) as own:
        await own.execute("INSERT INTO orders VALUES ('tea')")
        await own.enqueue(app, double.call(4))
        await own.rollback()
    assert orders(url) == []
    assert await ids(app) == set()


async def test_outside_of_atomic_it_is_refused(app: Fairlane, double: Task[[int], int], url: str) -> None:
    async with opened(DjangoOnSqlite, url, autocommit=True) as own:
        with pytest.raises(InvalidInput, match="no open transaction"):
            await own.enqueue(app, double.call(4))


async def test_another_file_is_refused(app: Fairlane, double: Task[[int], int], tmp_path: Path) -> None:
    async with opened(DjangoOnSqlite, f"sqlite:///{tmp_path / 'other.db'}") as own:
        with pytest.raises(InvalidInput, match="another file"):
            await own.enqueue(app, double.call(4))
        await own.rollback()


async def test_a_transaction_that_django_will_roll_back_takes_no_job(
    app: Fairlane, double: Task[[int], int], url: str
) -> None:
    errors = importlib.import_module("django.db.transaction")
    async with opened(DjangoOnSqlite, url) as own:
        own.connection.needs_rollback = True
        with pytest.raises(errors.TransactionManagementError):
            await own.enqueue(app, double.call(4))
        await own.rollback()
    assert await ids(app) == set()


async def test_errors_of_the_database_are_djangos(app: Fairlane, double: Task[[int], int], url: str) -> None:
    errors = importlib.import_module("django.db.utils")
    async with opened(DjangoOnSqlite, url) as own:
        await own.execute("PRAGMA busy_timeout = 50")
        other = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(errors.OperationalError, match="locked"):
            await own.enqueue(app, double.call(4))
        other.execute("ROLLBACK")
        other.close()
        await own.rollback()
    assert await ids(app) == set()
