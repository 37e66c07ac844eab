"""The store on Redis or Valkey. A verb is a call of one function of the library: one round trip, atomic.

Changes that may concern any number of jobs take several calls, each a bounded step: other lane limits, and the sticky
keys of a worker that is gone. `find` and `failures` read in pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from ...errors import InvalidInput, NotFound, QueueFull, SessionLost, StoreMissing
from ...model.binding import Binding, Release
from ...model.ended import EndedPage, check_ended
from ...model.job import (
    MOST_JOBS_PER_CALL,
    Claimed,
    Enqueued,
    Held,
    Job,
    JobKind,
    JobState,
    NewJob,
    Verdict,
    check_ids,
)
from ...model.listings import FailureGroup, LaneListing, LanePage, LanesCursor, LineCursor, check_failures, check_lane
from ...model.maintenance import Admitted, Promoted, Pruned, Recount, Rescued, Retention
from ...model.names import PAYLOAD_BYTES, check_count, check_key, check_name, check_seconds, check_size
from ...model.reading import DeclinedTask, Filter, JobPosition, Page, QueueReading, check_page
from ...model.schedule import Schedule, StoredSchedule
from ...model.session import Claim, Finished, NewSession, Renewal, Session, Term
from ...model.settings import SettingsChange
from ...model.states import Move, Transition
from ...model.tokens import AccessToken, NewToken, stored
from ..clock import Clock
from ..codes import STATES
from ..diagnosis import Finding
from ..shared.claimed_jobs import fail_unreadable, log_lost
from ..shared.token_rows import check_token, same_token, unknown_token
from . import (
    encoding,
    ended,
    health,
    reading,
    records,
    roles,
    server_checks,
    settings,
)
from .address import Address, parse
from .connection_pool import Connections
from .driver_errors import NotAllowed
from .encoding import encode
from .functions import FullQueue, Functions
from .push import PushedClaims
from .wakeups import RedisWakeups, connector

MOST_STAMPS = 100_000
"""Stamps of claimed jobs that are kept; beyond that all are dropped, and a loss repeats fewer completions."""
MOST_AT_ONCE = 100
"""Calls with up to this many jobs do not wait for other calls of the same event loop."""
SCHEMA = 1
"""The version of the keys and their content. Older code refuses a namespace with a newer schema."""
MOST_RECOUNTED = 200_000
"""The most jobs that a recount checks: it is one step, and takes 16 µs for each."""
MOST_MOVED_KEYS = 200
"""The most keys of dead workers, and jobs of those keys, that one step moves. Other calls wait some 15 ms for it."""


class RedisStore:
    """Implements `fairlane.store.port.Store` on a namespace of a server. Open it with `open`."""

    def __init__(self, address: Address, clock: Clock | None) -> None:
        self._address = address
        self._connections = Connections(address)
        self._functions = Functions(self._connections, address.prefix, clock)
        self._call, self._send = self._functions.call, self._functions.send
        self._stamps: dict[str, bytes] = {}
        """Jobs claimed through this object: distinguishes them from later ones with the same id."""
        self._wakeups = RedisWakeups(connector(address), address.prefix)
        self._pushed = PushedClaims(address, self._wakeups)
        self._locks: WeakValueDictionary[tuple[int, str], asyncio.Lock] = WeakValueDictionary()

    @property
    def wakeups(self) -> RedisWakeups:
        return self._wakeups

    def on_data_loss(self, call: Callable[[], Awaitable[None]]) -> None:
        """Run `call` when the server is found to have lost data, before the call that found it returns."""
        self._functions.data_loss.on_loss = call

    @classmethod
    async def open(cls, url: str, *, clock: Clock | None = None, create: bool = True) -> RedisStore:
        """Open the namespace of a URL; with `create`, make it if it does not exist."""
        store = cls(parse(url), clock)
        try:
            await server_checks.check(store._connections)
            if not create and await store._functions.look("HGET", "counter", "schema") is None:
                raise StoreMissing(f"there is no Fairlane namespace in {store._address}")
            await store.migrate()
        except BaseException:
            await store.close()
            raise
        return store

    # -- sessions ------------------------------------------------------------------------------------------------

    def _lock(self, name: str) -> asyncio.Lock:
        """The lock of this name in this event loop; dropped when no task holds it."""
        key = (id(asyncio.get_running_loop()), name)
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        return lock

    async def register(self, session: NewSession) -> Session:
        new = encode(encoding.session_of(session))
        # The previous worker of its index may have had many keys; they are released in steps.
        while (await self._call("register", new, MOST_MOVED_KEYS))["more"]:
            pass
        [found] = records.sessions_of(await self._call("sessions", session.id))
        return found

    async def renew(self, session: str, held: Sequence[Held], *, claim: int, stopping: bool = False) -> Renewal:
        pairs = encode([(h.id, h.fence) for h in held])
        answer = await self._call("renew", session, pairs, claim, int(stopping))
        return Renewal(
            lost=tuple(held[place] for place in answer["lost"]),
            cancel=tuple(answer["cancel"]),
            taken_back=tuple(answer["taken_back"]),
            now=float(answer["now"]),
        )

    async def leave(self, session: str, *, begun: Sequence[Held] | None = None) -> None:
        pairs = b"" if begun is None else encode([(h.id, h.fence) for h in begun])
        self._pushed.forget(session)
        answer = await self._call("leave", session, pairs, MOST_MOVED_KEYS)
        # If this process dies before the last key is released, the leader continues.
        while answer["more"]:
            answer = await self._call("lose", MOST_MOVED_KEYS)

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
        alone = encoding.lone_job_of(jobs[0]) if len(jobs) == 1 else None
        answer: dict[str, Any] | None
        try:
            if alone is not None:
                answer = await self._functions.call_for_signature("enqueue_one", *alone)
            else:
                answer = await self._enqueue_many(jobs)
        except FullQueue as exc:
            raise QueueFull(str(exc), await self._room(exc.where)) from None
        if answer is None or not answer["answers"]:
            return [Enqueued(job.id, True, JobState.PENDING) for job in jobs]
        return [Enqueued(id, created, STATES[state]) for id, created, state in answer["answers"]]

    async def _enqueue_many(self, jobs: Sequence[NewJob]) -> dict[str, Any]:
        parts = [part for job in jobs for part in (encoding.content_of(job), job.headers or b"")]
        asked = encode(encoding.requests_of(jobs))
        # Large calls of one event loop are sent one after the other, so that they arrive in the order of the calls.
        # Encoding is done before, while another call is in progress.
        async with self._lock("enqueue") if len(jobs) > MOST_AT_ONCE else nullcontext():
            return await self._call("enqueue", asked, *parts)

    async def _room(self, where: dict[str, Any]) -> float | None:
        answer = await self._send("service", where["queue"], where["class"])
        return reading.room_of(answer, where["class"], where.get("lane"), where.get("limit"))

    async def claim(self, session: str, claim: Claim) -> list[Claimed]:
        async with self._claiming(session):
            parts = self._pushed.take(session, claim.number)
            if parts is None:
                parts = (await self._call("claim", session, self._claim_of(session, claim)))["parts"]
        return await self._claimed(session, parts, claim)

    async def finish(self, session: str, transitions: Sequence[Transition], *, claim: Claim | None = None) -> Finished:
        if not transitions and claim is None:
            return Finished(())
        decisions, results = encoding.transitions_of(transitions, 6)
        async with nullcontext() if claim is None else self._claiming(session):
            answer, parts = await self._functions.call_for_parts(
                "finish", session, decisions, b"" if claim is None else self._claim_of(session, claim), *results
            )
        verdicts = encoding.verdicts_of([t.held for t in transitions], answer["verdicts"])
        self._remember(session, transitions, verdicts)
        return Finished(verdicts, () if claim is None else tuple(await self._claimed(session, parts, claim)))

    @asynccontextmanager
    async def _claiming(self, session: str) -> AsyncIterator[None]:
        """Serialise the claims of a session: on two connections a higher number could arrive first."""
        async with self._lock(f"claim {session}"):
            try:
                yield
            except SessionLost:
                self._pushed.forget(session)
                raise

    def _claim_of(self, session: str, claim: Claim) -> bytes:
        """Encode a claim that is about to be sent. If it returns nothing, the next one may be answered by a push."""
        accepts_push = self._wakeups.has_subscriptions() and self._pushed.expect(session, claim.number + 1)
        return encoding.claim_of(claim, accepts_push)

    async def _claimed(self, session: str, parts: Sequence[bytes], claim: Claim) -> list[Claimed]:
        answered = encoding.answered_of(parts, session)
        if len(self._stamps) > MOST_STAMPS:
            self._stamps.clear()
        self._stamps.update(zip([job.id for job in answered.claimed], answered.stamps, strict=True))
        log_lost(answered.lost)
        if answered.broken:
            await fail_unreadable(self, session, answered.broken, claim)
        return answered.claimed

    def _remember(self, session: str, transitions: Sequence[Transition], verdicts: Sequence[Verdict]) -> None:
        """Keep accepted completions, to repeat them if the server loses them."""
        stamps = [self._stamps.pop(transition.held.id, None) for transition in transitions]
        completed = [
            (transition, stamp)
            for transition, verdict, stamp in zip(transitions, verdicts, stamps, strict=True)
            if stamp is not None and transition.move is Move.COMPLETE and verdict.accepted
        ]
        if completed:
            self._functions.data_loss.remember(session, completed)

    async def progress(self, session: str, reports: Sequence[tuple[Held, bytes]]) -> list[Verdict]:
        for _, value in reports:
            check_size("progress", value, PAYLOAD_BYTES)
        named = [(held.id, held.fence, place) for place, (held, _) in enumerate(reports, start=5)]
        answer = await self._call("progress", session, encode(named), *(value for _, value in reports))
        return list(encoding.verdicts_of([held for held, _ in reports], answer["verdicts"]))

    async def cancel(self, ids: Sequence[str]) -> list[JobState]:
        for id in ids:
            if not reading.storable(id):
                raise NotFound(f"there is no job {id!r}")
        answer = await self._call("cancel", encode(list(ids)))
        return [STATES[state] for state in answer["states"]]

    async def forget(self, ids: Sequence[str], retention: Retention) -> list[bool]:
        check_ids(ids)
        asked = encode([id for id in dict.fromkeys(ids) if reading.storable(id)])
        gone = set((await self._call("forget", asked, encode(msgspec.to_builtins(retention))))["gone"])
        return [id in gone for id in ids]

    async def release(self, pool: str, key: str, cleanup: NewJob | None = None) -> Release:
        check_name("pool", pool)
        check_key("key", key)
        if cleanup is None:
            return Release((await self._call("release", pool, key, b"", b"", b""))["release"])
        if cleanup.kind is not JobKind.CLEANUP:
            raise InvalidInput("cleanup", "give a job of kind 'cleanup'")
        job = msgspec.structs.replace(cleanup, pool=pool)
        # A clean-up is not sticky for its users; the store places it with its binding.
        msgspec.structs.force_setattr(job, "sticky", key)
        request, content = encode(encoding.request_of(job)), encoding.content_of(job)
        return Release((await self._call("release", pool, key, request, content, job.headers or b""))["release"])

    # -- the leader's passes -------------------------------------------------------------------------------------

    async def promote(self, *, limit: int = 1_000, term: int | None = None) -> Promoted:
        answer = await self._pass("promote", limit, term)
        # A number without a fraction comes as an integer.
        next_due, late = (None if answer.get(key) is None else float(answer[key]) for key in ("next_due", "late"))
        return Promoted(
            promoted=answer["promoted"], expired=answer["expired"], more=answer["more"], next_due=next_due, late=late
        )

    async def admit(self, *, limit: int = 1_000, term: int | None = None) -> Admitted:
        return Admitted(**await self._pass("admit", limit, term))

    async def rescue(self, *, limit: int = 1_000, declare: bool = True, term: int | None = None) -> Rescued:
        answer = await self._pass("rescue", limit, term, int(declare), MOST_MOVED_KEYS)
        return Rescued(**(answer | {"declared": tuple(answer["declared"]), "now": float(answer["now"])}))

    async def prune(self, retention: Retention, *, limit: int = 1_000, term: int | None = None) -> Pruned:
        return Pruned(**await self._pass("prune", limit, term, encode(msgspec.to_builtins(retention))))

    async def _pass(self, verb: str, limit: int, term: int | None, *more: Any) -> dict[str, Any]:
        check_count("limit", limit, least=1, most=100_000)
        answer = await self._call(verb, "" if term is None else term, limit, *more)
        log_lost(answer.pop("damaged", ()))
        return answer

    async def lead(self, session: str, *, lease: float, term: int | None = None) -> Term | None:
        check_key("session", session)
        check_seconds("lease", lease, least=0.05)
        return records.term_of(await self._call("lead", session, repr(float(lease)), "" if term is None else term))

    async def resign(self, term: int) -> None:
        await self._call("resign", term)

    # -- settings ------------------------------------------------------------------------------------------------

    async def configure(self, changes: Sequence[SettingsChange]) -> None:
        await settings.configure(self._functions, changes)

    async def declare(self, schedules: Sequence[Schedule]) -> list[StoredSchedule]:
        if schedules:
            made = [
                {"name": each.name, "timetable": msgspec.json.encode(each.timetable).decode(), "job": place}
                for place, each in enumerate(schedules, start=4)
            ]
            await self._call("declare", encode(made), *(each.job for each in schedules))
        return await self.schedules()

    async def add_token(self, token: NewToken) -> AccessToken:
        record = encode(records.token_record(stored(token, 0.0)))
        answer = await self._call("add_token", record, "" if token.expires is None else repr(float(token.expires)))
        return same_token(records.token_of(answer["token"]), token)

    async def revoke_token(self, id: str) -> bool:
        check_token(id)
        answer = await self._call("revoke_token", id)
        if not answer["known"]:
            raise unknown_token(id)
        return bool(answer["revoked"])

    # -- reading -------------------------------------------------------------------------------------------------

    async def schedules(self) -> list[StoredSchedule]:
        return await reading.schedules(self._functions)

    async def leader(self) -> Term | None:
        return await reading.leader(self._functions)

    async def get(self, ids: Sequence[str]) -> list[Job | None]:
        return await reading.get(self._functions, ids)

    async def find(self, where: Filter, *, limit: int = 50, cursor: str | None = None) -> Page:
        return await reading.find(self._functions, where, limit=limit, cursor=cursor)

    async def positions(self, ids: Sequence[str]) -> list[JobPosition | None]:
        return await reading.positions(self._functions, ids)

    async def queues(self) -> list[QueueReading]:
        return await reading.queues(self._functions)

    async def lanes(self, queue: str, *, limit: int = 100, cursor: str | None = None) -> LaneListing:
        return await reading.lanes(self._functions, queue, limit, LanesCursor.read(cursor))

    async def lane_line(self, queue: str, lane: str | None, *, limit: int = 50, cursor: str | None = None) -> LanePage:
        check_lane(queue, lane)
        check_page(limit)
        return await reading.lane_line(self._functions, queue, lane, limit, LineCursor.read(cursor))

    async def declined(self, *, limit: int = 100) -> list[DeclinedTask]:
        return await reading.declined(self._functions, limit)

    async def failures(
        self, *, queue: str | None = None, task: str | None = None, limit: int = 50
    ) -> list[FailureGroup]:
        check_failures(queue, task)
        check_page(limit)
        return await reading.failures(self._functions, queue, task, limit)

    async def ended(self, after: str | None, *, limit: int = 1_000) -> EndedPage:
        check_ended(limit)
        return await ended.read_ended(self._functions, after, limit)

    async def sessions(self) -> list[Session]:
        return await reading.sessions(self._functions)

    async def bindings(self, pool: str | None = None, key: str | None = None, *, limit: int = 100) -> list[Binding]:
        return await reading.bindings(self._functions, pool, key, limit=limit)

    async def tokens(self) -> list[AccessToken]:
        return await reading.tokens(self._functions)

    # -- the store itself ----------------------------------------------------------------------------------------

    async def recount(self) -> Recount:
        answer = await self._call("recount", MOST_RECOUNTED)
        return Recount(jobs=answer["jobs"], differences=tuple(answer["differences"]))

    async def migrate(self) -> int:
        try:
            return int((await self._call("open", SCHEMA, encode(roles.IN_FUNCTIONS)))["schema"])
        except NotAllowed:
            # A read-only user opens what another user has made.
            return await reading.schema(self._functions, SCHEMA)

    async def findings(self) -> list[Finding]:
        """What `fairlane doctor` reports about the server."""
        return await health.findings(self._connections)

    async def close(self) -> None:
        self._wakeups.close()
        await self._pushed.close()
        await self._connections.close()
