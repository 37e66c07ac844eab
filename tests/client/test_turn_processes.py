"""Turns of several processes, one of which dies."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fairlane import Fairlane, JobState, Reason, SessionLost, Settings
from fairlane.model.session import SessionState

from ..frozen import freeze
from .conftest import QUICK, eventually

HOLDER = Path(__file__).with_name("turn_holder.py")


@asynccontextmanager
async def _holder(url: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Another process that holds the lane, and the id of its turn."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(HOLDER), url, str(QUICK.lease), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
        yield process, line.split()[0]
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()


@pytest.fixture
async def models(url: str) -> AsyncIterator[Fairlane]:
    """An application that shares its lane with the other process."""
    app = Fairlane(settings=Settings(url=url, intervals=QUICK))
    app.queue("models").lane("flux", limit=1)
    yield app
    await app.close()


async def _freeze(process: asyncio.subprocess.Process, app: Fairlane) -> None:
    await freeze(
        lambda: process.send_signal(signal.SIGSTOP),
        lambda: process.send_signal(signal.SIGCONT),
        await app.connection.store(),
        process.pid,
    )


async def test_the_next_in_line_starts_when_the_holder_was_killed(models: Fairlane, url: str) -> None:
    async with _holder(url) as (process, dead_turn):
        waiting = models.turn("flux", queue="models", timeout=60)
        entering = asyncio.create_task(waiting.begin(body=None))

        async def in_line() -> bool:
            return (await models.handle(waiting.id).position()) is not None

        await eventually(in_line)
        process.kill()
        await entering
        job = await models.client.job(dead_turn)
        assert (job.state, job.reason) == (JobState.CANCELLED, Reason.WAITER_GONE)
        await waiting.end(None)
        assert (await models.client.job(waiting.id)).state is JobState.COMPLETED


async def test_a_holder_that_was_frozen_beyond_its_lease_is_stopped_when_it_wakes(models: Fairlane, url: str) -> None:
    async with _holder(url) as (process, frozen_turn):
        await _freeze(process, models)
        async with models.turn("flux", queue="models", timeout=60):
            assert (await models.client.job(frozen_turn)).reason is Reason.WAITER_GONE
            process.send_signal(signal.SIGCONT)
            async with asyncio.timeout(60):
                assert await process.wait() == 1, "its body was stopped, and leaving raised"


async def test_a_process_that_ends_in_order_gives_its_place_up_at_once(models: Fairlane, url: str) -> None:
    other = Fairlane(settings=Settings(url=url, intervals=QUICK))
    other.queue("models").lane("flux", limit=1)
    held = other.turn("flux", queue="models")
    await held.begin(body=None)
    await other.close()
    async with models.turn("flux", queue="models", timeout=60):
        states = {session.state for session in await models.client.sessions()}
        assert states == {SessionState.ENDED, SessionState.LIVE}
    with pytest.raises(SessionLost, match="closed"):
        await held.end(None)
