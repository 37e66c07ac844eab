"""Several processes at one store, on the real clock: what must happen once happens once, whichever process is first."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fairlane.model.binding import BindingState
from fairlane.model.ids import new_id
from fairlane.model.job import JobState, NewJob
from fairlane.model.reading import Filter
from fairlane.model.session import NewSession, SessionKind
from fairlane.model.settings import LaneRule, QueueSettings, SettingsChange
from fairlane.model.slots import Slots
from fairlane.store.port import Store
from tests.forks import Fork

from .race_worker import LANE, QUEUE, REPEATS
from .reopening import open_again

PATIENCE = 60.0
PROCESSES = 4
JOBS = 300


@pytest.fixture
async def shared(store_url: str) -> AsyncIterator[Store]:
    """The store that the processes share, on its real clock."""
    opened = await open_again(store_url)
    yield opened
    await opened.close()


async def _race(role: str, url: str) -> list[Any]:
    """Run `role` in several processes that start at the same moment. Returns what each of them reported."""
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder, "start")
        os.mkfifo(start)
        # Each waits for the end of a FIFO, which they all see when its last writer closes it.
        gun = os.open(start, os.O_RDWR)
        racers = [Racer(role, url, number, start) for number in range(PROCESSES)]
        try:
            await _until(lambda: all(racer.ready() for racer in racers))
            os.close(gun)
            gun = -1
            await _until(lambda: all(racer.process.poll() is not None for racer in racers))
        finally:
            if gun >= 0:
                os.close(gun)
            for racer in racers:
                racer.process.send_signal(signal.SIGKILL)
                racer.process.wait()
        return [racer.seen() for racer in racers]


class Racer:
    """One of the processes."""

    def __init__(self, role: str, url: str, number: int, start: Path) -> None:
        self._output = start.with_name(f"{number}")
        arguments = [role, url, str(number)]
        self.process = Fork("tests.conformance.race_worker", arguments, source=start, output=self._output)

    def ready(self) -> bool:
        """Whether it waits for the start."""
        said = self._output.read_text() if self._output.exists() else ""
        assert self.process.poll() is None, said
        return said == "ready\n"

    def seen(self) -> Any:
        """What it reported, once it has ended."""
        said = self._output.read_text()
        assert self.process.wait() == 0, said
        return json.loads(said.removeprefix("ready\n"))


async def _until(look: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not look():
            await asyncio.sleep(0.002)


async def _send(store: Store, jobs: list[NewJob]) -> None:
    for start in range(0, len(jobs), 1_000):
        await store.enqueue(jobs[start : start + 1_000])


async def _worker(store: Store) -> None:
    slots = Slots(total=10)
    await store.register(NewSession(id=new_id(), kind=SessionKind.WORKER, lease=600, queues=(QUEUE,), slots=slots))


async def test_each_job_is_started_once_however_many_claim(shared: Store, store_url: str) -> None:
    ids = [f"job-{number}" for number in range(JOBS)]
    await _send(shared, [NewJob(id=id, task="task", queue=QUEUE, lane=f"user:{id[-1]}") for id in ids])
    seen = await _race("claim", store_url)
    starts = Counter(id for each in seen for id, _ in each["starts"])
    assert starts == Counter(ids)
    jobs = await shared.get(ids)
    assert {job and (job.state, job.fence) for job in jobs} == {(JobState.COMPLETED, 1)}
    assert (await shared.recount()).differences == ()


async def test_a_lane_is_never_fuller_than_its_limit_however_many_claim(shared: Store, store_url: str) -> None:
    narrow = QueueSettings(lanes=(LaneRule(pattern=LANE, limit=1),))
    await shared.configure([SettingsChange(queue=QUEUE, declared=narrow)])
    ids = [f"job-{number}" for number in range(80)]
    await _send(shared, [NewJob(id=id, task="task", queue=QUEUE, lane=LANE) for id in ids])
    seen = await _race("claim", store_url)
    assert {each["fullest"] for each in seen} <= {0, 1}
    assert Counter(id for each in seen for id, _ in each["starts"]) == Counter(ids)
    # One place and strict order: each job began after the one before it had ended.
    jobs = [job for job in await shared.get(ids) if job is not None]
    spans = [(job.started_at or 0.0, job.finished_at or 0.0) for job in jobs]
    assert all(ended <= began for (_, ended), (began, _) in pairwise(spans))
    assert (await shared.admit()).repaired == 0


async def test_of_several_electors_one_gets_the_term(shared: Store, store_url: str) -> None:
    won = [term for term in await _race("elect", store_url) if term is not None]
    assert len(won) == 1
    leader = await shared.leader()
    assert leader is not None
    assert leader.number == won[0]


async def test_no_term_is_given_out_twice(store_url: str) -> None:
    won = await _race("reelect", store_url)
    terms = [term for each in won for term in each]
    assert terms
    assert len(set(terms)) == len(terms)
    assert all(each == sorted(each) for each in won)


async def test_concurrent_first_jobs_of_a_sticky_key_share_one_binding(shared: Store, store_url: str) -> None:
    for _ in range(3):
        await _worker(shared)
    sent = [id for each in await _race("bind", store_url) for id in each]
    bindings = await shared.bindings(limit=500)
    assert Counter(binding.key for binding in bindings) == Counter(f"plan-{key}" for key in range(REPEATS))
    assert {binding.state for binding in bindings} == {BindingState.OPEN}
    place = {binding.key: f"default/{binding.index}" for binding in bindings}
    jobs = [job for job in await shared.get(sent) if job is not None]
    assert len(jobs) == PROCESSES * REPEATS
    assert all(job.worker == place[job.sticky or ""] for job in jobs)
    per_worker = Counter(place.values())
    assert max(per_worker.values()) - min(per_worker.values()) <= 1


async def test_concurrent_enqueues_of_one_unique_value_create_one_job(shared: Store, store_url: str) -> None:
    answers = await _race("unique", store_url)
    for value in range(REPEATS):
        told = [each[value] for each in answers]
        assert len({id for id, _ in told}) == 1, told
        assert sum(created for _, created in told) == 1, told
    page = await shared.find(Filter(queue=QUEUE), limit=500)
    assert len(page.jobs) == REPEATS


async def test_concurrent_enqueues_of_one_id_create_one_job(shared: Store, store_url: str) -> None:
    made = [id for each in await _race("same", store_url) for id in each]
    assert sorted(made) == sorted(f"same-{value}" for value in range(REPEATS))
    page = await shared.find(Filter(queue=QUEUE), limit=500)
    assert len(page.jobs) == REPEATS


async def test_no_two_workers_get_one_index(store_url: str) -> None:
    assert sorted(await _race("register", store_url)) == list(range(PROCESSES))


async def test_jobs_sent_by_several_processes_all_arrive_each_with_its_own_number(
    shared: Store, store_url: str
) -> None:
    sent = [id for each in await _race("send", store_url) for id in each]
    # Calls that found the queue locked may have left their jobs to be admitted by the next call.
    await shared.admit()
    jobs = [job for job in await shared.get(sent) if job is not None]
    assert len(jobs) == len(sent)
    arrivals = [job.arrival for job in jobs]
    assert None not in arrivals
    assert len(set(arrivals)) == len(arrivals)
    [reading] = await shared.queues()
    assert reading.counts.pending == len(sent)
