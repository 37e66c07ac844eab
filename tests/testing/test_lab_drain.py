"""How the lab runs jobs, what it does when they raise, wait or never end, and that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import time
import traceback
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from fairlane import (
    Fairlane,
    FairlaneError,
    InvalidInput,
    JobCancelled,
    JobFailed,
    JobState,
    ManualClock,
    NewJob,
    Retry,
    Settings,
    Snooze,
    current_job,
    testing,
)
from fairlane.testing import Drained, Lab, drain

PATIENCE = 45.0
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()
DAY = 86_400.0
elsewhere = Fairlane(settings=Settings(url="sqlite:////nowhere/at/all.db"))


@elsewhere.task(isolate=True)
async def whose_process() -> int:
    """Return the id of its process."""
    return os.getpid()


@elsewhere.task(isolate=True, retries=1)
async def dies() -> None:
    """Kill its process."""
    os._exit(7)


@elsewhere.task(isolate=True)
async def asks_another() -> int:
    """Wait for another isolated job."""
    return await (await whose_process.enqueue()).result(timeout=PATIENCE)


@elsewhere.task(timeout=5)
def asks_another_in_time() -> int:
    """Wait for another job that has a timeout."""
    return whose_process_in_time.blocking.enqueue().result(timeout=PATIENCE)


@elsewhere.task(timeout=0.05)
def whose_process_in_time() -> int:
    """Return the id of its process; a worker would run it in a child process, and kill that."""
    time.sleep(0.2)
    return os.getpid()


@pytest.fixture
def app() -> Fairlane:
    """An application whose own store cannot be opened: whatever works, works in the lab."""
    return Fairlane(settings=Settings(url="sqlite:////nowhere/at/all.db"))


@pytest.fixture
async def lab(app: Fairlane) -> AsyncIterator[Lab]:
    """A lab with one worker."""
    async with testing.embedded(app, clock=ManualClock(NOON)) as lab:
        yield lab


async def test_a_raised_error_shows_the_line_of_the_body(app: Fairlane, lab: Lab) -> None:
    @app.task
    async def charge(amount: int) -> None:
        _refuse(amount)

    @app.task
    def charge_plainly(amount: int) -> None:
        _refuse(amount)

    for task in (charge, charge_plainly):
        job = await task.enqueue(-1)
        with pytest.raises(ValueError, match="-1 is not an amount") as caught:
            await lab.drain(errors="raise")
        assert "_refuse" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert any(job.id in note and "attempt 1" in note for note in caught.value.__notes__)
        # The run counts all the same, and the record shows the user's frames only.
        record = await job.job()
        assert record.state is JobState.SCHEDULED
        assert "_refuse" in str(record.attempts[-1].error)
        assert "testing/drain.py" not in str(record.attempts[-1].error)


def _refuse(amount: int) -> None:
    raise ValueError(f"{amount} is not an amount")


async def test_what_a_body_asks_for_is_not_raised_but_what_no_body_raised_is(app: Fairlane, lab: Lab) -> None:
    @app.task
    async def again() -> None:
        raise Retry(delay=5)

    @app.task(timeout=0.05)
    async def endless() -> None:
        await asyncio.Event().wait()

    await again.enqueue()
    assert await lab.drain(errors="raise") == Drained(retried=1, runs=1)
    await endless.enqueue()
    with pytest.raises(JobFailed, match="timeout"):
        await lab.drain(errors="raise")
    with pytest.raises(InvalidInput, match="errors"):
        await lab.drain(errors="ignore")  # type: ignore[arg-type]  # the mistake


async def test_a_task_that_the_application_does_not_have_fails_at_once(app: Fairlane, lab: Lab) -> None:
    @app.task
    async def known() -> None: ...

    store = await app.connection.store()
    for id in ("odd", "strange"):
        await store.enqueue([NewJob(id=id, task="unheard-of")])
    with pytest.raises(JobFailed, match="unheard-of"):
        await lab.drain(errors="raise")
    await lab.drain()
    assert [(job.state, job.attempt) for job in await lab.jobs()] == [(JobState.FAILED, 0)] * 2


async def test_a_body_that_enqueues_for_ever_is_stopped_with_advice(app: Fairlane, lab: Lab) -> None:
    @app.task(name="endless")
    async def endless() -> None:
        await endless.enqueue()

    await endless.enqueue()
    with pytest.raises(FairlaneError, match=r"has run 20 jobs.*one of endless.*limit="):
        await lab.drain(limit=20)
    states = [job.state for job in await lab.jobs()]
    assert states == [JobState.COMPLETED] * 20 + [JobState.PENDING]


async def test_a_body_may_wait_for_another_job(app: Fairlane, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    # It is detected that it waits; it is not assumed because the job is slow.
    monkeypatch.setattr(drain, "PATIENCE", 1e6)

    @app.task
    async def child(n: int) -> int:
        return n + 1

    @app.task
    async def parent() -> int:
        return await (await child.enqueue(41)).result(timeout=PATIENCE)

    @app.task
    def plain_parent() -> int:
        return child.blocking.enqueue(1).result(timeout=PATIENCE)

    job, plain = await parent.enqueue(), await plain_parent.enqueue()
    assert await lab.drain(errors="raise") == Drained(completed=4, runs=4)
    assert await job.result() == 42
    assert await plain.result() == 2


async def test_a_slow_body_has_the_lab_to_itself(app: Fairlane, lab: Lab) -> None:
    ran: list[str] = []

    @app.task
    async def slow(name: str) -> None:
        ran.append(f"{name} begins")
        await asyncio.sleep(0.3)
        ran.append(f"{name} ends")

    await slow.enqueue("first")
    await slow.enqueue("second")
    assert await lab.drain() == Drained(completed=2, runs=2)
    assert ran == ["first begins", "first ends", "second begins", "second ends"]


async def test_a_job_that_waits_for_a_job_which_is_not_due_is_reported(app: Fairlane, lab: Lab) -> None:
    @app.task
    async def child() -> None: ...

    @app.task
    async def parent() -> None:
        await (await child.options(delay=60).enqueue()).result()

    job = await parent.enqueue()
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(FairlaneError, match="waits for another job"):
            await lab.drain()
    assert await job.state() is JobState.PENDING


async def test_a_running_body_is_cancelled(app: Fairlane, lab: Lab) -> None:
    @app.task
    async def patient() -> None:
        await asyncio.Event().wait()

    @app.task
    async def canceller(id: str) -> None:
        await app.handle(id).cancel()

    job = await patient.enqueue()
    await canceller.enqueue(job.id)
    async with asyncio.timeout(PATIENCE):
        assert await lab.drain() == Drained(completed=1, cancelled=1, runs=2)
    with pytest.raises(JobCancelled, match="by_user"):
        await job.result()


async def test_progress_is_stored(app: Fairlane, lab: Lab) -> None:
    @app.task
    async def render() -> None:
        current_job().progress({"percent": 10})
        current_job().progress({"percent": 80})

    job = await render.enqueue()
    await lab.drain()
    assert await job.progress() == {"percent": 80}


async def test_a_drain_that_is_broken_off_hands_back_what_runs(app: Fairlane, lab: Lab) -> None:
    begun = asyncio.Event()
    go_on = asyncio.Event()

    @app.task
    async def slow() -> str:
        begun.set()
        await go_on.wait()
        return "done"

    job = await slow.enqueue()
    draining = asyncio.create_task(lab.drain())
    await asyncio.wait_for(begun.wait(), PATIENCE)
    with pytest.raises(FairlaneError, match="already running jobs"):
        await lab.drain()
    draining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await draining
    record = await job.job()
    assert (record.state, record.attempt) == (JobState.PENDING, 0)
    go_on.set()
    assert await lab.drain() == Drained(completed=1, runs=1)


async def test_one_job_is_run_alone_and_the_others_keep_their_order(app: Fairlane, lab: Lab) -> None:
    ran: list[int] = []

    @app.task
    async def double(n: int) -> int:
        ran.append(n)
        return 2 * n

    handles = [await double.enqueue(n) for n in range(4)]
    assert await lab.run(handles[2]) == 4
    assert ran == [2]
    assert await handles[2].state() is JobState.COMPLETED
    assert await lab.drain() == Drained(completed=3, runs=3)
    assert ran == [2, 0, 1, 3]


async def test_running_one_job_raises_what_its_body_raised(app: Fairlane, lab: Lab) -> None:
    @app.task(retries=0)
    async def body(how: str) -> None:
        raise ValueError("no") if how == "error" else Snooze(5)

    failing, snoozing = await body.enqueue("error"), await body.enqueue("snooze")
    with pytest.raises(ValueError, match="no"):
        await lab.run(failing)
    with pytest.raises(Snooze):
        await lab.run(snoozing)
    assert await failing.state() is JobState.FAILED
    assert await snoozing.state() is JobState.SCHEDULED


async def test_one_job_that_cannot_start_is_refused_with_the_reason(app: Fairlane) -> None:
    app.queue("models").lane("*", limit=1)

    @app.task(queue="models", lane="flux")
    async def render() -> None: ...

    async with testing.embedded(app) as lab:
        first, second, later = (
            await render.enqueue(),
            await render.enqueue(),
            await render.options(delay=60).enqueue(),
        )
        with pytest.raises(FairlaneError, match="1 ahead in lane flux"):
            await lab.run(second)
        with pytest.raises(FairlaneError, match="due in 60 s"):
            await lab.run(later)
        await lab.run(first)
        with pytest.raises(FairlaneError, match="completed"):
            await lab.run(first)
        await lab.run(second)


async def test_the_application_is_as_it_was_after_the_lab(tmp_path: Path) -> None:
    app = Fairlane(f"sqlite:///{tmp_path / 'own.db'}")
    app.queue("models").lane("*", limit=1)

    @app.task(name="work")
    async def work(n: int) -> None: ...

    own = await work.enqueue(1)
    url, store = app.settings.url, await app.connection.store()
    async with app.turn("flux", queue="models", timeout=PATIENCE) as turn:
        for n in (2, 3):
            async with testing.embedded(app) as lab:
                assert await lab.jobs() == []
                await work.enqueue(n)
                async with app.turn("sdxl", queue="models", timeout=PATIENCE):
                    assert await lab.drain() == Drained(completed=1, runs=1)
                directory = Path(app.settings.url.removeprefix("sqlite:///")).parent
                assert directory.is_dir()
            assert not directory.exists()
        assert not turn.lost
    assert app.settings.url == url
    assert await app.connection.store() is store
    assert await own.state() is JobState.PENDING
    assert [job.id for job in (await app.client.find(task="work")).jobs] == [own.id]
    await app.close()


async def test_a_lab_that_is_left_refuses_to_work(app: Fairlane) -> None:
    async with testing.embedded(app) as lab:
        with pytest.raises(FairlaneError, match="already in a lab"):
            async with testing.embedded(app):
                pass
        assert await lab.drain() == Drained()
    with pytest.raises(FairlaneError, match="closed"):
        await lab.drain()
    with pytest.raises(InvalidInput, match="workers"):
        async with testing.embedded(app, workers=-1):
            pass


async def test_code_that_closes_the_application_does_not_end_the_lab(app: Fairlane, lab: Lab) -> None:
    @app.task
    async def work() -> None: ...

    await work.enqueue()
    await app.close()
    assert await lab.drain() == Drained(completed=1, runs=1)


async def test_isolated_tasks_run_here_unless_the_real_thing_is_wanted() -> None:
    async with testing.embedded(elsewhere) as lab:
        assert await lab.run(await whose_process.enqueue()) == os.getpid()
        assert await lab.run(await whose_process_in_time.enqueue()) == os.getpid()
        for waiting in (asks_another, asks_another_in_time):
            await waiting.enqueue()
            assert await lab.drain(errors="raise") == Drained(completed=2, runs=2)
    async with testing.embedded(elsewhere, isolate="real") as lab:
        assert await lab.run(await whose_process.enqueue()) != os.getpid()
        assert await lab.run(await whose_process_in_time.enqueue()) == os.getpid()


async def test_a_child_process_that_dies_is_a_crash() -> None:
    async with testing.embedded(elsewhere, isolate="real") as lab:
        job = await dies.enqueue()
        assert await lab.drain() == Drained(failed=1, retried=1, runs=2)
        with pytest.raises(JobFailed, match="crashed"):
            await job.result()
