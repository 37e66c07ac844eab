"""Short names for what the suite does often. Independent of the store under test."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from fairlane.model.ids import new_id
from fairlane.model.job import Claimed, Enqueued, Held, Job, JobState, NewJob, Priority, Reason
from fairlane.model.reading import JobPosition
from fairlane.model.session import Claim, Finished, NewSession, Renewal, Session, SessionKind
from fairlane.model.settings import LaneRule, QueueSettings, SettingsChange
from fairlane.model.slots import Ask, Reserved, Slots
from fairlane.model.states import UNKNOWN_TASK_SECONDS, Transition, complete, decline, fail, hand_back, retry
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store

UNRESERVED = Reserved()


class Kit:
    """A store, its clock, and the workers a test has started."""

    def __init__(self, store: Store, clock: ManualClock) -> None:
        self.store = store
        self.clock = clock
        self._numbers = count(1)
        self._ids = count(1)

    def new(self, task: str = "task", **fields: Any) -> NewJob:
        """A request with a readable id, unless one is given."""
        fields.setdefault("id", f"job-{next(self._ids)}")
        return NewJob(task=task, **fields)

    async def enqueue(self, task: str = "task", **fields: Any) -> str:
        """Enqueue one job and return its id."""
        [answer] = await self.store.enqueue([self.new(task, **fields)])
        return answer.id

    async def enqueue_all(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Enqueue any number of jobs, in calls of at most 1,000."""
        answers: list[Enqueued] = []
        for start in range(0, len(jobs), 1_000):
            answers += await self.store.enqueue(jobs[start : start + 1_000])
        return answers

    async def worker(
        self,
        *queues: str,
        slots: int = 10,
        reserved: Reserved = UNRESERVED,
        lease: float = 15.0,
        pool: str = "default",
        index: int | None = None,
        host: str = "localhost",
        id: str | None = None,
        tasks: tuple[str, ...] | None = None,
    ) -> Worker:
        """A registered worker; it serves `default` unless given others."""
        session = await self.store.register(
            NewSession(
                id=id or new_id(),
                kind=SessionKind.WORKER,
                lease=lease,
                host=host,
                pool=pool,
                index=index,
                queues=queues or ("default",),
                slots=Slots(total=slots, reserved=reserved),
                tasks=tasks,
            )
        )
        return Worker(self, session)

    async def waiter(self, *, lease: float = 15.0) -> Worker:
        """A registered waiter, for turns."""
        session = await self.store.register(NewSession(id=new_id(), kind=SessionKind.WAITER, lease=lease))
        return Worker(self, session)

    async def settings(self, queue: str = "default", *lanes: LaneRule, version: int = 0, **fields: Any) -> None:
        """Declare settings of a queue."""
        declared = QueueSettings(lanes=lanes, **fields)
        await self.store.configure([SettingsChange(queue=queue, declared=declared, version=version)])

    async def job(self, id: str) -> Job:
        """The job, which must exist."""
        [job] = await self.store.get([id])
        assert job is not None, f"{id} is unknown"
        return job

    async def state(self, id: str) -> JobState:
        """The state of a job that must exist."""
        return (await self.job(id)).state

    async def positions(self, id: str) -> JobPosition | None:
        """The position of a job."""
        [position] = await self.store.positions([id])
        return position

    def number(self) -> int:
        """A claim number that was not used before in this test."""
        return next(self._numbers)


class Worker:
    """A session. Every call goes through the store; nothing is remembered here but the number of the last claim."""

    def __init__(self, kit: Kit, session: Session) -> None:
        self.kit = kit
        self.session = session
        self.id = session.id
        self.last_claim = 0

    @property
    def name(self) -> str:
        """``pool/index``."""
        worker = self.session.worker
        assert worker is not None
        return worker

    def everything(self, total: int) -> Claim:
        """A claim that asks for jobs of the inbox and of every queue of this worker, class by class."""
        asks = [Ask(source, p, total) for p in Priority for source in (None, *self.session.queues)]
        return Claim(number=self.kit.number(), asks=tuple(asks), total=total)

    async def claim(self, total: int = 1, *asks: Ask) -> list[Claimed]:
        """Claim up to `total` jobs: by the given asks, or from everywhere, class by class."""
        call = self.everything(total)
        # The result may not depend on whether the worker was notified, so every other claim says that it was.
        notified = call.number % 2 == 1
        call = Claim(number=call.number, asks=asks or call.asks, total=total, notified=notified)
        claimed = await self.kit.store.claim(self.id, call)
        self.last_claim = call.number
        return claimed

    async def claim_ids(self, total: int = 1, *asks: Ask) -> list[str]:
        """The ids of what `claim` starts, in the order of the answer."""
        return [job.id for job in await self.claim(total, *asks)]

    async def finish(self, *transitions: Transition) -> Finished:
        """Write transitions."""
        return await self.kit.store.finish(self.id, transitions)

    async def complete(self, *jobs: Claimed | Held, result: bytes | None = b"null") -> Finished:
        """Complete jobs that this worker holds."""
        return await self.finish(*(complete(_held(job), result) for job in jobs))

    async def fail(self, *jobs: Claimed | Held, error: str = "boom") -> Finished:
        """Fail jobs for good."""
        return await self.finish(*(fail(_held(job), Reason.ERROR, error) for job in jobs))

    async def retry(self, *jobs: Claimed | Held, delay: float = 0.0) -> Finished:
        """Retry jobs after an error."""
        return await self.finish(*(retry(_held(job), delay, Reason.ERROR, "boom") for job in jobs))

    async def hand_back(self, *jobs: Claimed | Held) -> Finished:
        """Hand jobs back, uncharged."""
        return await self.finish(*(hand_back(_held(job)) for job in jobs))

    async def decline(self, *jobs: Claimed | Held, patience: float = UNKNOWN_TASK_SECONDS) -> Finished:
        """Decline jobs, because their tasks are unknown to this worker."""
        return await self.finish(*(decline(_held(job), "no such task", patience=patience) for job in jobs))

    async def renew(self, *held: Claimed | Held, claim: int | None = None, stopping: bool = False) -> Renewal:
        """Renew, naming what is held."""
        named = [_held(job) for job in held]
        number = self.last_claim if claim is None else claim
        return await self.kit.store.renew(self.id, named, claim=number, stopping=stopping)

    async def leave(self, *begun: Held) -> None:
        """End the session; only `begun` counts as begun."""
        await self.kit.store.leave(self.id, begun=begun)


def _held(job: Claimed | Held) -> Held:
    return job.held if isinstance(job, Claimed) else job
