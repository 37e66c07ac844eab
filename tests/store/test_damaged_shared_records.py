"""Records that many jobs share (settings of a queue, sessions, bindings): one that cannot be read affects no others."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fairlane.doctor import diagnose
from fairlane.model.job import Held, JobState
from fairlane.model.reading import Filter
from fairlane.model.settings import LaneRule, QueueOverride, QueueSettings, SettingsChange
from fairlane.runtime.connection import Connection
from fairlane.store import open_store
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store
from tests.conformance.kit import Kit, Worker
from tests.servers.stores import empty_stores

from .damage import SHARED, damage_shared

pytestmark = pytest.mark.anyio
DECLARED = QueueSettings(limit=5, lanes=(LaneRule(pattern="one", limit=1),))


def _ways(*begin: str) -> pytest.MarkDecorator:
    chosen = [way for way in SHARED if way[1].startswith(begin)]
    return pytest.mark.parametrize(("kind", "what"), chosen, ids=[f"{k}-{w.replace(' ', '-')}" for k, w in chosen])


@pytest.fixture
def url(kind: str, tmp_path: Path) -> Iterator[str]:
    with empty_stores(kind, tmp_path) as given:
        yield given.next()


@pytest.fixture(autouse=True)
def _nothing_logged_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlane.store.shared.stored_settings._logged", set())


@asynccontextmanager
async def _kit_at(url: str, clock: ManualClock) -> AsyncIterator[Kit]:
    store = await open_store(url, clock=clock)
    try:
        yield Kit(store, clock)
    finally:
        await store.close()


async def _everything_is_read(store: Store, ids: list[str]) -> None:
    """Every verb that reads answers, and shows the jobs."""
    assert all(job is not None for job in await store.get(ids))
    assert {job.id for job in (await store.find(Filter())).jobs} >= set(ids)
    await store.find(Filter(state=JobState.RUNNING))
    assert [queue.name for queue in await store.queues()] == ["default"]
    await store.lanes("default")
    await store.positions(ids)
    await store.sessions()
    await store.bindings()
    await store.bindings("default", "a")
    await store.declined()
    await store.leader()


async def _passes_go_on(store: Store) -> None:
    await store.admit()
    await store.promote()
    await store.rescue()
    await store.recount()


@_ways("declared", "override", "rules", "settings", "queue", "no queue")
async def test_a_queue_whose_settings_cannot_be_read_goes_on_by_the_usual_ones(
    url: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    async with _kit_at(url, clock) as kit:
        await kit.store.configure([SettingsChange(queue="default", declared=DECLARED, version=3)])
        if what == "override":
            await kit.store.configure([SettingsChange(queue="default", override=QueueOverride(limit=4))])
        worker = await kit.worker()
        ids = [await kit.enqueue(lane=lane) for lane in ("one", "one", "two", None)]
        assert len(await worker.claim(1)) == 1
    await damage_shared(url, what)
    async with _kit_at(url, clock) as kit:
        store = kit.store
        ids.append(await kit.enqueue(lane="one"))
        await _everything_is_read(store, ids)
        [queue] = await store.queues()
        assert queue.problem
        if what in ("rules", "queue", "no queue"):
            assert queue.settings == QueueSettings()
        errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert [error for error in errors if "'default'" in error], errors
        again = await kit.worker()
        claimed = await again.claim(5)
        assert claimed
        await again.complete(*claimed)
        await _passes_go_on(store)
        async with _doctor(url) as findings:
            assert any("cannot be read" in finding and "default" in finding for finding in findings), findings
        await store.configure([SettingsChange(queue="default", declared=DECLARED, version=3, override=None)])
        [queue] = await store.queues()
        assert (queue.settings, queue.problem) == (DECLARED, None)
        while claimed := await again.claim(5):
            await again.complete(*claimed)
        assert (await store.recount()).differences == ()


@asynccontextmanager
async def _doctor(url: str) -> AsyncIterator[list[str]]:
    async def open_it() -> Store:
        return await open_store(url)

    connection = Connection(open_it)
    try:
        yield [f"{finding.topic}: {finding.what}" for finding in await diagnose(connection)]
    finally:
        await connection.close()


@_ways("session", "task set")
async def test_a_session_that_cannot_be_read_stops_no_other(url: str, what: str) -> None:
    clock = ManualClock()
    async with _kit_at(url, clock) as kit:
        store = kit.store
        broken = await kit.worker(index=0, tasks=("task",), slots=1)
        held = await kit.enqueue()
        assert await broken.claim_ids(1) == [held]
        sticky = await kit.enqueue(sticky="b")
        await damage_shared(url, what)
        other = await kit.worker(index=1)
        ids = [held, sticky, *[await kit.enqueue() for _ in range(3)]]
        await _everything_is_read(store, ids)
        assert other.id in [session.id for session in await store.sessions()]
        assert len(await other.claim(2)) == 2
        await _passes_go_on(store)
        clock.advance(10)
        await other.renew(*await _held_by(store, other))
        clock.advance(10)
        await other.renew(*await _held_by(store, other))
        await _passes_go_on(store)
        clock.advance(3)
        await _passes_go_on(store)
        while claimed := await other.claim(4):
            await other.complete(*claimed)
        left = [job.id for job in (await store.find(Filter())).jobs if not job.state.final]
        assert [id for id in left if id in (held, sticky)] == [], "what it held or was bound to it goes to another"


async def _held_by(store: Store, worker: Worker) -> list[Held]:
    jobs = (await store.find(Filter(state=JobState.RUNNING))).jobs
    return [Held(job.id, job.fence) for job in jobs if job.session == worker.id]


@_ways("binding", "no binding")
async def test_a_binding_that_cannot_be_read_stops_no_other(url: str, what: str) -> None:
    clock = ManualClock()
    async with _kit_at(url, clock) as kit:
        store = kit.store
        _, second = await kit.worker(index=0), await kit.worker(index=1)
        ids = [await kit.enqueue(sticky=key) for key in ("a", "b")]
        await damage_shared(url, what)
        await _everything_is_read(store, ids)
        assert [binding.key for binding in await store.bindings() if binding.key == "b"] == ["b"]
        await _passes_go_on(store)
        ids.append(await kit.enqueue(sticky="a"))
        ids.append(await kit.enqueue(sticky="c"))
        await _everything_is_read(store, ids)
        clock.advance(10)
        await second.renew()
        clock.advance(10)
        await _passes_go_on(store)
        await second.renew()
        await _passes_go_on(store)
        assert sorted(await second.claim_ids(10)) == sorted(ids), "its worker is gone: another has the key now"
        for _ in range(2):
            clock.advance(86_500)
            await _passes_go_on(store)
