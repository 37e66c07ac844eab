"""Managers in processes that are killed or stood still: each slot fires once, and a leader that wakes up too late
changes nothing."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from fairlane.model.job import NewJob
from fairlane.model.reading import Filter
from fairlane.model.schedule import Schedule, Timetable, template_of
from fairlane.store.port import Store

from ..frozen import freeze
from .waiting import until_awaited

SCRIPT = Path(__file__).with_name("manager_process.py")
ROOT = SCRIPT.parent.parent.parent

Start = Callable[[str], Awaitable[asyncio.subprocess.Process]]


@asynccontextmanager
async def processes(url: str, log: Path, scale: float) -> AsyncIterator[Start]:
    """Starts managers on the store at `url`, with intervals of that scale; kills whatever still runs at the end."""
    started: list[asyncio.subprocess.Process] = []

    async def start(session: str) -> asyncio.subprocess.Process:
        with log.open("a") as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, str(SCRIPT), url, session, str(scale)),
                cwd=ROOT,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
            )
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in started:
            if process.returncode is None:
                process.kill()
        for process in started:
            await process.communicate()


async def wait_for_word(process: asyncio.subprocess.Process, word: str) -> str:
    """Wait for a line that begins with `word`."""
    assert process.stdout is not None
    async with asyncio.timeout(60):
        async for line in process.stdout:
            if line.decode().startswith(word):
                return line.decode().strip()
    raise AssertionError(f"the manager ended before it said {word!r}")


async def leader_of(store: Store) -> str | None:
    term = await store.leader()
    return None if term is None else term.session


async def test_killed_leaders_cost_no_slot_and_double_none(live_store: Store, store_url: str, tmp_path: Path) -> None:
    template = template_of(NewJob(id="x", task="tick"))
    [stored] = await live_store.declare([Schedule(name="each", timetable=Timetable(every=1.0), job=template)])
    async with processes(store_url, tmp_path / "log", 0.1) as start:
        alive = {name: await start(name) for name in ("m0", "m1", "m2")}
        for number in range(3, 8):
            await until_awaited(lambda: _one_of(live_store, set(alive)))
            leader = await leader_of(live_store)
            if leader not in alive:
                continue
            victim = alive.pop(leader)
            victim.send_signal(signal.SIGKILL)
            await victim.wait()
            alive[f"m{number}"] = await start(f"m{number}")
        await until_awaited(lambda: _caught_up(live_store, stored.stored_at + 8))

    page = await live_store.find(Filter(), limit=500)
    fired = sorted(int(job.id.rpartition(":")[2]) for job in page.jobs)
    assert len(fired) == len(set(fired))
    assert fired == list(range(fired[0], fired[-1] + 1)), "no slot is missing"
    assert fired[0] - stored.stored_at <= 1.0
    assert fired[-1] >= stored.stored_at + 7


async def _one_of(store: Store, names: set[str]) -> bool:
    return await leader_of(store) in names


async def _caught_up(store: Store, instant: float) -> bool:
    [schedule] = await store.declare([])
    return schedule.last_slot is not None and schedule.last_slot >= instant


async def test_a_leader_that_stood_still_finds_itself_replaced_and_steps_down(
    live_store: Store, store_url: str, tmp_path: Path
) -> None:
    # Long enough that no manager loses its term because the machine is busy.
    async with processes(store_url, tmp_path / "log", 0.4) as start:
        first = await start("first")
        await wait_for_word(first, "leads")
        second = await start("second")
        await freeze(
            lambda: first.send_signal(signal.SIGSTOP),
            lambda: first.send_signal(signal.SIGCONT),
            live_store,
            first.pid,
        )
        try:
            await wait_for_word(second, "leads")
        finally:
            first.send_signal(signal.SIGCONT)

        await wait_for_word(first, "follows")

        assert await leader_of(live_store) == "second"
    assert "stepped down from term 1: " in (tmp_path / "log").read_text()
