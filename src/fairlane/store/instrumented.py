"""A wrapper around a store that emits `Events` for every call and its result. It decides nothing and changes no result.
Without listeners a call costs one more check of `events.active`; jobs that started in that time have no task and queue
in their `Finished`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

from .. import events as news
from ..model.binding import Binding, Release
from ..model.ended import EndedPage
from ..model.job import Acceptance, Claimed, Enqueued, Held, Job, JobState, NewJob, Reason, Verdict
from ..model.listings import FailureGroup, LaneListing, LanePage
from ..model.maintenance import Admitted, Promoted, Pruned, Recount, Rescued, Retention
from ..model.reading import DeclinedTask, Filter, JobPosition, Page, QueueReading
from ..model.schedule import Schedule, StoredSchedule
from ..model.session import Claim, Finished, NewSession, Renewal, Session, Term
from ..model.settings import SettingsChange
from ..model.slots import MOST_SLOTS
from ..model.states import Move, Transition
from ..model.tokens import AccessToken, NewToken
from .diagnosis import Counted, Diagnosable, Finding
from .port import Store
from .transactions import Transactions
from .wakeups import Wakeups

T = TypeVar("T")


class _Run(NamedTuple):
    fence: int
    task: str
    queue: str
    began: float


class InstrumentedStore:
    """Implements `fairlane.store.port.Store` by delegating to another store, and emits events."""

    def __init__(self, inner: Store, events: news.Events) -> None:
        self._inner = inner
        self._events = events
        # Runs that have not ended yet. A lost claim never ends, so the oldest are dropped beyond the number of slots
        # that a worker can have. Each operation on it is atomic, because the lease keeper's thread uses it too.
        self._runs: OrderedDict[str, _Run] = OrderedDict()

    @property
    def inner(self) -> Store:
        """The wrapped store, for its capabilities beyond the port."""
        return self._inner

    @property
    def events(self) -> news.Events:
        """Where the events go."""
        return self._events

    @property
    def wakeups(self) -> Wakeups:
        return self._inner.wakeups

    # -- how events are made -------------------------------------------------------------------------------------

    def _timed(self, verb: str, call: Coroutine[Any, Any, T]) -> Awaitable[T]:
        return self._time(verb, call) if self._events.active else call

    async def _time(self, verb: str, call: Coroutine[Any, Any, T]) -> T:
        began = perf_counter()
        error: str | None = None
        try:
            return await call
        except BaseException as exc:
            error = type(exc).__name__
            raise
        finally:
            self._events.emit(news.Called(verb, perf_counter() - began, error))

    def _emit_started(self, session: str, jobs: Iterable[Claimed]) -> None:
        now = perf_counter()
        for job in jobs:
            known = self._runs.get(job.id)
            if known is not None and known.fence == job.fence:
                # A repeated claim: its first reply did not reach the caller.
                continue
            self._runs[job.id] = _Run(job.fence, job.task, job.queue, now)
            self._events.emit(
                news.Started(
                    job.id, job.task, job.queue, job.lane, job.priority, job.attempt, job.fence, session, job.waited
                )
            )  # fmt: skip
        while len(self._runs) > MOST_SLOTS:
            self._runs.popitem(last=False)

    def _forget(self, held: Held) -> _Run | None:
        run = self._runs.get(held.id)
        return self._runs.pop(held.id, None) if run is not None and run.fence == held.fence else None

    def _emit_finished(self, session: str, transition: Transition, verdict: Verdict, now: float) -> None:
        held = transition.held
        run = self._forget(held)
        if not verdict.accepted or verdict.state is None:
            self._events.emit(news.Refused(held.id, held.fence, session, "finish"))
            return
        if verdict.acceptance is Acceptance.REPEATED and run is None:
            # Emitted already. If the run were still known, the reply to the first write would have been lost.
            return
        move, reason, group = transition.move, transition.reason, transition.error_group
        if verdict.state is JobState.FAILED:
            # A decline fails a job that has been declined for too long.
            move = Move.FAIL
        if verdict.state is JobState.CANCELLED and move is not Move.CANCEL:
            # A cancel was requested meanwhile, so the store cancelled the job instead.
            move, reason, group = Move.CANCEL, Reason.BY_USER, None
        elif verdict.state is JobState.FAILED and move is Move.HAND_BACK:
            # One hand-back too many, and no attempt was left.
            reason, group = Reason.CRASHED, move.value
        self._events.emit(
            news.Finished(
                id=held.id,
                task=run and run.task,
                queue=run and run.queue,
                fence=held.fence,
                session=session,
                state=verdict.state,
                outcome=move,
                seconds=run and now - run.began,
                reason=reason,
                error_group=group,
            )
        )

    # -- sessions ------------------------------------------------------------------------------------------------

    async def register(self, session: NewSession) -> Session:
        answer = await self._timed("register", self._inner.register(session))
        if self._events.active:
            self._events.emit(news.SessionRegistered(answer.id, answer.kind, answer.worker))
        return answer

    async def renew(self, session: str, held: Sequence[Held], *, claim: int, stopping: bool = False) -> Renewal:
        return await self._timed("renew", self._inner.renew(session, held, claim=claim, stopping=stopping))

    async def leave(self, session: str, *, begun: Sequence[Held] | None = None) -> None:
        await self._timed("leave", self._inner.leave(session, begun=begun))
        if self._events.active:
            self._events.emit(news.SessionLeft(session))

    # -- jobs ----------------------------------------------------------------------------------------------------

    async def enqueue(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        if not self._events.active:
            return await self._inner.enqueue(jobs)
        answers = await self._timed("enqueue", self._inner.enqueue(jobs))
        if self._events.active:
            for job, answer in zip(jobs, answers, strict=True):
                self._events.emit(news.Enqueued(answer.id, job.task, job.queue, job.lane, job.priority, answer.created))
        return answers

    async def claim(self, session: str, claim: Claim) -> list[Claimed]:
        claimed = await self._timed("claim", self._inner.claim(session, claim))
        if self._events.active:
            self._emit_started(session, claimed)
        return claimed

    async def finish(self, session: str, transitions: Sequence[Transition], *, claim: Claim | None = None) -> Finished:
        finished = await self._timed("finish", self._inner.finish(session, transitions, claim=claim))
        if self._events.active:
            now = perf_counter()
            for transition, verdict in zip(transitions, finished.verdicts, strict=True):
                self._emit_finished(session, transition, verdict, now)
            self._emit_started(session, finished.claimed)
        return finished

    async def progress(self, session: str, reports: Sequence[tuple[Held, bytes]]) -> list[Verdict]:
        verdicts = await self._timed("progress", self._inner.progress(session, reports))
        if self._events.active:
            for (held, _), verdict in zip(reports, verdicts, strict=True):
                if not verdict.accepted:
                    self._events.emit(news.Refused(held.id, held.fence, session, "progress"))
        return verdicts

    async def cancel(self, ids: Sequence[str]) -> list[JobState]:
        states = await self._timed("cancel", self._inner.cancel(ids))
        if self._events.active:
            for id, state in zip(ids, states, strict=True):
                self._events.emit(news.CancelRequested(id, state))
        return states

    async def forget(self, ids: Sequence[str], retention: Retention) -> list[bool]:
        return await self._timed("forget", self._inner.forget(ids, retention))

    async def release(self, pool: str, key: str, cleanup: NewJob | None = None) -> Release:
        answer = await self._timed("release", self._inner.release(pool, key, cleanup))
        if self._events.active:
            self._events.emit(news.Released(pool, key, answer))
        return answer

    # -- the leader's passes -------------------------------------------------------------------------------------

    async def promote(self, *, limit: int = 1_000, term: int | None = None) -> Promoted:
        answer = await self._timed("promote", self._inner.promote(limit=limit, term=term))
        if self._events.active:
            self._events.emit(news.Passed("promote", answer))
        return answer

    async def admit(self, *, limit: int = 1_000, term: int | None = None) -> Admitted:
        answer = await self._timed("admit", self._inner.admit(limit=limit, term=term))
        if self._events.active:
            self._events.emit(news.Passed("admit", answer))
        return answer

    async def rescue(self, *, limit: int = 1_000, declare: bool = True, term: int | None = None) -> Rescued:
        answer = await self._timed("rescue", self._inner.rescue(limit=limit, declare=declare, term=term))
        if self._events.active:
            self._events.emit(news.Passed("rescue", answer))
        return answer

    async def prune(self, retention: Retention, *, limit: int = 1_000, term: int | None = None) -> Pruned:
        answer = await self._timed("prune", self._inner.prune(retention, limit=limit, term=term))
        if self._events.active:
            self._events.emit(news.Passed("prune", answer))
        return answer

    async def lead(self, session: str, *, lease: float, term: int | None = None) -> Term | None:
        answer = await self._timed("lead", self._inner.lead(session, lease=lease, term=term))
        if term is None and answer is not None and answer.session == session and self._events.active:
            self._events.emit(news.Led(session, answer.number))
        return answer

    async def resign(self, term: int) -> None:
        await self._timed("resign", self._inner.resign(term))
        if self._events.active:
            self._events.emit(news.Resigned(term))

    # -- settings ------------------------------------------------------------------------------------------------

    async def configure(self, changes: Sequence[SettingsChange]) -> None:
        await self._timed("configure", self._inner.configure(changes))

    async def declare(self, schedules: Sequence[Schedule]) -> list[StoredSchedule]:
        return await self._timed("declare", self._inner.declare(schedules))

    async def add_token(self, token: NewToken) -> AccessToken:
        return await self._timed("add_token", self._inner.add_token(token))

    async def revoke_token(self, id: str) -> bool:
        return await self._timed("revoke_token", self._inner.revoke_token(id))

    # -- reading -------------------------------------------------------------------------------------------------

    async def schedules(self) -> list[StoredSchedule]:
        return await self._timed("schedules", self._inner.schedules())

    async def leader(self) -> Term | None:
        return await self._timed("leader", self._inner.leader())

    async def get(self, ids: Sequence[str]) -> list[Job | None]:
        return await self._timed("get", self._inner.get(ids))

    async def find(self, where: Filter, *, limit: int = 50, cursor: str | None = None) -> Page:
        return await self._timed("find", self._inner.find(where, limit=limit, cursor=cursor))

    async def positions(self, ids: Sequence[str]) -> list[JobPosition | None]:
        return await self._timed("positions", self._inner.positions(ids))

    async def queues(self) -> list[QueueReading]:
        return await self._timed("queues", self._inner.queues())

    async def lanes(self, queue: str, *, limit: int = 100, cursor: str | None = None) -> LaneListing:
        return await self._timed("lanes", self._inner.lanes(queue, limit=limit, cursor=cursor))

    async def lane_line(self, queue: str, lane: str | None, *, limit: int = 50, cursor: str | None = None) -> LanePage:
        return await self._timed("lane_line", self._inner.lane_line(queue, lane, limit=limit, cursor=cursor))

    async def declined(self, *, limit: int = 100) -> list[DeclinedTask]:
        return await self._timed("declined", self._inner.declined(limit=limit))

    async def failures(
        self, *, queue: str | None = None, task: str | None = None, limit: int = 50
    ) -> list[FailureGroup]:
        return await self._timed("failures", self._inner.failures(queue=queue, task=task, limit=limit))

    async def ended(self, after: str | None, *, limit: int = 1_000) -> EndedPage:
        return await self._timed("ended", self._inner.ended(after, limit=limit))

    async def sessions(self) -> list[Session]:
        return await self._timed("sessions", self._inner.sessions())

    async def bindings(self, pool: str | None = None, key: str | None = None, *, limit: int = 100) -> list[Binding]:
        return await self._timed("bindings", self._inner.bindings(pool, key, limit=limit))

    async def tokens(self) -> list[AccessToken]:
        return await self._timed("tokens", self._inner.tokens())

    # -- the store itself ----------------------------------------------------------------------------------------

    async def recount(self) -> Recount:
        return await self._timed("recount", self._inner.recount())

    async def migrate(self) -> int:
        return await self._timed("migrate", self._inner.migrate())

    async def close(self) -> None:
        await self._timed("close", self._inner.close())

    # -- what a store may offer beyond the port ------------------------------------------------------------------

    @property
    def transactions(self) -> Transactions | None:
        found: Transactions | None = getattr(self._inner, "transactions", None)
        return found

    async def findings(self) -> list[Finding]:
        return await self._inner.findings() if isinstance(self._inner, Diagnosable) else []

    async def counters(self) -> dict[str, int]:
        return await self._inner.counters() if isinstance(self._inner, Counted) else {}

    def on_data_loss(self, call: Callable[[], Awaitable[None]]) -> None:
        on_data_loss(self._inner, call)


def on_data_loss(store: Store, call: Callable[[], Awaitable[None]]) -> None:
    """Call `call` whenever a store detects that it has lost data, if it can detect that."""
    listen: Callable[[Callable[[], Awaitable[None]]], None] | None = getattr(store, "on_data_loss", None)
    if listen is not None:
        listen(call)
