"""The store on Redis or Valkey. Every verb is one call of one function of the library: one round trip, atomic."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakValueDictionary

import msgspec
import redis.asyncio as driver
from redis.exceptions import ResponseError

from ...binding import Binding, Release
from ...clock import Clock
from ...errors import (
    Conflict,
    IndexTaken,
    InvalidInput,
    NotFound,
    QueueFull,
    SessionLost,
    Stale,
    StoreError,
    TermLost,
)
from ...job import MOST_JOBS_PER_CALL, Claimed, Enqueued, Held, Job, JobKind, JobState, NewJob, Verdict
from ...lanes import terms
from ...names import PAYLOAD_BYTES, check_count, check_key, check_name, check_seconds, check_size
from ...reading import Counts, Filter, LaneReading, Page, QueueReading, Standing, check_page
from ...schedule import Schedule, StoredSchedule
from ...session import Claim, Finished, NewSession, Renewal, Session, Term
from ...settings import QueueOverride, QueueSettings, SettingsChange
from ...states import Transition
from ...upkeep import Admitted, Promoted, Pruned, Recount, Rescued, Retention
from ..codes import STATES
from ..rows import position_of, schedules_of, settings_of
from . import library, records, requests, standings
from .address import parse
from .pair import dialling
from .requests import decode, encode
from .wakeups import RedisWakeups

MOST_SCANNED = 100
_COUNTS = ("scheduled", "pending", "running", "completed", "failed", "cancelled")
SETS_OF_STATES = {
    JobState.SCHEDULED: "later",
    JobState.PENDING: "alive",
    JobState.FAILED: f"by:state:{STATES.index(JobState.FAILED)}",
    JobState.CANCELLED: f"by:state:{STATES.index(JobState.CANCELLED)}",
}
"""Where to look for jobs in a state. Those that run are found by who runs them, and all others by their tasks."""
BOOT_SECONDS = 1e9
"""Readings of two boots lie further apart than any lease is long."""


class RedisStore:
    """The verbs of `fairlane.store.Store` on a namespace of a server."""

    def __init__(self, host: str, port: int, prefix: str, clock: Clock | None) -> None:
        self._client = driver.Redis(host=host, port=port, protocol=2)
        self._prefix = prefix
        self._clock = clock
        self._boots: list[str] = []
        self._turns: WeakValueDictionary[tuple[int, str], asyncio.Lock] = WeakValueDictionary()
        self._wakeups = RedisWakeups(dialling(parse(f"redis://{host}:{port}")), prefix)

    @property
    def wakeups(self) -> RedisWakeups:
        return self._wakeups

    # -- how calls get there -------------------------------------------------------------------------------------

    def _moments(self) -> tuple[str, str]:
        if self._clock is None:
            return "", ""
        boot = self._clock.boot()
        if boot not in self._boots:
            self._boots.append(boot)
        return repr(self._clock.now()), repr(self._clock.monotonic() + BOOT_SECONDS * self._boots.index(boot))

    async def _send(self, verb: str, *args: Any) -> Any:
        arguments = (library.function(verb), 1, self._prefix, *self._moments(), *args)
        try:
            return await self._client.fcall(*arguments)
        except ResponseError as exc:
            if "Function not found" not in str(exc):
                raise StoreError(str(exc)) from exc
        await self._load()
        return await self._client.fcall(*arguments)

    async def _load(self) -> None:
        try:
            await self._client.function_load(library.text())
        except ResponseError as exc:
            if "already exists" not in str(exc):
                raise

    async def _call(self, verb: str, *args: Any) -> dict[str, Any]:
        answer = await self._send(verb, *args)
        if isinstance(answer, list):
            return {"parts": answer}
        found: dict[str, Any] = decode(answer)
        if "refused" in found:
            _refuse(**found["refused"])
        return found

    def _turn(self, session: str) -> asyncio.Lock:
        """Claims of one session go one after the other: on two connections their numbers could overtake each other."""
        key = (id(asyncio.get_running_loop()), session)
        lock = self._turns.get(key)
        if lock is None:
            lock = self._turns[key] = asyncio.Lock()
        return lock

    # -- sessions ------------------------------------------------------------------------------------------------

    async def register(self, session: NewSession) -> Session:
        await self._call("register", encode(requests.session_of(session)))
        [found] = (await self._call("sessions", session.id))["sessions"]
        return records.session_of(found)

    async def renew(self, session: str, held: Sequence[Held], *, claim: int, stopping: bool = False) -> Renewal:
        pairs = encode([(h.id, h.fence) for h in held])
        answer = await self._call("renew", session, pairs, claim, int(stopping))
        return Renewal(
            lost=tuple(held[place] for place in answer["lost"]),
            cancel=tuple(answer["cancel"]),
            taken_back=tuple(answer["taken_back"]),
            now=answer["now"],
        )

    async def leave(self, session: str, *, begun: Sequence[Held] | None = None) -> None:
        pairs = b"" if begun is None else encode([(h.id, h.fence) for h in begun])
        await self._call("leave", session, pairs)

    # -- jobs ----------------------------------------------------------------------------------------------------

    async def enqueue(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        if len(jobs) > MOST_JOBS_PER_CALL:
            raise InvalidInput(
                "jobs", f"{len(jobs)} are more than {MOST_JOBS_PER_CALL} in one call; send them in parts"
            )
        if not jobs:
            return []
        if any(job.kind is JobKind.CLEANUP for job in jobs):
            raise InvalidInput("kind", "a clean-up is stored by release, not by enqueue")
        bodies = [part for job in jobs for part in (requests.content_of(job), job.headers or b"")]
        try:
            answer = await self._call("enqueue", encode([requests.request_of(job) for job in jobs]), *bodies)
        except _Full as exc:
            raise QueueFull(str(exc), await self._room(exc.where)) from None
        if not answer["answers"]:
            return [Enqueued(job.id, True, JobState.PENDING) for job in jobs]
        return [Enqueued(id, created, STATES[state]) for id, created, state in answer["answers"]]

    async def _room(self, where: dict[str, Any]) -> float | None:
        answer = await self._send("service", where["queue"], where["class"])
        return standings.room_of(answer, where["class"], where.get("lane"), where.get("limit"))

    async def claim(self, session: str, claim: Claim) -> list[Claimed]:
        async with self._turn(session):
            answer = await self._call("claim", session, requests.claim_of(claim))
        return requests.claimed_of(answer["parts"])

    async def finish(self, session: str, transitions: Sequence[Transition], *, claim: Claim | None = None) -> Finished:
        if not transitions and claim is None:
            return Finished(())
        decisions, results = requests.transitions_of(transitions, 6)
        async with nullcontext() if claim is None else self._turn(session):
            answer = await self._call(
                "finish", session, decisions, b"" if claim is None else requests.claim_of(claim), *results
            )
        first, *rest = answer["parts"]
        verdicts = requests.verdicts_of([t.held for t in transitions], decode(first)["verdicts"])
        return Finished(verdicts, tuple(requests.claimed_of(rest)))

    async def progress(self, session: str, reports: Sequence[tuple[Held, bytes]]) -> list[Verdict]:
        for _, value in reports:
            check_size("progress", value, PAYLOAD_BYTES)
        named = [(held.id, held.fence, place) for place, (held, _) in enumerate(reports, start=5)]
        answer = await self._call("progress", session, encode(named), *(value for _, value in reports))
        return list(requests.verdicts_of([held for held, _ in reports], answer["verdicts"]))

    async def cancel(self, ids: Sequence[str]) -> list[JobState]:
        for id in ids:
            if not _storable(id):
                raise NotFound(f"there is no job {id!r}")
        answer = await self._call("cancel", encode(list(ids)))
        return [STATES[state] for state in answer["states"]]

    async def release(self, pool: str, key: str, cleanup: NewJob | None = None) -> Release:
        check_name("pool", pool)
        check_key("key", key)
        if cleanup is None:
            return Release((await self._call("release", pool, key, b"", b"", b""))["release"])
        if cleanup.kind is not JobKind.CLEANUP:
            raise InvalidInput("cleanup", "give a job of kind 'cleanup'")
        job = msgspec.structs.replace(cleanup, pool=pool)
        # Users leave the placing of a clean-up to its binding; here it is placed.
        msgspec.structs.force_setattr(job, "sticky", key)
        request, content = encode(requests.request_of(job)), requests.content_of(job)
        return Release((await self._call("release", pool, key, request, content, job.headers or b""))["release"])

    # -- the leader's passes -------------------------------------------------------------------------------------

    async def promote(self, *, limit: int = 1_000, term: int | None = None) -> Promoted:
        answer = await self._pass("promote", limit, term)
        return Promoted(
            promoted=answer["promoted"],
            expired=answer["expired"],
            more=answer["more"],
            next_due=answer.get("next_due"),
        )

    async def admit(self, *, limit: int = 1_000, term: int | None = None) -> Admitted:
        return Admitted(**await self._pass("admit", limit, term))

    async def rescue(self, *, limit: int = 1_000, declare: bool = True, term: int | None = None) -> Rescued:
        answer = await self._pass("rescue", limit, term, int(declare))
        return Rescued(**(answer | {"declared": tuple(answer["declared"])}))

    async def prune(self, retention: Retention, *, limit: int = 1_000, term: int | None = None) -> Pruned:
        return Pruned(**await self._pass("prune", limit, term, encode(msgspec.to_builtins(retention))))

    async def _pass(self, verb: str, limit: int, term: int | None, *more: Any) -> dict[str, Any]:
        check_count("limit", limit, least=1, most=100_000)
        return await self._call(verb, "" if term is None else term, limit, *more)

    async def lead(self, session: str, *, lease: float, term: int | None = None) -> Term | None:
        check_key("session", session)
        check_seconds("lease", lease, least=0.05)
        number = (await self._call("lead", session, repr(float(lease)), "" if term is None else term))["term"]
        return Term(number=number, session=session, lease=lease, remaining=lease) if number else None

    async def resign(self, term: int) -> None:
        await self._call("resign", term)

    # -- settings ------------------------------------------------------------------------------------------------

    async def configure(self, changes: Sequence[SettingsChange]) -> None:
        """Merged here and stored if nobody else has changed settings meanwhile."""
        while True:
            seen = int(await self._client.hget(self._prefix + "counter", "settings") or 0)
            made = [change for each in changes if (change := await self._change_of(each)) is not None]
            if not made or (await self._call("configure", seen, encode(made)))["done"]:
                return
            await asyncio.sleep(0)

    async def _change_of(self, change: SettingsChange) -> dict[str, Any] | None:
        number = await self._client.hget(self._prefix + "queues", change.queue)
        raw = None if number is None else await self._client.hget(self._prefix + "queue", number)
        record = {} if raw is None else decode(_bytes(raw))
        old = msgspec.json.decode(record.get("declared", "{}"), type=QueueSettings)
        version, laid = record.get("version", 0), record.get("override")
        before = None if laid is None else msgspec.json.decode(laid, type=QueueOverride)
        declared, override = old, before if change.override is msgspec.UNSET else change.override
        if change.declared is not None and change.version >= version:
            declared, version = change.declared, change.version
        if raw is not None and (declared, version, override) == (old, record.get("version", 0), before):
            return None
        try:
            settings = declared if override is None else override.over(declared)
        except InvalidInput as exc:
            raise InvalidInput(exc.field, f"{exc.problem} (queue {change.queue!r}, with its override)") from None
        lanes = (old if before is None else before.over(old)).lanes
        made: dict[str, Any] = {
            "queue": change.queue,
            "version": version,
            "declared": msgspec.json.encode(declared).decode(),
            "settings": msgspec.json.encode(settings).decode(),
            "lanes_changed": settings.lanes != lanes,
        }
        if override is not None:
            made["override"] = msgspec.json.encode(override).decode()
        return made

    # -- reading -------------------------------------------------------------------------------------------------

    async def leader(self) -> Term | None:
        found = (await self._call("leader"))["leader"]
        if not found:
            return None
        number, session, lease, remaining = found
        return Term(number=number, session=session, lease=lease, remaining=remaining)

    async def get(self, ids: Sequence[str]) -> list[Job | None]:
        answer = await self._call("get", encode([id for id in ids if _storable(id)]))
        found = {job.id: job for job in map(records.job_of, answer["parts"])}
        return [found.get(id) for id in ids]

    async def find(self, where: Filter, *, limit: int = 50, cursor: str | None = None) -> Page:
        """A page, newest first: the narrowest filter picks the index, the others are checked job by job."""
        check_page(limit)
        found: list[tuple[int, Job]] = []
        before, more = position_of(cursor), True
        sets = encode(await self._sets_of(where))
        while more and len(found) <= limit:
            *jobs, rest = (await self._call("scan", sets, before, min(limit + 1, MOST_SCANNED)))["parts"]
            more = bool(rest)
            for parts in jobs:
                before = int(parts[0])
                job = records.job_of(parts)
                if _matches(job, where):
                    found.append((before, job))
        page = found[:limit]
        return Page(tuple(job for _, job in page), str(page[-1][0]) if len(found) > limit else None)

    async def _sets_of(self, where: Filter) -> list[str]:
        """The index that narrows most."""
        if where.error_group is not None:
            return [f"by:group:{where.error_group}"]
        if where.worker is not None:
            return await self._sets_of_worker(where.worker)
        if where.sticky is not None:
            return [f"by:sticky:{where.sticky}"]
        number: str | None = None
        if where.queue is not None:
            found = await self._client.hget(self._prefix + "queues", where.queue)
            if found is None:
                return []
            number = _bytes(found).decode()
        if where.lane is not None and number is not None:
            return [f"by:lane:{number}|{where.lane}"]
        if where.state is JobState.RUNNING:
            held = [session for session in await self.sessions() if session.remaining > 0 or any(session.running)]
            return ["parents", *(name for session in held for name in _held_sets(session.id))]
        if where.state in SETS_OF_STATES:
            return [SETS_OF_STATES[where.state]]
        names = [_bytes(name).decode() for name in await self._client.smembers(self._prefix + "tasks")]
        return [
            f"by:task:{name}"
            for name in names
            for queue, _, task in [name.partition(":")]
            if number in (None, queue) and where.task in (None, task)
        ]

    async def _sets_of_worker(self, worker: str) -> list[str]:
        """What waits for it, runs there now and ended there, over all sessions that had this place."""
        held = [session.id for session in await self.sessions() if session.worker == worker]
        live = [name for id in held for name in _held_sets(id)]
        return [f"inboxed:{worker}", *live, *(f"by:session:{id}" for id in held)]

    async def queues(self) -> list[QueueReading]:
        answer = await self._call("queues")
        readings = []
        for name, record, classes in sorted(answer["queues"]):
            override = record.get("override")
            settings, laid_over = settings_of(record["declared"], override)
            counts = [Counts(**dict(zip(_COUNTS, numbers, strict=True))) for numbers in classes]
            readings.append(
                QueueReading(
                    name=name,
                    settings=settings,
                    version=record["version"],
                    override=laid_over,
                    classes=(counts[0], counts[1], counts[2]),
                    workers=sum(name in queues for queues in answer["serving"]),
                )
            )
        return readings

    async def lanes(self, queue: str, *, limit: int = 100) -> list[LaneReading]:
        check_page(limit)
        answer = await self._call("lanes", queue, limit)
        settings = msgspec.json.decode(answer["settings"], type=QueueSettings)
        rows: list[tuple[str | None, int, int]] = [tuple(row) for row in answer["lanes"]]
        pending = answer["pending"] - sum(waits for _, waits, _ in rows)
        running = answer["running"] - sum(runs for _, _, runs in rows)
        if pending or running:
            rows.append((None, pending, running))
        rows.sort(key=lambda row: (-row[1], -row[2], row[0] or ""))
        return [
            LaneReading(queue=queue, lane=lane, terms=terms(settings, lane), pending=waits, running=runs)
            for lane, waits, runs in rows[:limit]
        ]

    async def bindings(self, pool: str | None = None, key: str | None = None, *, limit: int = 100) -> list[Binding]:
        check_page(limit)
        answer = await self._call("bindings", pool or "", key or "", limit)
        return [records.binding_of(tie) for tie in answer["bindings"]]

    async def declare(self, schedules: Sequence[Schedule]) -> list[StoredSchedule]:
        if schedules:
            made = [
                {"name": each.name, "timetable": msgspec.json.encode(each.timetable).decode(), "job": place}
                for place, each in enumerate(schedules, start=4)
            ]
            await self._call("declare", encode(made), *(each.job for each in schedules))
        rows = []
        for name, raw, job in (await self._call("schedules"))["parts"]:
            record = decode(raw)
            moments = record["stored_at"], record["declared_at"], record.get("last_slot")
            rows.append((_bytes(name).decode(), record["timetable"], job, *moments))
        return schedules_of(sorted(rows))

    async def standing(self, ids: Sequence[str]) -> list[Standing | None]:
        asked = encode([id for id in ids if _storable(id)])
        found = standings.standings_of(await self._send("standing", asked, encode(standings.LIMITS)))
        return [found.get(id) for id in ids]

    async def sessions(self) -> list[Session]:
        return [records.session_of(each) for each in (await self._call("sessions", ""))["sessions"]]

    # -- the store itself ----------------------------------------------------------------------------------------

    async def recount(self) -> Recount:
        answer = await self._call("recount")
        return Recount(jobs=answer["jobs"], differences=tuple(answer["differences"]))

    async def close(self) -> None:
        self._wakeups.close()
        await self._client.aclose()


class _Full(Exception):
    """A queue or a lane takes no more; when there is room is asked for after that."""

    def __init__(self, message: str, where: dict[str, Any]) -> None:
        super().__init__(message)
        self.where = where


def _held_sets(session: str) -> list[str]:
    """What a session holds, by class, and its turns."""
    return [f"held:{session}:{kind}" for kind in "012t"]


def _bytes(value: bytes | str) -> bytes:
    """The driver says that it might give texts; as it was opened, it does not."""
    return value if isinstance(value, bytes) else value.encode()


def _storable(text: str) -> bool:
    """Whether a text can be sent at all: not one out of half characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _matches(job: Job, where: Filter) -> bool:
    fields = ("state", "queue", "lane", "task", "sticky", "worker", "error_group")
    return all(wanted is None or getattr(job, name) == wanted for name in fields for wanted in [getattr(where, name)])


def _refuse(code: str, message: Any, detail: Any = None) -> None:
    """Raise the error that a function has answered with."""
    if code == "invalid":
        raise InvalidInput(detail, message)
    if code == "index_taken":
        raise IndexTaken(message, detail)
    if code == "full":
        where = f"queue {detail['queue']!r}"
        if "lane" in detail:
            where = f"lane {detail['lane']!r} of {where}"
        raise _Full(f"{where} has {message} jobs waiting and takes at most {detail['most']}", detail)
    kinds = {
        "conflict": Conflict,
        "not_found": NotFound,
        "session_lost": SessionLost,
        "stale": Stale,
        "term_lost": TermLost,
    }
    raise kinds[code](message)
