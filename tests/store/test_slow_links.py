"""A link that is too slow for the deadline of a call: repeated calls get more time, and succeed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest

from fairlane.model.job import JobState
from fairlane.store import open_store
from fairlane.store.shared import deadlines
from fairlane.store.shared.deadlines import Deadlines
from tests.worker.yard import yard_at

pytestmark = pytest.mark.anyio
BIG = 50_000
JOBS = 8


@contextlib.asynccontextmanager
async def slow_link(url: str, rate: float) -> AsyncIterator[str]:
    """The same server behind a proxy that forwards this many bytes per second, per direction and connection."""
    parts = urlsplit(url)
    pumps: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(8192):
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(len(data) / rate)
        except OSError:
            pass
        finally:
            writer.transport.abort()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(parts.hostname, parts.port)
        for each in (pump(reader, back), pump(there, writer)):
            task = asyncio.ensure_future(each)
            pumps.add(task)
            task.add_done_callback(pumps.discard)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=2**15)
    port = server.sockets[0].getsockname()[1]
    try:
        yield parts._replace(netloc=parts.netloc.replace(f":{parts.port}", f":{port}")).geturl()
    finally:
        server.close()
        for task in list(pumps):
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        await asyncio.sleep(0.01)  # what was aborted is closed in the next turn of the loop


@pytest.mark.parametrize("store_kind", ["postgresql", "redis"], indirect=True)
async def test_claims_and_endings_pass_a_slow_link(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with yard_at(store_url) as yard, slow_link(store_url, 800_000) as narrow:

        async def body(data: str) -> str:
            return data

        yard.task(body, retries=0)
        ids = [await yard.enqueue("body", "x" * BIG) for _ in range(JOBS)]
        slow = await open_store(narrow)
        # Half a second is what the answer takes; a quarter of that is what it has at first.
        monkeypatch.setattr(deadlines, "CALL_SECONDS", 0.12)
        try:
            async with yard.worker(store=slow, slots=JOBS):
                for id in ids:
                    job = await yard.until(id)
                    assert (job.state, len(job.result or b"")) == (JobState.COMPLETED, BIG + 2)
                    assert job.attempt == 1
        finally:
            await slow.close()


def test_a_repeated_call_has_more_time() -> None:
    deadlines = Deadlines()
    assert deadlines.seconds("claim") == 10
    deadlines.missed("claim")
    assert (deadlines.seconds("claim"), deadlines.seconds("renew")) == (20, 10)
    for _ in range(20):
        deadlines.missed("claim")
    assert deadlines.seconds("claim") == 60
    assert deadlines.seconds("claim", 128 * 1024 * 100) == 110, "what it sends takes its time in any case"
    deadlines.kept("claim")
    assert deadlines.seconds("claim") == 10
