"""The primary of two PostgreSQL servers dies and its standby takes over, while jobs are sent and run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

from fairlane.errors import StoreUnavailable
from fairlane.model.intervals import Intervals
from fairlane.model.job import JobState
from fairlane.model.session import SessionState
from tests.servers.postgresql import own_server
from tests.servers.standby import Standby
from tests.sizes import sized, strict

from . import figures, tasks
from .deployment import PostgresqlDeployment
from .ledger import now
from .world import World, open_world

SOON = sized(20.0, 3.0)
"""Seconds after the promotion within which bodies begin again."""
BUSY = 0.8
"""Seconds for which jobs are sent and run before the primary dies."""
UNANSWERED = 0.2
NOTICED = 1.0
"""Seconds until the standby is promoted: every process has tried in vain several times by then."""


class Pair(PostgresqlDeployment):
    """A primary and a standby that has everything the primary has acknowledged."""

    def __init__(self) -> None:
        with contextlib.ExitStack() as servers:
            self._server = servers.enter_context(own_server())
            database = urlsplit(self._server.fresh_database())
            self.standby = servers.enter_context(Standby(self._server))
            hosts = f"{database.netloc},127.0.0.1:{self.standby.port}"
            self.url = f"postgresql://{hosts}{database.path}?target_session_attrs=read-write"
            self._servers = servers.pop_all()

    def fail(self) -> None:
        """End the primary as the end of its machine does."""
        self._server.kill()

    def close(self) -> None:
        """These servers are not used again."""
        self._servers.close()


@contextlib.asynccontextmanager
async def sending(world: World) -> AsyncIterator[list[str]]:
    """Send jobs one after the other inside the block, repeating each until it is acknowledged. Yields their ids."""
    acknowledged: list[str] = []

    async def send() -> None:
        while True:
            call = tasks.sleep.call(0.02)
            while call.job.id not in acknowledged:
                await asyncio.sleep(0.01)
                with contextlib.suppress(StoreUnavailable):
                    acknowledged.append((await world.send(call)).id)

    sender = asyncio.ensure_future(send())
    try:
        yield acknowledged
    finally:
        sender.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sender


@strict
async def test_a_standby_takes_over_and_nothing_is_lost_or_runs_again(tmp_path: Path) -> None:
    with contextlib.closing(Pair()) as pair:
        async with open_world(tmp_path / "world", lambda _: pair, Intervals()) as world:
            await world.workers("w0", "w1", options=("-c", "5"))
            long = [(await world.send(tasks.sleep.call(BUSY + 2 * NOTICED))).id for _ in range(2)]
            later = [(await world.send(tasks.noop.options(delay=BUSY + NOTICED / 2).call())).id for _ in range(5)]
            async with sending(world) as acknowledged:
                await asyncio.sleep(BUSY)
                completed = await world.jobs(state=JobState.COMPLETED)
                with pair.standby.frozen():
                    # Commits are not acknowledged from now on: calls end without an answer.
                    await asyncio.sleep(UNANSWERED)
                    pair.fail()
                failed, before = now(), len(acknowledged)
                await asyncio.sleep(NOTICED)
                await asyncio.to_thread(pair.standby.promote)
                promoted = now()

                async def begun() -> list[int]:
                    return [entry.at for entry in world.ledger.begins() if entry.at > promoted]

                began = (await world.until(begun, "bodies begin again"))[0]

                async def sent() -> bool:
                    return len(acknowledged) > before + 10

                await world.until(sent, "jobs are sent again")
            jobs = await world.final(*acknowledged, *long, *later)
            figures.record(
                "a start after a failover",
                after_promotion=round((began - promoted) / 1e9, 2),
                after_failure=round((began - failed) / 1e9, 2),
            )
            assert completed, "nothing had been completed before"
            assert (began - promoted) / 1e9 < SOON
            assert {(job.state, job.attempt) for job in jobs} == {(JobState.COMPLETED, 1)}
            starts = world.ledger.starts()
            assert {starts[job.id] for job in jobs} == set(starts.values()) == {1}
            assert SessionState.DEAD not in {session.state for session in await world.client.sessions()}
            assert (await world.client.recount()).differences == ()
