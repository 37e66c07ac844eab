"""Lanes whose limit changes, job by job in many steps: what happens to them, and to others, in between."""

from __future__ import annotations

import pytest
import redis

from fairlane.model.job import Held, JobKind, JobState, Priority
from fairlane.model.maintenance import Retention
from fairlane.model.settings import LaneRule
from tests.conformance.kit import Kit, Worker
from tests.conformance.runs import bulk, drain
from tests.servers import valkey

from ..settling import Settling

FREE, PAUSED = LaneRule(pattern="slow"), LaneRule(pattern="slow", paused=True)
ONE, TWO = LaneRule(pattern="slow", limit=1), LaneRule(pattern="slow", limit=2)
TWO_IN_ORDER = LaneRule(pattern="slow", limit=2, ordered=True)


@pytest.fixture
def kit(settling: Settling) -> Kit:
    return settling.kit


async def test_a_lane_that_settles_starts_nothing_and_all_others_go_on(settling: Settling, kit: Kit) -> None:
    worker = await kit.worker(slots=50)
    slow = [await kit.enqueue(lane="slow") for _ in range(6)]
    [first] = await worker.claim(1)
    for rule, starts in ((PAUSED, []), (FREE, slow[1:4])):
        assert await settling.change(rule)
        for _ in range(3):
            other = await kit.enqueue(lane="other")
            assert await worker.claim_ids(50) == [other]
            assert await settling.go_on()
        await settling.end()
        assert await worker.claim_ids(len(starts)) == starts
    await worker.complete(first)
    assert await drain(worker) == slow[4:]


async def test_the_leader_continues_for_a_process_that_died_while_changing_rules(settling: Settling, kit: Kit) -> None:
    slow = [await kit.enqueue(lane="slow") for _ in range(5)]
    worker = await kit.worker(slots=50)
    assert await settling.change(TWO)
    assert not await worker.claim(50)
    assert not (await kit.store.admit()).more
    assert await worker.claim_ids(50) == slow[:2]


async def test_configure_returns_when_the_rules_hold(settling: Settling, kit: Kit) -> None:
    slow = [await kit.enqueue(lane="slow") for _ in range(5)]
    settling.let_live()
    worker = await kit.worker(slots=50)
    await kit.settings("default", TWO, version=1)
    assert await worker.claim_ids(50) == slow[:2]


async def test_a_lane_that_is_freed_keeps_its_order_for_jobs_that_arrive_meanwhile(
    settling: Settling, kit: Kit
) -> None:
    await settling.change(ONE)
    worker = await kit.worker(slots=50)
    slow = [await kit.enqueue(lane="slow", priority=Priority.LOW) for _ in range(7)]
    [first] = await worker.claim(50)
    assert await settling.change(FREE)
    assert await settling.go_on(3)
    # A late one, whose number was passed already, and others that were just added.
    await worker.hand_back(first)
    late = bulk(kit, "slow", 2, priority=Priority.LOW)
    slow += [await kit.enqueue(lane="slow", priority=Priority.LOW), *[job.id for job in await kit.enqueue_all(late)]]
    assert not await worker.claim(50)
    assert [position.place for position in await kit.store.positions(slow) if position] == list(range(1, 11))
    await settling.end()
    assert await worker.claim_ids(50) == slow


async def test_the_turn_of_a_lane_is_not_lost_when_its_record_is_forgotten_meanwhile(
    settling: Settling, kit: Kit
) -> None:
    worker = await kit.worker(slots=50)
    slow = [await kit.enqueue(lane="slow") for _ in range(3)]
    assert await settling.change(LaneRule(pattern="slow", limit=3, ordered=True))
    await kit.store.prune(Retention(), limit=1_000)
    await settling.end()
    assert await worker.claim_ids(50) == slow


async def test_a_cache_with_a_settling_lane_is_invalidated_when_it_has_settled(settling: Settling, kit: Kit) -> None:
    """Another version of the functions, or another server, remembers rules for as long as their number stays."""
    prefix = settling.store._functions._prefix
    with redis.Redis(port=valkey.server().port) as client:

        def number() -> int:
            return int(client.hget(f"{prefix}counter", "settings") or 0)

        for lane in ("slow", "slower"):
            await kit.enqueue_all(bulk(kit, lane, 3))
        assert await settling.change(LaneRule(pattern="slow*", limit=1))
        changes, more = 0, True
        while more:
            before, left = number(), client.hlen(f"{prefix}settling:1")
            more = await settling.go_on()
            assert (number() > before) == (client.hlen(f"{prefix}settling:1") < left)
            changes += number() > before
        assert changes == 2
        assert not client.exists(f"{prefix}settling:1", f"{prefix}unsettled")


async def test_workers_are_notified_when_a_lane_has_settled(settling: Settling, kit: Kit) -> None:
    await kit.enqueue_all(bulk(kit, "slow", 3))
    for rule in (PAUSED, FREE):
        assert await settling.change(rule)
        with redis.Redis(port=valkey.server().port) as client, client.pubsub() as subscriber:
            subscriber.subscribe(f"{settling.store._functions._prefix}topics")
            assert subscriber.get_message(timeout=5)
            await settling.end()
            message = subscriber.get_message(timeout=0.2)
        assert (message is not None and message["data"] == b"queue:default") == (rule is FREE)


async def test_a_lane_that_begins_to_settle_and_stays_as_it_was_stays_closed_for_its_head(
    settling: Settling, kit: Kit
) -> None:
    ordered = ONE
    await settling.change(ordered)
    worker = await kit.worker()
    slow = [await kit.enqueue(lane="slow") for _ in range(4)]
    await worker.complete(*await worker.claim())
    await worker.retry(*await worker.claim(), delay=5.0)
    assert await settling.change(FREE)
    await settling.change(ordered)
    await settling.end()
    assert not await worker.claim()
    kit.clock.advance(6)
    await kit.store.promote()
    assert await drain(worker, batch=1) == slow[1:]


async def test_configuring_stored_rules_again_waits_until_they_hold(settling: Settling, kit: Kit) -> None:
    """The process that stored them may have died before the lanes had settled."""
    slow = [await kit.enqueue(lane="slow") for _ in range(5)]
    assert await settling.change(TWO)
    settling.let_live()
    await kit.settings("default", TWO, version=1)
    assert await (await kit.worker()).claim_ids(10) == slow[:2]


async def test_a_lane_that_begins_to_settle_anew_starts_its_first_job_first(settling: Settling, kit: Kit) -> None:
    await settling.change(TWO)
    first, second = [await kit.enqueue(lane="slow") for _ in range(2)]
    # The first has lost its place by the time the other rule comes, and the second has not.
    assert await settling.change(FREE)
    await settling.change(LaneRule(pattern="slow", limit=1, ordered=False))
    await settling.end()
    worker = await kit.worker()
    assert await drain(worker, batch=1) == [first, second]


async def test_a_retry_keeps_an_ordered_lane_closed_though_it_was_not_passed_yet(settling: Settling, kit: Kit) -> None:
    worker = await kit.worker()
    slow = [await kit.enqueue(lane="slow") for _ in range(4)]
    first, second = await worker.claim(2)
    assert await settling.change(ONE)
    await worker.retry(second, delay=1.0)
    await worker.complete(first)
    await settling.end()
    assert not await worker.claim(5)
    kit.clock.advance(2)
    await kit.store.promote()
    assert await drain(worker) == slow[1:]


async def test_a_running_job_has_the_rank_of_the_new_order_when_it_comes_back(settling: Settling, kit: Kit) -> None:
    await settling.change(TWO)
    worker = await kit.worker()
    await kit.enqueue(lane="slow", sticky="key", priority=Priority.LOW)
    [held] = await worker.claim(1)
    await settling.change(TWO_IN_ORDER)
    await settling.end()
    await worker.retry(held, delay=5.0)
    for _ in range(2):
        await kit.enqueue(lane="slow", priority=Priority.LOW)
    await settling.change(ONE)
    await settling.end()
    assert not await worker.claim(5), "the lane is closed for the first one, which waits for its retry"


async def turn(kit: Kit, waiter: Worker) -> str:
    new = kit.new("turn", lane="slow", kind=JobKind.TURN, waiter=waiter.id)
    return (await kit.store.enqueue([new]))[0].id


async def test_a_turn_does_not_start_in_a_lane_that_is_being_paused(settling: Settling, kit: Kit) -> None:
    await settling.change(ONE)
    busy = await kit.worker(slots=1)
    await kit.enqueue(sticky="key")
    held = await busy.claim(1)
    await kit.enqueue(lane="slow", sticky="key")  # it has the place of the lane, and no worker can start it
    waiting = await turn(kit, await kit.waiter())
    kit.clock.advance(3)
    await busy.renew(*held)
    assert await settling.change(PAUSED)
    await kit.store.admit()
    assert await kit.state(waiting) is JobState.PENDING


async def test_no_place_moves_to_a_late_job_of_a_lane_that_is_being_freed(settling: Settling, kit: Kit) -> None:
    await settling.change(TWO)
    busy, idle = await kit.worker(slots=1), await kit.worker()
    await kit.enqueue(sticky="key")
    held = await busy.claim(1)
    first = await kit.enqueue(lane="slow")
    claimed = await idle.claim(1)
    await kit.enqueue(lane="slow", sticky="key")  # it has the other place, and no worker can start it
    last = await kit.enqueue(lane="slow")
    assert await settling.change(FREE)
    await idle.hand_back(*claimed)  # its number was passed already
    kit.clock.advance(3)
    await busy.renew(*held)
    await kit.store.admit()
    assert await drain(idle) == [first, last]
    assert (await settling.store.recount()).differences == ()


async def test_a_turn_starts_in_a_lane_that_has_settled_without_a_leader(settling: Settling, kit: Kit) -> None:
    await settling.change(ONE)
    waiter = await kit.waiter()
    for _ in range(3):
        await waiter.complete(Held(await turn(kit, waiter), 1))
    await turn(kit, waiter)
    assert await settling.change(TWO)
    settling.let_live()
    await kit.settings("default", TWO, version=2)
    assert await kit.state(await turn(kit, waiter)) is JobState.RUNNING


async def test_a_job_can_start_that_is_the_first_ever_in_its_inbox_when_the_lane_has_settled(
    settling: Settling, kit: Kit
) -> None:
    await settling.change(PAUSED)
    workers = [await kit.worker(), await kit.worker()]
    slow = [await kit.enqueue(lane="slow", sticky=key) for key in "ab"]
    assert await settling.change(FREE)
    assert not await settling.go_on(10)
    assert [await worker.claim_ids(5) for worker in workers] == [[id] for id in slow]


async def test_places_are_not_called_exact_while_a_lane_settles(settling: Settling, kit: Kit) -> None:
    await kit.worker()
    slow = [await kit.enqueue(lane="slow", sticky="key") for _ in range(5)]
    assert await settling.change(TWO)
    assert not any(position.exact for position in await kit.store.positions(slow) if position)
    await settling.end()
    settled = [position for position in await kit.store.positions(slow) if position]
    assert [position.place for position in settled] == [1, 2, 3, 4, 5]
    assert all(position.exact for position in settled)
