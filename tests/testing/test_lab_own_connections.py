"""Code that stores jobs in its own transaction runs in a lab, whatever database that transaction is in."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import call

import pytest

from fairlane import Fairlane, InvalidInput, current_job, testing
from tests.servers.postgresql import server
from tests.store.own_connections import DRIVERS, DjangoOnSqlite, Own, opened

pytestmark = pytest.mark.anyio

app = Fairlane("postgresql://nobody@nowhere.invalid/shop")
app.queue("parcels").lane("user:*", limit=1)


@app.task(queue="parcels", lane="user:{user}")
async def pack(user: str) -> str:
    return f"parcel for {user}"


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[str]:
    databases = server()
    fresh = databases.fresh_database(migrated=False)
    yield fresh
    databases.done(fresh)


@pytest.mark.postgresql
@pytest.mark.parametrize("kind", DRIVERS.values(), ids=list(DRIVERS))
async def test_a_connection_of_every_driver_is_accepted(kind: Callable[[], Own], elsewhere: str) -> None:
    async with testing.embedded(app) as lab:
        async with opened(kind, elsewhere) as own:
            await own.enqueue(app, pack.call("ann"), pack.call("ann"))
            await own.commit()
        assert await lab.enqueued(pack) == [call("ann"), call("ann")]
        assert (await lab.drain()).completed == 2


async def test_one_job_can_be_run(tmp_path: Path) -> None:
    async with testing.embedded(app) as lab, opened(DjangoOnSqlite, f"sqlite:///{tmp_path / 'site.db'}") as own:
        [job] = await own.enqueue(app, pack.call("ann"))
        assert await lab.run(app.handle(job.id)) == "parcel for ann"
        await own.commit()


async def test_the_jobs_stay_when_the_transaction_is_rolled_back(tmp_path: Path) -> None:
    async with testing.embedded(app) as lab:
        async with opened(DjangoOnSqlite, f"sqlite:///{tmp_path / 'site.db'}") as own:
            await own.enqueue(app, pack.call("ann"))
            await own.rollback()
        assert await lab.enqueued(pack) == [call("ann")]


def test_blocking_code_is_tested_the_same_way(tmp_path: Path) -> None:
    mine = sqlite3.connect(tmp_path / "site.db", isolation_level=None)
    with testing.embedded_blocking(app) as lab:
        mine.execute("BEGIN")
        app.blocking.enqueue_on(mine, pack.call("ann"))
        mine.execute("COMMIT")
        assert lab.drain().completed == 1
    mine.close()


async def test_the_transaction_of_a_job_is_still_one_with_its_jobs() -> None:
    shop = Fairlane()

    @shop.task(retries=0)
    async def order(ok: bool) -> None:
        await shop.enqueue_on(await current_job().transaction(), post.call())
        if not ok:
            raise ValueError

    @shop.task
    async def post() -> None: ...

    async with testing.embedded(shop) as lab:
        await order.enqueue(False)
        assert (await lab.drain()).failed == 1
        assert await lab.enqueued(post) == []
        await order.enqueue(True)
        assert (await lab.drain()).completed == 2
        assert await lab.enqueued(post) == [call()]


async def test_what_is_no_connection_or_has_no_transaction_is_refused(tmp_path: Path) -> None:
    mine = sqlite3.connect(tmp_path / "site.db", isolation_level=None)
    async with testing.embedded(app):
        with pytest.raises(InvalidInput, match=r"is a builtins\.object"):
            await app.enqueue_on(object(), pack.call("ann"))
        with pytest.raises(InvalidInput, match="no open transaction"):
            await asyncio.to_thread(app.blocking.enqueue_on, mine, pack.call("ann"))
    mine.close()
