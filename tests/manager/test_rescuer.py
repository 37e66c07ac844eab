"""The rescuer: what it takes back, and when it is too cautious to declare a session dead."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fairlane.errors import StoreUnavailable
from fairlane.manager.leader_context import Contact, LeaderContext, StoreClock
from fairlane.manager.rescuer import Rescuer
from fairlane.model.job import Held, JobState
from fairlane.model.session import SessionState
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store
from tests.conformance.kit import Kit, Worker

from .conftest import MakeContext
from .faults import Faults, faulty


class Scene:
    """A leader that passes every two seconds, and a worker that is silent from the start."""

    def __init__(self, kit: Kit, worker: Worker, context: LeaderContext, faults: Faults) -> None:
        self.kit = kit
        self.clock = kit.clock
        self.worker = worker
        self.context = context
        self.faults = faults
        self.rescuer = Rescuer(context)

    async def passes(self, seconds: float) -> None:
        """Let time pass, with a pass every two seconds."""
        for _ in range(int(seconds / 2)):
            self.clock.advance(2.0)
            await self.one_pass()

    async def one_pass(self) -> None:
        await self.rescuer.run_once()

    async def dead(self) -> bool:
        """Whether the worker was declared dead."""
        sessions = await self.kit.store.sessions()
        [state] = [each.state for each in sessions if each.id == self.worker.id]
        return state is SessionState.DEAD


@pytest.fixture
async def scene(kit: Kit, store: Store, make_context: MakeContext) -> Scene:
    """The worker holds one job."""
    through, faults = faulty(store)
    worker = await kit.worker(lease=15.0)
    await kit.enqueue(id="held")
    await worker.claim()
    context = await make_context(through=through)
    return Scene(kit, worker, context, faults)


async def test_a_silent_worker_is_declared_dead_and_its_job_retried(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    await scene.passes(14)
    assert not await scene.dead()

    await scene.passes(4)

    assert await scene.dead()
    assert await scene.kit.state("held") is JobState.PENDING
    assert (scene.context.counts["declared_dead"], scene.context.counts["rescued"]) == (1, 1)
    worker = scene.worker.session
    [dead] = [each for each in await scene.kit.store.sessions() if each.id == worker.id]
    named = f"worker {dead.worker} on {dead.host}, pid {dead.pid} (session {dead.id})"
    assert caplog.messages == [f"declared 1 session dead and took 1 job back: {named}"]


async def test_recovery_takes_at_most_lease_and_two_passes(scene: Scene) -> None:
    started = scene.clock.now()
    while not await scene.dead():
        await scene.passes(2)

    assert scene.clock.now() - started <= 15.0 + 2 * 2.0


async def test_a_job_without_retries_left_fails_as_crashed(
    kit: Kit, scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await kit.worker(lease=1.0)
    await kit.enqueue(id="last", retries=0)
    await worker.claim()

    await scene.passes(14)

    assert await kit.state("last") is JobState.FAILED
    assert scene.context.counts["crashed"] == 1
    assert "1 job of dead sessions failed: no retry was left" in caplog.messages


async def test_the_first_pass_declares_no_session(scene: Scene, clock: ManualClock) -> None:
    await scene.passes(2)
    clock.advance(1_000.0)
    rescuer = Rescuer(replace(scene.context, clock=StoreClock(clock.monotonic)))

    await rescuer.run_once()
    assert not await scene.dead()
    clock.advance(2.0)
    await rescuer.run_once()
    assert await scene.dead(), "it has been in contact for long enough, so the second pass may"


async def test_a_fresh_process_waits_for_ten_seconds_of_contact(scene: Scene, clock: ManualClock) -> None:
    clock.advance(100.0)

    await scene.passes(10)
    assert not await scene.dead()
    await scene.passes(2)
    assert await scene.dead()


async def test_the_calls_of_a_standby_count_as_contact(
    kit: Kit, scene: Scene, make_context: MakeContext, clock: ManualClock
) -> None:
    contact = Contact(clock.monotonic)
    with contact.call():
        assert await kit.store.lead("standby", lease=10.0) == await kit.store.leader()
    clock.advance(20.0)
    await kit.store.resign(scene.context.term)
    rescuer = Rescuer(await make_context("standby", contact=contact))

    await rescuer.run_once()
    clock.advance(2.0)
    await rescuer.run_once()

    assert await scene.dead()


async def test_an_outage_begins_the_caution_anew(scene: Scene, clock: ManualClock) -> None:
    await scene.passes(12)
    scene.faults.down("rescue")
    for _ in range(10):
        clock.advance(2.0)
        with pytest.raises(StoreUnavailable):
            await scene.rescuer.run_once()
    scene.faults.up()

    await scene.passes(10)
    assert not await scene.dead(), "it may have been cut off together with us"
    await scene.passes(4)
    assert await scene.dead()


async def test_a_worker_that_renews_after_the_outage_keeps_its_job(scene: Scene, clock: ManualClock) -> None:
    await scene.passes(12)
    scene.faults.down("rescue")
    clock.advance(30.0)
    with pytest.raises(StoreUnavailable):
        await scene.rescuer.run_once()
    scene.faults.up()
    await scene.passes(4)

    assert (await scene.worker.renew(Held("held", 1))).lost == ()
    await scene.passes(14)

    assert await scene.kit.state("held") is JobState.RUNNING
    assert scene.context.counts["rescued"] == 0


@pytest.mark.parametrize("step", [3_600.0, -3_600.0, 2.5, -2.5])
async def test_a_step_of_the_clock_costs_one_pass(scene: Scene, clock: ManualClock, step: float) -> None:
    await scene.passes(14)
    clock.step_wall(step)

    await scene.passes(2)
    assert not await scene.dead()
    await scene.passes(2)
    assert await scene.dead()


async def test_a_small_step_is_within_the_slack(scene: Scene, clock: ManualClock) -> None:
    await scene.passes(14)
    clock.step_wall(1.5)
    await scene.passes(2)

    assert await scene.dead()


async def test_a_suspend_that_stops_our_clock_alone_is_noticed_before_a_session_is_declared(
    kit: Kit, store: Store, make_context: MakeContext, clock: ManualClock
) -> None:
    """The store runs elsewhere: its leases run out while this machine sleeps with its monotonic clock."""
    asleep = 0.0

    def monotonic() -> float:
        return clock.monotonic() - asleep

    worker = await kit.worker(lease=15.0)
    context = replace(await make_context(contact=Contact(monotonic)), clock=StoreClock(monotonic))
    scene = Scene(kit, worker, context, Faults())
    await scene.passes(10)
    await worker.renew()
    await scene.passes(2)
    clock.advance(500.0)
    asleep = 500.0

    await scene.one_pass()
    assert not await scene.dead()
    await worker.renew()
    await scene.passes(4)
    assert not await scene.dead(), "it had the time to renew"


async def test_standing_still_with_running_clocks_costs_one_pass(scene: Scene, clock: ManualClock) -> None:
    """A container was paused with all its processes: clocks ran on, no session could renew, and no call failed."""
    await scene.passes(12)
    clock.advance(60.0)

    await scene.one_pass()
    assert not await scene.dead()
    await scene.passes(2)
    assert await scene.dead()


async def test_a_full_pass_comes_back_at_once(kit: Kit, scene: Scene, clock: ManualClock) -> None:
    await scene.passes(12)
    for _ in range(3):
        worker = await kit.worker(lease=0.05, slots=600)
        await kit.enqueue_all([kit.new() for _ in range(600)])
        await worker.claim(600)
    clock.advance(2.0)
    delays = [await scene.rescuer.run_once()]
    while delays[-1] == 0.0:
        delays.append(await scene.rescuer.run_once())

    assert scene.context.counts["rescued"] >= 1_800
    assert delays[0] == 0.0
    assert delays[-1] == scene.context.intervals.rescue


def test_the_stores_clock_is_unknown_before_it_was_read(clock: ManualClock) -> None:
    read = StoreClock(clock.monotonic)
    assert (read.now(), read.age) == (None, None)
    read.set(100.0)
    clock.advance(2.0)
    assert (read.now(), read.age) == (102.0, 2.0)
