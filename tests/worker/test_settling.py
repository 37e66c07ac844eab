"""How the transaction of a body ends, whenever the body is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fairlane.errors import NotSupported, StoreUnavailable
from fairlane.model.job import Held
from fairlane.model.states import Move, Transition, complete
from fairlane.runtime.running_job import RunningJob, current_job
from fairlane.store.transactions import RunTransaction
from fairlane.task import AsyncTask
from fairlane.worker import body

from .apart import claimed
from .yard import NoSender

Body = Callable[[], Any]


class Odd(BaseException):
    """Not an Exception, like the exceptions that end a program."""


class Opened:
    """A transaction that ends as the test sets, and records how it ended."""

    broken = None
    connection = "connection"

    def __init__(self) -> None:
        self.told: list[str] = []
        self.answer: bool | Exception = True
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.waits = asyncio.Event()

    async def begin(self) -> Opened:
        await self._step("begin")
        return self

    async def commit(self, session: str, transition: Transition, progress: bytes | None) -> bool:
        assert (session, transition.move) == ("session", Move.COMPLETE)
        await self._step(f"commit {progress!r}" if progress else "commit")
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def roll_back(self) -> None:
        await self._step("roll back")

    async def _step(self, name: str) -> None:
        self.waits.set()
        await self.go_on.wait()
        self.told.append(name)


class Stage:
    """One run of a body."""

    def __init__(self, function: Body) -> None:
        self.opened = Opened()
        job = claimed()
        store: Any = type("Store", (), {"transactions": self.opened})

        async def get() -> Any:
            return store

        self.running = RunningJob(job, lambda held, value: None, None, lambda: RunTransaction(get, "session", job.held))
        self.running.enter()
        sender: Any = NoSender()
        task: AsyncTask[[], Any] = AsyncTask(sender, function, {"name": "task"})
        self.run = asyncio.ensure_future(body.run_coroutine(task, job, self.running))

    async def stopped(self) -> body.Ending | None:
        """Cancel the run while the store does not answer, then let it answer. Returns the ending, if there is one."""
        for _ in range(3):
            self.run.cancel()
            await asyncio.sleep(0.01)
        self.opened.go_on.set()
        try:
            return await asyncio.wait_for(self.run, 30)
        except asyncio.CancelledError:
            return None


async def effect() -> str:
    """A body that asks for a transaction."""
    assert await current_job().transaction() == "connection"
    current_job().progress(1)
    return "done"


async def test_a_body_that_returns_is_committed_with_its_last_report() -> None:
    stage = Stage(effect)
    assert await stage.run == body.Returned(b'"done"', committed=True)
    assert stage.opened.told == ["begin", "commit b'1'"]


async def test_a_body_that_asks_for_none_has_none() -> None:
    async def plain() -> None: ...

    stage = Stage(plain)
    assert await stage.run == body.Returned(b"null")
    assert stage.opened.told == []


async def test_a_body_that_is_stopped_is_rolled_back() -> None:
    async def slow() -> None:
        await current_job().transaction()
        await asyncio.sleep(60)

    stage = Stage(slow)
    while not stage.opened.told:
        await asyncio.sleep(0.01)
    stage.run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stage.run
    assert stage.opened.told == ["begin", "roll back"]


async def test_a_body_that_is_stopped_while_its_transaction_begins_leaves_none_behind() -> None:
    stage = Stage(effect)
    stage.opened.go_on.clear()
    await stage.opened.waits.wait()
    assert await stage.stopped() is None
    assert stage.opened.told == ["begin", "roll back"]


@pytest.mark.parametrize(("answer", "committed"), [(True, True), (False, None), (StoreUnavailable("gone"), None)])
async def test_a_commit_that_has_begun_is_waited_for_even_if_the_run_is_stopped(
    answer: bool | Exception, committed: bool | None
) -> None:
    async def returning() -> None:
        await current_job().transaction()
        stage.opened.go_on.clear()
        stage.opened.waits.clear()

    stage = Stage(returning)
    stage.opened.answer = answer
    while stage.opened.go_on.is_set():
        await asyncio.sleep(0)
    await stage.opened.waits.wait()
    ending = await stage.stopped()
    if committed:
        assert ending == body.Returned(b"null", committed=True)
    else:
        assert isinstance(ending, body.Raised), "only what is committed counts as returned"
    assert stage.opened.told == ["begin", "commit"]


@pytest.mark.parametrize("error", [ValueError("no"), Odd()])
async def test_a_body_that_raises_is_rolled_back(error: BaseException) -> None:
    async def raising() -> None:
        await current_job().transaction()
        raise error

    stage = Stage(raising)
    if isinstance(error, Exception):
        assert isinstance(await stage.run, body.Raised)
    else:
        with pytest.raises(Odd):
            await stage.run
    assert stage.opened.told == ["begin", "roll back"]


async def test_the_reason_of_the_store_is_reported_instead_of_what_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def puzzled() -> None:
        await current_job().transaction()
        raise ValueError("cannot operate on a closed database")

    monkeypatch.setattr(Opened, "broken", StoreUnavailable("it was open for too long"))
    ending = await Stage(puzzled).run
    assert isinstance(ending, body.Raised)
    assert "too long" in ending.error


@pytest.mark.parametrize("committed", [True, False])
async def test_what_is_reported_inside_is_written_with_the_commit_or_after_its_failure(committed: bool) -> None:
    reported: list[bytes] = []

    async def reporting() -> None:
        current_job().progress("before")
        await current_job().transaction()
        current_job().progress("inside")

    stage = Stage(reporting)
    stage.running._report = lambda held, value: reported.append(value)
    stage.opened.answer = committed
    await stage.run
    assert reported == ([b'"before"'] if committed else [b'"before"', b'"inside"'])
    assert stage.opened.told == ["begin", "commit b'\"inside\"'"]


async def test_a_caller_that_stops_waiting_does_not_cancel_it_for_others() -> None:
    async def impatient() -> str:
        try:
            await asyncio.wait_for(current_job().transaction(), 0.01)
        except TimeoutError:
            stage.opened.go_on.set()
        return str(await current_job().transaction())

    stage = Stage(impatient)
    stage.opened.go_on.clear()
    assert await stage.run == body.Returned(b'"connection"', committed=True)
    assert stage.opened.told == ["begin", "commit"]


async def test_outside_of_a_coroutine_function_there_is_none() -> None:
    running = RunningJob(claimed(), lambda held, value: None)
    with pytest.raises(NotSupported, match="async def"):
        running.transaction()


async def test_a_transaction_that_never_began_commits_nothing() -> None:
    async def get() -> Any:
        raise AssertionError("the store was opened")

    run = RunTransaction(get, "session", Held("a", 1))
    assert await run.commit(complete(Held("a", 1))) is False
    assert await run.roll_back() is None
