"""Wake-ups through a server between processes and threads: latency, ends, forks, idleness."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import pytest

from fairlane import event_loops
from fairlane.store.shared.subscriptions import TopicSubscription

from .carriers import Carrier, Open
from .notices import threads
from .wakeup_process import Wakeups, echoed, running

pytestmark = pytest.mark.anyio

NOTHING: frozenset[str] = frozenset()


@pytest.fixture
def wakeups(opened: Open) -> Wakeups:
    return opened()


def open_files() -> list[str]:
    """The descriptors of this process."""
    return sorted(entry.name for entry in Path("/proc/self/fd").iterdir())


# -- processes -----------------------------------------------------------------------------------------------------


async def test_processes_wake_each_other_within_milliseconds(wakeups: Wakeups, carrier: Carrier) -> None:
    spans = await echoed(wakeups, 200, carrier.url, carrier.name)
    sys.stdout.write(f"received in another process after {median(spans):.3f} ms, p99 {spans[-3]:.3f} ms\n")
    assert median(spans) < 20


async def test_a_forked_child_may_publish_and_takes_nothing_from_its_parent(carrier: Carrier) -> None:
    with running("fork", carrier.url, carrier.name) as parent:
        assert await asyncio.to_thread(parent.wait, 30) == 0


async def test_topics_that_a_process_publishes_just_before_it_exits_are_delivered(
    wakeups: Wakeups, carrier: Carrier
) -> None:
    subscription = wakeups.subscribe(["queue:last", "job:last"])
    with running("leave", carrier.url, carrier.name) as leaving:
        assert await subscription.wait(30)
        assert await asyncio.to_thread(leaving.wait, 10) == 0


async def test_waiting_costs_no_processor_time(wakeups: Wakeups) -> None:
    subscription = wakeups.subscribe(["queue:a", "job:1"])
    before = time.process_time()
    assert not await subscription.wait(1.0)
    spent = time.process_time() - before
    sys.stdout.write(f"an idle second of waiting: {spent * 1e3:.2f} ms of processor time\n")
    assert spent < 0.05


async def test_publishing_is_cheap(wakeups: Wakeups) -> None:
    wakeups.subscribe(["queue:b"])
    spans = []
    for _ in range(500):
        before = time.perf_counter()
        wakeups.publish(["queue:a", "job:1"])
        spans.append(time.perf_counter() - before)
        await asyncio.sleep(0.0005)
    sys.stdout.write(f"publish: {median(spans) * 1e6:.1f} µs\n")
    assert median(spans) * 1e6 < 200


# -- threads and event loops ---------------------------------------------------------------------------------------


async def test_any_thread_may_publish(wakeups: Wakeups, opened: Open) -> None:
    other = opened()
    subscriptions = [wakeups.subscribe(["job:*"]), other.subscribe(["job:*"])]
    start = threading.Barrier(4)

    def publish(thread: int) -> None:
        start.wait(5)
        for number in range(200):
            wakeups.publish([f"job:{thread}-{number}"])

    everything = {f"job:{thread}-{number}" for thread in range(4) for number in range(200)}
    with ThreadPoolExecutor(4) as pool:
        publishing = [pool.submit(publish, thread) for thread in range(4)]
        for subscription in subscriptions:
            received: set[str] = set()
            while received != everything:
                news = await subscription.wait(5)
                assert news
                received |= news
    assert [each.exception() for each in publishing] == [None] * 4


async def test_every_event_loop_is_notified(wakeups: Wakeups, opened: Open) -> None:
    other = opened()
    ready = threading.Barrier(3)

    def listen(topic: str) -> frozenset[str]:
        async def receive() -> frozenset[str]:
            subscription = wakeups.subscribe([topic])
            ready.wait(5)
            received = await subscription.wait(5)
            subscription.close()
            return received

        return asyncio.run(receive())

    with ThreadPoolExecutor(2) as pool:
        listening = [pool.submit(listen, topic) for topic in ("queue:a", "queue:b")]
        await asyncio.to_thread(ready.wait, 5)
        wakeups.publish(["queue:a"])
        other.publish(["queue:b"])
        assert [each.result(10) for each in listening] == [{"queue:a"}, {"queue:b"}]


async def test_a_subscription_whose_event_loop_is_gone_is_forgotten(wakeups: Wakeups) -> None:
    async def subscribe() -> TopicSubscription:
        return wakeups.subscribe(["queue:a"])

    left = await asyncio.to_thread(lambda: asyncio.run(subscribe()))
    subscription = wakeups.subscribe(["queue:a"])
    wakeups.publish(["queue:a"])
    assert await subscription.wait(0) == {"queue:a"}
    assert wakeups._subscriptions.all() == (subscription,)
    left.close()
    left.close()


# -- connections, and their end ------------------------------------------------------------------------------------


async def test_few_connections_serve_everything_and_none_is_made_for_nothing(
    wakeups: Wakeups, carrier: Carrier
) -> None:
    await carrier.left_alone()
    subscription = wakeups.subscribe([])
    wakeups.publish([])
    await asyncio.sleep(0.05)
    assert not threads()
    assert carrier.connected() == 0
    subscription.listen(["queue:a"])
    wakeups.subscribe(["job:1"])
    assert carrier.connected() == 1
    for _ in range(3):
        wakeups.publish(["queue:b", "job:2"])
        await asyncio.sleep(0.02)
    assert threads() == ["fairlane-wakeups"]
    assert carrier.connected() == carrier.connections


@pytest.mark.parametrize("published", [[], ["queue:b"]])
async def test_closing_ends_every_wait_and_leaves_nothing_behind(
    wakeups: Wakeups, carrier: Carrier, published: list[str]
) -> None:
    await carrier.left_alone()
    # The first loop of uvloop in a process opens a pipe that stays; whether it was imported depends on other tests.
    await asyncio.to_thread(event_loops.run_beside, asyncio.sleep(0))
    files, tasks = open_files(), asyncio.all_tasks()
    waiting = [asyncio.create_task(wakeups.subscribe([topic]).wait()) for topic in ("queue:a", "job:1")]
    wakeups.publish(published)
    await asyncio.sleep(0)
    wakeups.close()
    wakeups.close()
    assert await asyncio.gather(*waiting) == [NOTHING, NOTHING]
    assert not threads()
    assert open_files() == files
    assert asyncio.all_tasks() == tasks
    await carrier.left_alone()
    wakeups.publish(["queue:a"])
    assert not threads()
    with pytest.raises(RuntimeError, match="closed"):
        wakeups.subscribe(["queue:a"])


async def test_closing_a_subscription_leaves_the_others(wakeups: Wakeups) -> None:
    subscription, other = wakeups.subscribe(["queue:a"]), wakeups.subscribe(["leader"])
    subscription.close()
    subscription.close()
    wakeups.publish(["queue:a", "leader"])
    before = time.monotonic()
    assert await subscription.wait(0.05) == NOTHING
    assert time.monotonic() - before > 0.04
    assert await other.wait(5) == {"leader"}


async def test_another_thread_may_close(wakeups: Wakeups) -> None:
    waiting = asyncio.create_task(wakeups.subscribe(["queue:a"]).wait())
    await asyncio.sleep(0)
    await asyncio.to_thread(wakeups.close)
    assert await waiting == NOTHING


@pytest.mark.parametrize("pause", [0.0, 0.002, 0.01])
async def test_closing_sends_what_was_published_before(wakeups: Wakeups, opened: Open, pause: float) -> None:
    subscription = wakeups.subscribe(["queue:a"])
    for _ in range(5):
        brief = opened()
        brief.publish(["leader"])
        await asyncio.sleep(pause)
        brief.publish(["queue:a"])
        brief.close()
        assert await subscription.wait(5) == {"queue:a"}


async def test_wakeups_that_were_forgotten_end(carrier: Carrier) -> None:
    await carrier.left_alone()
    wakeups = carrier.wakeups()
    wakeups.publish(["queue:a"])
    assert threads()
    del wakeups
    assert not threads()
    await carrier.left_alone()
