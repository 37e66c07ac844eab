"""Wake-ups: delivery from one store object to another, and which processes each verb notifies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from fairlane.model.job import Held, JobKind
from fairlane.model.settings import LaneRule
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store
from fairlane.store.wakeups import (
    LEADER,
    Subscription,
    job_topic,
    place_topic,
    queue_topic,
    session_topic,
    worker_topic,
)

from .kit import Kit, Worker
from .reopening import open_again

PATIENCE = 10.0
"""How long a test waits, in real seconds, for a hint that must come. It comes within milliseconds."""
DEFAULT = queue_topic("default")


@pytest.fixture
async def listener(store: Store, store_url: str, clock: ManualClock) -> AsyncIterator[Store]:
    """A second store object on the same URL."""
    opened = await open_again(store_url, clock)
    yield opened
    await opened.close()


async def _heard(subscription: Subscription, *topics: str) -> frozenset[str]:
    """Wait until all `topics` were received. Returns all that were."""
    received: frozenset[str] = frozenset()
    while not received.issuperset(topics):
        news = await subscription.wait(PATIENCE)
        assert news, f"waited in vain for {set(topics) - received}"
        received |= news
    return received


async def test_topics_that_one_store_object_publishes_are_delivered_to_another(store: Store, listener: Store) -> None:
    subscription = listener.wakeups.subscribe(["queue:a", "queue:b"])
    store.wakeups.publish(["queue:a"])
    assert await _heard(subscription, "queue:a") == {"queue:a"}
    store.wakeups.publish(["queue:a", "queue:b"])
    assert await _heard(subscription, "queue:a", "queue:b") == {"queue:a", "queue:b"}
    subscription.close()


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("steps", range(6))
async def test_a_wait_that_is_cancelled_at_any_moment_loses_nothing(store: Store, steps: int, apart: bool) -> None:
    subscription = store.wakeups.subscribe(["queue:a"])
    waiting = asyncio.create_task(subscription.wait())
    await asyncio.sleep(0)
    if apart:
        await asyncio.to_thread(store.wakeups.publish, ["queue:a"])
    else:
        store.wakeups.publish(["queue:a"])
    for _ in range(steps):
        await asyncio.sleep(0)
    waiting.cancel()
    try:
        received = await waiting
    except asyncio.CancelledError:
        received = await subscription.wait(0)
    assert received == {"queue:a"}
    subscription.close()


async def test_the_callback_of_a_subscription_is_called_for_every_delivery(store: Store, listener: Store) -> None:
    woken: list[int] = []
    subscription = listener.wakeups.subscribe([DEFAULT, "leader"], lambda: woken.append(len(woken)))

    async def more_than(times: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while len(woken) <= times:
                await asyncio.sleep(0.005)

    store.wakeups.publish([DEFAULT])
    await more_than(0)
    # The topics received so far were not taken; the next one wakes all the same.
    before = len(woken)
    store.wakeups.publish(["leader"])
    await more_than(before)
    assert await _heard(subscription, DEFAULT, "leader") == {DEFAULT, "leader"}
    subscription.close()
    before = len(woken)
    store.wakeups.publish([DEFAULT])
    await asyncio.sleep(0.05)
    assert len(woken) == before


async def test_a_store_object_notifies_itself(store: Store) -> None:
    subscription = store.wakeups.subscribe(["leader"])
    store.wakeups.publish(["leader"])
    assert await _heard(subscription, "leader") == {"leader"}
    subscription.close()


async def test_every_listener_is_notified_of_its_own_topics_only(store: Store, listener: Store) -> None:
    one, two = listener.wakeups.subscribe(["queue:one"]), listener.wakeups.subscribe(["queue:two", "queue:last"])
    store.wakeups.publish(["queue:one", "queue:two", "queue:three"])
    store.wakeups.publish(["queue:last"])
    assert await _heard(two, "queue:two", "queue:last") == {"queue:two", "queue:last"}
    assert await _heard(one, "queue:one") == {"queue:one"}
    one.close()
    two.close()


async def test_what_is_published_between_two_calls_is_kept_for_the_next(store: Store, listener: Store) -> None:
    subscription = listener.wakeups.subscribe(["queue:a", "queue:b"])
    marker = listener.wakeups.subscribe(["queue:end"])
    store.wakeups.publish(["queue:a"])
    store.wakeups.publish(["queue:b"])
    store.wakeups.publish(["queue:end"])
    await _heard(marker, "queue:end")
    assert await subscription.wait(PATIENCE) == {"queue:a", "queue:b"}
    assert await subscription.wait(0.0) == frozenset()
    subscription.close()
    marker.close()


async def test_listening_to_other_topics_replaces_the_ones_before(store: Store, listener: Store) -> None:
    subscription = listener.wakeups.subscribe(["queue:old"])
    subscription.listen(["queue:new"])
    store.wakeups.publish(["queue:old"])
    store.wakeups.publish(["queue:new"])
    assert await _heard(subscription, "queue:new") == {"queue:new"}
    subscription.close()


async def test_waiting_ends_with_nothing_when_the_time_is_over(store: Store) -> None:
    subscription = store.wakeups.subscribe(["queue:silent"])
    assert await subscription.wait(0.01) == frozenset()
    subscription.close()


async def test_a_closed_subscription_receives_nothing_and_closing_twice_is_harmless(
    store: Store, listener: Store
) -> None:
    closed, open_one = listener.wakeups.subscribe(["queue:a"]), listener.wakeups.subscribe(["queue:a"])
    closed.close()
    closed.close()
    store.wakeups.publish(["queue:a"])
    await _heard(open_one, "queue:a")
    assert await closed.wait(0.0) == frozenset()
    open_one.close()


async def test_publishing_without_listeners_and_to_a_closed_store_never_raises(store: Store, listener: Store) -> None:
    store.wakeups.publish(["queue:a"])
    listener.wakeups.subscribe(["queue:a"])
    await listener.close()
    await listener.close()
    store.wakeups.publish(["queue:a"])
    listener.wakeups.publish(["queue:a"])
    store.wakeups.publish([])


Verb = Callable[[], Awaitable[object]]
Scene = Callable[[Kit], Awaitable[tuple[str, Verb]]]
"""Arranges what a verb needs. Returns the topic that the verb must publish."""


async def _enqueue(kit: Kit) -> tuple[str, Verb]:
    return DEFAULT, kit.enqueue


async def _enqueue_for_a_worker(kit: Kit) -> tuple[str, Verb]:
    worker = await kit.worker()
    return worker_topic(worker.name), lambda: kit.enqueue(sticky="plan")


async def _claimed(kit: Kit) -> tuple[Worker, Held]:
    worker = await kit.worker()
    await kit.enqueue()
    [claimed] = await worker.claim()
    return worker, claimed.held


async def _retry(kit: Kit) -> tuple[str, Verb]:
    worker, held = await _claimed(kit)
    return DEFAULT, lambda: worker.retry(held)


async def _hand_back(kit: Kit) -> tuple[str, Verb]:
    worker, held = await _claimed(kit)
    return DEFAULT, lambda: worker.hand_back(held)


async def _take_back(kit: Kit) -> tuple[str, Verb]:
    worker, _ = await _claimed(kit)
    return DEFAULT, worker.renew


async def _leave(kit: Kit) -> tuple[str, Verb]:
    worker, _ = await _claimed(kit)
    return DEFAULT, worker.leave


async def _rescue(kit: Kit) -> tuple[str, Verb]:
    await _claimed(kit)
    kit.clock.advance(16)
    return DEFAULT, kit.store.rescue


async def _promote(kit: Kit) -> tuple[str, Verb]:
    await kit.enqueue(delay=5)
    kit.clock.advance(5)
    return DEFAULT, kit.store.promote


async def _hand_the_place_on(kit: Kit) -> tuple[str, Verb]:
    await kit.settings("default", LaneRule(pattern="lane", limit=1))
    worker = await kit.worker()
    for _ in range(2):
        await kit.enqueue(lane="lane")
    [claimed] = await worker.claim()
    return DEFAULT, lambda: worker.complete(claimed)


async def _cancel_the_holder_of_a_place(kit: Kit) -> tuple[str, Verb]:
    await kit.settings("default", LaneRule(pattern="lane", limit=1))
    first, _ = [await kit.enqueue(lane="lane") for _ in range(2)]
    return DEFAULT, lambda: kit.store.cancel([first])


async def _room_under_the_queue_limit(kit: Kit) -> tuple[str, Verb]:
    await kit.settings(limit=1)
    worker, held = await _claimed(kit)
    await kit.enqueue()
    return DEFAULT, lambda: worker.complete(held)


async def _resume_a_queue(kit: Kit) -> tuple[str, Verb]:
    await kit.settings(paused=True)
    await kit.enqueue()
    return DEFAULT, lambda: kit.settings(version=1)


async def _resume_a_lane(kit: Kit) -> tuple[str, Verb]:
    await kit.settings("default", LaneRule(pattern="lane", paused=True))
    await kit.enqueue(lane="lane")
    return DEFAULT, lambda: kit.settings(version=1)


async def _release(kit: Kit) -> tuple[str, Verb]:
    worker = await kit.worker()
    await kit.enqueue(sticky="plan")
    await worker.complete(*await worker.claim())
    cleanup = kit.new("tidy", kind=JobKind.CLEANUP)
    return worker_topic(worker.name), lambda: kit.store.release("default", "plan", cleanup)


async def _broadcast(kit: Kit) -> tuple[str, Verb]:
    worker = await kit.worker()
    return worker_topic(worker.name), lambda: kit.enqueue(kind=JobKind.BROADCAST)


async def _rebind(kit: Kit) -> tuple[str, Verb]:
    leaving, stays = await kit.worker(), await kit.worker()
    await kit.enqueue(sticky="plan")
    return worker_topic(stays.name), leaving.leave


async def _request_cancel(kit: Kit) -> tuple[str, Verb]:
    worker, held = await _claimed(kit)
    return session_topic(worker.id), lambda: kit.store.cancel([held.id])


async def _grant_a_turn(kit: Kit) -> tuple[str, Verb]:
    await kit.settings("default", LaneRule(pattern="lane", limit=1))
    worker, waiter = await kit.worker(), await kit.waiter()
    await kit.enqueue(lane="lane")
    [claimed] = await worker.claim()
    await kit.enqueue(lane="lane", kind=JobKind.TURN, waiter=waiter.id)
    return session_topic(waiter.id), lambda: worker.complete(claimed)


async def _resign(kit: Kit) -> tuple[str, Verb]:
    term = await kit.store.lead("manager", lease=10)
    assert term is not None
    number = term.number
    return LEADER, lambda: kit.store.resign(number)


async def _finish(kit: Kit) -> tuple[str, Verb]:
    worker, held = await _claimed(kit)
    return job_topic(held.id), lambda: worker.complete(held)


async def _report_progress(kit: Kit) -> tuple[str, Verb]:
    worker, held = await _claimed(kit)
    return job_topic(held.id), lambda: kit.store.progress(worker.id, [(held, b"50")])


async def _start(kit: Kit) -> tuple[str, Verb]:
    worker = await kit.worker()
    id = await kit.enqueue()
    return job_topic(id), worker.claim


async def _cancel_what_waits(kit: Kit) -> tuple[str, Verb]:
    id = await kit.enqueue()
    return job_topic(id), lambda: kit.store.cancel([id])


async def _line(kit: Kit) -> tuple[Worker, list[str]]:
    await kit.settings("default", LaneRule(pattern="lane", limit=1))
    return await kit.worker(), [await kit.enqueue(lane="lane") for _ in range(3)]


async def _start_the_first_of_a_lane(kit: Kit) -> tuple[str, Verb]:
    worker, _ = await _line(kit)
    return place_topic("default", "lane"), worker.claim


async def _cancel_one_in_the_middle_of_a_lane(kit: Kit) -> tuple[str, Verb]:
    _, ids = await _line(kit)
    return place_topic("default", "lane"), lambda: kit.store.cancel([ids[1]])


async def _end_the_turn_before(kit: Kit) -> tuple[str, Verb]:
    await kit.settings("default", LaneRule(pattern="lane", limit=1))
    waiter = await kit.waiter()
    first, _, _ = [await kit.enqueue(lane="lane", kind=JobKind.TURN, waiter=waiter.id) for _ in range(3)]
    return place_topic("default", "lane"), lambda: waiter.complete(Held(first, 1))


SCENES: list[Scene] = [
    *(_enqueue, _enqueue_for_a_worker, _retry, _hand_back, _take_back, _leave, _rescue, _promote),
    *(_hand_the_place_on, _cancel_the_holder_of_a_place, _room_under_the_queue_limit),
    *(_resume_a_queue, _resume_a_lane, _release, _broadcast, _rebind, _request_cancel, _grant_a_turn),
    *(_resign, _finish, _report_progress, _start, _cancel_what_waits),
    *(_start_the_first_of_a_lane, _cancel_one_in_the_middle_of_a_lane, _end_the_turn_before),
]


@pytest.mark.parametrize("scene", SCENES)
async def test_a_verb_notifies_the_processes_it_concerns(kit: Kit, listener: Store, scene: Scene) -> None:
    topic, verb = await scene(kit)
    subscription = listener.wakeups.subscribe([topic])
    # Hints from the preparation may still arrive: the marker comes after them.
    subscription.listen([topic, "queue:marker"])
    kit.store.wakeups.publish(["queue:marker"])
    await _heard(subscription, "queue:marker")
    await verb()
    assert topic in await _heard(subscription, topic)
    subscription.close()
