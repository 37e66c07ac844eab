"""Listeners and streams: each receives every event in order, and none can affect the code that emits them."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from fairlane.events import Called, Event, Events, EventStream, Lost, Resigned, SessionLeft

WAIT = 30.0


async def take(stream: EventStream, count: int) -> list[Event]:
    """The next `count` events, which must come."""
    async with asyncio.timeout(WAIT):
        return [await anext(stream) for _ in range(count)]


def test_every_listener_receives_every_event_in_order() -> None:
    events = Events()
    first: list[Event] = []
    second: list[Event] = []
    events.subscribe(first.append)
    events.subscribe(second.append)

    for term in range(3):
        events.emit(Resigned(term))

    assert first == second == [Resigned(0), Resigned(1), Resigned(2)]


def test_an_unsubscribed_listener_receives_nothing_more() -> None:
    events = Events()
    received: list[Event] = []
    stop = events.subscribe(received.append)
    events.emit(Resigned(1))
    stop()
    stop()

    events.emit(Resigned(2))

    assert received == [Resigned(1)]


def test_a_listener_that_subscribed_twice_is_called_twice_and_unsubscribes_once_for_each() -> None:
    events = Events()
    received: list[Event] = []
    stop = events.subscribe(received.append)
    events.subscribe(received.append)
    events.emit(Resigned(1))
    stop()

    events.emit(Resigned(2))

    assert received == [Resigned(1), Resigned(1), Resigned(2)]


def test_events_are_active_exactly_while_there_is_a_listener() -> None:
    events = Events()
    seen = [events.active]
    stops = [events.subscribe(lambda event: None) for _ in range(2)]
    for stop in stops:
        seen.append(events.active)
        stop()
    seen.append(events.active)

    assert seen == [False, True, True, False]


def test_a_listener_that_raises_is_logged_once_and_disturbs_no_other(caplog: pytest.LogCaptureFixture) -> None:
    events = Events()
    received: list[Event] = []

    def broken(event: Event) -> None:
        raise RuntimeError("no disk")

    events.subscribe(broken)
    events.subscribe(received.append)
    with caplog.at_level(logging.ERROR, logger="fairlane"):
        events.emit(Resigned(1))
        events.emit(Resigned(2))

    assert received == [Resigned(1), Resigned(2)]
    [record] = caplog.records
    assert record.name == "fairlane.events"
    assert "broken" in record.getMessage()


def test_each_listener_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    events = Events()
    for problem in ("no disk", "no network"):

        def broken(event: Event, problem: str = problem) -> None:
            raise RuntimeError(problem)

        events.subscribe(broken)

    with caplog.at_level(logging.ERROR, logger="fairlane"):
        events.emit(Resigned(1))

    assert len(caplog.records) == 2


def test_a_listener_may_unsubscribe_itself_while_it_is_called() -> None:
    events = Events()
    received: list[Event] = []

    def once(event: Event) -> None:
        received.append(event)
        stop()

    stop = events.subscribe(once)
    others: list[Event] = []
    events.subscribe(others.append)

    events.emit(Resigned(1))
    events.emit(Resigned(2))

    assert received == [Resigned(1)]
    assert others == [Resigned(1), Resigned(2)]


def test_threads_that_come_and_go_leave_no_entry_behind() -> None:
    events = Events()

    def come_and_go() -> None:
        for _ in range(300):
            events.subscribe(lambda event: None)()
            events.emit(Resigned(1))

    with ThreadPoolExecutor(8) as pool:
        for each in [pool.submit(come_and_go) for _ in range(8)]:
            each.result(WAIT)

    assert not events.active


def test_an_event_says_its_type_in_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(SessionLeft("s-1"))) == {"type": "SessionLeft", "session": "s-1"}
    assert msgspec.json.decode(msgspec.json.encode(Called("claim", 0.5, None)), type=Called).verb == "claim"


async def test_a_stream_yields_what_happens_from_now_on() -> None:
    events = Events()
    events.emit(Resigned(0))
    async with events.stream() as stream:
        events.emit(Resigned(1))
        events.emit(Resigned(2))

        assert await take(stream, 2) == [Resigned(1), Resigned(2)]
    assert not events.active


async def test_a_reader_that_waits_is_woken() -> None:
    events = Events()
    async with events.stream() as stream:
        reader = asyncio.create_task(take(stream, 2))
        for term in (1, 2):
            await asyncio.sleep(0)
            events.emit(Resigned(term))

        assert await reader == [Resigned(1), Resigned(2)]


async def test_a_slow_reader_loses_the_oldest_events_and_gets_their_number() -> None:
    events = Events()
    async with events.stream(kept=3) as stream:
        for term in range(10):
            events.emit(Resigned(term))
        assert await take(stream, 4) == [Lost(7), Resigned(7), Resigned(8), Resigned(9)]

        events.emit(Resigned(10))
        assert await take(stream, 1) == [Resigned(10)]


async def test_a_slow_reader_costs_the_quick_one_nothing() -> None:
    events = Events()
    async with events.stream(kept=1) as slow, events.stream() as quick:
        for term in range(5):
            events.emit(Resigned(term))

        assert await take(quick, 5) == [Resigned(term) for term in range(5)]
        assert await take(slow, 2) == [Lost(4), Resigned(4)]


async def test_events_from_other_threads_all_arrive_each_thread_in_order() -> None:
    events = Events()
    threads, each = 4, 500

    def emit(number: int) -> None:
        for term in range(each):
            events.emit(Called(str(number), float(term), None))

    async with events.stream(kept=threads * each) as stream:
        running = [threading.Thread(target=emit, args=(number,)) for number in range(threads)]
        for thread in running:
            thread.start()
        received = await take(stream, threads * each)
        for thread in running:
            thread.join(WAIT)

    for number in range(threads):
        mine = [event.seconds for event in received if isinstance(event, Called) and event.verb == str(number)]
        assert mine == [float(term) for term in range(each)]


async def test_what_was_lost_and_what_was_read_add_up_under_fire_from_threads() -> None:
    events = Events()
    total = 4 * 2_000

    def emit() -> None:
        for term in range(2_000):
            events.emit(Resigned(term))

    seen = 0
    async with events.stream(kept=10) as stream:
        running = [threading.Thread(target=emit) for _ in range(4)]
        for thread in running:
            thread.start()
        async with asyncio.timeout(WAIT):
            while seen < total:
                event = await anext(stream)
                seen += event.count if isinstance(event, Lost) else 1
        for thread in running:
            thread.join(WAIT)

    assert seen == total


async def test_a_reader_that_gives_up_waiting_loses_nothing() -> None:
    events = Events()
    async with events.stream() as stream:
        for _ in range(3):
            reader = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            reader.cancel()
            await asyncio.wait([reader])
        events.emit(Resigned(1))

        assert await take(stream, 1) == [Resigned(1)]


async def test_leaving_a_stream_ends_it_for_a_reader_that_waits() -> None:
    events = Events()

    async def read(stream: EventStream) -> list[Event]:
        return [event async for event in stream]

    async with events.stream() as stream:
        reader = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        assert not reader.done()

    assert await asyncio.wait_for(reader, WAIT) == []
    assert await asyncio.wait_for(read(stream), WAIT) == []


def test_a_stream_whose_loop_is_gone_disturbs_no_other(caplog: pytest.LogCaptureFixture) -> None:
    events = Events()

    async def abandon() -> None:
        stream = await events.stream().__aenter__()
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        assert not reader.done()

    asyncio.run(abandon())
    events.emit(Resigned(1))

    assert not events.active
    assert not caplog.records
