"""The wrapper at the port emits events for every call and its result, and changes no result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import msgspec
import pytest

from fairlane import events as news
from fairlane.errors import NotFound, StoreUnavailable
from fairlane.events import Called, Event, Events
from fairlane.model import tokens
from fairlane.model.binding import Release
from fairlane.model.job import Held, JobState, Priority, Reason
from fairlane.model.maintenance import Rescued, Retention
from fairlane.model.reading import Filter
from fairlane.model.session import SessionKind
from fairlane.model.settings import QueueSettings, SettingsChange
from fairlane.model.states import Move, complete, fail
from fairlane.store import instrumented, open_store
from fairlane.store.clock import ManualClock
from fairlane.store.instrumented import InstrumentedStore
from fairlane.store.port import Store
from tests.conformance.kit import Kit
from tests.conformance.test_every_verb import PROPERTIES, verbs_of

E = TypeVar("E", bound=Event)
VERBS = verbs_of(Store) - PROPERTIES


class Received:
    """What a listener received."""

    def __init__(self, events: Events) -> None:
        self.all: list[Event] = []
        self.stop = events.subscribe(self.all.append)

    def of(self, kind: type[E]) -> list[E]:
        """The events of one kind, in order."""
        return [event for event in self.all if isinstance(event, kind)]


@pytest.fixture
def events() -> Events:
    """There are no listeners yet."""
    return Events()


@pytest.fixture
def clock() -> ManualClock:
    """The clock of the store."""
    return ManualClock()


@pytest.fixture
async def inner(store_url: str, clock: ManualClock) -> AsyncIterator[Store]:
    """A real store."""
    store = await open_store(store_url, clock=clock)
    yield store
    await store.close()


@pytest.fixture
def store(inner: Store, events: Events) -> Store:
    """The store, watched."""
    return InstrumentedStore(inner, events)


@pytest.fixture
def kit(store: Store, clock: ManualClock) -> Kit:
    """Short words for the watched store."""
    return Kit(store, clock)


@pytest.fixture
def received(events: Events) -> Received:
    """A listener from the start."""
    return Received(events)


class LostReplies:
    """A store whose verbs in `lost` happen, and then their answer gets lost; once each."""

    def __init__(self, store: Store, lost: Sequence[str]) -> None:
        self._store = store
        self._lost = set(lost)

    def __getattr__(self, verb: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **options: Any) -> Any:
            answer = await getattr(self._store, verb)(*args, **options)
            if verb in self._lost:
                self._lost.remove(verb)
                raise StoreUnavailable("the connection broke; repeat the call")
            return answer

        return call


async def test_a_decline_is_emitted_and_as_a_failure_when_it_was_the_last(kit: Kit, received: Received) -> None:
    worker = await kit.worker(tasks=())
    await kit.store.enqueue([kit.new(), kit.new()])
    first, second = await worker.claim(2)
    await worker.decline(first)
    await worker.decline(second, patience=0)
    assert [(each.state, each.outcome, each.reason) for each in received.of(news.Finished)] == [
        (JobState.PENDING, Move.DECLINE, Reason.UNKNOWN_TASK),
        (JobState.FAILED, Move.FAIL, Reason.UNKNOWN_TASK),
    ]


async def test_every_verb_is_emitted_by_its_name(kit: Kit, received: Received) -> None:
    store = kit.store
    worker = await kit.worker()
    id = await kit.enqueue()
    [job] = await worker.claim()
    term = await store.lead(worker.id, lease=10.0)
    assert term is not None
    token, _ = tokens.make("a page", ["read"])
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "renew": lambda: store.renew(worker.id, [job.held], claim=worker.last_claim),
        "progress": lambda: store.progress(worker.id, [(job.held, b"1")]),
        "finish": lambda: store.finish(worker.id, [complete(job.held)]),
        "cancel": lambda: store.cancel([id]),
        "forget": lambda: store.forget(["nobody"], Retention()),
        "release": lambda: store.release("default", "plan-7"),
        "promote": lambda: store.promote(term=term.number),
        "admit": lambda: store.admit(term=term.number),
        "rescue": lambda: store.rescue(declare=False, term=term.number),
        "prune": lambda: store.prune(Retention(), term=term.number),
        "lead": lambda: store.lead(worker.id, lease=10.0, term=term.number),
        "resign": lambda: store.resign(term.number),
        "configure": lambda: store.configure([SettingsChange(queue="q", declared=QueueSettings(limit=3))]),
        "declare": lambda: store.declare([]),
        "schedules": store.schedules,
        "leader": store.leader,
        "get": lambda: store.get([id]),
        "find": lambda: store.find(Filter(queue="default"), limit=5),
        "positions": lambda: store.positions([id]),
        "queues": store.queues,
        "lanes": lambda: store.lanes("default", limit=5),
        "lane_line": lambda: store.lane_line("default", None, limit=5),
        "declined": lambda: store.declined(limit=5),
        "failures": lambda: store.failures(limit=5),
        "ended": lambda: store.ended(None, limit=5),
        "add_token": lambda: store.add_token(token),
        "tokens": store.tokens,
        "revoke_token": lambda: store.revoke_token(token.id),
        "sessions": store.sessions,
        "bindings": lambda: store.bindings("default", limit=5),
        "recount": store.recount,
        "migrate": store.migrate,
        "leave": lambda: store.leave(worker.id, begun=[]),
        "close": store.close,
    }
    assert calls.keys() | {"register", "enqueue", "claim"} == VERBS

    received.all.clear()
    for verb, call in calls.items():
        await call()
        [called] = received.of(Called)
        assert (called.verb, called.error) == (verb, None)
        assert called.seconds >= 0
        received.all.clear()


async def test_answers_are_those_of_the_store(kit: Kit, inner: Store, received: Received) -> None:
    await kit.settings("images", limit=3)
    id = await kit.enqueue(queue="images", lane="ann")

    assert await kit.store.get([id, "nobody"]) == await inner.get([id, "nobody"])
    assert await kit.store.queues() == await inner.queues()
    assert await kit.store.find(Filter(queue="images"), limit=1) == await inner.find(Filter(queue="images"), limit=1)


async def test_the_life_of_a_job_is_emitted(kit: Kit, received: Received) -> None:
    worker = await kit.worker("images")
    id = await kit.enqueue("render", queue="images", lane="ann", priority=Priority.HIGH)
    [job] = await worker.claim()
    await worker.complete(job)

    assert received.of(news.SessionRegistered) == [news.SessionRegistered(worker.id, SessionKind.WORKER, worker.name)]
    assert received.of(news.Enqueued) == [news.Enqueued(id, "render", "images", "ann", Priority.HIGH, True)]
    assert received.of(news.Started) == [
        news.Started(id, "render", "images", "ann", Priority.HIGH, 1, job.fence, worker.id, 0.0)
    ]
    [finished] = received.of(news.Finished)
    assert (finished.id, finished.task, finished.queue) == (id, "render", "images")
    assert (finished.state, finished.outcome, finished.reason) == (JobState.COMPLETED, Move.COMPLETE, None)
    assert finished.seconds is not None
    assert finished.seconds >= 0


async def test_a_duplicate_is_emitted_as_not_created(kit: Kit, received: Received) -> None:
    first = await kit.enqueue(unique="once")
    await kit.enqueue(unique="once")

    assert [(each.id, each.created) for each in received.of(news.Enqueued)] == [(first, True), (first, False)]


async def test_a_retry_and_a_failure_are_emitted_with_their_reason(kit: Kit, received: Received) -> None:
    worker = await kit.worker()
    await kit.enqueue()
    for end in (worker.retry, worker.fail):
        [job] = await worker.claim()
        await end(job)

    assert [(each.state, each.outcome, each.reason) for each in received.of(news.Finished)] == [
        (JobState.PENDING, Move.RETRY, Reason.ERROR),
        (JobState.FAILED, Move.FAIL, Reason.ERROR),
    ]
    assert [each.attempt for each in received.of(news.Started)] == [1, 2]


async def test_jobs_claimed_with_a_finish_are_emitted_after_it(kit: Kit, received: Received) -> None:
    worker = await kit.worker()
    first, second = await kit.enqueue(), await kit.enqueue()
    [job] = await worker.claim()

    await kit.store.finish(worker.id, [complete(job.held)], claim=worker.everything(1))

    lives = [e for e in received.all if isinstance(e, news.Started | news.Finished)]
    assert [(type(e), e.id) for e in lives] == [
        (news.Started, first),
        (news.Finished, first),
        (news.Started, second),
    ]


async def test_a_repeated_claim_starts_nothing_twice(kit: Kit, received: Received) -> None:
    worker = await kit.worker()
    await kit.enqueue()
    claim = worker.everything(1)
    assert await kit.store.claim(worker.id, claim) == await kit.store.claim(worker.id, claim)

    assert len(received.of(news.Started)) == 1


async def test_a_repeated_finish_is_emitted_once(kit: Kit, received: Received) -> None:
    worker = await kit.worker()
    await kit.enqueue()
    [job] = await worker.claim()
    await worker.complete(job)
    await worker.complete(job)

    assert len(received.of(news.Finished)) == 1
    assert not received.of(news.Refused)


async def test_a_finish_whose_reply_was_lost_is_emitted_when_it_is_repeated(inner: Store, events: Events) -> None:
    received = Received(events)
    shaky = cast("Store", LostReplies(inner, ["finish", "claim"]))
    kit = Kit(InstrumentedStore(shaky, events), ManualClock())
    worker = await kit.worker()
    id = await kit.enqueue()
    claim = worker.everything(1)
    with pytest.raises(StoreUnavailable):
        await kit.store.claim(worker.id, claim)
    assert not received.of(news.Started)
    [job] = await kit.store.claim(worker.id, claim)
    with pytest.raises(StoreUnavailable):
        await worker.complete(job)
    assert not received.of(news.Finished)

    await worker.complete(job)

    assert [each.id for each in received.of(news.Started)] == [id]
    assert [(each.id, each.task) for each in received.of(news.Finished)] == [(id, "task")]
    errors = [(called.verb, called.error) for called in received.of(Called) if called.error]
    assert errors == [("claim", "StoreUnavailable"), ("finish", "StoreUnavailable")]


async def test_a_stale_write_is_emitted_as_rejected_and_not_as_finished(kit: Kit, received: Received) -> None:
    worker = await kit.worker()
    id = await kit.enqueue()
    [job] = await worker.claim()
    lost = Held(id, job.fence + 1)
    await worker.complete(lost)
    await kit.store.progress(worker.id, [(lost, b"1"), (job.held, b"1")])

    assert received.of(news.Refused) == [
        news.Refused(id, lost.fence, worker.id, "finish"),
        news.Refused(id, lost.fence, worker.id, "progress"),
    ]
    assert not received.of(news.Finished)
    await worker.complete(job)
    assert [each.task for each in received.of(news.Finished)] == ["task"]


async def test_a_cancel_is_emitted_as_requested_and_as_ended(kit: Kit, received: Received) -> None:
    worker = await kit.worker()
    id = await kit.enqueue()
    [job] = await worker.claim()
    await kit.store.cancel([id])
    await worker.fail(job)

    assert received.of(news.CancelRequested) == [news.CancelRequested(id, JobState.RUNNING)]
    [finished] = received.of(news.Finished)
    assert (finished.state, finished.outcome) == (JobState.CANCELLED, Move.CANCEL)
    assert (finished.reason, finished.error_group) == (Reason.BY_USER, None)
    stored = await kit.job(id)
    assert (stored.state, stored.reason) == (finished.state, finished.reason)


async def test_a_rescue_is_emitted_with_its_counts(kit: Kit, received: Received) -> None:
    worker = await kit.worker()
    await kit.enqueue()
    [job] = await worker.claim()
    kit.clock.advance(60)
    await kit.store.rescue()

    [passed] = received.of(news.Passed)
    assert passed.verb == "rescue"
    assert isinstance(passed.answer, Rescued)
    assert passed.answer.declared == (worker.id,)
    assert passed.answer.retried == 1
    await worker.complete(job)
    assert [each.id for each in received.of(news.Refused)] == [job.id]


async def test_leadership_leaving_and_releases_are_emitted_once_each(kit: Kit, received: Received) -> None:
    worker = await kit.worker()
    term = await kit.store.lead(worker.id, lease=10.0)
    assert term is not None
    await kit.store.lead(worker.id, lease=10.0, term=term.number)
    await kit.store.lead("other", lease=10.0)
    await kit.store.resign(term.number)
    await kit.store.release("default", "plan-7")
    await worker.leave()

    assert received.of(news.Led) == [news.Led(worker.id, term.number)]
    assert received.of(news.Resigned) == [news.Resigned(term.number)]
    assert received.of(news.Released) == [news.Released("default", "plan-7", Release.NOTHING)]
    assert received.of(news.SessionLeft) == [news.SessionLeft(worker.id)]


async def test_an_error_propagates_and_is_emitted_by_its_name(kit: Kit, received: Received) -> None:
    with pytest.raises(NotFound):
        await kit.store.cancel(["nobody"])

    assert [(called.verb, called.error) for called in received.of(Called)] == [("cancel", "NotFound")]
    assert not received.of(news.CancelRequested)


async def test_a_cancelled_call_stays_cancelled_and_is_emitted(events: Events, received: Received) -> None:
    class Stuck:
        async def get(self, ids: Sequence[str]) -> None:
            await asyncio.Event().wait()

    call = asyncio.create_task(InstrumentedStore(cast("Store", Stuck()), events).get(["x"]))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

    assert [(called.verb, called.error) for called in received.of(Called)] == [("get", "CancelledError")]


async def test_a_late_subscriber_gets_the_end_of_a_run_without_its_beginning(kit: Kit, events: Events) -> None:
    worker = await kit.worker()
    id = await kit.enqueue()
    [job] = await worker.claim()
    received = Received(events)
    await worker.complete(job)

    [finished] = received.of(news.Finished)
    assert (finished.id, finished.state) == (id, JobState.COMPLETED)
    assert (finished.task, finished.queue, finished.seconds) == (None, None, None)


async def test_what_never_ends_is_forgotten_the_oldest_first(
    kit: Kit, received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instrumented, "MOST_SLOTS", 2)
    worker = await kit.worker()
    for _ in range(4):
        await kit.enqueue()
    jobs = await worker.claim(4)
    await worker.complete(*jobs)

    assert [each.task for each in received.of(news.Finished)] == [None, None, "task", "task"]


async def test_no_event_carries_what_a_job_carries(kit: Kit, received: Received) -> None:
    worker = await kit.worker()
    await kit.enqueue(payload=b'[["hunter2"],{}]', headers=b'{"token":"hunter2"}')
    await kit.enqueue()
    first, second = await worker.claim(2)
    await kit.store.progress(worker.id, [(first.held, b'"hunter2"')])
    await kit.store.finish(
        worker.id, [complete(first.held, b'"hunter2"'), fail(second.held, Reason.ERROR, "hunter2", group="ValueError")]
    )

    assert received.of(news.Finished)[1].error_group == "ValueError"
    assert b"hunter2" not in msgspec.json.encode(received.all)


async def test_a_listener_that_raises_does_not_disturb_the_call(kit: Kit, events: Events) -> None:
    def broken(event: Event) -> None:
        raise RuntimeError("no disk")

    events.subscribe(broken)
    worker = await kit.worker()
    id = await kit.enqueue()
    assert [job.id for job in await worker.claim()] == [id]


async def test_an_unlistened_store_makes_no_event(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    def emit(self: Events, event: Event) -> None:
        raise AssertionError(f"{event} was created without a listener")

    monkeypatch.setattr(Events, "emit", emit)
    worker = await kit.worker()
    await kit.enqueue()
    await worker.complete(*await worker.claim(1))
    await kit.store.promote()
    await worker.renew()


async def test_claims_of_two_sessions_are_distinguished(kit: Kit, received: Received) -> None:
    first, second = await kit.worker(), await kit.worker()
    id = await kit.enqueue()
    [job] = await first.claim()
    await first.hand_back(job)
    [again] = await second.claim()
    await first.complete(job)
    await second.complete(again)

    assert [(each.session, each.fence) for each in received.of(news.Started)] == [
        (first.id, job.fence),
        (second.id, again.fence),
    ]
    assert [(each.outcome, each.session) for each in received.of(news.Finished)] == [
        (Move.HAND_BACK, first.id),
        (Move.COMPLETE, second.id),
    ]
    assert [(each.id, each.session) for each in received.of(news.Refused)] == [(id, first.id)]
