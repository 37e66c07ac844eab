"""What happens in the demo, act by act. Every number told is measured: it is read from the store's own records.

The acts say in words what they do and what came of it; whoever shows them, as a live screen or line by line, looks at
`lines`, `people` and `queue_of_the_model`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from ...handle import Handle
from ...model.job import Job, JobState
from ...model.reading import Counts
from ...model.session import Session
from ..display import duration
from . import scene
from .scene import app
from .stage import SLOTS, Stage

WORKERS = 3
BULK = 300
GUESTS = ("Bob", "Cleo", "Dan")
ASKING = ("Eve", "Finn", "Gina", "Hugo")
MODEL = "flux"
BEAT = 1.0
"""Between two sentences: long enough to read one."""
PATIENCE = 60.0
LOOK = 0.02
"""Between two looks at the store."""

Say = Callable[[str], None]


class Person:
    """Somebody who sends pictures: how many, and how long the last one waited."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sent = 0
        self.waited: float | None = None


class Play:
    """One round after the other, on one stage."""

    def __init__(self, stage: Stage, say: Say) -> None:
        self._stage = stage
        self._say = say
        self.round = 0
        self.people: dict[str, Person] = {}
        self.queue_of_the_model: dict[str, Handle[str]] = {}
        self.again = 0
        """Jobs that ran a second time because their worker was killed."""

    async def begin(self) -> None:
        """Start the workers; Ann has sent her first pictures before they are there."""
        self._say(f"Starting [b]{WORKERS} workers[/b] with {SLOTS} slots each, as real processes on one SQLite file.")
        for _ in range(WORKERS):
            self._stage.start_worker()
        # They take a moment to start; meanwhile there is something to see.
        await self._crowd()
        await self._stage.wait_for_workers(WORKERS)

    async def play_round(self) -> None:
        """Everything once."""
        self.round += 1
        if self.round > 1:
            await self._crowd()
        await self._until(lambda counts: counts.running > 0)
        await asyncio.sleep(BEAT / 2)
        await self._guests()
        await self._urgent()
        await self._line()
        await self._death()
        await self._end()

    async def _crowd(self) -> None:
        self._say(f"[b]Ann[/b] sends [b]{BULK} pictures[/b] at once. They fill every slot that ordinary work may use.")
        await self._send("Ann", BULK)

    async def _guests(self) -> None:
        """One picture each, sent while hundreds of another wait."""
        for name in GUESTS:
            ahead = await self._waiting()
            [handle] = await self._send(name, 1)
            wait = await self._wait_of(name, handle)
            alone = ahead * scene.DRAWING_SECONDS / (WORKERS * (SLOTS - 1))
            self._say(
                f"[b]{name}[/b] sends one picture. It starts after [b green]{duration(wait)}[/b green], although "
                f"{ahead} of Ann's were there before it. First come, first served would have been {duration(alone)}."
            )
            await asyncio.sleep(BEAT)

    async def _urgent(self) -> None:
        handle = await scene.rush.enqueue("Ida")
        self._person("Ida").sent += 1
        wait = await self._wait_of("Ida", handle)
        self._say(
            f"[b]Ida's[/b] picture is urgent: it starts after [b green]{duration(wait)}[/b green], in the slot that "
            "every worker keeps free for such."
        )
        await asyncio.sleep(BEAT)

    async def _line(self) -> None:
        self._say(
            f"The model [b]{MODEL}[/b] answers one person at a time. {len(ASKING)} ask; each sees his place in line."
        )
        for person in ASKING:
            self.queue_of_the_model[person] = await scene.ask.enqueue(MODEL, person)
        last = self.queue_of_the_model[ASKING[-1]]
        position = await last.position()
        if position is not None:
            eta = "" if position.eta is None else f", about {duration(position.eta)} to go"
            self._say(f"{ASKING[-1]} is told: [b]{position.ahead} ahead[/b] of you in {MODEL}{eta}.")
        await asyncio.sleep(2 * BEAT)

    async def _death(self) -> None:
        if await self._waiting() < 10 * SLOTS * WORKERS:
            await self._send("Ann", BULK // 2)
        victim, held = await self._busiest()
        began = time.monotonic()
        self._stage.kill(victim.pid)
        held = await self._still_held(held)
        self._say(
            f"[b red]kill -9[/b red] for worker {victim.worker}, in the middle of {len(held)} jobs. "
            "Nobody cleans up after it."
        )
        self._stage.start_worker()
        hands = await self._run_again(held)
        took = time.monotonic() - began
        self.again += len(held)
        self._say(
            f"All {len(held)} run again, on {hands}: [b green]{duration(took)}[/b green] after the death, with leases "
            "of 2 s. A new worker has taken its place."
        )
        await asyncio.sleep(BEAT)

    async def _end(self) -> None:
        await self._until(lambda counts: counts.pending + counts.running == 0)
        counts = [queue.counts for queue in await app.client.queues()]
        done, failed = sum(c.completed for c in counts), sum(c.failed for c in counts)
        sent = sum(person.sent for person in self.people.values()) + len(ASKING) * self.round
        differences = (await app.client.recount()).differences
        agree = "every number agrees with a recount" if not differences else f"{len(differences)} numbers were wrong"
        self._say(
            f"[b]{sent} jobs sent, {done} done, {failed} failed, {sent - done - failed} lost[/b]; {self.again} ran "
            f"twice, because their worker died; {agree}."
        )
        self.queue_of_the_model.clear()
        await asyncio.sleep(2 * BEAT)

    # -- what the acts are made of -----------------------------------------------------------------------------------

    def _person(self, name: str) -> Person:
        return self.people.setdefault(name, Person(name))

    async def _send(self, name: str, count: int) -> list[Handle[str]]:
        person = self._person(name)
        handles = await app.enqueue_many([scene.draw.call(name, person.sent + n) for n in range(count)])
        person.sent += count
        return handles

    async def _wait_of(self, name: str, handle: Handle[Any]) -> float:
        """How long a job waited for its start, by the store's clock."""
        async with asyncio.timeout(PATIENCE):
            async for _ in handle.watch():
                job = await handle.job()
                if job.started_at is not None:
                    wait = job.started_at - job.enqueued_at
                    self._person(name).waited = wait
                    return wait
        raise AssertionError("a job that has ended was started")

    async def _waiting(self) -> int:
        return sum(queue.counts.pending for queue in await app.client.queues() if queue.name == "pictures")

    async def _until(self, reached: Callable[[Counts], bool]) -> None:
        """Until the queues together are as they should be."""
        async with asyncio.timeout(PATIENCE):
            while True:
                counts = [queue.counts for queue in await app.client.queues()]
                pending, running = sum(c.pending for c in counts), sum(c.running for c in counts)
                if reached(Counts(pending=pending, running=running)):
                    return
                await asyncio.sleep(LOOK)

    async def _busiest(self) -> tuple[Session, list[Job]]:
        """The worker with the highest index that has its hands full, and what it holds."""
        async with asyncio.timeout(PATIENCE):
            while True:
                for worker in reversed(await self._stage.workers()):
                    page = await app.client.find(state=JobState.RUNNING, worker=worker.worker)
                    if len(page.jobs) >= SLOTS - 1:
                        return worker, list(page.jobs)
                await asyncio.sleep(LOOK)
        raise AssertionError("a timeout raises")

    async def _still_held(self, held: list[Job]) -> list[Job]:
        """Those that had not ended in the moment between the look and the kill."""
        now = [await app.client.job(job.id) for job in held]
        return [job for job, before in zip(now, held, strict=True) if not job.state.final and job.fence == before.fence]

    async def _run_again(self, held: list[Job]) -> str:
        """Wait until every job has begun once more; answers where."""
        workers: dict[str, str] = {}
        async with asyncio.timeout(PATIENCE):
            while len(workers) < len(held):
                for before in held:
                    job = await app.client.job(before.id)
                    if job.fence > before.fence and job.worker is not None:
                        workers[job.id] = job.worker
                await asyncio.sleep(LOOK)
        return " and ".join(sorted(set(workers.values())))
