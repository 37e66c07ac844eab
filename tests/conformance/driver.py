"""Runs every verb on a store and on the model, and compares them after each step.

The driver keeps what a fleet of processes would remember (the claims they made, what they wrote), so that a machine can
repeat any of it later. Times are chosen so that no two of them are equal: leases end at .3, due times at .2, expiries
at .1 of a half second, and the clock moves by halves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Any, NoReturn, TypeVar

import msgspec

from fairlane.errors import FairlaneError
from fairlane.model.ended import EndedJob
from fairlane.model.job import Held, Job, JobState, NewJob, Priority
from fairlane.model.reading import Filter
from fairlane.model.session import Claim, NewSession, SessionKind, Term
from fairlane.model.settings import SettingsChange
from fairlane.model.slots import Ask, Reserved, Slots
from fairlane.model.states import Transition, complete
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store

from .model import Mismatch, Model, Sight, differences

T = TypeVar("T")
LEASE = 15.3
TERM_LEASE = 10.3
BROADCASTS = "news"
CLEANUPS = "tidy"
SERVED = ("work", "mail", "models")


class Driver:
    """A store, the model of it, and what their users remember."""

    def __init__(self, open_store: Callable[[ManualClock], Awaitable[Store]]) -> None:
        self.clock = ManualClock()
        self.runner = asyncio.Runner()
        self.store = self.runner.run(_awaited(open_store(self.clock)))
        self.model = Model(self.clock)
        self.calls: list[str] = []
        """Every call so far, as code."""
        self.broken = False
        self.sent: dict[str, NewJob] = {}
        self.last_claims: dict[str, Claim] = {}
        self.starts: list[tuple[str, Held]] = []
        """Every start there ever was, with its session."""
        self.writes: list[tuple[str, Transition]] = []
        self.terms: list[Term] = []
        self.finals: dict[str, tuple[object, ...]] = {}
        self.load: dict[tuple[str, str | None], int] = {}
        self.ended: dict[str, EndedJob] = {}
        """What the feed of ended jobs has returned so far."""
        self.cursor = self.runner.run(_awaited(self.store.ended(None))).cursor

    def close(self) -> None:
        """Close the store and the loop."""
        self.runner.run(self.store.close())
        self.runner.close()

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.calls.append(f"clock.advance({seconds})")
        self.clock.advance(seconds)

    def both(self, verb: str, *args: Any, **options: Any) -> Any:
        """Call a verb on the store and on the model, and compare. None if it was rejected, as the model requires."""
        spelled = [spell(arg) for arg in args] + [f"{name}={spell(value)}" for name, value in options.items()]
        self.calls.append(f"await store.{verb}({', '.join(spelled)})")
        reply: Any
        try:
            reply = self.runner.run(getattr(self.store, verb)(*args, **options))
        except FairlaneError as exc:
            reply = exc
        self.calls[-1] += f"  # {spell(reply)}"
        try:
            return self._compare(verb, args, options, reply)
        except Mismatch as mismatch:
            self.fail(str(mismatch))
        except BaseException:
            self.broken = True
            raise

    def fail(self, what: str) -> NoReturn:
        """Fail with what was wrong and every call that led to it."""
        self.broken = True
        steps = "\n".join(self.calls)
        raise Mismatch(f"{what}\n\nafter these calls:\n{steps}")

    def _compare(self, verb: str, args: Sequence[Any], options: dict[str, Any], reply: Any) -> Any:
        sight = self.runner.run(self._look())
        self.model.see(sight)
        refused = False
        try:
            getattr(self.model, verb)(*args, **options, reply=reply)
        except FairlaneError as refusal:
            if type(reply) is not type(refusal):
                raise Mismatch(f"{verb} must raise {type(refusal).__name__}: {refusal}") from None
            refused = True
        self.model.settle()
        found = differences(self.model, sight, frozenset({BROADCASTS, CLEANUPS}))
        found += self._changed_finals(sight) + self._exceeded_limits(sight)
        if found:
            raise Mismatch("\n".join(found))
        self._remember_starts()
        return None if refused else reply

    async def _look(self) -> Sight:
        ids = list(self.sent)
        page = await self.store.find(Filter(queue=BROADCASTS), limit=500)
        ids += [job.id for job in page.jobs if job.id not in self.sent]
        jobs = {job.id: job for job in await self.store.get(ids) if job is not None}
        waiting = list(jobs)
        positions = dict(zip(waiting, await self.store.positions(waiting), strict=True))
        return Sight(
            jobs=jobs,
            positions=positions,
            queues={queue.name: queue for queue in await self.store.queues()},
            sessions={session.id: session for session in await self.store.sessions()},
            bindings=tuple(await self.store.bindings(limit=500)),
            leader=await self.store.leader(),
            ended=await self._follow(),
        )

    async def _follow(self) -> dict[str, EndedJob]:
        page = await self.store.ended(self.cursor)
        self.cursor = page.cursor
        self.ended |= {job.id: job for job in page.jobs}
        return self.ended

    def _changed_finals(self, sight: Sight) -> list[str]:
        """A final job stays final: not even its times may change."""
        found = []
        for id, job in sight.jobs.items():
            if id in self.finals and self.finals[id] != _ending(job):
                found.append(f"{id} was final as {self.finals[id]}, and is {_ending(job)}")
            elif job.state.final:
                self.finals[id] = _ending(job)
        return found

    def _exceeded_limits(self, sight: Sight) -> list[str]:
        """No lane and no queue starts a job beyond its limit, which may be lowered below what runs already."""
        records = self.model.records
        load: dict[tuple[str, str | None], int] = {}
        limits: dict[tuple[str, str | None], int | None] = {}
        for id, job in sight.jobs.items():
            if job.state is JobState.RUNNING and job.session is not None:
                record = records.jobs[id]
                if record.new.lane is not None:
                    load[record.line] = load.get(record.line, 0) + 1
                    limits[record.line] = records.terms(record).limit
                if record.takes_slot:
                    whole = (job.queue, "the whole queue")
                    load[whole] = load.get(whole, 0) + 1
                    limits[whole] = records.settings(job.queue).limit
        found = [
            f"{line} runs {running} of at most {limits[line]}"
            for line, running in load.items()
            if (limit := limits[line]) is not None and running > max(limit, self.load.get(line, 0))
        ]
        self.load = load
        return found

    # -- what the users of a store remember ----------------------------------------------------------------------

    def enqueue(self, jobs: Sequence[NewJob]) -> None:
        """Send jobs."""
        for job in jobs:
            self.sent.setdefault(job.id, job)
        self.both("enqueue", list(jobs))

    def claim(self, session: str, claim: Claim) -> None:
        """Claim; every second time as a notified worker, which must make no difference."""
        claim = msgspec.structs.replace(claim, notified=claim.number % 4 < 2)
        if self.both("claim", session, claim) is not None:
            self.last_claims[session] = claim

    def finish(self, session: str, transitions: Sequence[Transition], claim: Claim | None = None) -> None:
        """Write transitions, and claim with them."""
        answer = self.both("finish", session, list(transitions), claim=claim)
        self.writes += [(session, transition) for transition in transitions]
        if claim is not None and answer is not None:
            self.last_claims[session] = claim

    def _remember_starts(self) -> None:
        for job in self.model.records.jobs.values():
            if job.state is JobState.RUNNING and job.holder is not None:
                start = (job.holder, Held(job.id, job.fence))
                if start not in self.starts:
                    self.starts.append(start)

    def held(self, session: str) -> list[Held]:
        """What the session holds by the model."""
        return [Held(job.id, job.fence) for job in self.model.records.held_by(session)]

    def drain(self) -> None:
        """Let every old session die and new ones run what is left: each job must end, exactly once."""
        records = self.model.records
        self._resume()
        self.advance(60.0)
        self.both("rescue")
        self.both("promote")
        unfinished = [job for job in records.jobs.values() if not job.state.final]
        indices = {0} | {i for job in unfinished for i in (job.index, job.new.worker) if i is not None}
        workers = [self._drainer(index) for index in sorted(indices)]
        for _ in range(20):
            while sum(self._work_off(worker) for worker in workers):
                pass
            if all(job.state.final for job in records.jobs.values()):
                break
            self.advance(6.0)
            self.both("promote")
        left = {job.id: job.state for job in records.jobs.values() if not job.state.final}
        found = [f"{id} is {state} for ever" for id, state in left.items()]
        stored = self.runner.run(self._count())
        if stored != len(records.jobs):
            found.append(f"the store has {stored} jobs, {len(records.jobs)} were accepted")
        if found:
            self.fail("\n".join(found))
        self.both("recount")

    def _resume(self) -> None:
        """Clear all overrides and pauses."""
        changes = []
        for name, queue in self.model.records.queues.items():
            rules = tuple(msgspec.structs.replace(rule, paused=False) for rule in queue.declared.lanes)
            declared = msgspec.structs.replace(queue.declared, paused=False, lanes=rules)
            changes.append(SettingsChange(queue=name, declared=declared, version=queue.version, override=None))
        self.both("configure", changes)

    def _drainer(self, index: int) -> str:
        id = f"drainer-{index}"
        self.both(
            "register",
            NewSession(
                id=id,
                kind=SessionKind.WORKER,
                lease=36_000.3,
                index=index,
                queues=SERVED,
                slots=Slots(total=200, reserved=Reserved()),
            ),
        )
        return id

    def _work_off(self, worker: str) -> int:
        """Start all jobs and complete them. Returns how many that were."""
        asks = [Ask(source, priority, 200) for priority in Priority for source in (None, *SERVED)]
        number = self.model.records.sessions[worker].claim + 1
        self.claim(worker, Claim(number=number, asks=tuple(asks), total=200))
        held = self.held(worker)
        if held:
            self.finish(worker, [complete(each) for each in held])
        return len(held)

    async def _count(self) -> int:
        """Every job there is, page by page."""
        found: set[str] = set()
        cursor: str | None = None
        while True:
            page = await self.store.find(Filter(), limit=100, cursor=cursor)
            found |= {job.id for job in page.jobs}
            cursor = page.cursor
            if cursor is None:
                return len(found)


def spell(value: Any) -> str:
    """A value as code, without fields that have their defaults."""
    if isinstance(value, msgspec.Struct):
        said = []
        for info in msgspec.structs.fields(value):
            part = getattr(value, info.name)
            if part != info.default:
                said.append(f"{info.name}={spell(part)}")
        return f"{type(value).__name__}({', '.join(said)})"
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, list | tuple):
        inner = ", ".join(spell(part) for part in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    return repr(value)


def _ending(job: Job) -> tuple[object, ...]:
    return (job.state, job.reason, job.attempt, job.fence, job.finished_at, job.result)


async def _awaited(value: Awaitable[T]) -> T:
    return await value
