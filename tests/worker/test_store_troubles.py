"""The worker when its store fails: outages, lost sessions, rejections and hanging calls."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

import pytest

from fairlane.errors import InvalidInput, SessionLost, Stale
from fairlane.model.job import JobState
from fairlane.model.retry import Backoff
from fairlane.model.session import SessionState
from fairlane.model.settings import LaneRule

from .faulty import Faulty, wait_for
from .yard import PATIENCE, Yard

AT_ONCE = Backoff(base=0, most=0)


async def test_an_outage_while_it_registers_anew_is_waited_out(yard: Yard) -> None:
    async def body() -> None:
        return None

    yard.task(body)
    faulty = Faulty(yard.store)
    async with yard.worker(store=faulty) as worker:
        failures = iter(["before", "after", "before"])
        faulty.fail = lambda verb: next(failures, None) if verb == "register" else None
        await yard.store.leave(worker.session.id)
        await yard.until(await yard.enqueue("body"))
        live = [s for s in await yard.store.sessions() if s.state is SessionState.LIVE]
        # The registration whose answer was lost is the one that was repeated: there is no second session.
        assert [s.id for s in live] == [worker.session.id]


async def test_a_loss_that_is_reported_twice_creates_one_new_session(yard: Yard) -> None:
    async def body() -> None:
        return None

    yard.task(body)
    async with yard.worker() as worker:
        first = worker.session.id
        await yard.store.leave(first)
        await wait_for(lambda: worker.session.id != first)
        second = worker.session.id
        worker.session_lost(first)
        await asyncio.sleep(0.2)
        await yard.until(await yard.enqueue("body"))
        assert worker.session.id == second


async def test_a_loss_that_is_reported_while_it_registers_creates_one_new_session(yard: Yard) -> None:
    async def body() -> None:
        return None

    yard.task(body)
    faulty = Faulty(yard.store)
    async with yard.worker(store=faulty) as worker:
        first = worker.session.id
        registered = []

        def tell(verb: str, args: tuple[Any, ...]) -> None:
            if verb == "register":
                registered.append(args)
                worker.session_lost(first)

        faulty.refuse = tell
        await yard.store.leave(first)
        await wait_for(lambda: worker.session.id != first)
        await yard.until(await yard.enqueue("body"))
        assert len(registered) == 1


async def test_burst_goes_on_after_it_has_lost_its_session(yard: Yard) -> None:
    async def body() -> None:
        return None

    yard.task(body)
    ids = [await yard.enqueue("body") for _ in range(3)]
    faulty = Faulty(yard.store)
    worker = yard.make(store=faulty, burst=True)
    once = iter([True])

    def refuse(verb: str, args: tuple[Any, ...]) -> None:
        if verb == "claim" and next(once, False):
            raise SessionLost("gone")

    faulty.refuse = refuse
    await asyncio.wait_for(worker.run(), PATIENCE)
    assert {(await yard.job(id)).state for id in ids} == {JobState.COMPLETED}


async def test_a_result_that_the_store_rejects_for_good_holds_up_no_other(yard: Yard) -> None:
    async def body(name: str) -> str:
        return name

    yard.task(body)
    ids = {name: await yard.enqueue("body", name) for name in ("a", "b", "odd", "c", "d")}

    def refuse(verb: str, args: tuple[Any, ...]) -> None:
        if verb == "finish" and any(t.held.id == ids["odd"] and t.result for t in args[1]):
            raise InvalidInput("result", "is not to my taste")

    faulty = Faulty(yard.store)
    faulty.refuse = refuse
    async with yard.worker(store=faulty, slots=5):
        jobs = {name: await yard.until(id) for name, id in ids.items()}
    assert {name: job.state for name, job in jobs.items() if name != "odd"} == dict.fromkeys("abcd", JobState.COMPLETED)
    assert jobs["odd"].state is JobState.FAILED
    assert jobs["odd"].error == "result: is not to my taste"


async def test_without_contact_nothing_new_is_claimed(yard: Yard) -> None:
    runs = Counter[str]()

    async def body(lane: str) -> None:
        runs[lane] += 1
        await asyncio.sleep(30 if runs[lane] == 1 else 0)

    yard.task(body, lane="{lane}")
    await yard.lanes(LaneRule(pattern="one", limit=1))
    async with yard.worker(slots=1) as worker:
        id = await yard.enqueue("body", "one")
        await wait_for(lambda: runs["one"] == 1)
        with pytest.MonkeyPatch.context() as deaf:
            deaf.setattr(worker, "renewed", lambda renewal: None)
            worker.contact_lost()
            await yard.until(id, JobState.PENDING)
            await asyncio.sleep(0.5)
            assert runs["one"] == 1
        assert (await yard.until(id)).state is JobState.COMPLETED
    assert runs["one"] == 2


async def test_what_was_claimed_before_contact_was_lost_does_not_begin_in_a_limited_lane(yard: Yard) -> None:
    runs = Counter[str]()

    async def body(lane: str) -> None:
        runs[lane] += 1

    yard.task(body, lane="{lane}")
    await yard.lanes(LaneRule(pattern="one", limit=1))
    faulty = Faulty(yard.store)

    async def lose_contact(verb: str, answer: Any) -> None:
        # The store has started the jobs, and contact is lost before the worker gets the answer.
        if verb == "claim" and answer:
            worker.contact_lost()
            await asyncio.sleep(0)

    async with yard.worker(store=faulty) as worker:
        with pytest.MonkeyPatch.context() as deaf:
            deaf.setattr(worker, "renewed", lambda renewal: None)
            faulty.answered = lose_contact
            calls = [yard.registry.find("body").call(lane) for lane in ("one", "many")]
            limited, free = [answer.id for answer in await yard.store.enqueue([call.job for call in calls])]
            await yard.until(free)
            job = await yard.until(limited, JobState.PENDING)
            assert [attempt.outcome for attempt in job.attempts] == ["taken_back"]
            assert runs["one"] == 0
            faulty.answered = None
        assert (await yard.until(limited)).attempt == 1
    assert runs == {"one": 1, "many": 1}


async def test_an_unexpected_error_is_logged_with_its_traceback(yard: Yard, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        return None

    yard.task(body)
    faulty = Faulty(yard.store)
    broken = iter([True])

    def refuse(verb: str, args: tuple[Any, ...]) -> None:
        if verb == "finish" and next(broken, False):
            raise NameError("a typing mistake")

    faulty.refuse = refuse
    with caplog.at_level(logging.WARNING, logger="fairlane.worker"):
        async with yard.worker(store=faulty):
            await yard.until(await yard.enqueue("body"))
    [record] = [r for r in caplog.records if "a typing mistake" in r.getMessage()]
    assert record.exc_info is not None


async def test_a_worker_leaves_no_subscription_behind(yard: Yard) -> None:
    for _ in range(3):
        async with yard.worker():
            pass
    wakeups: Any = yard.store.wakeups
    kept = wakeups._subscriptions
    assert list(kept.all() if hasattr(kept, "all") else kept) == []


async def test_the_keeper_of_a_loop_that_is_gone_lets_the_session_expire(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone:
        def is_closed(self) -> bool:
            return True

    async with yard.worker() as worker:
        monkeypatch.setattr(worker._keeper, "_owner_loop", Gone())

        async def expired() -> bool:
            return any(s.id == worker.session.id and s.remaining < 0 for s in await yard.store.sessions())

        await wait_for(expired)


async def test_importing_an_application_does_not_count_as_time_of_the_body(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    from . import slow_to_import

    monkeypatch.setenv("FAIRLANE_TEST_SLOW", "yes")
    yard.registry.add(slow_to_import.quick)
    async with yard.worker():
        job = await yard.until(await yard.enqueue("quick"))
    assert (job.state, job.result) == (JobState.COMPLETED, b'"in time"')


async def test_endings_are_written_while_the_store_fails_at_claims(yard: Yard) -> None:
    released = asyncio.Event()

    async def body() -> str:
        await released.wait()
        return "done"

    yard.task(body)
    first = [await yard.enqueue("body") for _ in range(2)]
    broken = asyncio.Event()

    def refuse(verb: str, args: tuple[Any, ...]) -> None:
        if broken.is_set() and verb in ("claim", "finish with claim"):
            raise ValueError("a record that cannot be read")

    class WithoutClaims(Faulty):
        """Rejects calls of `finish` that claim."""

        async def finish(self, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("claim") is not None:
                refuse("finish with claim", args)
            return await self.store.finish(*args, **kwargs)

    faulty = WithoutClaims(yard.store)
    faulty.refuse = refuse
    async with yard.worker(store=faulty, slots=3):
        for id in first:
            await yard.until(id, JobState.RUNNING)
        broken.set()
        later = await yard.enqueue("body")
        released.set()
        for id in first:
            assert (await yard.until(id, patience=5)).state is JobState.COMPLETED
        broken.clear()
        assert (await yard.until(later)).state is JobState.COMPLETED


async def test_a_claim_that_the_store_rejects_as_too_old_counts_as_unanswered(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hint about the work is kept, and not dropped as after an empty answer."""

    async def body() -> None:
        return None

    yard.task(body)
    rejected: list[int] = []
    answered: list[int] = []

    def refuse(verb: str, args: tuple[Any, ...]) -> None:
        if verb == "claim" and not rejected:
            rejected.append(args[1].number)
            raise Stale("a later claim was seen")

    faulty = Faulty(yard.store)
    async with yard.worker(store=faulty) as worker:
        monkeypatch.setattr(worker._announced, "claimed", lambda claim, jobs: answered.append(claim.number))
        faulty.refuse = refuse
        await yard.until(await yard.enqueue("body"))
    assert rejected
    assert answered
    assert not set(rejected) & set(answered)
