"""What the HTTP service costs, as ratios of one run on the embedded store.

    python -m benchmarks.http_service            # everything
    python -m benchmarks.http_service rates      # the first two figures

`POST /jobs` beside the same FastAPI application answering a constant to the same request; the batch route beside
`enqueue_many` in process; and what open streams cost a worker (`http_streams`). The command ends with 1 when a bound is
broken.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import uvicorn
from starlette.requests import Request
from starlette.responses import Response

from fairlane import Fairlane
from fairlane.http import create_app

from . import http_streams

CONNECTIONS = 16
SECONDS = 3.0
BATCH = 1_000
ROUNDS = 3
LEAST = 0.5
BODY = msgspec.json.encode({"task": "add", "args": [1, 2]})
CONSTANT = b'{"id":"01hzy3v9k7e8m4q2n6p5r1s0t0","created":true,"state":"pending"}'


def make(url: str) -> Fairlane:
    """An application with one small task."""
    app = Fairlane(url)

    @app.task(name="add")
    async def add(a: int, b: int) -> int:
        return a + b

    return app


def serve(url: str, port: int) -> None:
    """The service, and a route of the same application that answers a constant."""
    web = create_app(make(url))

    @web.post("/constant")
    async def constant(request: Request) -> Response:
        await request.body()
        return Response(CONSTANT, 202, media_type="application/json")

    uvicorn.run(web, port=port, log_level="error", access_log=False)


def request(path: str, body: bytes) -> bytes:
    """A request as bytes."""
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join((*lines, "", "")).encode() + body


async def rate(port: int, message: bytes, connections: int, seconds: float) -> float:
    """Requests a second that are answered with 202."""
    end = time.perf_counter() + seconds
    done = 0

    async def client() -> None:
        nonlocal done
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
        while time.perf_counter() < end:
            writer.write(message)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 202 " in head.split(b"\r\n")[0], head
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            done += 1
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(connections)))
    return done / (time.perf_counter() - began)


async def in_process(url: str) -> float:
    """Jobs a second by `enqueue_many`."""
    app = make(url)
    task = app.registry.find("add")
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        await app.enqueue_many([task.call(1, 2) for _ in range(BATCH)])
        count += BATCH
    took = time.perf_counter() - began
    await app.close()
    return count / took


async def measure(port: int, folder: Path) -> bool:
    """Print the ratios; answers whether they keep their bounds."""
    batch = request("/api/v1/jobs:batch", b"[" + b",".join([BODY] * BATCH) + b"]")
    single, many = list[float](), list[float]()
    for number in range(ROUNDS):
        constant = await rate(port, request("/constant", BODY), CONNECTIONS, SECONDS)
        jobs = await rate(port, request("/api/v1/jobs", BODY), CONNECTIONS, SECONDS)
        batches = BATCH * await rate(port, batch, 1, SECONDS)
        own = await in_process(f"sqlite:///{folder / f'own-{number}.db'}")
        single.append(jobs / constant)
        many.append(batches / own)
        print(f"constant {constant:,.0f}/s, POST /jobs {jobs:,.0f}/s, ratio {jobs / constant:.2f}")
        print(f"enqueue_many {own:,.0f}/s, batch {batches:,.0f}/s, ratio {batches / own:.2f}")
    ratios = statistics.median(single), statistics.median(many)
    print(f"POST /jobs {ratios[0]:.2f} of a constant answer, batch {ratios[1]:.2f} of enqueue_many (at least {LEAST})")
    return min(ratios) >= LEAST


def run(what: str, folder: Path) -> bool:
    """One part, with a service and a store of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    url = f"sqlite:///{folder}/{what}.db"
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(url, port), daemon=True)
    process.start()
    time.sleep(3)
    try:
        if what == "rates":
            return asyncio.run(measure(port, folder))
        return asyncio.run(http_streams.measure(port, url))
    finally:
        process.terminate()
        process.join()


def main() -> None:
    """Measure."""
    wanted = sys.argv[1:] or ["rates", "streams"]
    if not {*wanted} <= {"rates", "streams"}:
        raise SystemExit("name rates, streams or nothing")
    with tempfile.TemporaryDirectory() as folder:
        kept = [run(what, Path(folder)) for what in wanted]
    raise SystemExit(not all(kept))


if __name__ == "__main__":
    main()
