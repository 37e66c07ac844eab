"""Random sequences of calls, part one: processes that come and go, and requests of clients.

A rule whose numbers select nothing (no session yet, nothing running) does nothing, so that shrinking stays simple. The
machine makes no call whose result is unspecified; comments say where.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from fairlane.model.binding import BindingState
from fairlane.model.job import Held, JobKind, NewJob
from fairlane.model.session import NewSession, SessionKind, SessionState
from fairlane.model.settings import SettingsChange
from fairlane.model.slots import Reserved, Slots
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store

from .driver import BROADCASTS, CLEANUPS, LEASE, SERVED, Driver
from .model.bindings import active
from .model.records import SessionRecord
from .model.requests import unique_is_unsaid
from .wishes import MODELS, STEADY, Wish, WorkSettings, few, flags, numbers, wishes, work_settings

T = TypeVar("T")


def pick(things: Sequence[T], number: int) -> T | None:
    """One of `things`; None if there are none."""
    return things[number % len(things)] if things else None


class Fleet(RuleBasedStateMachine):
    """One random sequence of calls on a store."""

    open_store: Callable[[ManualClock], Awaitable[Store]]
    """Makes an empty store; set in the class, because Hypothesis makes the instances."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(type(self).open_store)
        self.records = self.driver.model.records
        self.made = 0
        self.crashed: set[str] = set()
        self.cleanups: dict[str, NewJob] = {}

    def teardown(self) -> None:
        try:
            if not self.driver.broken:
                self.driver.drain()
        finally:
            self.driver.close()

    def next_id(self, kind: str) -> str:
        self.made += 1
        return f"{kind}-{self.made}"

    def workers(self) -> list[SessionRecord]:
        """Workers whose process has not crashed; expired, ended and dead ones are among them."""
        return [s for s in self.records.sessions.values() if s.is_worker and s.new.id not in self.crashed]

    def expired(self, session: SessionRecord) -> bool:
        return session.lease_ends < self.driver.clock.monotonic()

    # -- sessions ------------------------------------------------------------------------------------------------

    @initialize(settings=work_settings, slots=st.sampled_from([4, 2]), wanted=st.lists(wishes, min_size=3, max_size=8))
    def begin(self, settings: WorkSettings, slots: int, wanted: list[Wish]) -> None:
        """Start with some settings, two workers and something to do."""
        self.driver.both(
            "configure",
            [
                SettingsChange(queue="work", declared=settings.declared(), version=5),
                SettingsChange(queue="models", declared=MODELS, version=1),
            ],
        )
        for _ in range(2):
            self.start_worker(None, slots, True, False)
        self.enqueue(wanted)

    @rule(index=st.sampled_from([None, None, 5, 6]), slots=st.sampled_from([1, 2, 4]), reserved=flags, away=flags)
    def start_worker(self, index: int | None, slots: int, reserved: bool, away: bool) -> None:
        """A worker registers, sometimes under an index that is taken."""
        holders = [s for s in self.records.sessions.values() if s.is_worker and s.index == index]
        present = next((s for s in holders if s.present), None)
        if index is not None:
            # Which session has an index between the end of a lease and the pass that notices it is unspecified.
            kept = any(b.active and b.index == index for b in self.records.bindings)
            if present is None:
                unsaid = kept and all(self.expired(s) for s in holders)
            else:
                unsaid = self.expired(present)
            if unsaid:
                return
        if len([s for s in self.records.sessions.values() if s.present and s.is_worker]) >= 5 and present is None:
            return
        self.driver.both(
            "register",
            NewSession(
                id=self.next_id("worker"),
                kind=SessionKind.WORKER,
                lease=LEASE,
                host="there" if away and present is not None else "here",
                index=index,
                queues=SERVED,
                slots=Slots(total=slots, reserved=Reserved(high=1 if reserved and slots > 1 else 0)),
            ),
        )

    @rule(session=numbers)
    def register_again(self, session: int) -> None:
        """The reply to a registration was lost, or a process does not know that it was declared dead."""
        known = pick(list(self.records.sessions.values()), session)
        if known is not None:
            self.driver.both("register", known.new)

    @rule()
    def beat(self) -> None:
        """Every process that has not crashed renews, and names all it holds."""
        for session in list(self.records.sessions.values()):
            if session.present and session.new.id not in self.crashed:
                self.renew_one(session, self.driver.held(session.new.id), False)

    @rule(session=numbers, forgotten=few, old=few, stopping=st.sampled_from([False, False, False, True]))
    def renew(self, session: int, forgotten: list[int], old: list[int], stopping: bool) -> None:
        """A renewal that omits some recorded claims and names earlier ones. Dead sessions try it too."""
        known = pick(list(self.records.sessions.values()), session)
        if known is not None:
            held = self.driver.held(known.new.id)
            names = [name for i, name in enumerate(held) if i not in forgotten]
            names += [start[1] for n in old if (start := pick(self.driver.starts, n))]
            self.renew_one(known, list(dict.fromkeys(names)), stopping and known.is_worker)

    def renew_one(self, session: SessionRecord, held: Sequence[Held], stopping: bool) -> None:
        self.driver.both("renew", session.new.id, list(held), claim=session.claim, stopping=stopping)

    @rule(session=numbers, begun=st.sampled_from(["all", "none", "some"]))
    def leave(self, session: int, begun: str) -> None:
        """A process stops, or its supervisor reports that it died."""
        known = pick(list(self.records.sessions.values()), session)
        if known is not None:
            held = self.driver.held(known.new.id)
            named = {"all": None, "none": [], "some": held[::2]}[begun]
            self.driver.both("leave", known.new.id, begun=named)

    # -- requests ------------------------------------------------------------------------------------------------

    @rule(wanted=st.lists(wishes, min_size=1, max_size=4))
    def enqueue(self, wanted: list[Wish]) -> None:
        jobs = [wish.request(self.next_id("job")) for wish in wanted]
        if not any(unique_is_unsaid(self.records, job) for job in jobs):
            self.driver.enqueue(jobs)

    @rule(job=numbers, changed=st.sampled_from([False, False, True]))
    def enqueue_again(self, job: int, changed: bool) -> None:
        """The same id is sent again, with the same content or with other content."""
        sent = [new for new in self.driver.sent.values() if new.id in self.records.jobs]
        known = pick([new for new in sent if new.kind is not JobKind.CLEANUP], job)
        if known is not None:
            self.driver.enqueue([msgspec.structs.replace(known, payload=b"[[1],{}]") if changed else known])

    @rule(
        waiter=numbers,
        newcomer=flags,
        lane=st.sampled_from(["gpu:a", "gpu:a", "gpu:b", "endless"]),
        expires=st.sampled_from([None, 4.1]),
    )
    def wait_for_turn(self, waiter: int, newcomer: bool, lane: str, expires: float | None) -> None:
        """A waiter requests a turn; in a lane without a limit that is rejected."""
        if newcomer:
            new = NewSession(id=self.next_id("waiter"), kind=SessionKind.WAITER, lease=LEASE)
            self.driver.both("register", new)
        waiters = [s for s in self.records.sessions.values() if s.new.kind is SessionKind.WAITER]
        # Whether an expired waiter still counts as live for a request is unspecified.
        known = pick([s for s in waiters if not (s.present and self.expired(s))][::-1], waiter)
        if known is not None:
            turn = NewJob(
                id=self.next_id("turn"),
                task="turn",
                queue="models",
                lane=lane,
                kind=JobKind.TURN,
                waiter=known.new.id,
                expires=expires,
            )
            self.driver.enqueue([turn])

    @rule(ttl=st.sampled_from([0.0, 6.45]))
    def broadcast(self, ttl: float) -> None:
        """Every worker gets a copy. Whether one that is stopping does is not specified."""
        if not any(s.state is SessionState.STOPPING for s in self.records.sessions.values()):
            new = NewJob(
                id=self.next_id("broadcast"),
                task="task",
                queue=BROADCASTS,
                kind=JobKind.BROADCAST,
                ttl=ttl,
                backoff=STEADY,
            )
            self.driver.enqueue([new])

    @rule(jobs=st.lists(numbers, min_size=1, max_size=3), unknown=st.sampled_from([False, False, False, True]))
    def cancel(self, jobs: list[int], unknown: bool) -> None:
        """Cancel jobs. What cancelling a clean-up does to its binding is not specified."""
        known = [job for job in self.records.jobs.values() if job.new.kind is not JobKind.CLEANUP]
        ids = [job.id for n in jobs if (job := pick(known, n))] + (["nobody"] if unknown else [])
        if ids:
            self.driver.both("cancel", list(dict.fromkeys(ids)))

    @rule(key=st.sampled_from(["k1", "k2", "k3"]), with_cleanup=flags)
    def release(self, key: str, with_cleanup: bool) -> None:
        """Release a key; while it drains, repeat the call."""
        binding = active(self.records, "default", key)
        if binding is not None and binding.state is BindingState.DRAINING:
            cleanup = self.cleanups.get(key)
        elif with_cleanup:
            cleanup = NewJob(
                id=self.next_id("cleanup"),
                task="tidy",
                queue=CLEANUPS,
                kind=JobKind.CLEANUP,
                retries=0,
                backoff=STEADY,
            )
            self.driver.sent[cleanup.id] = cleanup
        else:
            cleanup = None
        if cleanup is not None:
            self.cleanups[key] = cleanup
        else:
            self.cleanups.pop(key, None)
        self.driver.both("release", "default", key, cleanup)
