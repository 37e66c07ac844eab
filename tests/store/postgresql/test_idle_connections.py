"""How many connections a process holds while it has nothing to do, and what is said when the server has too few."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from fairlane import Fairlane, Intervals, Settings, event_loops
from fairlane.store.diagnosis import Level
from fairlane.store.postgresql import database
from fairlane.store.postgresql.health import IDLE_CONNECTIONS
from fairlane.store.postgresql.store import PostgresqlStore
from tests.servers.postgresql import server


@pytest.fixture
def url() -> Iterator[str]:
    made = server().fresh_database()
    yield made
    server().done(made)


def held(url: str) -> Counter[str]:
    """The connections to a database, by the name of the application."""
    with psycopg.connect(server().url, autocommit=True) as connection:
        rows = connection.execute(
            "SELECT application_name FROM pg_stat_activity WHERE datname = %s", [urlsplit(url).path.strip("/")]
        ).fetchall()
    return Counter(name for (name,) in rows)


def application(url: str) -> tuple[Fairlane, Any]:
    app = Fairlane(settings=Settings(url=url, intervals=Intervals().scaled(0.2)))

    @app.task(name="double")
    async def double(number: int) -> int:
        return 2 * number

    return app, double


async def test_an_idle_worker_with_its_manager_holds_three_connections(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "IDLE_SECONDS", 0.5)
    app, double = application(url)
    worker = app.worker(slots=4)
    running = asyncio.create_task(worker.run())
    handles = await app.enqueue_many([double.call(number) for number in range(20)])
    async with asyncio.timeout(20):
        assert [await handle.result() for handle in handles] == [2 * number for number in range(20)]
    looks: list[Counter[str]] = []
    async with asyncio.timeout(20):
        # Connections opened for the work are closed when they were unused for a while; then no more are opened.
        while len(looks) < 10:
            await asyncio.sleep(0.2)
            seen = await asyncio.to_thread(held, url)
            looks = [*looks, seen] if seen.total() <= IDLE_CONNECTIONS else []
    assert looks[-1] == {"fairlane": 2, "fairlane wake-ups": 1}
    assert (await app.client.leader()) is not None
    worker.stop()
    await running
    await app.close()


async def test_the_lease_keepers_store_listens_through_the_connection_of_the_process(url: str) -> None:
    store = await PostgresqlStore.open(url)
    received: list[str] = []
    ready, published = threading.Event(), threading.Event()

    async def beside() -> None:
        own = await PostgresqlStore.open(url)
        subscription = own.wakeups.subscribe(["session:a"])
        ready.set()
        received.extend(await subscription.wait(5))
        await asyncio.to_thread(published.wait, 5)
        # The store whose connection it borrowed is closed: it opens its own.
        later = own.wakeups.subscribe(["session:b"])
        own.wakeups.publish(["session:b"])
        received.extend(await later.wait(5))
        await own.close()

    thread = threading.Thread(target=lambda: event_loops.run_beside(beside()))
    thread.start()
    await asyncio.to_thread(ready.wait, 5)
    assert held(url)["fairlane wake-ups"] == 1
    store.wakeups.publish(["session:a"])
    await store.close()
    published.set()
    await asyncio.to_thread(thread.join, 10)
    assert received == ["session:a", "session:b"]


async def test_beside_the_programs_work_a_call_waits_for_another_only_for_a_moment(url: str) -> None:
    def beside() -> tuple[float, int]:
        async def calls() -> tuple[float, int]:
            store = await PostgresqlStore.open(url)
            await asyncio.gather(*(store.leader() for _ in range(20)))
            quick = held(url).total()
            slow = asyncio.create_task(store._database.fetchrow("SELECT pg_sleep(30)"))
            await asyncio.sleep(0.1)
            began = asyncio.get_running_loop().time()
            await store.leader()
            took = asyncio.get_running_loop().time() - began
            slow.cancel()
            await asyncio.gather(slow, return_exceptions=True)
            await store.close()
            return took, quick

        return event_loops.run_beside(calls())

    took, quick = await asyncio.to_thread(beside)
    assert quick == 1
    assert took < 15, "a renewal must not wait for a pass that hangs"


async def test_a_worker_says_at_its_start_when_the_server_cannot_carry_the_fleet(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = urlsplit(url).path.strip("/")
    app, _ = application(url)
    with psycopg.connect(server().url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} CONNECTION LIMIT 2".encode())
        try:
            store = await PostgresqlStore.open(url)
            with caplog.at_level(logging.WARNING, "fairlane.postgresql"):
                worker = app.worker(slots=1)
                running = asyncio.create_task(worker.run())
                async with asyncio.timeout(10):
                    await worker.ready.wait()
            [record] = [each for each in caplog.records if each.name == "fairlane.postgresql"]
            assert f"database {name} allows 2 connections" in record.getMessage()
            assert "at most 0 worker processes" in record.getMessage()
            [finding] = [each for each in await store.findings() if each.topic == "connections"]
            assert finding.level is Level.WARN
            connection.execute(f"ALTER DATABASE {name} CONNECTION LIMIT 100".encode())
            [finding] = [each for each in await store.findings() if each.topic == "connections"]
            assert finding.level is Level.OK
            worker.stop()
            await running
            await store.close()
            await app.close()
        finally:
            connection.execute(f"ALTER DATABASE {name} CONNECTION LIMIT -1".encode())
