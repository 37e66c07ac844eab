"""Two stores that get the same calls: whatever one of them answers, the other must answer too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from random import Random
from typing import Any

import msgspec

from fairlane.errors import FairlaneError
from fairlane.model.job import Claimed, Job, JobKind, JobState, NewJob, Priority, Reason
from fairlane.model.reading import Filter
from fairlane.model.session import Claim, NewSession, SessionKind
from fairlane.model.settings import LaneRule, QueueOverride, QueueSettings, SettingsChange
from fairlane.model.slots import Ask, Reserved, Slots
from fairlane.model.states import Transition, complete, fail, hand_back, retry, snooze
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store

QUEUES = ("images", "mail")
LANES = (None, "ann", "bob", "heavy", "doc", "pair:1", "pair:2")
WORKERS = ("worker-0", "worker-1")
RULES = (
    LaneRule(pattern="doc", limit=1),
    LaneRule(pattern="pair:*", limit=2, ordered=False),
    LaneRule(pattern="heavy", weight=3.0),
)
NOWHERE = {"sticky": "nowhere", "pool": "nobody", "lane": "ann"}
EVERYTHING = tuple(Ask(source, priority, 3) for priority in Priority for source in (None, *QUEUES))


class Twins:
    """A store, its twin, and the life that they share."""

    def __init__(self, one: Store, other: Store, clock: ManualClock, seed: int) -> None:
        self.one = one
        self.other = other
        self.clock = clock
        self.random = Random(seed)
        self.ids: list[str] = []
        self.held: dict[str, list[Claimed]] = {worker: [] for worker in WORKERS}
        self.claims = 0

    async def both(self, verb: str, *args: Any, **options: Any) -> Any:
        """Call a verb on both. Returns None if both reject it alike."""
        answers = [await _answer(store, verb, args, options) for store in (self.one, self.other)]
        assert answers[0] == answers[1], f"{verb}{args}"
        return None if isinstance(answers[0], tuple) and answers[0][:1] == ("refused",) else answers[0]

    # -- a life ----------------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Settings and processes."""
        limited = QueueSettings(lanes=RULES, limit=7, reserved=Reserved(high=1))
        await self.both("configure", [SettingsChange(queue="images", declared=limited, version=1)])
        await self.both("configure", [SettingsChange(queue="mail", declared=QueueSettings(lanes=RULES), version=1)])
        for worker in WORKERS:
            slots = Slots(total=3, reserved=Reserved(high=1))
            await self.both(
                "register", NewSession(id=worker, kind=SessionKind.WORKER, lease=1e6, queues=QUEUES, slots=slots)
            )
        await self.both("register", NewSession(id="waiter", kind=SessionKind.WAITER, lease=1e6))

    async def step(self) -> None:
        """Make a random call, most often one that sends jobs."""
        likely = (self._enqueue, self._claim, self._finish) * 4 + (self._pass, self._pass, self._cancel, self._odd)
        await self.random.choice(likely)()

    async def _enqueue(self) -> None:
        await self.both("enqueue", [self._job() for _ in range(self.random.randint(1, 5))])

    def _job(self) -> NewJob:
        draw = self.random
        id = f"job-{len(self.ids)}"
        self.ids.append(id)
        queue, lane = draw.choice(QUEUES), draw.choice(LANES)
        if queue == "images" and lane == "doc" and draw.random() < 0.3:
            return NewJob(id=id, task="turn", queue=queue, lane=lane, kind=JobKind.TURN, waiter="waiter")
        place: dict[str, Any] = {}
        if queue == "mail":
            # Only these are bound to a worker: which queue of an inbox comes first is no rule.
            place = draw.choice(
                [{}, {}, {"sticky": f"key-{draw.randint(0, 2)}"}, {"worker": draw.randint(0, 2)}, NOWHERE]
            )
        fields: dict[str, Any] = {
            "task": draw.choice(("draw", "send")),
            "lane": lane,
            "priority": draw.choice(tuple(Priority)),
            "cost": draw.choice((1.0, 1.0, 2.5)),
            "delay": draw.choice((0.0, 0.0, 0.0, 4.0)),
            "expires": draw.choice((None, None, None, 30.0)),
            "headers": draw.choice((None, b"{}")),
        }
        return NewJob(id=id, queue=queue, **(fields | place))

    async def _claim(self) -> None:
        worker = self.random.choice(WORKERS)
        self.claims += 1
        claim = Claim(number=self.claims, asks=EVERYTHING, total=self.random.randint(1, 3))
        self.held[worker] += await self.both("claim", worker, claim) or ()

    async def _finish(self) -> None:
        worker = self.random.choice(WORKERS)
        self.random.shuffle(self.held[worker])
        ended = [self.held[worker].pop() for _ in range(self.random.randint(0, len(self.held[worker])))]
        if ended:
            await self.both("finish", worker, [self._end(job) for job in ended])

    def _end(self, job: Claimed) -> Transition:
        draw = self.random.random()
        if draw < 0.5:
            return complete(job.held, b"1")
        if draw < 0.7:
            return fail(job.held, Reason.ERROR, "broken", group=self.random.choice(("broken", "torn")))
        if draw < 0.85:
            return retry(job.held, self.random.choice((0.0, 3.0)), Reason.ERROR, "not yet")
        return snooze(job.held, 2.0) if draw < 0.93 else hand_back(job.held)

    async def _pass(self) -> None:
        self.clock.advance(self.random.choice((0.5, 1.0, 2.5)))
        for verb in ("promote", "admit"):
            await self.both(verb)

    async def _cancel(self) -> None:
        if self.ids:
            await self.both("cancel", [self.random.choice(self.ids)])

    async def _odd(self) -> None:
        draw = self.random.random()
        if draw < 0.4:
            paused = QueueOverride(paused=True) if self.random.random() < 0.3 else None
            await self.both("configure", [SettingsChange(queue=self.random.choice(QUEUES), override=paused)])
        elif draw < 0.7:
            id = f"news-{len(self.ids)}"
            self.ids += [id, f"{id}/0", f"{id}/1"]
            await self.both("enqueue", [NewJob(id=id, task="news", queue="mail", kind=JobKind.BROADCAST)])
        else:
            await self.both("release", "default", f"key-{self.random.randint(0, 2)}")

    # -- what readers see ------------------------------------------------------------------------------------------

    async def compare(self) -> None:
        """Compare everything that can be read by name."""
        unknown = [*self.ids, "unknown", "a\0b", "\udcff"]
        assert _jobs(await self.one.get(unknown)) == _jobs(await self.other.get(unknown))
        for verb, args in (
            ("positions", [unknown]),
            ("queues", []),
            ("sessions", []),
            ("leader", []),
            ("bindings", []),
        ):
            await self.both(verb, *args)
        for queue in (*QUEUES, "none", "no\0ne"):
            await self.both("lanes", queue)
        for pool, key in product((None, "default", "none"), (None, "key-0", "no\0ne")):
            await self.both("bindings", pool, key, limit=2)

    async def compare_pages(self) -> None:
        """Compare all pages of each filter, and of two filters together."""
        for where in filters():
            # The cursors of the two stores need not be equal.
            cursor: str | None = None
            other_cursor: str | None = None
            while True:
                page = await self.one.find(where, limit=7, cursor=cursor)
                other = await self.other.find(where, limit=7, cursor=other_cursor)
                assert _jobs(page.jobs) == _jobs(other.jobs), where
                cursor, other_cursor = page.cursor, other.cursor
                assert (cursor is None) == (other_cursor is None), where
                if cursor is None:
                    break


def filters() -> Iterator[Filter]:
    """All filters alone, and in pairs."""
    values: dict[str, tuple[Any, ...]] = {
        "state": (JobState.FAILED, *JobState),
        "queue": ("images", "none"),
        "task": ("draw", "turn"),
        "sticky": ("key-1",),
        "worker": ("default/0", "default/2", "localhost", "nobody/", "x/y"),
        "error_group": ("broken",),
    }
    yield Filter()
    yield Filter(queue="images", lane="doc")
    yield Filter(queue="images", lane="doc", state=JobState.PENDING)
    for number, (field, given) in enumerate(values.items()):
        for value in given:
            yield Filter(**{field: value})
            for other, others in list(values.items())[:number]:
                yield Filter(**{field: value, other: others[0]})


async def _answer(store: Store, verb: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    try:
        return await getattr(store, verb)(*args, **options)
    except FairlaneError as exc:
        return ("refused", type(exc), str(exc))


def _jobs(found: Sequence[Job | None]) -> list[Job | None]:
    """Jobs whose arrivals are numbered anew in each class of a queue: only there does their order matter."""
    arrivals: dict[tuple[str, Priority], list[int]] = {}
    for job in found:
        if job is not None and job.arrival is not None:
            arrivals.setdefault((job.queue, job.priority), []).append(job.arrival)
    return [job and _renumbered(job, arrivals.get((job.queue, job.priority), [])) for job in found]


def _renumbered(job: Job, arrivals: list[int]) -> Job:
    place = None if job.arrival is None else sorted(arrivals).index(job.arrival)
    return msgspec.structs.replace(job, arrival=place)
