"""How a worker starts, is notified, loses its session or its contact, and stops."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import sys
import threading
import time
from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from msgspec.structs import replace

from fairlane.model.job import JobState, Priority, Reason
from fairlane.model.retry import Backoff
from fairlane.model.session import NewSession, SessionKind, SessionState
from fairlane.model.settings import LaneRule
from fairlane.model.slots import Reserved, Slots
from fairlane.supervisor.crash_state import CrashState

from .faulty import Faulty, wait_for
from .yard import PATIENCE, QUICK, Yard


async def test_never_more_jobs_run_than_slots_and_reserved_ones_stay_free(yard: Yard) -> None:
    now: Counter[str] = Counter()
    most: Counter[str] = Counter()
    rng = Random(5)

    async def work(word: str) -> None:
        now[word] += 1
        most["all"] = max(most["all"], now.total())
        most["below high"] = max(most["below high"], now.total() - now["high"])
        await asyncio.sleep(rng.uniform(0, 0.01))
        now[word] -= 1

    yard.task(work)
    words = [rng.choice(["high", "normal", "low"]) for _ in range(300)]
    ids = [await yard.enqueue("work", word, priority=word) for word in words]
    async with yard.worker(slots=5, reserved=Reserved(high=2)) as worker:
        for id in ids:
            await yard.until(id)
        assert worker.done == 300
    assert (most["all"], most["below high"]) == (5, 3)


async def test_cancelling_a_running_coroutine_stops_it(yard: Yard) -> None:
    begun = asyncio.Event()

    async def sleep() -> None:
        begun.set()
        await asyncio.sleep(60)

    yard.task(sleep)
    async with yard.worker():
        id = await yard.enqueue("sleep")
        await begun.wait()
        at = time.monotonic()
        assert await yard.store.cancel([id]) == [JobState.RUNNING]
        job = await yard.until(id)
        assert time.monotonic() - at < 20
    assert (job.state, job.reason) == (JobState.CANCELLED, Reason.BY_USER)


async def test_a_thread_is_asked_to_cancel_and_completes_if_it_returns(yard: Yard) -> None:
    from fairlane.runtime.running_job import current_job

    begun = threading.Event()

    def work() -> str:
        begun.set()
        deadline = time.monotonic() + 10
        while not current_job().cancel_requested and time.monotonic() < deadline:
            time.sleep(0.01)
        return "tidied up"

    yard.task(work)
    async with yard.worker():
        id = await yard.enqueue("work")
        await asyncio.to_thread(begun.wait, 10)
        await yard.store.cancel([id])
        job = await yard.until(id)
    assert (job.state, job.result) == (JobState.COMPLETED, b'"tidied up"')


async def test_a_stop_waits_for_what_runs_and_claims_nothing_more(yard: Yard) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await go.wait()

    yard.task(work)
    async with yard.worker(slots=1) as worker:
        first = await yard.enqueue("work")
        await begun.wait()
        second = await yard.enqueue("work")
        worker.stop()
        await wait_for(lambda: _state(yard, worker.session.id, SessionState.STOPPING))
        go.set()
        await yard.until(first)
    assert (await yard.job(first)).attempt == 1
    assert (await yard.job(second)).state is JobState.PENDING
    [session] = [s for s in await yard.store.sessions() if s.id == worker.session.id]
    assert session.state is SessionState.ENDED


async def _state(yard: Yard, session: str, state: SessionState) -> bool:
    return any(s.id == session and s.state is state for s in await yard.store.sessions())


async def test_after_the_grace_the_rest_is_handed_back_uncharged(yard: Yard) -> None:
    begun = asyncio.Event()
    threads = threading.Event()
    release = threading.Event()

    async def work() -> None:
        begun.set()
        await asyncio.sleep(60)

    def thread() -> None:
        threads.set()
        release.wait(30)

    yard.task(work)
    yard.task(thread)
    worker = yard.make(grace=0.2)
    running = asyncio.ensure_future(worker.run())
    ids = [await yard.enqueue("work"), await yard.enqueue("thread")]
    await begun.wait()
    await asyncio.to_thread(threads.wait, 10)
    worker.stop()
    await asyncio.wait_for(running, PATIENCE)
    jobs = [await yard.job(id) for id in ids]
    release.set()
    assert [(job.state, job.attempt, job.fence) for job in jobs] == [(JobState.PENDING, 0, 1)] * 2
    assert [job.attempts[0].outcome for job in jobs] == ["handed_back"] * 2


async def test_a_second_stop_does_not_wait_for_the_grace(yard: Yard) -> None:
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        await asyncio.sleep(60)

    yard.task(work)
    worker = yard.make(grace=60)
    running = asyncio.ensure_future(worker.run())
    id = await yard.enqueue("work")
    await begun.wait()
    worker.stop()
    await asyncio.sleep(0.1)
    assert not running.done()
    worker.stop(now=True)
    await asyncio.wait_for(running, 10)
    assert (await yard.job(id)).state is JobState.PENDING


async def test_a_session_that_was_declared_dead_stops_its_jobs_and_registers_again(yard: Yard) -> None:
    begun: list[asyncio.Event] = []
    stopped: list[str] = []

    async def work() -> None:
        begun.append(asyncio.Event())
        try:
            await asyncio.sleep(0.3 if len(begun) > 1 else 60)
        except asyncio.CancelledError:
            stopped.append("stopped")
            raise

    yard.task(work)
    async with yard.worker() as worker:
        id = await yard.enqueue("work")
        await wait_for(lambda: bool(begun))
        first = worker.session.id
        await yard.store.leave(first)
        job = await yard.until(id)
        assert worker.session.id != first
    assert stopped == ["stopped"]
    assert (job.state, job.attempt) == (JobState.COMPLETED, 2)


@pytest.mark.parametrize("how", ["before", "after"])
async def test_an_outage_loses_and_doubles_nothing(yard: Yard, how: str) -> None:
    runs: Counter[str] = Counter()
    rng = Random(11)

    async def work(name: str) -> None:
        runs[name] += 1

    yard.task(work)
    names = [f"job-{n}" for n in range(60)]
    ids = [await yard.enqueue("work", name) for name in names]
    faulty = Faulty(yard.store)
    faulty.fail = lambda verb: how if verb in ("finish", "claim") and rng.random() < 0.4 else None
    async with yard.worker(slots=4, store=faulty):
        jobs = [await yard.until(id) for id in ids]
    assert {job.state for job in jobs} == {JobState.COMPLETED}
    assert {job.attempt for job in jobs} == {1}
    assert runs == Counter(names)


async def test_an_outage_is_logged_once_and_does_not_spin(yard: Yard, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        return None

    yard.task(work)
    faulty = Faulty(yard.store)
    async with yard.worker(store=faulty):
        faulty.fail = lambda verb: "before"
        before = faulty.calls.total()
        with caplog.at_level(logging.WARNING, logger="fairlane"):
            await asyncio.sleep(0.5)
        assert faulty.calls.total() - before < 15
        assert len([r for r in caplog.records if "trying again" in r.message and r.name == "fairlane.worker"]) <= 1
        faulty.fail = lambda verb: None
        await yard.until(await yard.enqueue("work"))


async def test_without_contact_jobs_of_limited_lanes_end_before_the_lease_does(yard: Yard) -> None:
    """The keeper has lost its store; the test calls the worker as the keeper would."""
    ended: set[str] = set()
    begun: Counter[str] = Counter()
    go = asyncio.Event()

    async def work(lane: str) -> None:
        begun[lane] += 1
        try:
            if begun[lane] == 1:
                await go.wait()
        except asyncio.CancelledError:
            ended.add(lane)
            raise

    yard.task(work, lane="{lane}")
    await yard.lanes(LaneRule(pattern="one", limit=1))
    async with yard.worker() as worker:
        limited, free = await yard.enqueue("work", "one"), await yard.enqueue("work", "many")
        await wait_for(lambda: begun.total() == 2)
        worker.contact_lost()
        await wait_for(lambda: "one" in ended)
        go.set()
        again = await yard.until(limited)
        job = await yard.until(free)
    assert "many" not in ended
    assert (job.state, job.fence) == (JobState.COMPLETED, 1)
    assert (again.state, again.attempt, again.fence) == (JobState.COMPLETED, 1, 2)


async def test_a_body_that_computes_for_three_leases_runs_once(yard: Yard, caplog: pytest.LogCaptureFixture) -> None:
    runs: list[float] = []
    lease = 2.0

    async def compute() -> None:
        runs.append(time.monotonic())
        until = time.monotonic() + 3 * lease
        while time.monotonic() < until:
            sum(range(1_000))

    yard.task(compute, name="shop.compute")
    with caplog.at_level(logging.WARNING, logger="fairlane"):
        async with yard.worker(intervals=replace(QUICK, lease=lease)):
            job = await yard.until(await yard.enqueue("compute"))
    assert len(runs) == 1
    assert (job.state, job.fence) == (JobState.COMPLETED, 1)
    [report] = [r.getMessage() for r in caplog.records if "has blocked the event loop" in r.getMessage()]
    assert f"task shop.compute (job {job.id})" in report
    assert "test_lifecycle.py" in report


async def test_a_low_job_starts_in_spite_of_an_endless_stream_of_high_ones(yard: Yard) -> None:
    started: list[Priority] = []

    async def work(priority: int) -> None:
        started.append(Priority(priority))

    yard.task(work)
    for _ in range(100):
        await yard.enqueue("work", 0, priority="high")
    for _ in range(10):
        await yard.enqueue("work", 2, priority="low")
    async with yard.worker(slots=1):
        await wait_for(lambda: len(started) == 110)
    lows = [n for n, priority in enumerate(started) if priority is Priority.LOW]
    assert lows[0] <= 10
    assert all(after - before <= 10 for before, after in pairwise(lows))


async def test_work_for_the_inbox_and_for_several_queues_is_found(yard: Yard) -> None:
    async def work(name: str) -> str:
        return name

    yard.task(work)
    async with yard.worker(queues={"mail": 1, "images": 3}) as worker:
        ids = [
            await yard.enqueue("work", "mail", queue="mail"),
            await yard.enqueue("work", "images", queue="images"),
            await yard.enqueue("work", "sticky", sticky="plan-7", queue="elsewhere"),
            await yard.enqueue("work", "direct", worker=worker.session.index, queue="elsewhere"),
        ]
        for id in ids:
            assert (await yard.until(id)).state is JobState.COMPLETED


async def test_cron_and_delays_run_because_the_worker_hosts_a_manager(yard: Yard) -> None:
    async def work() -> None:
        return None

    yard.task(work)
    async with yard.worker() as worker:
        job = await yard.until(await yard.enqueue("work", delay=0.3))
        assert job.started_at is not None
        assert job.due_at is None or job.started_at >= job.due_at
        assert worker.manager is not None
    async with yard.worker(manager=False) as worker:
        assert worker.manager is None


async def test_a_thread_that_outlives_its_session_keeps_its_slot(yard: Yard) -> None:
    """Slots limit what really runs: a function that cannot be stopped counts until it ends."""
    now, most = 0, 0
    lock = threading.Lock()
    release = threading.Event()

    def work(long: bool) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        if long:
            release.wait(20)
        with lock:
            now -= 1

    yard.task(work, retries=5)
    async with yard.worker(slots=2) as worker:
        long = await yard.enqueue("work", True)
        await yard.until(long, JobState.RUNNING)
        await wait_for(lambda: now == 1)
        first = worker.session.id
        await yard.store.leave(first, begun=[])
        await yard.store.cancel([long])
        await wait_for(lambda: worker.session.id != first)
        short = [await yard.enqueue("work", False) for _ in range(20)]
        for id in short:
            await yard.until(id)
        release.set()
        await wait_for(lambda: now == 0)
        for id in [await yard.enqueue("work", False) for _ in range(5)]:
            await yard.until(id)
    assert most == 2


async def test_a_named_index_is_waited_for_while_its_process_lives(
    yard: Yard, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None: ...

    yard.task(work, retries=0)
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
    try:
        holder = NewSession(
            id="holder",
            kind=SessionKind.WORKER,
            host=socket.gethostname(),
            pid=other.pid,
            index=0,
            slots=Slots(total=1),
            lease=60,
        )
        await yard.store.register(holder)
        worker = yard.make(index=0)
        running = asyncio.ensure_future(worker.run())
        with caplog.at_level(logging.WARNING, logger="fairlane"):
            await asyncio.sleep(0.6)
        assert not worker.ready.is_set()
        assert any(f"process {other.pid} of this host" in r.getMessage() for r in caplog.records)
        other.kill()
        await other.wait()
        await asyncio.wait_for(worker.ready.wait(), PATIENCE)
        assert worker.session.index == 0
    finally:
        if other.returncode is None:
            other.kill()
            await other.wait()
        worker.stop(now=True)
        await asyncio.wait_for(running, PATIENCE)


async def test_the_log_contains_what_went_wrong_and_no_arguments(yard: Yard, caplog: pytest.LogCaptureFixture) -> None:
    async def work(secret: str) -> None:
        raise ValueError("no such customer")

    async def fine() -> None: ...

    error = "ValueError: no such customer"
    yard.task(work, retries=1, backoff=Backoff(base=0, most=0))
    yard.task(fine)
    with caplog.at_level(logging.INFO, logger="fairlane"):
        async with yard.worker():
            id = await yard.enqueue("work", "sk-live")
            await yard.until(id)
            await yard.until(await yard.enqueue("fine"))
    told = [r for r in caplog.records if r.name == "fairlane.worker.jobs"]
    assert [(r.levelname, re.sub(r"(waited .*)?ran [0-9.]+ s", "ran TIME", r.getMessage())) for r in told[:2]] == [
        ("WARNING", f"work {id}, attempt 1 of 2 in queue default, ran TIME: runs again in 0.0 s: {error}"),
        ("ERROR", f"work {id}, attempt 2 of 2 in queue default, ran TIME: failed, no retry is left: {error}"),
    ]
    assert [r.levelname for r in told[2:]] == ["INFO"]
    assert "sk-live" not in caplog.text


async def test_a_worker_that_ends_its_session_asks_for_no_more_renewals(yard: Yard) -> None:
    state = CrashState.make()
    worker = yard.make(burst=True)
    worker._crash_state = state
    await asyncio.wait_for(worker.run(), PATIENCE)
    reading = state.read()
    assert (reading.session, reading.last_beat) == (worker.session.id, None)
    state.close()
