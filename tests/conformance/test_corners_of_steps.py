"""What one step does to several jobs, lanes or settings at once, and what a later pass must not undo."""

from __future__ import annotations

import pytest

from fairlane.model.job import JobKind, JobState, Priority, Reason
from fairlane.model.maintenance import Retention
from fairlane.model.reading import Filter
from fairlane.model.settings import LaneRule, QueueOverride, QueueSettings, SettingsChange
from fairlane.model.states import complete, retry
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store

from .kit import Kit


def lanes(limit: int, *, ordered: bool = False) -> QueueSettings:
    return QueueSettings(lanes=(LaneRule(pattern="L", limit=limit, ordered=ordered),))


async def test_a_unique_value_that_was_taken_again_outlives_the_pruning_of_the_one_before(
    kit: Kit, store: Store, clock: ManualClock
) -> None:
    worker = await kit.worker()
    await kit.enqueue(id="first", unique="value", unique_for=10.0)
    await worker.complete(*await worker.claim())
    clock.advance(11.0)
    await kit.enqueue(id="second", unique="value")
    clock.advance(1.0)
    await store.prune(Retention())
    [answer] = await store.enqueue([kit.new(id="third", unique="value")])
    assert (answer.id, answer.created) == ("second", False)


async def test_an_id_that_was_taken_again_outlives_the_pruning_of_the_one_before(
    kit: Kit, store: Store, clock: ManualClock
) -> None:
    keep = Retention(completed_seconds=0.0, id_seconds=10.0)
    worker = await kit.worker()
    await kit.enqueue(id="same")
    await worker.complete(*await worker.claim())
    clock.advance(1.0)
    assert (await store.prune(keep)).jobs == 1
    clock.advance(11.0)
    await kit.enqueue(id="same")
    await store.prune(keep)
    assert await kit.state("same") is JobState.PENDING
    [again] = await store.enqueue([kit.new(id="same")])
    assert not again.created


async def test_a_task_of_which_every_job_was_forgotten_is_found_again(
    kit: Kit, store: Store, clock: ManualClock
) -> None:
    worker = await kit.worker()
    for id in ("first", "second"):
        await kit.enqueue(id=id, task="rare")
        assert [job.id for job in (await store.find(Filter(task="rare"))).jobs] == [id]
        await worker.complete(*await worker.claim())
        clock.advance(1.0)
        await store.prune(Retention(completed_seconds=0.0))


@pytest.mark.parametrize("limit", [1, 2])
async def test_a_job_that_gets_its_place_and_starts_in_one_step_runs(kit: Kit, store: Store, limit: int) -> None:
    await kit.settings("default", LaneRule(pattern="L", limit=limit))
    worker = await kit.worker()
    for id in ("other", "first", "second", "third")[2 - limit :]:
        await kit.enqueue(id=id, lane="L")
    *_, running = await worker.claim(5)
    for id in ("second", "third"):
        finished = await store.finish(worker.id, [complete(running.held, b"1")], claim=worker.everything(5))
        [running] = finished.claimed
        assert running.id == id
        assert await kit.state(id) is JobState.RUNNING
        assert (await store.recount()).differences == ()
    await worker.complete(running)
    assert await kit.state("third") is JobState.COMPLETED


async def test_a_place_that_is_lost_and_won_again_in_one_step_is_held(kit: Kit, store: Store) -> None:
    await kit.settings("default", LaneRule(pattern="L", limit=2, ordered=False))
    worker = await kit.worker(slots=10)
    for id in ("A", "B"):
        await kit.enqueue(id=id, lane="L")
    first, second = await worker.claim(2)
    await kit.enqueue(id="X", lane="L", priority=Priority.LOW)
    await worker.finish(retry(first.held, 0.0, Reason.ERROR, "boom"), complete(second.held, b"1"))
    assert (await store.recount()).differences == ()
    await kit.enqueue(id="H", lane="L", priority=Priority.HIGH)
    assert await worker.claim_ids(5) == ["H", "A"]


async def test_lowering_and_raising_a_limit_in_one_call_keeps_every_job_in_line(kit: Kit, store: Store) -> None:
    worker = await kit.worker(slots=10)
    await store.configure([SettingsChange(queue="default", version=1, declared=lanes(3))])
    ids = [await kit.enqueue(lane="L") for _ in range(3)]
    changes = [SettingsChange(queue="default", version=n, declared=lanes(limit)) for n, limit in ((2, 1), (3, 4))]
    await store.configure(changes)
    assert sorted(await worker.claim_ids(10)) == ids
    assert (await store.recount()).differences == ()


async def test_changes_of_one_queue_in_one_call_build_on_each_other(kit: Kit, store: Store) -> None:
    await store.configure(
        [
            SettingsChange(queue="default", version=1, declared=QueueSettings(limit=2)),
            SettingsChange(queue="default", override=QueueOverride(paused=True)),
        ]
    )
    [reading] = await store.queues()
    assert (reading.settings.limit, reading.settings.paused) == (2, True)


async def test_a_retrying_job_holds_no_place_once_its_lane_is_unordered(kit: Kit, store: Store) -> None:
    worker = await kit.worker(slots=10)
    await store.configure([SettingsChange(queue="default", version=1, declared=lanes(2, ordered=True))])
    for id in ("J1", "J2", "J3"):
        await kit.enqueue(id=id, lane="L")
    first, _ = await worker.claim(2)
    await worker.retry(first, delay=100.0)
    await store.configure([SettingsChange(queue="default", version=2, declared=lanes(1, ordered=True))])
    await store.configure([SettingsChange(queue="default", version=3, declared=lanes(2))])
    assert await worker.claim_ids(5) == ["J3"]


async def test_a_turn_of_a_session_that_has_not_renewed_is_found_among_what_runs(
    kit: Kit, store: Store, clock: ManualClock
) -> None:
    await kit.settings("default", LaneRule(pattern="L", limit=1))
    waiter = await kit.waiter(lease=5.0)
    await kit.enqueue(id="turn", lane="L", kind=JobKind.TURN, waiter=waiter.id)
    clock.advance(6.0)
    page = await store.find(Filter(state=JobState.RUNNING))
    assert [job.id for job in page.jobs] == ["turn"]


HOSTILE = ("x|1", "1.1.|a", "|", "1|strict:a", "{tag}", "a:b", "*", "%d", "ä|ö", "' OR 1=1", "0000000000000001a", " ")


async def test_lanes_that_are_called_like_keys_of_a_store_are_lanes_like_any_other(
    kit: Kit, store: Store, clock: ManualClock
) -> None:
    await kit.settings("default", LaneRule(pattern="strict:*", limit=1))
    worker = await kit.worker(slots=50)
    names = [name for lane in HOSTILE for name in (lane, f"strict:{lane}")]
    ids = {name: [await kit.enqueue(lane=name, unique=f"{name} {n}") for n in range(2)] for name in names}
    started: list[str] = []
    while claimed := await worker.claim(50):
        started += [job.id for job in claimed]
        await worker.complete(*claimed)
    assert sorted(started) == sorted(id for pair in ids.values() for id in pair)
    for name, pair in ids.items():
        assert [id for id in started if id in pair] == pair, name
        page = await store.find(Filter(queue="default", lane=name))
        assert {job.id for job in page.jobs} == set(pair), name
    clock.advance(100 * 86_400.0)
    await worker.renew()
    for _ in range(2):
        await store.prune(Retention())
    assert (await store.recount()).differences == ()
    assert await store.lanes("default") == []
