"""What open streams cost, and how soon they tell: 500 of one job, and 500 of as many jobs in lanes.

    python -m benchmarks.http_service streams

A worker beside the service drains jobs without streams and with each kind of them, in turns. Then the job at the head
of a line is cancelled, which moves every job behind it: the time counts from before that call until the event has
arrived at 95 % of the streams.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection

from fairlane import Fairlane
from fairlane.model.job import NewJob

STREAMS = 500
LANES = 50
EVENTS = 5
"""Events of each round and kind, each of which takes one head from every line."""
ROUNDS = 3
JOBS = 60_000
"""Of each drain: enough for seconds, because a service looks at all that is watched once a second."""
SLOTS = 100
MOST_LOSS, MOST_SECONDS = 0.10, 0.250
ENOUGH = int(STREAMS * 0.95)


def make(url: str) -> Fairlane:
    """Work for the worker, and a queue that is watched and that nobody serves."""
    app = Fairlane(url)
    app.queue("work")
    app.queue("watched").lane("*", limit=1)

    @app.task(name="noop", queue="work")
    async def noop() -> int:
        return 1

    return app


def work(url: str, orders: Connection) -> None:
    """The worker's process: drains as many jobs as it is told to, and answers with its rate."""
    asyncio.run(_work(url, orders))


async def _work(url: str, orders: Connection) -> None:
    app = make(url)
    noop = app.registry.find("noop")
    while jobs := await asyncio.to_thread(orders.recv):
        await app.enqueue_many([noop.call() for _ in range(jobs)])
        worker = app.worker(slots=SLOTS, queues=["work"])
        running = asyncio.ensure_future(worker.run())
        while worker.done < jobs // 20:  # noqa: ASYNC110 - a counter, so that the loop under test does nothing more
            await asyncio.sleep(0.005)
        began, before = time.perf_counter(), worker.done
        while worker.done < jobs:  # noqa: ASYNC110 - the same
            await asyncio.sleep(0.005)
        took = time.perf_counter() - began
        worker.stop()
        await running
        orders.send((jobs - before) / took)
    await app.close()


class Reader(asyncio.Protocol):
    """A client of one stream, which notes when a change of place arrived."""

    def __init__(self, id: str) -> None:
        self.request = f"GET /api/v1/jobs/{id}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        self.told = asyncio.Event()
        self.arrived: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the stream."""
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        """Note what came."""
        if b"event: position" in data:
            self.arrived.append(time.perf_counter())
        elif b"event: state" in data:
            self.told.set()


class Streams:
    """Open streams on jobs that wait in lanes, and what stands before these jobs."""

    def __init__(self, port: int, app: Fairlane, watched: Sequence[str], heads: list[list[str]]) -> None:
        self._port = port
        self._app = app
        self._watched = watched
        self._heads = heads
        self.delays: list[float] = []

    async def __aenter__(self) -> Streams:
        loop = asyncio.get_running_loop()
        opened = [await loop.create_connection(partial(Reader, id), "127.0.0.1", self._port) for id in self._watched]
        self._transports = [transport for transport, _ in opened]
        self._readers = [reader for _, reader in opened]
        async with asyncio.timeout(30):
            await asyncio.gather(*(reader.told.wait() for reader in self._readers))
        await asyncio.sleep(2)  # whatever follows from their opening
        return self

    async def __aexit__(self, *_: object) -> None:
        for transport in self._transports:
            transport.close()
        await asyncio.sleep(1)

    async def move(self) -> None:
        """Move every job up by one, and note how long it took until enough streams were notified."""
        before = [len(reader.arrived) for reader in self._readers]
        began = time.perf_counter()
        await self._app.client.cancel(self._heads.pop())
        async with asyncio.timeout(10):
            while True:
                await asyncio.sleep(0.05)
                pairs = zip(self._readers, before, strict=True)
                arrived = sorted(reader.arrived[seen] for reader, seen in pairs if len(reader.arrived) > seen)
                if len(arrived) >= ENOUGH:
                    break
        self.delays.append(arrived[ENOUGH - 1] - began)


async def waiting(app: Fairlane, name: str, lanes: int, jobs: int) -> tuple[list[str], list[list[str]]]:
    """Ids of jobs to watch, and for each event to come the head of every lane."""
    heads: list[list[str]] = []
    for number in range(ROUNDS * EVENTS):
        made = [
            NewJob(id=f"{name}-h{number}-{lane}", task="noop", queue="watched", lane=f"{name}{lane}")
            for lane in range(lanes)
        ]
        await app.client.send(made)
        heads.append([job.id for job in made])
    watched = [NewJob(id=f"{name}-{n}", task="noop", queue="watched", lane=f"{name}{n % lanes}") for n in range(jobs)]
    await app.client.send(watched)
    heads.reverse()
    return [job.id for job in watched], heads


async def measure(port: int, url: str) -> bool:
    """Print the figures; answers whether they keep their bounds."""
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=work, args=(url, there), daemon=True)
    process.start()
    app = make(url)

    async def rate() -> float:
        here.send(JOBS)
        return float(await asyncio.to_thread(here.recv))

    try:
        await app.client.queues()
        [one], heads = await waiting(app, "one", 1, 1)
        kinds = {"of one job": ([one] * STREAMS, heads), "of 500 jobs": await waiting(app, "many", LANES, STREAMS)}
        await rate()  # everything is loaded and the file has its size
        kept = {name: list[float]() for name in kinds}
        delays = {name: list[float]() for name in kinds}
        for _ in range(ROUNDS):
            alone = [await rate()]
            beside: dict[str, float] = {}
            for name, (watched, before) in kinds.items():
                async with Streams(port, app, watched, before) as streams:
                    beside[name] = await rate()
                    for _ in range(EVENTS):
                        await streams.move()
                    delays[name] += streams.delays
                alone.append(await rate())
            own = statistics.mean(alone)
            for name, found in beside.items():
                kept[name].append(found / own)
                print(f"worker alone {own:,.0f}/s, beside {STREAMS} streams {name} {found:,.0f}/s, {found / own:.2f}")
    finally:
        here.send(0)
        process.join(10)
        await app.close()
    fine = True
    for name in kinds:
        ratio, slowest = statistics.median(kept[name]), max(delays[name])
        middle = statistics.median(delays[name])
        good = ratio >= 1 - MOST_LOSS and slowest <= MOST_SECONDS
        fine &= good
        print(
            f"{STREAMS} streams {name}: the worker keeps {ratio:.2f} of its rate (at least {1 - MOST_LOSS:.2f}); "
            f"an event is at 95 % of them after {middle * 1_000:.0f} ms, at most {slowest * 1_000:.0f} ms (250) "
            f"{'' if good else 'BROKEN'}"
        )
    return fine
