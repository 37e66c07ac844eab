"""What happens to a job, depending on what its body does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from contextvars import ContextVar
from typing import Any

import pytest
from msgspec.structs import replace

from fairlane.errors import Cancel, Fail, InvalidInput, Retry, Snooze
from fairlane.model.job import JobState, Reason
from fairlane.model.retry import Backoff
from fairlane.runtime.running_job import current_job

from .faulty import Faulty
from .yard import PATIENCE, Yard

AT_ONCE = Backoff(base=0, most=0)


async def test_a_coroutine_runs_with_its_arguments_and_its_result_is_stored(yard: Yard) -> None:
    async def add(a: int, b: int) -> int:
        await asyncio.sleep(0)
        return a + b

    yard.task(add)
    async with yard.worker():
        job = await yard.until(await yard.enqueue("add", 2, 3))
    assert (job.state, job.result, job.attempt) == (JobState.COMPLETED, b"5", 1)


async def test_a_plain_function_runs_in_a_thread(yard: Yard) -> None:
    def where() -> str:
        assert current_job().task == "where"
        return threading.current_thread().name

    yard.task(where)
    async with yard.worker():
        job = await yard.until(await yard.enqueue("where"))
    assert job.state is JobState.COMPLETED
    assert job.result is not None
    assert threading.current_thread().name not in job.result.decode()


async def test_plain_functions_do_not_block_each_other_nor_the_loop(yard: Yard) -> None:
    meeting = threading.Barrier(3, timeout=10)

    def meet() -> None:
        meeting.wait()

    yard.task(meet)
    async with yard.worker(slots=3):
        jobs = [await yard.enqueue("meet") for _ in range(3)]
        assert [(await yard.until(id)).state for id in jobs] == [JobState.COMPLETED] * 3


async def test_an_error_is_retried_until_the_budget_is_used_up(yard: Yard) -> None:
    attempts: list[int] = []

    async def explode() -> None:
        attempts.append(current_job().attempt)
        raise RuntimeError("the fuse was lit")

    yard.task(explode, retries=2, backoff=AT_ONCE)
    async with yard.worker():
        job = await yard.until(await yard.enqueue("explode"))
    assert attempts == [1, 2, 3]
    assert (job.state, job.reason) == (JobState.FAILED, Reason.ERROR)
    assert job.error is not None
    assert "RuntimeError: the fuse was lit" in job.error
    assert "test_runs.py" in job.error
    assert "fairlane/worker" not in job.error
    assert job.error_group == "RuntimeError in explode"


async def test_an_error_is_grouped_by_the_function_that_called_a_library(yard: Yard) -> None:
    def parse() -> None:
        json.loads("{")

    yard.task(parse, retries=0)
    async with yard.worker():
        job = await yard.until(await yard.enqueue("parse"))
    assert job.error_group == "JSONDecodeError in parse"
    assert "raw_decode" in (job.error or ""), "the traceback is whole"


async def test_a_plain_function_that_fails_once_is_run_again(yard: Yard) -> None:
    def flaky() -> str:
        if current_job().attempt == 1:
            raise OSError("not today")
        return "tomorrow"

    yard.task(flaky, backoff=AT_ONCE)
    async with yard.worker():
        job = await yard.until(await yard.enqueue("flaky"))
    assert (job.state, job.result, job.attempt) == (JobState.COMPLETED, b'"tomorrow"', 2)


async def test_a_body_may_say_how_its_run_ends(yard: Yard) -> None:
    async def fail() -> None:
        raise Fail("no such customer")

    async def cancel() -> None:
        raise Cancel("nobody waits any more")

    async def snooze() -> str:
        if current_job().fence == 1:
            raise Snooze(0.05)
        return f"attempt {current_job().attempt}"

    async def again() -> str:
        if current_job().attempt == 1:
            raise Retry("not yet", delay=0.05)
        return "done"

    for task in (fail, cancel, snooze, again):
        yard.task(task, backoff=Backoff(base=300, jitter=False))
    async with yard.worker():
        failed, cancelled, snoozed, retried = [
            await yard.until(id) for id in [await yard.enqueue(n) for n in ("fail", "cancel", "snooze", "again")]
        ]
    assert (failed.state, failed.attempt) == (JobState.FAILED, 1)
    assert cancelled.state is JobState.CANCELLED
    assert (snoozed.result, snoozed.attempts[0].outcome) == (b'"attempt 1"', "snoozed")
    assert (retried.result, retried.attempt) == (b'"done"', 2)


async def test_a_senseless_snooze_is_an_error_that_says_so(yard: Yard) -> None:
    async def snooze() -> None:
        raise Snooze(-5)

    yard.task(snooze, retries=0)
    async with yard.worker():
        job = await yard.until(await yard.enqueue("snooze"))
    assert job.state is JobState.FAILED
    assert job.error is not None
    assert "delay" in job.error


async def test_a_payload_that_does_not_fit_never_reaches_the_body(yard: Yard) -> None:
    seen: list[object] = []

    async def greet(name: str, times: int = 1) -> None:
        seen.append((name, times))

    yard.task(greet)
    good = yard.registry.find("greet").call("ann").job
    for number, payload in enumerate(
        [b'[["ann","twice"],{}]', b"[[],{}]", b'[["a",1,2],{}]', b'[["a"],{"x":1}]', b"{}"]
    ):
        await yard.store.enqueue([replace(good, id=f"bad-{number}", payload=payload)])
    async with yard.worker():
        jobs = [await yard.until(f"bad-{number}") for number in range(5)]
    assert seen == []
    assert {(job.state, job.reason, job.attempt) for job in jobs} == {(JobState.FAILED, Reason.BAD_PAYLOAD, 1)}
    assert jobs[0].error is not None
    assert "argument 'times'" in jobs[0].error


async def test_a_result_that_json_cannot_hold_fails_at_once(yard: Yard) -> None:
    async def odd() -> object:
        return object()

    yard.task(odd)
    async with yard.worker():
        job = await yard.until(await yard.enqueue("odd"))
    assert (job.state, job.attempt) == (JobState.FAILED, 1)
    assert job.error is not None
    assert job.error.startswith("result:")


async def test_a_body_that_calls_exit_does_not_end_the_worker(yard: Yard) -> None:
    async def leave() -> None:
        raise SystemExit(3)

    def leave_thread() -> None:
        raise SystemExit(3)

    async def fine() -> str:
        return "fine"

    for task in (leave, leave_thread, fine):
        yard.task(task, retries=0)
    async with yard.worker():
        ids = [await yard.enqueue(name) for name in ("leave", "leave_thread", "fine")]
        states = [(await yard.until(id)).state for id in ids]
    assert states == [JobState.FAILED, JobState.FAILED, JobState.COMPLETED]


async def test_a_body_that_cancels_itself_has_failed(yard: Yard) -> None:
    async def give_up() -> None:
        raise asyncio.CancelledError

    yard.task(give_up, retries=0)
    async with yard.worker():
        job = await yard.until(await yard.enqueue("give_up"))
    assert (job.state, job.reason) == (JobState.FAILED, Reason.ERROR)


async def test_a_coroutine_that_takes_too_long_is_stopped_and_charged(yard: Yard) -> None:
    stopped: list[float] = []

    async def dawdle() -> None:
        begun = time.monotonic()
        try:
            await asyncio.sleep(30)
        finally:
            stopped.append(time.monotonic() - begun)

    yard.task(dawdle, timeout=0.2, retries=1, backoff=AT_ONCE)
    async with yard.worker():
        job = await yard.until(await yard.enqueue("dawdle"))
    assert (job.state, job.reason, job.attempt) == (JobState.FAILED, Reason.TIMEOUT, 2)
    assert len(stopped) == 2
    assert all(0.15 < taken < 10 for taken in stopped)
    assert job.error is not None
    assert "0.2 s" in job.error


async def test_many_timeouts_end_each_at_its_own_time(yard: Yard) -> None:
    ended: dict[str, float] = {}

    async def dawdle(name: str) -> None:
        begun = time.monotonic()
        try:
            await asyncio.sleep(30)
        finally:
            ended[name] = time.monotonic() - begun

    yard.task(dawdle, retries=0)
    async with yard.worker(slots=3):
        ids = [
            await yard.enqueue("dawdle", name, timeout=timeout)
            for name, timeout in (("long", 1.0), ("short", 0.1), ("middle", 0.5))
        ]
        for id in ids:
            await yard.until(id)
    assert sorted(ended, key=lambda name: ended[name]) == ["short", "middle", "long"]
    assert ended["short"] < 0.45


async def test_a_body_that_ignores_its_timeout_keeps_its_slot_until_it_ends(yard: Yard) -> None:
    released = asyncio.Event()
    begun = asyncio.Event()

    async def stubborn() -> str:
        begun.set()
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue
        return "in my own time"

    async def other() -> None:
        return None

    yard.task(stubborn, timeout=0.1, retries=0)
    yard.task(other)
    async with yard.worker(slots=1):
        id = await yard.enqueue("stubborn")
        await begun.wait()
        waiting = await yard.enqueue("other")
        await asyncio.sleep(0.5)
        assert (await yard.job(waiting)).state is JobState.PENDING
        released.set()
        assert (await yard.until(id)).state is JobState.COMPLETED
        await yard.until(waiting)


@pytest.mark.parametrize("kind", ["coroutine", "thread"])
async def test_a_body_that_goes_on_after_its_stop_is_named_once(
    yard: Yard, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("fairlane.worker.executor.IGNORED_SECONDS", 0.3)
    released = threading.Event()

    async def stubborn() -> None:
        while not released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)

    def deaf() -> None:
        released.wait(PATIENCE)

    async def obedient() -> None:
        await asyncio.sleep(PATIENCE)

    yard.task(stubborn, timeout=0.1)
    yard.task(obedient, timeout=0.1, retries=0)
    yard.task(deaf)
    async with yard.worker():
        stopped = await yard.enqueue("obedient")
        id = await yard.enqueue("stubborn" if kind == "coroutine" else "deaf")
        if kind == "thread":
            await yard.until(id, JobState.RUNNING)
            await yard.store.cancel([id])
        async with asyncio.timeout(PATIENCE):
            while not (told := [r for r in caplog.records if "still runs" in r.getMessage()]):
                await asyncio.sleep(0.01)
        assert (await yard.until(stopped)).state is JobState.FAILED
        released.set()
        await yard.until(id)
    told = [r for r in caplog.records if "still runs" in r.getMessage()]
    words = {
        "coroutine": f"task stubborn (job {id}) ignores its timeout of 0.1 s: it still runs 0.3 s later",
        "thread": f"task deaf (job {id}) does not stop although the job was cancelled: it still runs 0.3 s later",
    }
    assert [record.getMessage().partition(", and keeps")[0] for record in told] == [words[kind]]
    assert told[0].levelname == "WARNING"


async def test_the_end_of_a_job_does_not_overtake_its_last_progress(yard: Yard) -> None:
    faulty = Faulty(yard.store)
    sent = asyncio.Event()
    real = yard.store.progress

    async def slow(*args: Any) -> Any:
        sent.set()
        await asyncio.sleep(0.3)
        return await real(*args)

    faulty.progress = slow  # type: ignore[attr-defined]  # hides the verb it would hand on

    async def body() -> None:
        current_job().progress("last")
        await sent.wait()

    yard.task(body)
    id = await yard.enqueue("body")
    async with yard.worker(store=faulty):
        assert (await yard.until(id)).progress == b'"last"'


async def test_progress_is_stored_while_the_body_runs(yard: Yard) -> None:
    go = threading.Event()

    def count() -> None:
        for number in range(1_000):
            current_job().progress({"done": number})
        go.wait(10)

    yard.task(count)
    async with yard.worker():
        id = await yard.enqueue("count")
        async with asyncio.timeout(10):
            while (await yard.job(id)).progress != b'{"done":999}':
                await asyncio.sleep(0.01)
        go.set()
        assert (await yard.until(id)).state is JobState.COMPLETED


async def test_every_body_has_a_context_of_its_own(yard: Yard) -> None:
    word: ContextVar[str] = ContextVar("word", default="clean")
    seen: list[str] = []

    async def stain() -> None:
        seen.append(word.get())
        word.set("stained")

    yard.task(stain)
    async with yard.worker(slots=1):
        for _ in range(3):
            await yard.until(await yard.enqueue("stain"))
    assert seen == ["clean"] * 3


async def test_the_current_job_is_known_inside_a_body_only(yard: Yard) -> None:
    async def who() -> list[object]:
        job = current_job()
        return [job.id, job.attempt, job.fence, job.idempotency_key, job.queue, job.lane, job.remaining]

    yard.task(who, lane="ann")
    async with yard.worker():
        id = await yard.enqueue("who", timeout=60)
        job = await yard.until(id)
    assert job.result is not None
    assert f'["{id}",1,1,"{id}","default","ann",' in job.result.decode()
    with pytest.raises(Exception, match="outside of a job"):
        current_job()


def test_a_local_plain_function_cannot_have_a_timeout(tmp_path: object) -> None:
    def local() -> None:
        return None

    yard = Yard(None, "")  # type: ignore[arg-type]  # no store is asked
    with pytest.raises(InvalidInput, match=r"timeout: .*child process"):
        yard.task(local, timeout=5)


async def test_a_coroutine_that_a_decorator_hides_is_reported(yard: Yard) -> None:
    async def inner() -> str:
        return "never"

    def hidden() -> object:
        return inner()

    yard.task(hidden)
    async with yard.worker():
        job = await yard.until(await yard.enqueue("hidden"))
    assert (job.state, job.attempt) == (JobState.FAILED, 1)
    assert job.error is not None
    assert "must be an `async def` itself" in job.error
