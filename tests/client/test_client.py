"""The use cases of a client, on a real store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fairlane import (
    BroadcastHandle,
    Cancellation,
    Conflict,
    Fairlane,
    InvalidInput,
    JobState,
    ManualClock,
    NotFound,
    QueueFull,
    Release,
    Settings,
    StoreUnavailable,
)
from fairlane.model.job import Claimed, JobKind
from fairlane.model.lanes import LaneTerms, terms
from fairlane.model.reading import QueueReading
from fairlane.model.states import Transition
from fairlane.task import Task

from .conftest import QUICK, kit_of


def _task(app: Fairlane, **settings: Any) -> Task[[int], int]:
    @app.task(name="double", **settings)
    async def double(number: int) -> int:
        return 2 * number

    return double


async def _queue(app: Fairlane, name: str = "default") -> QueueReading:
    [reading] = [queue for queue in await app.client.queues() if queue.name == name]
    return reading


async def _terms(app: Fairlane, lane: str) -> LaneTerms:
    return terms((await _queue(app)).settings, lane)


async def test_sending_a_call_twice_makes_one_job(app: Fairlane) -> None:
    call = _task(app).call(1)
    first, second = await app.enqueue(call), await app.enqueue(call)
    assert (first.created, second.created) == (True, False)
    assert first.id == second.id == call.job.id
    assert len((await app.client.find()).jobs) == 1


async def test_a_known_id_with_other_content_is_a_conflict(app: Fairlane) -> None:
    task = _task(app).options(id="order-7")
    await task.enqueue(1)
    assert (await task.enqueue(1)).created is False
    with pytest.raises(Conflict, match="order-7"):
        await task.enqueue(2)


async def test_a_duplicate_of_a_unique_value_gives_the_handle_of_the_job_there_is(app: Fairlane) -> None:
    task = _task(app, unique="once:{number}")
    first, second, other = await task.enqueue(1), await task.enqueue(1), await task.enqueue(2)
    assert (second.id, second.created) == (first.id, False)
    assert (other.id != first.id, other.created) == (True, True)


async def test_many_jobs_are_sent_in_thousands_in_order_and_progress_is_reported(app: Fairlane) -> None:
    task = _task(app)
    told: list[tuple[int, int]] = []
    calls = [task.call(n) for n in range(2_500)]
    handles = await app.enqueue_many(calls, progress=lambda done, of: told.append((done, of)))
    assert told == [(1_000, 2_500), (2_000, 2_500), (2_500, 2_500)]
    assert [handle.id for handle in handles] == [call.job.id for call in calls]
    assert (await _queue(app)).counts.pending == 2_500
    assert await app.enqueue_many([]) == []


async def test_sending_many_again_after_an_outage_stores_only_what_is_missing(
    app: Fairlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = _task(app)
    calls = [task.call(n) for n in range(1_500)]
    store: Any = await app.connection.store()
    enqueue, answered = store.inner.enqueue, 0

    async def lossy(jobs: Any) -> Any:
        nonlocal answered
        answer = await enqueue(jobs)
        answered += 1
        if answered == 2:
            raise StoreUnavailable("the reply was lost")
        return answer

    monkeypatch.setattr(store.inner, "enqueue", lossy)
    with pytest.raises(StoreUnavailable):
        await app.enqueue_many(calls)
    handles = await app.enqueue_many(calls)
    assert not any(handle.created for handle in handles)
    assert (await _queue(app)).counts.pending == 1_500


async def test_one_bad_job_of_a_thousand_refuses_the_thousand(app: Fairlane) -> None:
    app.queue("default", max_pending=5)
    task = _task(app)
    with pytest.raises(QueueFull):
        await app.enqueue_many([task.call(n) for n in range(6)])
    assert (await app.client.find()).jobs == ()


async def test_a_broadcast_gives_each_worker_a_copy_and_reports_which_workers_ran_it(app: Fairlane) -> None:
    kit = await kit_of(app)
    workers = [await kit.worker() for _ in range(2)]
    broadcast = await app.broadcast(_task(app).call(4))
    copies = await broadcast.children()
    assert sorted(copies) == ["default/0", "default/1"]
    assert [copy.parent for copy in await app.client.children(broadcast.id)] == [broadcast.id] * 2
    for number, worker in enumerate(workers):
        await worker.complete(*await worker.claim(), result=b"%d" % number)
    assert await broadcast.result(timeout=30) == dict.fromkeys(("default/0", "default/1"), JobState.COMPLETED)
    assert [await copies[name].result() for name in sorted(copies)] == [0, 1]
    assert sorted(await broadcast.children()) == ["default/0", "default/1"]
    again = await broadcast.retry()
    assert isinstance(again, BroadcastHandle)
    assert len(await again.children()) == 2
    assert await app.client.children(copies["default/0"].id) == []


async def test_a_release_runs_the_clean_up_of_the_key_on_its_worker(app: Fairlane) -> None:
    task = _task(app)
    worker = await (await kit_of(app)).worker()
    assert await app.release("plan-7") is Release.NOTHING
    await task.options(sticky="plan-7").enqueue(1)
    await worker.complete(*await worker.claim())
    assert await app.release("plan-7", cleanup=task.call(0)) is Release.DRAINING
    [cleanup] = await worker.claim()
    assert cleanup.kind is JobKind.CLEANUP
    await worker.complete(cleanup)
    [binding] = await app.client.bindings("default", "plan-7")
    assert binding.state.value == "released"


async def test_jobs_are_found_page_by_page_newest_first(app: Fairlane) -> None:
    task = _task(app)
    handles = [await task.options(lane="user:ann").enqueue(n) for n in range(3)]
    await task.enqueue(9)
    page = await app.client.find(queue="default", lane="user:ann", limit=2)
    assert [job.id for job in page.jobs] == [handles[2].id, handles[1].id]
    rest = await app.client.find(queue="default", lane="user:ann", limit=2, cursor=page.cursor)
    assert [job.id for job in rest.jobs] == [handles[0].id]
    assert (await app.client.find(state=JobState.FAILED)).jobs == ()
    with pytest.raises(InvalidInput, match="queue"):
        await app.client.find(lane="user:ann")


async def test_several_jobs_are_cancelled_together_or_not_at_all(app: Fairlane) -> None:
    task = _task(app)
    handles = [await task.enqueue(n) for n in range(2)]
    with pytest.raises(NotFound):
        await app.client.cancel([handles[0].id, "nobody"])
    assert await handles[0].state() is JobState.PENDING
    assert await app.client.cancel([h.id for h in handles]) == [Cancellation.CANCELLED] * 2


async def test_a_handle_made_from_an_id_reads_results_with_or_without_the_task(app: Fairlane) -> None:
    @app.task
    async def colours() -> set[str]:
        return {"red"}

    sent = await colours.enqueue()
    worker = await (await kit_of(app)).worker()
    await worker.complete(*await worker.claim(), result=b'["red"]')
    assert await app.handle(sent.id).result() == ["red"]
    assert await app.handle(sent.id, colours).result() == {"red"}
    assert (await app.client.job(sent.id)).state is JobState.COMPLETED
    again = await app.client.retry(sent.id)
    assert (await again.job()).retry_of == sent.id


async def test_a_paused_queue_starts_nothing_and_a_resumed_one_does(app: Fairlane) -> None:
    handle = await _task(app).enqueue(1)
    worker = await (await kit_of(app)).worker()
    await app.client.set_limit("default", 3)
    await app.client.pause("default")
    assert await worker.claim() == []
    assert await handle.why() == "queue default is paused"
    await app.client.resume("default")
    assert len(await worker.claim()) == 1
    assert (await _queue(app)).settings.limit == 3, "the other override stays"


async def test_pausing_a_lane_keeps_its_other_terms_and_touches_no_other_lane(app: Fairlane) -> None:
    app.queue("default").lane("user:*", limit=3, weight=2.0, ordered=True)
    await _task(app).options(lane="user:ann").enqueue(1)
    before = await _terms(app, "user:ann")
    await app.client.pause("default", "user:ann")
    assert (await _terms(app, "user:ann")).paused
    assert await _terms(app, "user:bob") == before
    worker = await (await kit_of(app)).worker()
    assert await worker.claim() == []
    await app.client.resume("default", "user:ann")
    assert await _terms(app, "user:ann") == before
    assert (await _queue(app)).override is None, "nothing is left that would hide a later declaration"
    assert len(await worker.claim()) == 1


async def test_resuming_a_lane_keeps_the_limit_that_was_set_for_it(app: Fairlane) -> None:
    app.queue("default").lane("*", limit=3)
    await _task(app).enqueue(1)
    await app.client.set_limit("default", 5, lane="big")
    await app.client.pause("default", "big")
    assert (await _terms(app, "big")).paused
    await app.client.resume("default", "big")
    assert (await _terms(app, "big")).limit == 5
    assert (await _terms(app, "small")).limit == 3
    await app.client.clear_override("default")
    assert (await _terms(app, "big")).limit == 3


async def test_a_declared_lane_rule_survives_a_pause_of_that_lane(app: Fairlane) -> None:
    app.queue("default").lane("flux", limit=1)
    await _task(app).enqueue(1)
    before = await _terms(app, "flux")
    assert before == LaneTerms(limit=1, ordered=True, own_limit=1)
    await app.client.pause("default", "flux")
    await app.client.resume("default", "flux")
    assert await _terms(app, "flux") == before


async def test_a_limit_of_an_ordered_lane_can_be_taken_away(app: Fairlane) -> None:
    app.queue("default").lane("flux", limit=2, ordered=True)
    await _task(app).enqueue(1)
    await app.client.set_limit("default", None, lane="flux")
    assert await _terms(app, "flux") == LaneTerms()


async def test_settings_of_an_unknown_queue_are_not_found(app: Fairlane) -> None:
    client = app.client
    for verb in (client.pause, client.resume, client.clear_override, client.lanes):
        with pytest.raises(NotFound, match="imgaes"):
            await verb("imgaes")


@pytest.mark.parametrize("limit", [0, -1, True])
async def test_a_limit_that_would_run_nothing_is_refused(app: Fairlane, limit: int) -> None:
    await _task(app).enqueue(1)
    with pytest.raises(InvalidInput, match="limit"):
        await app.client.set_limit("default", limit)
    with pytest.raises(InvalidInput, match="limit"):
        await app.client.set_limit("default", limit, lane="flux")


async def test_the_client_lists_sessions_and_waiting_jobs(app: Fairlane) -> None:
    await _task(app).options(lane="user:ann").enqueue(1)
    await (await kit_of(app)).worker()
    [session] = await app.client.sessions()
    assert session.worker == "default/0"
    assert [lane.lane for lane in await app.client.lanes("default")] == ["user:ann"]
    assert await app.client.leader() is None
    assert (await app.client.recount()).differences == ()
    assert await app.client.migrate() >= 1


class Spans:
    """A tracer that records its calls."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.made: list[tuple[str, str]] = []

    @contextmanager
    def headers(self, task: str, queue: str) -> Iterator[dict[str, str] | None]:
        self.open.append(task)
        self.made.append((task, queue))
        try:
            yield {"traceparent": f"span-{len(self.made)}"}
        finally:
            self.open.remove(task)

    @contextmanager
    def run(self, claimed: Claimed) -> Iterator[Callable[[Transition], None]]:
        yield lambda transition: None


async def test_a_tracer_stands_around_each_sending_and_its_headers_travel_in_the_jobs(url: str) -> None:
    spans = Spans()
    async with Fairlane(settings=Settings(url=url, intervals=QUICK), tracer=spans) as app:
        task = _task(app, queue="numbers")
        one = await task.enqueue(1)
        many = await app.enqueue_many([task.call(n) for n in range(3)])
        assert spans.made == [("double", "numbers")] * 2
        assert spans.open == []
        assert (await one.job()).headers == b'{"traceparent":"span-1"}'
        assert {(await handle.job()).headers for handle in many} == {b'{"traceparent":"span-2"}'}


async def test_an_expired_job_is_cancelled_as_expired(still_app: Fairlane, clock: ManualClock) -> None:
    handle = await _task(still_app, expires=10).enqueue(1)
    clock.advance(11)
    await (await still_app.connection.store()).promote()
    assert await handle.why() == "cancelled (expired)"


async def test_clearing_a_limit_lets_the_declared_one_count_and_leaves_pauses(app: Fairlane) -> None:
    app.queue("default", limit=8).lane("user:*", limit=2)
    await app.client.set_limit("default", 3)
    await app.client.set_limit("default", 1, lane="user:*")
    await app.client.set_limit("default", 5, lane="user:ann")
    await app.client.pause("default", "user:ann")
    assert ((await _queue(app)).settings.limit, (await _terms(app, "user:bob")).limit) == (3, 1)
    await app.client.clear_limit("default")
    assert ((await _queue(app)).settings.limit, (await _terms(app, "user:bob")).limit) == (8, 1)
    await app.client.clear_limit("default", lane="user:*")
    assert (await _terms(app, "user:bob")).limit == 2
    await app.client.clear_limit("default", lane="user:ann")
    assert (await _terms(app, "user:ann")).paused
    await app.client.resume("default", "user:ann")
    assert (await _terms(app, "user:ann")).limit == 2
    await app.client.clear_limit("default", lane="nobody")
    assert (await _queue(app)).override is None


async def test_a_limit_of_a_queue_that_does_not_exist_is_not_cleared(app: Fairlane) -> None:
    with pytest.raises(NotFound):
        await app.client.clear_limit("nobody")
