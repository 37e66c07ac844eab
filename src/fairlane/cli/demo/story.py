"""The story of the demo. Every number in it is measured: it is read from the store.

Each step narrates in a sentence what it does and what happened. A live screen also reads `people` and
`model_requests`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from ...handle import Handle
from ...model.job import Job, JobState
from ...model.reading import Counts
from ...model.session import Session
from ..display import duration
from . import application
from .application import app
from .fleet import SLOTS, Fleet

WORKERS = 3
BULK = 300
GUESTS = ("Bob", "Cleo", "Dan")
ASKING = ("Eve", "Finn", "Gina", "Hugo")
MODEL = "flux"
QUEUES = ("pictures", "models")
"""What the story counts. Beside it runs what `run_sideshow` sends."""
ROOMS = ("garden", "kitchen", "studio")
PAUSE = 1.0
"""Seconds between two sentences: long enough to read one."""
STEP_TIMEOUT = 60.0
POLL = 0.02
"""Seconds between two reads of the store."""

Narrate = Callable[[str], None]


class Person:
    """A user: how many pictures were sent, and how long the last one waited."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sent = 0
        self.waited: float | None = None


class Story:
    """Runs the story in rounds on one fleet."""

    def __init__(self, fleet: Fleet, narrate: Narrate) -> None:
        self._fleet = fleet
        self._narrate = narrate
        self.round = 0
        self.people: dict[str, Person] = {}
        self.model_requests: dict[str, Handle[str]] = {}
        self.rerun = 0
        """Jobs that ran a second time because their worker was killed."""

    async def begin(self) -> None:
        """Start the workers. Ann sends her first pictures while they start."""
        self._narrate(
            f"Starting [b]{WORKERS} workers[/b] with {SLOTS} slots each, as real processes on one SQLite file."
        )
        for _ in range(WORKERS):
            self._fleet.start_worker()
        await self._flood()
        await self._fleet.wait_for_workers(WORKERS)

    async def run_sideshow(self) -> None:
        """Send what the story does not mention: chats that stick to a worker, and payments of which some fail."""
        for number in count():
            room = ROOMS[number % len(ROOMS)]
            await application.chat.options(sticky=room).enqueue(room, f"hello {number}")
            await application.charge.enqueue(GUESTS[number % len(GUESTS)], 1_000 * (number % 11))
            await asyncio.sleep(PAUSE)

    async def run_round(self) -> None:
        """Run every step once."""
        self.round += 1
        if self.round > 1:
            await self._flood()
        await self._until(lambda counts: counts.running > 0)
        await asyncio.sleep(PAUSE / 2)
        await self._send_single_pictures()
        await self._send_urgent()
        await self._ask_model()
        await self._kill_worker()
        await self._summarize()

    async def _flood(self) -> None:
        self._narrate(
            f"[b]Ann[/b] sends [b]{BULK} pictures[/b] at once. They fill every slot that is open to normal jobs."
        )
        await self._send("Ann", BULK)

    async def _send_single_pictures(self) -> None:
        """Send one picture each while hundreds of Ann's wait."""
        for name in GUESTS:
            ahead = await self._waiting()
            [handle] = await self._send(name, 1)
            wait = await self._wait_of(name, handle)
            alone = ahead * application.DRAWING_SECONDS / (WORKERS * (SLOTS - 1))
            self._narrate(
                f"[b]{name}[/b] sends one picture. It starts after [b green]{duration(wait)}[/b green], although "
                f"{ahead} of Ann's were waiting. First come, first served would have taken {duration(alone)}."
            )
            await asyncio.sleep(PAUSE)

    async def _send_urgent(self) -> None:
        handle = await application.rush.enqueue("Ida")
        self._person("Ida").sent += 1
        wait = await self._wait_of("Ida", handle)
        self._narrate(
            f"[b]Ida's[/b] picture is urgent: it starts after [b green]{duration(wait)}[/b green], in the slot that "
            "every worker reserves for urgent jobs."
        )
        await asyncio.sleep(PAUSE)

    async def _ask_model(self) -> None:
        self._narrate(
            f"The model [b]{MODEL}[/b] answers one request at a time. "
            f"{len(ASKING)} people ask; each sees their place in line."
        )
        for person in ASKING:
            self.model_requests[person] = await application.ask.enqueue(MODEL, person)
        last = self.model_requests[ASKING[-1]]
        position = await last.position()
        if position is not None:
            eta = "" if position.eta is None else f", about {duration(position.eta)} to go"
            self._narrate(f"{ASKING[-1]} sees: [b]{position.ahead} ahead[/b] of you in {MODEL}{eta}.")
        await asyncio.sleep(2 * PAUSE)

    async def _kill_worker(self) -> None:
        if await self._waiting() < 10 * SLOTS * WORKERS:
            await self._send("Ann", BULK // 2)
        victim, held = await self._busiest()
        began = time.monotonic()
        self._fleet.kill(victim.pid)
        held = await self._still_held(held)
        self._narrate(
            f"[b red]kill -9[/b red] for worker {victim.worker}, in the middle of {len(held)} jobs. "
            "It gets no chance to clean up."
        )
        self._fleet.start_worker()
        workers = await self._run_again(held)
        took = time.monotonic() - began
        self.rerun += len(held)
        self._narrate(
            f"All {len(held)} run again, on {workers}: [b green]{duration(took)}[/b green] after the kill, with leases "
            "of 2 s. A new worker has replaced it."
        )
        await asyncio.sleep(PAUSE)

    async def _summarize(self) -> None:
        await self._until(lambda counts: counts.pending + counts.running == 0)
        counts = await self._counts()
        done, failed = sum(c.completed for c in counts), sum(c.failed for c in counts)
        sent = sum(person.sent for person in self.people.values()) + len(ASKING) * self.round
        differences = (await app.client.recount()).differences
        agree = (
            "every number agrees with a recount"
            if not differences
            else f"a recount corrected {len(differences)} numbers"
        )
        self._narrate(
            f"In this story: [b]{sent} jobs sent, {done} done, {failed} failed, {sent - done - failed} lost[/b]; "
            f"{self.rerun} ran twice, because their worker died; {agree}."
        )
        self.model_requests.clear()
        await asyncio.sleep(2 * PAUSE)

    # -- steps in detail ---------- -----------------------------------------------------------------------------------

    def _person(self, name: str) -> Person:
        return self.people.setdefault(name, Person(name))

    async def _send(self, name: str, count: int) -> list[Handle[str]]:
        person = self._person(name)
        handles = await app.enqueue_many([application.draw.call(name, person.sent + n) for n in range(count)])
        person.sent += count
        return handles

    async def _wait_of(self, name: str, handle: Handle[Any]) -> float:
        """The time from enqueue to start, by the store's clock."""
        async with asyncio.timeout(STEP_TIMEOUT):
            async for _ in handle.watch():
                job = await handle.job()
                if job.started_at is not None:
                    wait = job.started_at - job.enqueued_at
                    self._person(name).waited = wait
                    return wait
        raise AssertionError("a job that has ended was started")

    async def _waiting(self) -> int:
        return sum(queue.counts.pending for queue in await app.client.queues() if queue.name == "pictures")

    async def _counts(self) -> list[Counts]:
        """The counts of the queues that the story is about."""
        return [queue.counts for queue in await app.client.queues() if queue.name in QUEUES]

    async def _until(self, reached: Callable[[Counts], bool]) -> None:
        """Wait until the total counts of these queues satisfy `reached`."""
        async with asyncio.timeout(STEP_TIMEOUT):
            while True:
                counts = await self._counts()
                pending, running = sum(c.pending for c in counts), sum(c.running for c in counts)
                if reached(Counts(pending=pending, running=running)):
                    return
                await asyncio.sleep(POLL)

    async def _busiest(self) -> tuple[Session, list[Job]]:
        """The busy worker with the highest index, and its running jobs."""
        async with asyncio.timeout(STEP_TIMEOUT):
            while True:
                for worker in reversed(await self._fleet.workers()):
                    page = await app.client.find(state=JobState.RUNNING, worker=worker.worker)
                    if len(page.jobs) >= SLOTS - 1:
                        return worker, list(page.jobs)
                await asyncio.sleep(POLL)
        raise AssertionError("a timeout raises")

    async def _still_held(self, held: list[Job]) -> list[Job]:
        """The jobs that had not ended between the read and the kill."""
        now = [await app.client.job(job.id) for job in held]
        return [job for job, before in zip(now, held, strict=True) if not job.state.final and job.fence == before.fence]

    async def _run_again(self, held: list[Job]) -> str:
        """Wait until every job has started again, and return the names of the workers."""
        workers: dict[str, str] = {}
        async with asyncio.timeout(STEP_TIMEOUT):
            while len(workers) < len(held):
                for before in held:
                    job = await app.client.job(before.id)
                    if job.fence > before.fence and job.worker is not None:
                        workers[job.id] = job.worker
                await asyncio.sleep(POLL)
        return " and ".join(sorted(set(workers.values())))
