"""Calls that take too long are ended by one timer for all of them, and cancelling goes on to mean cancelling."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fairlane.errors import StoreUnavailable
from fairlane.store.postgresql.database import Database
from fairlane.store.postgresql.store import PostgresqlStore
from fairlane.store.shared.deadlines import DeadlineTimer
from tests.conformance.kit import Kit


def database_of(kit: Kit) -> Database:
    assert isinstance(kit.store, PostgresqlStore)
    return kit.store._database


async def test_a_call_that_takes_too_long_is_an_outage_and_its_task_goes_on(kit: Kit) -> None:
    database = database_of(kit)
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(StoreUnavailable, match="did not answer in time"):
        await database.fetchrow("SELECT pg_sleep(30)", timeout=0.3)
    assert 0.3 <= loop.time() - began < 15
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    assert await database.fetchrow("SELECT 1 AS one") is not None


async def test_the_shortest_of_several_ends_first(kit: Kit) -> None:
    database = database_of(kit)

    async def sleep(timeout: float) -> float:
        with pytest.raises(StoreUnavailable):
            await database.fetchrow("SELECT pg_sleep(30)", timeout=timeout)
        return timeout

    ended = [await call for call in asyncio.as_completed([sleep(0.9), sleep(0.2), sleep(0.5)])]

    assert ended == [0.2, 0.5, 0.9]


async def test_a_call_that_is_cancelled_while_it_times_out_is_cancelled(kit: Kit) -> None:
    database = database_of(kit)
    call = asyncio.create_task(database.fetchrow("SELECT pg_sleep(30)", timeout=5))
    await asyncio.sleep(0.2)
    [wait] = database._pools[asyncio.get_running_loop()].patience._calls
    wait.expired = True
    call.cancel()
    call.cancel()

    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_call_that_was_answered_leaves_nothing_behind(kit: Kit) -> None:
    database = database_of(kit)
    for _ in range(10):
        await database.fetchrow("SELECT 1 AS one")
    patience = database._pools[asyncio.get_running_loop()].patience

    assert not patience._calls


async def test_an_answer_that_came_in_time_is_not_lost_while_its_connection_is_given_back(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = database_of(kit)
    await database.fetchrow("SELECT 1 AS one")
    pool = database._pools[asyncio.get_running_loop()]
    give_back = pool.give_back

    async def slowly(connection: Any) -> None:
        await asyncio.sleep(2.5)
        await give_back(connection)

    monkeypatch.setattr(pool, "keep", lambda connection: False)
    monkeypatch.setattr(pool, "give_back", slowly)

    assert await database.fetchrow("SELECT 1 AS one", timeout=2.0) is not None


async def test_no_timer_is_set_while_nothing_waits() -> None:
    patience = DeadlineTimer(asyncio.get_running_loop())
    patience.end(patience.begin(0.05))
    await asyncio.sleep(0.1)

    assert patience._timer is None


async def test_a_function_that_a_migration_has_changed_is_prepared_anew(kit: Kit, other: Any) -> None:
    database = database_of(kit)
    await other.execute("CREATE FUNCTION public.answer(OUT one integer) LANGUAGE sql AS 'SELECT 1'")
    assert dict((await database.fetchrow("SELECT * FROM public.answer()")) or {}) == {"one": 1}
    await other.execute(
        "DROP FUNCTION public.answer(); "
        "CREATE FUNCTION public.answer(OUT one integer, OUT two text) LANGUAGE sql AS $$ SELECT 1, 'two' $$"
    )

    assert dict((await database.fetchrow("SELECT * FROM public.answer()")) or {}) == {"one": 1, "two": "two"}
