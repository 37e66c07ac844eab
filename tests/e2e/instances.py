"""Instances of the application behind HTTP, as a caller sees them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx

from fairlane.http import AsyncClient

from .fleet import Process
from .world import World

ADDRESS = re.compile(r"running on (http://127\.0\.0\.1:\d+)")
THREE = {"MAX_CONCURRENT_TASKS": "3", "HIGH_PRIORITY_RESERVED": "1"}


class Site:
    """One instance: its process, its address, and clients of both APIs."""

    def __init__(self, process: Process, address: str) -> None:
        self.process = process
        self.address = address
        self.http = httpx.AsyncClient(base_url=address, timeout=30.0)
        self.client = AsyncClient(address, timeout=30.0)

    async def submit(self, priority: str | None = None) -> str:
        """Submit a job by the old API."""
        answer = await self.http.get("/task", params={} if priority is None else {"priority": priority})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    async def submit_many(self, count: int) -> list[str]:
        """Submit jobs one after the other by a connection of its own, at a fraction of what httpx costs."""
        url = httpx.URL(self.address)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        ids = []
        for _ in range(count):
            writer.write(b"GET /task HTTP/1.1\r\nHost: localhost\r\n\r\n")
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            body = await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
            assert head.startswith(b"http/1.1 200 "), body
            ids.append(str(json.loads(body)["id"]))
        writer.close()
        await writer.wait_closed()
        return ids

    async def status(self, id: str) -> dict[str, Any]:
        """The status of a job by the old API."""
        answer = await self.http.get(f"/task/{id}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def close(self) -> None:
        """Close the connections."""
        await self.http.aclose()
        await self.client.close()


async def started(world: World, *processes: Process) -> list[Site]:
    """Wait until instances claim and listen."""
    await world.ready(*processes)

    async def listening() -> list[Site] | None:
        found = [ADDRESS.search(process.output.read_text()) for process in processes]
        if not all(found):
            return None
        return [Site(process, match[1]) for process, match in zip(processes, found, strict=True) if match]

    sites = await world.until(listening, "the instances listen")
    assert sites is not None
    return sites


@contextlib.asynccontextmanager
async def sites(world: World, count: int = 1, env: Mapping[str, str] = THREE) -> AsyncIterator[list[Site]]:
    """This many instances."""
    found = await started(world, *(world.fleet.instance(name=f"web{number}", env=env) for number in range(count)))
    try:
        yield found
    finally:
        for site in found:
            await site.close()
