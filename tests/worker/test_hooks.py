"""Hooks: what runs when a worker starts and stops, and what stands around every body."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from typing import Any

import pytest

from fairlane import Cancel, Fail, Fairlane, InvalidInput, JobState, Retry, RunningJob, Snooze, current_job

from .hook_kit import AT_ONCE, both, coroutine, explode, plain, ran

word: ContextVar[str] = ContextVar("word", default="none")

# -- around a body ---------------------------------------------------------------------------------------------------


@both
async def test_hooks_of_both_kinds_nest_in_the_order_of_their_declaration(app: Fairlane, task: Any) -> None:
    told: list[str] = []

    @app.around_job
    def first(job: RunningJob) -> Iterator[None]:
        told.append(f"first {job.task} {job.attempt}")
        result = yield
        told.append(f"first saw {result}")

    @app.around_job
    async def second(job: RunningJob) -> AsyncIterator[None]:
        await asyncio.sleep(0)
        told.append("second")
        result = yield
        told.append(f"second saw {result}")

    @app.around_job
    def third(job: RunningJob) -> Iterator[None]:
        assert job is current_job()
        told.append("third")
        yield
        told.append("third ends")

    def body() -> int:
        told.append("body")
        return 7

    job = await ran(app, task(app, body))
    assert (job.state, job.result) == (JobState.COMPLETED, b"7")
    assert told == ["first work 1", "second", "third", "body", "third ends", "second saw 7", "first saw 7"]


@both
async def test_a_body_sees_the_context_that_hooks_of_both_kinds_made(app: Fairlane, task: Any) -> None:
    @app.around_job
    async def first(job: RunningJob) -> AsyncIterator[None]:
        word.set("later")
        yield

    @app.around_job
    def second(job: RunningJob) -> Iterator[None]:
        word.set(word.get() + " and at once")
        yield
        assert word.get() == "later and at once"

    assert (await ran(app, task(app, word.get))).result == b'"later and at once"'
    assert word.get() == "none"


async def test_a_plain_hook_around_a_plain_function_is_in_its_thread(app: Fairlane) -> None:
    threads: list[str] = []

    @app.around_job
    def hook(job: RunningJob) -> Iterator[None]:
        threads.append(threading.current_thread().name)
        yield
        threads.append(threading.current_thread().name)

    await ran(app, plain(app, lambda: threads.append(threading.current_thread().name)))
    assert len(set(threads)) == 1
    assert threads[0] != threading.current_thread().name


@both
async def test_hooks_see_the_exception_and_leave_no_trace_in_the_stored_error(app: Fairlane, task: Any) -> None:
    seen: list[BaseException] = []
    work = task(app, explode, retries=0)
    without = (await ran(app, work)).error

    @app.around_job
    async def first(job: RunningJob) -> AsyncIterator[None]:
        try:
            yield
        except ValueError as exc:
            seen.append(exc)
            raise

    @app.around_job
    def second(job: RunningJob) -> Iterator[None]:
        try:
            yield
        finally:
            seen.append(RuntimeError())

    job = await ran(app, work)
    assert (job.state, job.error_group, job.error) == (JobState.FAILED, "ValueError in explode", without)
    assert [type(exc) for exc in seen] == [RuntimeError, ValueError]


@both
async def test_an_exception_that_a_hook_swallows_goes_on_all_the_same(app: Fairlane, task: Any) -> None:
    seen: list[str] = []

    @app.around_job
    def first(job: RunningJob) -> Iterator[None]:
        try:
            yield
        except ValueError as exc:
            seen.append(f"first {exc}")

    @app.around_job
    async def second(job: RunningJob) -> AsyncIterator[None]:
        try:
            yield
        except ValueError as exc:
            seen.append(f"second {exc}")

    job = await ran(app, task(app, explode, retries=0))
    assert (job.state, job.error_group) == (JobState.FAILED, "ValueError in explode")
    assert seen == ["second the fuse was lit", "first the fuse was lit"]


@both
async def test_what_a_hook_raises_before_the_body_is_how_the_run_ends(app: Fairlane, task: Any) -> None:
    told: list[str] = []

    @app.around_job
    def first(job: RunningJob) -> Iterator[None]:
        try:
            yield
        except PermissionError:
            told.append("first saw it")
            raise

    @app.around_job
    async def second(job: RunningJob) -> AsyncIterator[None]:
        if job.attempt < 3:
            raise PermissionError("closed today")
        yield

    @app.around_job
    def third(job: RunningJob) -> Iterator[None]:
        told.append("third")
        yield

    job = await ran(app, task(app, lambda: told.append("body"), retries=2))
    assert (job.state, job.attempt) == (JobState.COMPLETED, 3)
    assert told == ["first saw it", "first saw it", "third", "body"]


@both
async def test_what_a_hook_raises_after_the_body_is_how_the_run_ends(app: Fairlane, task: Any) -> None:
    @app.around_job
    async def first(job: RunningJob) -> AsyncIterator[None]:
        result = yield
        if result == "bad":
            raise Fail("nobody wants that")

    @app.around_job
    def second(job: RunningJob) -> Iterator[None]:
        try:
            yield
        except KeyError:
            raise OSError("said otherwise") from None

    job = await ran(app, task(app, lambda: "bad", retries=3))
    assert (job.state, job.attempt) == (JobState.FAILED, 1)
    assert "nobody wants that" in str(job.error)
    job = await ran(app, task(app, lambda: dict[str, int]()["key"], retries=0))
    assert job.error_group == "OSError in second"


@both
@pytest.mark.parametrize(
    ("ending", "state"),
    [
        (Retry("not yet", delay=0), JobState.COMPLETED),
        (Snooze(0), JobState.COMPLETED),
        (Fail("no"), JobState.FAILED),
        (Cancel(), JobState.CANCELLED),
        (StopIteration("odd"), JobState.COMPLETED),
    ],
    ids=["retry", "snooze", "fail", "cancel", "stop iteration"],
)
async def test_what_a_body_asks_for_passes_through_hooks(
    app: Fairlane, task: Any, ending: Exception, state: JobState
) -> None:
    seen: list[type[BaseException]] = []

    @app.around_job
    async def first(job: RunningJob) -> AsyncIterator[None]:
        try:
            yield
        except BaseException as exc:
            seen.append(type(exc))
            raise

    @app.around_job
    def second(job: RunningJob) -> Iterator[None]:
        yield

    def body() -> None:
        if current_job().fence == 1:
            raise ending

    job = await ran(app, task(app, body))
    assert (job.state, job.fence) == (state, 2 if state is JobState.COMPLETED else 1)
    # A coroutine turns a StopIteration into a RuntimeError by itself.
    assert seen == [RuntimeError if isinstance(ending, StopIteration) and task is coroutine else type(ending)]


async def test_a_cancellation_passes_through_hooks(app: Fairlane) -> None:
    seen: list[str] = []
    begun = asyncio.Event()

    @app.around_job
    async def first(job: RunningJob) -> AsyncIterator[None]:
        try:
            yield
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            seen.append("first")

    @app.around_job
    def second(job: RunningJob) -> Iterator[None]:
        try:
            yield
        finally:
            seen.append("second")

    @app.task(name="wait")
    async def wait() -> None:
        begun.set()
        await asyncio.sleep(60)

    worker = app.worker(slots=2)
    serving = asyncio.create_task(worker.run())
    handle = await wait.enqueue()
    await asyncio.wait_for(begun.wait(), 20)
    await handle.cancel()
    while not (await handle.job()).state.final:
        await asyncio.sleep(0.01)
    worker.stop(now=True)
    await serving
    assert (await handle.state(), seen) == (JobState.CANCELLED, ["second", "first"])


async def test_a_hook_may_be_cancelled_before_its_body(app: Fairlane) -> None:
    @app.around_job
    async def slow(job: RunningJob) -> AsyncIterator[None]:
        await asyncio.sleep(60)
        yield

    @app.task(name="never", timeout=0.1, retries=0)
    async def never() -> None:
        raise AssertionError

    job = await ran(app, never)
    assert (job.state, str(job.reason)) == (JobState.FAILED, "timeout")


@both
async def test_a_hook_that_never_yields_or_yields_twice_is_an_error_that_names_it(app: Fairlane, task: Any) -> None:
    wrong = ["twice"]

    @app.around_job
    async def never(job: RunningJob) -> AsyncIterator[None]:
        if wrong == ["never"]:
            return
        yield

    @app.around_job
    def twice(job: RunningJob) -> Iterator[None]:
        yield
        if wrong == ["twice"]:
            yield

    work = task(app, lambda: 1, retries=0)
    assert "twice yielded twice" in str((await ran(app, work)).error)
    wrong[:] = ["never"]
    assert "never ended without a yield" in str((await ran(app, work)).error)


@pytest.mark.parametrize("store_kind", ["sqlite", "postgresql"], indirect=True)
async def test_a_hook_that_raises_after_the_body_rolls_its_transaction_back(app: Fairlane) -> None:
    @app.around_job
    def hook(job: RunningJob) -> Iterator[None]:
        yield
        if job.attempt == 1:
            raise OSError("after all")

    @app.task(name="write", backoff=AT_ONCE)
    async def write() -> int:
        await current_job().transaction()
        return current_job().attempt

    job = await ran(app, write)
    assert (job.state, job.result, job.attempt) == (JobState.COMPLETED, b"2", 2)


@pytest.mark.parametrize(
    ("decorate", "hook", "words"),
    [
        ("around_job", lambda job: None, "must be a generator that yields once"),
        ("around_job", 7, "must be a generator"),
        ("on_worker_start", lambda: None, "must take one argument, the worker"),
        ("on_worker_stop", 7, "must decorate a function, not a int"),
    ],
)
def test_a_hook_that_cannot_work_is_refused_where_it_is_declared(decorate: str, hook: Any, words: str) -> None:
    app = Fairlane("sqlite:///never-opened.db")
    with pytest.raises(InvalidInput, match=words) as caught:
        getattr(app, decorate)(hook)
    assert caught.value.field == decorate
