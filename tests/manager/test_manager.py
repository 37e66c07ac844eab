"""Managers that run: they lead, serve, step down and resign, by the machine's clock with short intervals."""

from __future__ import annotations

import asyncio
import time

import pytest

from fairlane.manager.manager import Manager, OnChange
from fairlane.model.ids import new_id
from fairlane.model.intervals import Intervals
from fairlane.model.job import JobState, NewJob
from fairlane.model.schedule import Schedule, Timetable, template_of
from fairlane.model.session import Claim, NewSession, SessionKind
from fairlane.model.slots import Ask, Slots
from fairlane.store import open_store
from fairlane.store.port import Store

from .faults import faulty
from .waiting import running, until, until_awaited

SHORT = Intervals().scaled(0.1)


async def state_of(store: Store, id: str) -> JobState:
    [job] = await store.get([id])
    assert job is not None
    return job.state


async def dying_worker(store: Store, id: str, *, lease: float) -> None:
    """Register a worker, claim the job `id`, and never renew the lease."""
    session = NewSession(id=new_id(), kind=SessionKind.WORKER, lease=lease, queues=("default",), slots=Slots(total=1))
    await store.register(session)
    [job] = await store.enqueue([NewJob(id=id, task="t")])
    asks = (Ask("default", NewJob(id="x", task="t").priority, 1),)
    [claimed] = await store.claim(session.id, Claim(number=1, asks=asks, total=1))
    assert claimed.id == job.id


async def test_one_manager_does_everything(live_store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    changes: list[int | None] = []
    manager = Manager(live_store, session="only", intervals=SHORT, on_change=changes.append)
    await dying_worker(live_store, "held", lease=SHORT.lease)
    await live_store.enqueue([NewJob(id="later", task="t", delay=0.3)])
    template = template_of(NewJob(id="x", task="tick", queue="ticks"))
    await live_store.declare([Schedule(name="each", timetable=Timetable(every=1.0), job=template)])
    assert not manager.leads

    async with running(manager.run()):
        await until(lambda: manager.leads)
        assert manager.term == 1
        await until(lambda: manager.counts["promoted"] >= 1)
        await until(lambda: manager.counts["declared_dead"] == 1)
        await until(lambda: manager.counts["fired"] >= 2)
        assert await state_of(live_store, "held") is JobState.PENDING
        assert await state_of(live_store, "later") is JobState.PENDING

    assert not manager.leads
    assert (changes[0], changes[-1]) == (1, None)
    assert await live_store.leader() is None, "it resigned"
    assert "leading from term 1" in caplog.messages
    assert any(message.startswith("resigned from term") for message in caplog.messages)
    assert manager.counts["repaired"] == 0


async def test_a_stopped_leader_hands_over_at_once(live_store: Store) -> None:
    patient = Intervals(stand=3_600.0)
    one, two = (Manager(live_store, session=name, intervals=patient) for name in ("one", "two"))
    async with running(two.run()) as second:
        await until(lambda: two.leads)
        async with running(one.run()):
            await asyncio.sleep(0.1)
            assert not one.leads

            second.cancel()

            # Neither the lease of ten seconds nor the next try in an hour could bring it about so soon.
            await until(lambda: one.leads)
            assert one.term == 2


async def test_a_killed_leader_is_succeeded_with_a_larger_term_and_the_work_goes_on(live_store: Store) -> None:
    through, faults = faulty(live_store)
    one, two = Manager(through, session="one", intervals=SHORT), Manager(live_store, session="two", intervals=SHORT)
    async with running(one.run()) as first:
        await until(lambda: one.leads)
        async with running(two.run()):
            faults.down("resign")
            first.cancel()
            await until(lambda: two.leads)
            assert two.term == 2
            await live_store.enqueue([NewJob(id="later", task="t", delay=0.05)])
            await until(lambda: two.counts["promoted"] == 1)


async def test_a_leader_without_contact_stops_its_services_before_the_next_one_leads(live_store: Store) -> None:
    through, faults = faulty(live_store)
    told: list[tuple[str, int | None]] = []
    one = Manager(through, session="one", intervals=SHORT, on_change=lambda term: told.append(("one", term)))
    two = Manager(live_store, session="two", intervals=SHORT, on_change=lambda term: told.append(("two", term)))
    async with running(one.run()):
        await until(lambda: one.leads)
        async with running(two.run()):
            faults.hanging.add("*")
            await until(lambda: two.leads)
            assert not one.leads
            assert told == [("one", 1), ("one", None), ("two", 2)]


async def test_a_lost_term_seen_by_any_service_ends_the_leadership(
    live_store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """The renewal would come much later: a pass notices first."""
    intervals = Intervals(promote=0.05, stand=3_600.0)
    changes: list[int | None] = []
    manager = Manager(live_store, session="one", intervals=intervals, on_change=changes.append)
    async with running(manager.run()):
        await until(lambda: manager.leads)
        await live_store.resign(1)
        other = await live_store.lead("other", lease=60.0)
        assert other is not None

        await until(lambda: changes == [1, None])

    assert any(message.startswith("stepped down from term 1: term 1 has ended") for message in caplog.messages)
    leader = await live_store.leader()
    assert leader is not None
    assert leader.session == "other", "it did not resign what is not its own"


async def test_it_leads_again_after_an_outage_and_says_little(
    live_store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    through, faults = faulty(live_store)
    manager = Manager(through, session="one", intervals=SHORT)
    async with running(manager.run()):
        await until(lambda: manager.leads)
        faults.down()
        await until(lambda: not manager.leads)
        calls = faults.calls.total()
        await until(lambda: faults.calls.total() >= calls + 5)
        assert len(caplog.messages) <= 9, caplog.messages
        faults.up()
        await until(lambda: manager.leads)
        await live_store.enqueue([NewJob(id="later", task="t", delay=0.05)])
        await until(lambda: manager.counts["promoted"] == 1)


async def test_an_outage_runs_no_job_again(live_store: Store) -> None:
    """The worker and the manager lose the store together; both come back, the worker a little later."""
    through, faults = faulty(live_store)
    intervals = SHORT
    manager = Manager(through, session="one", intervals=intervals)
    await dying_worker(live_store, "held", lease=3.0)
    [session] = await live_store.sessions()
    async with running(manager.run()):
        await until(lambda: manager.leads)
        faults.down()
        await until_awaited(lambda: _expired(live_store, session.id))
        faults.up()
        await until(lambda: manager.leads)
        await live_store.renew(session.id, [], claim=0)
        [seen] = await live_store.sessions()

    assert manager.counts["declared_dead"] == 0
    assert seen.remaining > 0


async def _expired(store: Store, session: str) -> bool:
    return any(each.remaining < 0 for each in await store.sessions() if each.id == session)


async def test_two_managers_of_two_processes_fire_each_slot_once(live_store: Store, store_url: str) -> None:
    template = template_of(NewJob(id="x", task="tick"))
    await live_store.declare([Schedule(name="each", timetable=Timetable(every=1.0), job=template)])
    other_store = await open_store(store_url)
    managers = [Manager(store, session=f"m{n}", intervals=SHORT) for n, store in enumerate([live_store, other_store])]
    try:
        async with running(managers[0].run()), running(managers[1].run()):
            await until(lambda: sum(each.counts["fired"] for each in managers) >= 3)
    finally:
        await other_store.close()

    [queue] = await live_store.queues()
    assert queue.counts.pending == sum(each.counts["fired"] for each in managers)


async def test_a_listener_that_fails_does_not_stop_the_manager(live_store: Store) -> None:
    def fail(term: int | None) -> None:
        raise RuntimeError("a mistake of the listener")

    manager = Manager(live_store, session="one", intervals=SHORT, on_change=fail)
    async with running(manager.run()) as task:
        await until(lambda: manager.leads)
        assert not task.done()


def _setting(event: asyncio.Event) -> OnChange:
    return lambda _: event.set()


async def test_a_stop_that_comes_together_with_the_loss_of_the_term_is_not_lost(live_store: Store) -> None:
    hurried = Intervals(promote=0.001, rescue=0.001, admit=0.001)
    for _ in range(20):
        won = asyncio.Event()
        manager = Manager(live_store, session="one", intervals=hurried, on_change=_setting(won))
        task = asyncio.create_task(manager.run())
        await won.wait()
        leader = await live_store.leader()
        assert leader is not None
        await live_store.resign(leader.number)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 20)


async def test_a_stop_in_the_moment_of_the_election_is_clean(live_store: Store) -> None:
    def stop(term: int | None) -> None:
        if term is not None:
            task.cancel()

    task = asyncio.create_task(Manager(live_store, session="one", on_change=stop).run())
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 20)

    assert await live_store.leader() is None


async def test_no_task_is_left_when_it_has_stopped(live_store: Store) -> None:
    before = asyncio.all_tasks()
    manager = Manager(live_store, session="one", intervals=SHORT)
    async with running(manager.run()):
        await until(lambda: manager.leads)
        assert len(asyncio.all_tasks()) > len(before)

    # A store may have one of its own for a moment after a call of it was cancelled.
    await until(lambda: asyncio.all_tasks() == before)


async def test_an_idle_leader_asks_little(live_store: Store) -> None:
    through, faults = faulty(live_store)
    manager = Manager(through, session="one")
    started = time.monotonic()
    async with running(manager.run()):
        await until(lambda: manager.leads)
        await asyncio.sleep(2.0)
    seconds = time.monotonic() - started

    assert faults.calls.total() <= 10 + 6 * seconds
