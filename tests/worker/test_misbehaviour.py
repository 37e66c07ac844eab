"""Job functions that misbehave, stores that fail at the worst moment, and stops in the middle of everything."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fairlane.model.job import Claimed, Held, JobState, Priority, Reason
from fairlane.model.retry import Backoff
from fairlane.model.session import Claim, NewSession, SessionKind
from fairlane.model.slots import Ask, Slots
from fairlane.model.states import Transition
from fairlane.runtime import lease_keeper
from fairlane.worker import shutdown

from .faulty import Faulty, wait_for
from .yard import PATIENCE, Yard

AT_ONCE = Backoff(base=0, most=0)


# -- functions -------------------------------------------------------------------------------------------------------


async def test_exit_in_a_task_that_a_body_started_does_not_end_the_worker(yard: Yard) -> None:
    async def poison() -> None:
        async def step() -> None:
            sys.exit("bad option")

        await asyncio.gather(step(), asyncio.sleep(5))

    async def fine() -> None:
        await asyncio.sleep(0.1)

    yard.task(poison, retries=1, backoff=AT_ONCE)
    yard.task(fine)
    async with yard.worker():
        innocent = await yard.enqueue("fine")
        job = await yard.until(await yard.enqueue("poison"))
        assert (await yard.until(innocent)).attempt == 1
    assert (job.state, job.attempt) == (JobState.FAILED, 2)
    assert job.error is not None
    assert "sys.exit('bad option')" in job.error


class Unshowable(Exception):
    __cause__ = 5  # type: ignore[assignment]  # that is the point


@pytest.mark.parametrize(
    "error",
    [SyntaxError("bad", ("f.py", 1, "x", "text")), Unshowable("boom")],  # type: ignore[arg-type]  # a column that is no number
    ids=["syntax error", "odd cause"],
)
async def test_an_exception_that_cannot_be_shown_is_an_error_all_the_same(yard: Yard, error: Exception) -> None:
    async def body() -> None:
        raise error

    yard.task(body, retries=0)
    async with yard.worker():
        job = await yard.until(await yard.enqueue("body"))
    assert (job.state, job.reason) == (JobState.FAILED, Reason.ERROR)
    assert job.error is not None
    assert type(error).__name__ in job.error


@pytest.mark.parametrize("when", ["enter", "tell", "exit"])
async def test_a_tracer_that_fails_costs_no_run(yard: Yard, when: str) -> None:
    class Spoiled:
        def headers(self, task: str, queue: str) -> Any:
            raise NotImplementedError

        @contextmanager
        def run(self, claimed: Claimed) -> Iterator[Callable[[Transition], None]]:
            if when == "enter":
                raise RuntimeError("no span")
            yield self.tell
            if when == "exit":
                raise RuntimeError("no end")

        def tell(self, transition: Transition) -> None:
            if when == "tell":
                raise RuntimeError("no exporter")

    runs: list[int] = []

    async def body() -> str:
        runs.append(1)
        return "done"

    yard.task(body)
    worker = yard.make(burst=True)
    worker._tracer = Spoiled()
    id = await yard.enqueue("body")
    await asyncio.wait_for(worker.run(), PATIENCE)
    assert (await yard.job(id)).result == b'"done"'
    assert runs == [1]


async def test_a_body_that_cleans_up_is_not_interrupted_a_second_time(yard: Yard) -> None:
    begun = asyncio.Event()
    tidied = asyncio.Event()

    async def body() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.6)
            tidied.set()
            raise

    yard.task(body, timeout=0.4)
    async with yard.worker():
        id = await yard.enqueue("body")
        await begun.wait()
        await yard.store.cancel([id])
        job = await yard.until(id)
    assert tidied.is_set()
    assert job.state is JobState.CANCELLED


async def test_suspects_that_no_child_process_finds_begin_one_at_a_time(yard: Yard) -> None:
    """A suspect that waits for another has not begun: it is neither charged if that kills the process, nor timed."""

    class Notes:
        def __init__(self) -> None:
            self.now: set[int] = set()
            self.most = 0

        def session(self, id: str) -> None: ...
        def beat(self) -> None: ...
        def leave(self) -> None: ...

        def begin(self, held: Held) -> int:
            self.now.add(number := len(self.now) + 1)
            self.most = max(self.most, len(self.now))
            return number

        def end(self, slot: int) -> None:
            self.now.discard(slot)

    async def slow() -> None:
        await asyncio.sleep(0.3)

    yard.task(slow, timeout=0.9, retries=1)
    ids = [await yard.enqueue("slow") for _ in range(5)]
    former = NewSession(id="former", kind=SessionKind.WORKER, slots=Slots(total=5), queues=("default",))
    await yard.store.register(former)
    asks = (Ask("default", Priority.NORMAL, 5),)
    assert len(await yard.store.claim("former", Claim(number=1, asks=asks, total=5))) == 5
    await yard.store.leave("former")
    notes = Notes()
    worker = yard.make(slots=5, burst=True)
    worker._crash_state = notes
    await asyncio.wait_for(worker.run(), PATIENCE)
    assert {(await yard.job(id)).state for id in ids} == {JobState.COMPLETED}
    # One that runs, and perhaps one whose end the store has not confirmed yet.
    assert notes.most <= 2


# -- stops -----------------------------------------------------------------------------------------------------------


async def test_cancelling_the_worker_stops_its_jobs_before_they_are_free(yard: Yard) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def body() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.2)
            assert (await yard.job("job")).state is JobState.RUNNING
            ended.set()

    yard.task(body)
    running = asyncio.ensure_future(yard.make().run())
    id = await yard.enqueue("body", id="job")
    await begun.wait()
    running.cancel()
    await asyncio.wait([running], timeout=PATIENCE)
    assert ended.is_set()
    job = await yard.job(id)
    assert (job.state, job.attempt) == (JobState.PENDING, 0)


async def test_cancelling_the_worker_in_the_middle_of_a_write_keeps_what_had_ended(yard: Yard) -> None:
    runs: list[int] = []

    async def body() -> None:
        runs.append(1)

    yard.task(body)
    faulty = Faulty(yard.store)
    worker = yard.make(store=faulty)
    running = asyncio.ensure_future(worker.run())
    await worker.ready.wait()
    hanging = iter(["hang"])
    faulty.fail = lambda verb: next(hanging, None) if verb == "finish" else None
    id = await yard.enqueue("body")
    await wait_for(lambda: faulty.calls["finish"] == 1)
    running.cancel()
    await asyncio.wait([running], timeout=PATIENCE)
    assert (await yard.job(id)).state is JobState.COMPLETED
    assert runs == [1]


@pytest.mark.parametrize("before", ["nothing", "timeout", "cancel"])
async def test_a_body_that_ignores_everything_does_not_hold_up_a_stop(
    yard: Yard, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "UNWIND_SECONDS", 0.2)
    begun, release, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    asked = 0

    async def deaf() -> None:
        nonlocal asked
        begun.set()
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                asked += 1
        ended.set()

    yard.task(deaf, timeout=0.2 if before == "timeout" else None)
    worker = yard.make()
    running = asyncio.ensure_future(worker.run())
    id = await yard.enqueue("deaf")
    await begun.wait()
    if before == "cancel":
        await yard.store.cancel([id])
    if before != "nothing":
        await wait_for(lambda: asked == 1)
    worker.stop(now=True)
    try:
        await asyncio.wait_for(running, 10)
        assert (await yard.job(id)).state is not JobState.RUNNING
    finally:
        release.set()
        await ended.wait()


async def test_one_failed_write_at_a_stop_does_not_run_a_completed_body_again(yard: Yard) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def body() -> None:
        begun.set()
        await go.wait()

    yard.task(body)
    faulty = Faulty(yard.store)
    async with yard.worker(store=faulty) as worker:
        id = await yard.enqueue("body")
        await begun.wait()
        failures = iter(["before", "before"])
        faulty.fail = lambda verb: next(failures, None) if verb == "finish" else None
        go.set()
        await asyncio.sleep(0)
        worker.stop(now=True)
    assert (await yard.job(id)).state is JobState.COMPLETED


@pytest.mark.parametrize("verb", ["finish", "claim", "leave"])
async def test_a_store_that_hangs_does_not_keep_a_worker_from_ending(
    yard: Yard, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "UNWIND_SECONDS", 0.3)
    monkeypatch.setattr(shutdown, "LAST_TRIES", 0.3)
    monkeypatch.setattr(lease_keeper, "SECONDS_TO_STOP", 0.5)

    async def body() -> None:
        return None

    yard.task(body)
    faulty = Faulty(yard.store)
    worker = yard.make(store=faulty, grace=0.1)
    running = asyncio.ensure_future(worker.run())
    await worker.ready.wait()
    faulty.fail = lambda called: "hang" if called == verb else None
    await yard.enqueue("body")
    await wait_for(lambda: faulty.calls[verb] > 0 or verb == "leave")
    worker.stop()
    await asyncio.wait_for(running, 15)
