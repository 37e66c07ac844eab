"""The lab as the tests of a user see it: real rules, no servers, and a clock that only the test moves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from unittest.mock import call

import pytest

from fairlane import (
    Backoff,
    Cancel,
    Fail,
    Fairlane,
    InvalidInput,
    JobCancelled,
    JobFailed,
    JobState,
    ManualClock,
    Priority,
    Release,
    Retry,
    Settings,
    Snooze,
    current_job,
    testing,
)
from fairlane.testing import Drained, Lab

PATIENCE = 45.0
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()
DAY = 86_400.0


@pytest.fixture
def app() -> Fairlane:
    """An application whose own store cannot be opened: whatever works, works in the lab."""
    return Fairlane(settings=Settings(url="sqlite:////nowhere/at/all.db"))


@pytest.fixture
async def lab(app: Fairlane) -> AsyncIterator[Lab]:
    """A lab with one worker."""
    async with testing.embedded(app, clock=ManualClock(NOON)) as lab:
        yield lab


async def test_what_was_enqueued_is_seen_and_run(app: Fairlane, lab: Lab) -> None:
    sent: list[tuple[str, bool]] = []

    @app.task
    async def send_mail(address: str, copy: bool = False) -> str:
        sent.append((address, copy))
        return address.upper()

    first = await send_mail.enqueue("ann@x")
    await send_mail.enqueue("bob@x", copy=True)
    assert await lab.enqueued(send_mail) == [call("ann@x"), call("bob@x", copy=True)]
    assert [job.state for job in await lab.jobs()] == [JobState.PENDING, JobState.PENDING]
    assert sent == []
    assert await lab.drain() == Drained(completed=2, runs=2)
    assert sent == [("ann@x", False), ("bob@x", True)]
    assert await first.result() == "ANN@X"
    assert await lab.drain() == Drained()
    assert await lab.enqueued(send_mail) == [call("ann@x"), call("bob@x", copy=True)]


async def test_jobs_are_listed_by_task_and_state(app: Fairlane, lab: Lab) -> None:
    @app.task(name="good")
    async def good() -> None: ...

    @app.task(name="bad", retries=0)
    async def bad() -> None:
        raise ValueError("no")

    handles = [await good.enqueue(), await bad.enqueue(), await good.enqueue()]
    await lab.drain()
    ids = [handle.id for handle in handles]
    assert [job.id for job in await lab.jobs()] == ids
    assert [job.id for job in await lab.jobs(good)] == [ids[0], ids[2]]
    assert [job.id for job in await lab.jobs("bad")] == [ids[1]]
    assert [job.id for job in await lab.jobs(state="failed")] == [ids[1]]
    assert await lab.jobs(good, JobState.FAILED) == []
    with pytest.raises(InvalidInput, match="state"):
        await lab.jobs(state="lost")


async def test_a_list_longer_than_a_page_is_whole(app: Fairlane, lab: Lab) -> None:
    @app.task
    async def count(n: int) -> None: ...

    await app.enqueue_many([count.call(n) for n in range(1_200)])
    assert await lab.enqueued(count) == [call(n) for n in range(1_200)]


async def test_a_retry_runs_once_its_whole_back_off_has_passed(app: Fairlane, lab: Lab) -> None:
    attempts: list[int] = []

    @app.task(retries=3, backoff=Backoff(base=10))
    async def flaky() -> str:
        attempts.append(current_job().attempt)
        if len(attempts) < 3:
            raise ConnectionError("the other side is away")
        return "done"

    job = await flaky.enqueue()
    assert await lab.drain() == Drained(retried=1, runs=1)
    assert await job.why() == "due in 10 s"
    lab.clock.advance(9)
    assert await lab.drain() == Drained()
    lab.clock.advance(1)
    assert await lab.drain() == Drained(retried=1, runs=1)
    lab.clock.advance(20)
    assert await lab.drain() == Drained(completed=1, runs=1)
    assert attempts == [1, 2, 3]
    assert await job.result() == "done"


async def test_a_job_that_fails_for_good_keeps_its_error(app: Fairlane, lab: Lab) -> None:
    @app.task(retries=1, backoff=Backoff(base=0))
    async def broken() -> None:
        raise ValueError("the tank is empty")

    job = await broken.enqueue()
    assert await lab.drain() == Drained(failed=1, retried=1, runs=2)
    with pytest.raises(JobFailed, match="the tank is empty"):
        await job.result()


async def test_task_functions_choose_how_their_run_ends(app: Fairlane, lab: Lab) -> None:
    @app.task
    async def body(how: str) -> None:
        if current_job().fence == 1:
            raise {"snooze": Snooze(60), "cancel": Cancel(), "fail": Fail("bad"), "retry": Retry(delay=30)}[how]

    for how in ("snooze", "cancel", "fail", "retry"):
        await body.enqueue(how)
    assert await lab.drain() == Drained(cancelled=1, failed=1, retried=1, runs=4)
    lab.clock.advance(60)
    assert await lab.drain() == Drained(completed=2, runs=2)


async def test_a_delayed_job_waits_for_the_clock_and_an_expired_one_never_runs(app: Fairlane, lab: Lab) -> None:
    @app.task
    async def remind() -> None: ...

    app_job = await remind.options(delay=3_600).enqueue()
    late = await remind.options(delay=3_600, expires=60).enqueue()
    assert await lab.drain() == Drained()
    lab.clock.advance(3_600)
    assert await lab.drain() == Drained(completed=1, cancelled=1, runs=1)
    assert await app_job.state() is JobState.COMPLETED
    with pytest.raises(JobCancelled, match="expired"):
        await late.result()


async def test_a_cron_task_runs_at_three_in_the_night(app: Fairlane) -> None:
    ran: list[str] = []
    clock = ManualClock(NOON)

    @app.task(cron="0 3 * * *")
    async def nightly() -> None:
        ran.append(f"{datetime.fromtimestamp(clock.now(), UTC):%d. %H:%M}")

    async with testing.embedded(app, clock=clock) as lab:
        assert await lab.drain() == Drained()
        clock.advance(14 * 3_600)
        assert await lab.drain() == Drained()
        clock.advance(3_600)
        assert await lab.drain() == Drained(completed=1, runs=1)
        assert await lab.drain() == Drained()
        for _ in range(3):
            clock.advance(DAY)
            await lab.drain()
        # A long jump: of the nights in between only the last one is made up for.
        clock.advance(10 * DAY + 3_600)
        await lab.drain()
    assert ran == ["02. 03:00", "03. 03:00", "04. 03:00", "05. 03:00", "15. 04:00"]


async def test_a_unique_job_exists_once_until_it_has_ended(app: Fairlane, lab: Lab) -> None:
    @app.task(unique="report:{day}")
    async def report(day: str) -> None: ...

    first = await report.enqueue("monday")
    again = await report.enqueue("monday")
    other = await report.enqueue("tuesday")
    assert (first.created, again.created, other.created) == (True, False, True)
    assert again.id == first.id
    assert await lab.drain() == Drained(completed=2, runs=2)
    assert (await report.enqueue("monday")).created
    assert await lab.enqueued(report) == [call("monday"), call("tuesday"), call("monday")]


async def test_an_ordered_lane_keeps_its_order_over_a_retry_while_others_go_on(app: Fairlane) -> None:
    app.queue("models").lane("doc:*", limit=1)
    ran: list[str] = []

    @app.task(queue="models", lane="doc:{doc}", backoff=Backoff(base=30, jitter=False))
    async def edit(doc: str, step: int) -> None:
        ran.append(f"{doc}{step}")
        if (doc, step) == ("a", 1) and current_job().attempt == 1:
            raise ConnectionError

    async with testing.embedded(app) as lab:
        for step in (1, 2, 3):
            await edit.options(priority="low" if step == 1 else "high").enqueue("a", step)
        waiting = await edit.enqueue("b", 1)
        assert await lab.drain() == Drained(completed=1, retried=1, runs=2)
        assert await waiting.state() is JobState.COMPLETED
        assert [job.state.value for job in await lab.jobs()] == ["scheduled", "pending", "pending", "completed"]
        lab.clock.advance(30)
        assert await lab.drain() == Drained(completed=3, runs=3)
    assert [name for name in ran if name.startswith("a")] == ["a1", "a1", "a2", "a3"]


async def test_priorities_and_lanes_decide_the_order(app: Fairlane, lab: Lab) -> None:
    ran: list[str] = []

    @app.task(lane="user:{user}")
    async def work(user: str, name: str) -> None:
        ran.append(name)

    for n in range(3):
        await work.options(priority="low").enqueue("ann", f"low {n}")
    for n in range(3):
        await work.enqueue("ann", f"ann {n}")
    await work.enqueue("bob", "bob")
    await work.options(priority="high").enqueue("ann", "high")
    assert await lab.drain() == Drained(completed=8, runs=8)
    assert ran[0] == "high"
    assert ran.index("bob") < ran.index("ann 2")
    assert ran[-3:] == ["low 0", "low 1", "low 2"]
    assert [name for name in ran if name.startswith("ann")] == ["ann 0", "ann 1", "ann 2"]


async def test_queues_take_turns(app: Fairlane, lab: Lab) -> None:
    ran: list[str] = []

    @app.task
    async def work(name: str) -> None:
        ran.append(name)

    for queue in ("b", "a"):
        for n in range(3):
            await work.options(queue=queue).enqueue(f"{queue}{n}")
    assert await lab.drain() == Drained(completed=6, runs=6)
    assert ran == ["a0", "b0", "a1", "b1", "a2", "b2"]


async def test_a_job_enqueues_into_a_new_queue(app: Fairlane, lab: Lab) -> None:
    @app.task
    async def first() -> None:
        await second.options(queue="novel").enqueue()

    @app.task
    async def second() -> None: ...

    await first.enqueue()
    assert await lab.drain() == Drained(completed=2, runs=2)


async def test_sticky_jobs_stay_together_and_the_clean_up_comes_last(app: Fairlane) -> None:
    ran: list[str] = []

    @app.task(sticky="plan-{plan}")
    async def step(plan: int, number: int) -> None:
        ran.append(f"{plan}.{number}")

    @app.task
    async def tidy(plan: int) -> None:
        ran.append(f"tidy {plan}")

    async with testing.embedded(app, workers=2) as lab:
        for number in (1, 2):
            for plan in (1, 2):
                await step.enqueue(plan, number)
        assert await app.release("plan-1", cleanup=tidy.call(1)) is Release.DRAINING
        assert (await lab.drain()).completed == 5
        places = {job.sticky: job.worker for job in await lab.jobs(step)}
        assert sorted(str(place) for place in places.values()) == ["default/0", "default/1"]
        assert [job.worker for job in await lab.jobs(tidy)] == [places["plan-1"]]
        assert ran.index("tidy 1") > ran.index("1.2") > ran.index("1.1")
        assert [binding.key for binding in await app.client.bindings() if binding.state == "open"] == ["plan-2"]


async def test_a_broadcast_runs_once_on_every_worker_of_its_pool(app: Fairlane) -> None:
    @app.task
    async def purge(model: str) -> str:
        return f"purged {model}"

    async with testing.embedded(app, workers={"default": 1, "gpu": 3}) as lab:
        sent = await app.broadcast(purge.call("flux"), pool="gpu")
        assert await lab.drain() == Drained(completed=3, runs=3)
        assert await sent.result() == dict.fromkeys(("gpu/0", "gpu/1", "gpu/2"), JobState.COMPLETED)
        assert [await copy.result() for copy in (await sent.children()).values()] == ["purged flux"] * 3
        assert await lab.enqueued(purge) == [call("flux")]


async def test_the_workers_are_there_however_far_the_clock_moves(app: Fairlane, lab: Lab) -> None:
    @app.task
    async def work() -> None: ...

    lab.clock.advance(100 * DAY)
    await work.options(sticky="plan-7").enqueue()
    await work.options(worker=0).enqueue()
    await app.broadcast(work.call())
    assert await lab.drain() == Drained(completed=3, runs=3)
    assert {job.worker for job in await lab.jobs(work) if job.kind != "broadcast"} == {"default/0"}


async def test_a_turn_is_held_however_far_the_clock_moves(app: Fairlane) -> None:
    app.queue("models").lane("*", limit=1)

    @app.task(queue="models", lane="flux")
    async def render() -> None: ...

    async with testing.embedded(app) as lab:
        async with app.turn("flux", queue="models", timeout=PATIENCE) as turn:
            job = await render.enqueue()
            lab.clock.advance(DAY)
            assert await lab.drain() == Drained()
            assert await job.why() == "lane flux is at its limit of 1"
            assert not turn.lost
        assert await lab.drain() == Drained(completed=1, runs=1)
        lab.clock.advance(DAY)
        async with app.turn("flux", queue="models", timeout=PATIENCE):
            pass


async def test_what_the_application_declares_counts_in_the_lab(app: Fairlane) -> None:
    app.queue("images", max_pending=2, lanes=["a", "b"])

    @app.task(queue="images", lane="{lane}")
    async def render(lane: str) -> None: ...

    async with testing.embedded(app):
        await render.enqueue("a")
        with pytest.raises(InvalidInput, match="lane"):
            await render.enqueue("c")
        [queue] = [queue for queue in await app.client.queues() if queue.name == "images"]
        assert queue.settings.max_pending == 2


async def test_the_same_jobs_run_in_the_same_order_every_time(app: Fairlane) -> None:
    ran: list[str] = []

    @app.task(lane="{lane}")
    async def work(lane: str, name: str) -> None:
        ran.append(name)
        if name.endswith("0"):
            await work.options(queue="late", lane=lane).enqueue(lane, f"{name} again")

    orders = []
    for _ in range(3):
        async with testing.embedded(app, workers=2) as lab:
            for n in range(24):
                queue, lane, priority = "abc"[n % 3], "xy"[n % 2], ("high", "normal", "low")[n % 3 - n % 2]
                sending = work.options(queue=queue, lane=lane, priority=Priority.parse(priority))
                await sending.enqueue(lane, str(n))
            await lab.drain()
        orders.append(tuple(ran))
        ran.clear()
    assert len(orders[0]) == 27
    assert len(set(orders)) == 1
