"""A store that has lost its data: what the application declared is there again before anything is claimed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import redis

from fairlane import Fairlane, Settings
from fairlane.model.session import SessionKind
from fairlane.store.port import Store
from fairlane.worker.worker import Worker
from tests.servers.stores import empty_stores

from .yard import QUICK, Yard

PATIENCE = 45.0


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    with empty_stores("redis", tmp_path) as stores:
        yield stores.next()


def flush(url: str) -> None:
    """Remove everything of a namespace in one step, as FLUSHALL would."""
    [namespace] = parse_qs(urlsplit(url).query)["namespace"]
    with redis.Redis.from_url(url.partition("?")[0]) as client:
        remove = "return redis.call('DEL', unpack(redis.call('KEYS', ARGV[1])))"
        assert client.eval(remove, 0, f"*{namespace}*")


async def test_a_worker_declares_before_it_registers_anew(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    register = type(yard.store).register

    async def registered(store: Store, *args: object) -> object:
        steps.append("register")
        return await register(store, *args)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(type(yard.store), "register", registered)

    async def declare(store: Store) -> None:
        steps.append("declare")

    made = yard.make(manager=False)
    worker = Worker(made._get_store, made._open_store, yard.registry, made._settings, declare=declare)
    serving = asyncio.ensure_future(worker.run())
    try:
        await asyncio.wait_for(worker.ready.wait(), PATIENCE)
        first = worker.session.id
        await yard.store.leave(first)
        async with asyncio.timeout(PATIENCE):
            while worker.session.id == first:
                await asyncio.sleep(0.01)
        assert steps == ["declare", "register", "declare", "register"]
    finally:
        worker.stop(now=True)
        await asyncio.wait_for(serving, PATIENCE)


async def test_limits_and_schedules_hold_after_redis_was_emptied(redis_url: str) -> None:
    app = Fairlane(settings=Settings(url=redis_url, intervals=QUICK))
    app.queue("models", limit=3).lane("*", limit=1)
    now = most = ticks = 0

    @app.task(queue="models", lane="m:{name}")
    async def use(name: str) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.05)
        now -= 1

    @app.task(every=1)
    async def tick() -> None:
        nonlocal ticks
        ticks += 1

    worker = app.worker(slots=8, grace=1)
    serving = asyncio.ensure_future(worker.run())
    try:
        await asyncio.wait_for(worker.ready.wait(), PATIENCE)
        await (await use.enqueue("flux")).result(PATIENCE)
        ticks = 0
        flush(redis_url)
        # At once, while the worker does not know it yet.
        handles = [await use.enqueue("flux") for _ in range(6)]
        for handle in handles:
            await handle.result(PATIENCE)
        assert most == 1
        [models] = [queue for queue in await app.client.queues() if queue.name == "models"]
        assert models.settings.limit == 3
        assert [(rule.pattern, rule.limit) for rule in models.settings.lanes] == [("*", 1)]
        async with asyncio.timeout(PATIENCE):
            while not ticks:
                await asyncio.sleep(0.05)
    finally:
        worker.stop(now=True)
        await asyncio.wait_for(serving, PATIENCE)
        await app.close()


async def test_a_process_without_a_worker_declares_its_queues_again(redis_url: str) -> None:
    app = Fairlane(settings=Settings(url=redis_url, intervals=QUICK))
    app.queue("models").lane("*", limit=1)

    @app.task(queue="models", lane="m:{name}")
    async def use(name: str) -> None: ...

    try:
        await use.enqueue("flux")
        flush(redis_url)
        await use.enqueue("flux")
        [models] = await app.client.queues()
        assert [(rule.pattern, rule.limit) for rule in models.settings.lanes] == [("*", 1)]
        assert not [session for session in await app.client.sessions() if session.kind is SessionKind.WORKER]
        flush(redis_url)
        # A turn needs a lane that has a limit.
        await use.enqueue("flux")
        async with app.turn("m:other", queue="models", timeout=PATIENCE):
            pass
    finally:
        await app.close()
