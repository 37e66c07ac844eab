"""The dashboard over a big store: how soon each page has its data, and what open pages cost a worker.

    python -m benchmarks dashboard

A service in a process of its own serves a store with a million finished jobs, one in a hundred failed, and 100,000
waiting jobs in 10,000 lanes. Each request of each page is made as the page makes it; a stream is timed until its first
events are there. Then a worker in another process drains a queue without and with twenty open pages, in turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import socket
import time
from collections.abc import AsyncIterator, Sequence
from itertools import cycle
from statistics import mean, median

import httpx
import uvicorn

from fairlane import Fairlane
from fairlane.http import create_app
from fairlane.model.job import JobState, NewJob, Reason
from fairlane.model.reading import Filter
from fairlane.model.states import complete, fail
from fairlane.store import open_store
from fairlane.store.port import Store

from .contest import Options
from .figures import Bound, Figure
from .http_streams import work
from .mixed import fresh_store
from .workload import QUEUE, RESULT, Run, Worker, job, load

STORES = ("sqlite", "postgresql", "redis")
LANES = 10_000
BATCH = 1_000
FAILED = 100
"""One of so many finished jobs failed."""
ERRORS = 20
"""Kinds of errors."""
OPEN = 20
TIMES = 5
MOST_MILLISECONDS, LEAST_RATE = 300.0, 0.9
SERVE_SECONDS = 30.0

Request = tuple[str, tuple[str, ...]]
"""A path, and the kinds of events to wait for; none for a document."""


async def run(run: Run, options: Options) -> list[Figure]:
    """Each store, one after the other."""
    # Nothing is deleted meanwhile.
    os.environ["FAIRLANE_RETENTION_COMPLETED_COUNT"] = str(10_000_000)
    figures: list[Figure] = []
    for kind in STORES:
        async with fresh_store(kind, run, options) as url:
            figures += await _measure(kind, url, run, options)
    return figures


async def _measure(kind: str, url: str, run: Run, options: Options) -> list[Figure]:
    finished, waiting = (20_000, 5_000) if run.quick else (1_000_000, 100_000)
    store = await open_store(url)
    try:
        await _fill(store, finished, waiting)
        pages = await _pages(store)
    finally:
        await store.close()
    if kind == "postgresql":
        await _settle(url)
    async with _served(url) as port:
        milliseconds = await _soonest(port, pages)
        shares = await _shares(port, url, pages, 5_000 if run.quick else 3 * options.jobs, options.rounds)
    slowest = max(milliseconds, key=lambda name: milliseconds[name])
    return [
        *(
            Figure(bench="dashboard", case=f"{kind}: {name}", value=value, unit="ms")
            for name, value in milliseconds.items()
        ),
        Figure(
            bench="dashboard",
            case=f"{kind}: slowest request ({slowest})",
            value=milliseconds[slowest],
            unit="ms",
            bound=Bound(limit=MOST_MILLISECONDS, least=False),
        ),
        Figure(
            bench="dashboard",
            case=f"{kind}: worker beside {OPEN} open pages",
            value=median(beside for _, beside in shares),
            unit="jobs/s",
            ratio=median(beside / alone for alone, beside in shares),
            against="without them",
            bound=Bound(limit=LEAST_RATE),
        ),
    ]


async def _fill(store: Store, finished: int, waiting: int) -> None:
    """Store jobs, run most of them, and leave the rest in lanes."""
    worker = await Worker.start(store, BATCH)
    ended = 0
    while ended < finished:
        await load(store, (_in_lane(n) for n in range(BATCH)))
        claimed = await worker.claim(BATCH)
        endings = [
            fail(each.held, Reason.ERROR, f"Error{n % ERRORS}: it broke", group=f"Error{n % ERRORS}")
            if (ended + n) % FAILED == 0
            else complete(each.held, RESULT)
            for n, each in enumerate(claimed)
        ]
        await worker.end(endings)
        ended += len(claimed)
    await load(store, (_in_lane(n) for n in range(waiting)))


def _in_lane(number: int) -> NewJob:
    return job(lane=f"user:{number % LANES}")


async def _settle(url: str) -> None:
    import asyncpg  # type: ignore[import-untyped]  # it has no types

    connection = await asyncpg.connect(url)
    try:
        await connection.execute("VACUUM (ANALYZE)")
        await connection.execute("CHECKPOINT")
    finally:
        await connection.close()


async def _pages(store: Store) -> dict[str, list[Request]]:
    """What each page of the dashboard requests."""
    [pending] = (await store.find(Filter(state=JobState.PENDING), limit=1)).jobs
    [failed] = (await store.find(Filter(state=JobState.FAILED), limit=1)).jobs
    return {
        "overview": [("/events", ("queues", "workers")), ("/history", ()), ("/doctor", ())],
        "queue": [
            (f"/queues/{QUEUE}", ()),
            (f"/queues/{QUEUE}/events", ("lanes",)),
            (f"/queues/{QUEUE}/lanes?limit=200", ()),
        ],
        "lane": [(f"/queues/{QUEUE}/line/events?lane=user:5", ("line",))],
        "job": [
            (f"/jobs/{pending.id}", ()),
            (f"/jobs/{pending.id}/events", ("state",)),
            (f"/jobs/{failed.id}", ()),
        ],
        "failures": [("/failures", ()), ("/failures/timeline", ())],
        "workers": [("/workers?kind=worker&state=dead", ()), ("/bindings?limit=500", ())],
        "schedules": [("/schedules", ())],
        "search": [(f"/search?q={text}", ()) for text in (pending.id, "bench", "user:5")],
        "jobs": [(f"/jobs?state={state}", ()) for state in ("pending", "completed", "failed")],
    }


# -- the service -----------------------------------------------------------------------------------------------------


def serve(url: str, port: int) -> None:
    """The process of the service."""
    app = Fairlane(url)
    app.queue(QUEUE)
    app.queue("work")

    @app.task(name="bench", queue=QUEUE)
    async def bench(text: str) -> str:
        return text

    uvicorn.run(create_app(app), port=port, log_level="error", access_log=False)


@contextlib.asynccontextmanager
async def _served(url: str) -> AsyncIterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(url, port), daemon=True)
    process.start()
    try:
        async with asyncio.timeout(SERVE_SECONDS), httpx.AsyncClient() as client:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    await client.get(f"http://127.0.0.1:{port}/api/v1/queues")
                    break
                await asyncio.sleep(0.1)
        yield port
    finally:
        process.terminate()
        await asyncio.to_thread(process.join)


def _client(port: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=60)


async def _first_events(client: httpx.AsyncClient, path: str, kinds: Sequence[str]) -> None:
    missing = {f"event: {kind}" for kind in kinds}
    async with client.stream("GET", path) as answer:
        assert answer.status_code == 200, f"{path}: {answer.status_code}"
        async for line in answer.aiter_lines():
            missing.discard(line)
            if not missing:
                return


async def _document(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(path)
    assert answer.status_code == 200, f"{path}: {answer.text}"


async def _soonest(port: int, pages: dict[str, list[Request]]) -> dict[str, float]:
    """The median time of each request, in milliseconds, by page and path; the first of all opens connections."""
    found: dict[str, float] = {}
    async with _client(port) as client:
        for page, requests in pages.items():
            for path, kinds in requests:
                took = []
                for _ in range(TIMES):
                    began = time.perf_counter()
                    await (_first_events(client, path, kinds) if kinds else _document(client, path))
                    took.append((time.perf_counter() - began) * 1_000)
                found[f"{page} {path}"] = median(took)
    return found


# -- open pages ------------------------------------------------------------------------------------------------------

POLLED = {"/history": 10.0, "/doctor": 10.0, "/failures": 10.0, "/failures/timeline": 10.0, "/bindings?limit=500": 2.0}
"""The documents that a page reads again, and after how many seconds."""


async def _keep_open(client: httpx.AsyncClient, requests: list[Request]) -> None:
    """A page that somebody looks at."""

    async def watch(path: str) -> None:
        async with client.stream("GET", path) as answer:
            async for _ in answer.aiter_raw():
                pass

    async def poll(path: str) -> None:
        while True:
            await _document(client, path)
            await asyncio.sleep(POLLED[path])

    async with asyncio.TaskGroup() as page:
        for path, kinds in requests:
            if kinds:
                page.create_task(watch(path))
            elif path in POLLED:
                page.create_task(poll(path))
            else:
                await _document(client, path)


async def _shares(
    port: int, url: str, pages: dict[str, list[Request]], jobs: int, rounds: int
) -> list[tuple[float, float]]:
    """The rates of a worker without and with open pages, round by round."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=work, args=(url, there), daemon=True)
    process.start()

    async def rate() -> float:
        here.send(jobs)
        return float(await asyncio.to_thread(here.recv))

    # Most people look at the overview, and others at different lanes.
    lanes: list[list[Request]] = [[(f"/queues/{QUEUE}/line/events?lane=user:{n}", ("line",))] for n in range(OPEN // 4)]
    several = cycle([pages["overview"], pages["queue"], pages["job"], pages["workers"], pages["failures"]])
    opened = [*lanes, *(next(several) for _ in range(OPEN - len(lanes)))]
    shares = []
    try:
        await rate()  # everything is loaded and the store has its size
        for _ in range(rounds):
            before = await rate()
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}/api/v1", timeout=60, limits=limits
            ) as client:
                looking = [asyncio.ensure_future(_keep_open(client, requests)) for requests in opened]
                await asyncio.sleep(3)
                beside = await rate()
                failed = [each for each in looking if each.done()]
                assert not failed, failed
                for each in looking:
                    each.cancel()
                await asyncio.gather(*looking, return_exceptions=True)
            shares.append((mean((before, await rate())), beside))
    finally:
        here.send(0)
        await asyncio.to_thread(process.join, 10)
    return shares
