"""What a handle returns about a job, from its start to its end."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, Unpack

import pytest

from fairlane import (
    Cancellation,
    Fairlane,
    InvalidInput,
    JobCancelled,
    JobFailed,
    JobState,
    ManualClock,
    NotFound,
    Position,
    Update,
    WouldDeadlock,
)
from fairlane.handle import Handle
from fairlane.runtime.running_job import HeldPlace
from fairlane.store.sqlite.store import SqliteStore
from fairlane.task import OneCall

from .conftest import kit_of, store_class


async def _sent(app: Fairlane, **options: Unpack[OneCall]) -> Handle[int]:
    @app.task(name="double")
    async def double(number: int) -> int:
        return 2 * number

    return await double.options(**options).enqueue(21)


async def test_a_result_is_given_as_the_type_the_function_is_annotated_with(app: Fairlane) -> None:
    handle = await _sent(app)
    kit = await kit_of(app)
    worker = await kit.worker()
    await worker.complete(*await worker.claim(), result=b"42")
    assert await handle.result() == 42
    assert await handle.result(timeout=0) == 42
    assert await handle.result(timeout=timedelta(seconds=5)) == 42


async def test_a_result_is_pushed_to_a_waiting_caller(app: Fairlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlane.runtime.job_watcher.POLL", 60.0)
    handle = await _sent(app)
    waiting = asyncio.create_task(handle.result(timeout=30))
    kit = await kit_of(app)
    worker = await kit.worker()
    [claimed] = await worker.claim()
    await worker.complete(claimed, result=b"42")
    assert await waiting == 42


async def test_a_result_whose_hint_was_lost_is_found_by_the_poll(
    app: Fairlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = await _sent(app)
    waiting = asyncio.create_task(handle.result(timeout=30))
    kit = await kit_of(app)
    worker = await kit.worker()
    wakeups: Any = kit.store.wakeups
    told = (wakeups, "_send_to_all") if store_class(app) is SqliteStore else (wakeups._subscriptions, "deliver")
    monkeypatch.setattr(*told, lambda *_: None)
    await worker.complete(*await worker.claim(), result=b"42")
    assert await waiting == 42


async def test_a_failed_job_raises_its_reason_and_error(app: Fairlane) -> None:
    handle = await _sent(app)
    worker = await (await kit_of(app)).worker()
    await worker.fail(
        *await worker.claim(), error='  File "a.py", line 1, in f\nValueError: no such cat\nin all the house'
    )
    with pytest.raises(JobFailed, match=r"ValueError: no such cat$") as failed:
        await handle.result()
    assert (failed.value.id, failed.value.reason) == (handle.id, "error")
    assert await handle.why() == "failed (error): ValueError: no such cat"


async def test_a_cancelled_job_raises_why(app: Fairlane) -> None:
    handle = await _sent(app)
    assert await handle.cancel() is Cancellation.CANCELLED
    with pytest.raises(JobCancelled, match="by_user"):
        await handle.result()
    assert await handle.why() == "cancelled (by_user)"


@pytest.mark.parametrize("timeout", [0, 0.05, timedelta(milliseconds=50)])
async def test_a_result_that_does_not_come_in_time_is_a_timeout_naming_the_job(
    app: Fairlane, timeout: float | timedelta
) -> None:
    handle = await _sent(app)
    with pytest.raises(TimeoutError, match=handle.id):
        await handle.result(timeout=timeout)
    assert await handle.state() is JobState.PENDING


async def test_a_timeout_that_is_no_duration_is_refused(app: Fairlane) -> None:
    handle = await _sent(app)
    with pytest.raises(InvalidInput, match="timeout"):
        await handle.result(timeout=-1)


async def test_an_unknown_id_is_not_found_by_any_verb_but_has_no_position(app: Fairlane) -> None:
    handle = app.handle("nobody")
    for verb in (handle.job, handle.state, handle.progress, handle.result, handle.why, handle.cancel, handle.retry):
        with pytest.raises(NotFound, match="nobody"):
            await verb()
    with pytest.raises(NotFound, match="nobody"):
        await anext(handle.watch())
    assert await handle.position() is None
    assert await handle.eta() is None


async def test_a_position_counts_those_ahead_in_the_lane(app: Fairlane) -> None:
    handles = [await _sent(app, lane="user:ann") for _ in range(3)]
    other = await _sent(app, lane="user:bob")
    assert [p and (p.ahead, p.place, p.of, p.exact) for p in [await h.position() for h in handles]] == [
        (0, 1, 3, True),
        (1, 2, 3, True),
        (2, 3, 3, True),
    ]
    position = await other.position()
    assert position is not None
    assert (position.ahead, position.of, position.eta) == (0, 1, None)


async def test_a_job_that_is_not_in_line_has_no_position(still_app: Fairlane, clock: ManualClock) -> None:
    later = await _sent(still_app, delay=30)
    assert await later.position() is None
    assert await later.eta() == 30
    assert await later.why() == "due in 30 s"
    kit = await kit_of(still_app, clock)
    worker = await kit.worker()
    handle = await _sent(still_app)
    [claimed] = await worker.claim()
    assert await handle.position() is None
    assert await handle.why() == "running on default/0 since 2023-11-14 22:13:20 UTC, attempt 1"
    assert await handle.cancel() is Cancellation.REQUESTED
    assert (await handle.why()).endswith("attempt 1, cancel requested")
    await worker.complete(claimed)
    assert await handle.cancel() is Cancellation.COMPLETED
    assert await handle.why() == "completed"


async def test_a_failed_job_answers_a_cancel_with_its_state(app: Fairlane) -> None:
    handle = await _sent(app)
    worker = await (await kit_of(app)).worker()
    await worker.fail(*await worker.claim())
    assert await handle.cancel() is Cancellation.FAILED


async def test_why_names_the_gate_of_a_waiting_job(app: Fairlane) -> None:
    await _sent(app, lane="user:ann")
    handle = await _sent(app, lane="user:ann")
    assert await handle.why() == "no live worker serves queue default"
    await (await kit_of(app)).worker(slots=1)
    assert await handle.why() == "1 ahead in lane user:ann"


async def test_a_watch_yields_every_change_once_and_ends_with_the_final_state(app: Fairlane) -> None:
    first, handle = await _sent(app, lane="user:ann"), await _sent(app, lane="user:ann")
    kit = await kit_of(app)
    worker = await kit.worker()
    told: list[Update] = []
    news = asyncio.Condition()

    async def watch() -> None:
        async for update in handle.watch():
            async with news:
                told.append(update)
                news.notify_all()

    async def until(count: int) -> None:
        async with asyncio.timeout(30), news:
            await news.wait_for(lambda: len(told) >= count)

    watching = asyncio.create_task(watch())
    await until(1)
    [one] = await worker.claim()
    assert one.id == first.id
    await until(2)
    [claimed] = await worker.claim()
    await until(3)
    for _ in range(2):
        await kit.store.progress(worker.id, [(claimed.held, b'{"done":7}')])
    await until(4)
    await worker.complete(claimed)
    await watching
    assert [(u.state.value, u.position and u.position.ahead, u.progress) for u in told] == [
        ("pending", 1, None),
        ("pending", 0, None),
        ("running", None, None),
        ("running", None, {"done": 7}),
        ("completed", None, {"done": 7}),
    ]
    assert await handle.progress() == {"done": 7}


async def test_an_estimate_that_only_moves_with_time_is_no_news() -> None:
    place = Position(ahead=1, place=2, of=2, exact=True, eta=3.0, queue_ahead=1)
    later = Position(ahead=1, place=2, of=2, exact=True, eta=2.0, queue_ahead=1)
    assert Update(JobState.PENDING, later, None).repeats(Update(JobState.PENDING, place, None))
    assert not Update(JobState.PENDING, None, None).repeats(Update(JobState.PENDING, place, None))
    assert not Update(JobState.PENDING, place, None).repeats(Update(JobState.PENDING, None, None))
    assert not Update(JobState.PENDING, place, 1).repeats(Update(JobState.PENDING, place, None))


async def test_a_watch_of_a_finished_job_yields_only_its_end(app: Fairlane) -> None:
    handle = await _sent(app)
    await handle.cancel()
    assert [update.state async for update in handle.watch()] == [JobState.CANCELLED]


async def test_retry_makes_a_new_job_that_names_the_old_one(app: Fairlane) -> None:
    handle = await _sent(app, lane="user:ann")
    with pytest.raises(InvalidInput, match="pending"):
        await handle.retry()
    await handle.cancel()
    again = await handle.retry()
    job = await again.job()
    assert again.id != handle.id
    assert (job.retry_of, job.lane, job.state) == (handle.id, "user:ann", JobState.PENDING)
    worker = await (await kit_of(app)).worker()
    await worker.complete(*await worker.claim(), result=b"42")
    assert await again.result() == 42
    assert await handle.state() is JobState.CANCELLED


async def test_waiting_for_a_job_behind_ones_own_lane_is_refused(app: Fairlane) -> None:
    app.queue("default").lane("flux", limit=1).lane("wide", limit=2)
    handle, wide = await _sent(app, lane="flux"), await _sent(app, lane="wide")
    with HeldPlace("default", "flux"):
        with pytest.raises(WouldDeadlock, match="flux"):
            await handle.result(timeout=30)
        with HeldPlace("default", "wide"), pytest.raises(TimeoutError):
            await wide.result(timeout=0.05)
    with HeldPlace("other", "flux"), pytest.raises(TimeoutError):
        await handle.result(timeout=0.05)


async def test_a_pause_is_no_deadlock_for_it_can_be_lifted(app: Fairlane) -> None:
    app.queue("default").lane("flux", limit=2)
    handle = await _sent(app, lane="flux")
    await app.client.pause("default", "flux")
    with HeldPlace("default", "flux"), pytest.raises(TimeoutError):
        await handle.result(timeout=0.05)
