"""The comparison with the model can fail: it detects stores each of which has one fault.

Every fault is one that real queues had. A faulty store is a wrapper around a correct one, so that it differs only in
the fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from fairlane.errors import SessionLost
from fairlane.model.ended import EndedPage
from fairlane.model.job import Claimed, Enqueued, Held, JobState, NewJob, Verdict
from fairlane.model.maintenance import Rescued
from fairlane.model.reading import QueueReading
from fairlane.model.session import Claim, Finished, Renewal, Term
from fairlane.model.settings import LaneRule, QueueSettings, SettingsChange
from fairlane.model.states import Move, Transition
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store
from tests.sizes import sized

from .conftest import Opener
from .machine import machine_of
from .model import Mismatch


class Faulty:
    """A store that is right in everything its subclasses do not change."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.calls = 0

    def __getattr__(self, verb: str) -> Any:
        return getattr(self.store, verb)


class FinishesWithoutFence(Faulty):
    """Every writer is treated as the holder."""

    async def finish(self, session: str, transitions: Sequence[Transition], *, claim: Claim | None = None) -> Finished:
        verdicts: list[Verdict] = []
        for transition in transitions:
            writer = session
            [job] = await self.store.get([transition.held.id])
            if job is not None and job.state is JobState.RUNNING and job.session is not None:
                writer = job.session
                transition = msgspec.structs.replace(transition, held=Held(job.id, job.fence))
            verdicts += (await self.store.finish(writer, [transition])).verdicts
        claimed = [] if claim is None else await self.store.claim(session, claim)
        return Finished(tuple(verdicts), tuple(claimed))


class RenewsTheDead(Faulty):
    """A session that was declared dead gets no error."""

    async def renew(self, session: str, held: Sequence[Held], *, claim: int, stopping: bool = False) -> Renewal:
        try:
            return await self.store.renew(session, held, claim=claim, stopping=stopping)
        except SessionLost:
            return Renewal(lost=(), cancel=(), taken_back=(), now=0.0)


class SwallowsCancels(Faulty):
    """Every third cancel is answered and forgotten."""

    async def cancel(self, ids: Sequence[str]) -> list[JobState]:
        self.calls += 1
        if self.calls % 3:
            return await self.store.cancel(ids)
        return [JobState.CANCELLED for _ in ids]


class ClaimsTwice(Faulty):
    """A claim returns jobs that an earlier claim has returned."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.handed_out: list[Claimed] = []

    async def claim(self, session: str, claim: Claim) -> list[Claimed]:
        claimed = await self.store.claim(session, claim)
        again = self.handed_out[:1]
        self.handed_out = claimed or self.handed_out
        return claimed + again


class RescuesInWordsOnly(Faulty):
    """The rescuer reports sessions as declared dead, but leaves them alive."""

    async def rescue(self, *, limit: int = 1_000, declare: bool = True, term: int | None = None) -> Rescued:
        done = await self.store.rescue(limit=limit, declare=False, term=term)
        late = [s.id for s in await self.store.sessions() if s.remaining < 0 and s.state in ("live", "stopping")]
        return msgspec.structs.replace(done, declared=tuple(late) if declare else ())


class ChargesHandBacks(Faulty):
    """A job that is handed back is treated as one that failed."""

    async def finish(self, session: str, transitions: Sequence[Transition], *, claim: Claim | None = None) -> Finished:
        charged = [msgspec.structs.replace(t, move=Move.RETRY) if t.move is Move.HAND_BACK else t for t in transitions]
        return await self.store.finish(session, charged, claim=claim)


class ForgetsUniqueValues(Faulty):
    """Two jobs with the same unique value are both stored."""

    async def enqueue(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        return await self.store.enqueue([msgspec.structs.replace(job, unique=None, unique_for=None) for job in jobs])


class OverrunsLanes(Faulty):
    """Lanes have one place more than their limit, and readers do not see it."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.given: dict[LaneRule, LaneRule] = {}

    async def configure(self, changes: Sequence[SettingsChange]) -> None:
        for change in changes:
            for rule in change.declared.lanes if change.declared is not None else ():
                if rule.limit is not None:
                    ordered = rule.limit == 1 if rule.ordered is None else rule.ordered
                    wider = msgspec.structs.replace(rule, limit=rule.limit + 1, ordered=ordered)
                    self.given[wider] = rule
        wide = {rule: wider for wider, rule in self.given.items()}
        await self.store.configure(
            [
                msgspec.structs.replace(change, declared=change.declared and _with_rules(change.declared, wide))
                for change in changes
            ]
        )

    async def queues(self) -> list[QueueReading]:
        return [
            msgspec.structs.replace(queue, settings=_with_rules(queue.settings, self.given))
            for queue in await self.store.queues()
        ]


def _with_rules(settings: QueueSettings, changed: Mapping[LaneRule, LaneRule]) -> QueueSettings:
    return msgspec.structs.replace(settings, lanes=tuple(changed.get(rule, rule) for rule in settings.lanes))


class LetsClassesWait(Faulty):
    """Asks are served in reverse order."""

    async def claim(self, session: str, claim: Claim) -> list[Claimed]:
        return await self.store.claim(session, msgspec.structs.replace(claim, asks=claim.asks[::-1]))


class ExtendsOldTerms(Faulty):
    """A leader that lost its term gets it extended, as long as no other session leads."""

    async def lead(self, session: str, *, lease: float, term: int | None = None) -> Term | None:
        extended = await self.store.lead(session, lease=lease, term=term)
        return extended or await self.store.lead(session, lease=lease)


class KeepsOldPayloads(Faulty):
    """A retry that changes the payload is treated as one that does not."""

    async def finish(self, session: str, transitions: Sequence[Transition], *, claim: Claim | None = None) -> Finished:
        unchanged = [msgspec.structs.replace(t, payload=None) for t in transitions]
        return await self.store.finish(session, unchanged, claim=claim)


class SkipsEnds(Faulty):
    """The feed of ended jobs omits the jobs of every other page."""

    async def ended(self, after: str | None, *, limit: int = 1_000) -> EndedPage:
        page = await self.store.ended(after, limit=limit)
        self.calls += bool(page.jobs)
        return msgspec.structs.replace(page, jobs=() if self.calls % 2 else page.jobs)


FAULTS = {
    FinishesWithoutFence: "a write by one who does not hold the job|the repeated",
    RenewsTheDead: "renew must raise SessionLost",
    SwallowsCancels: "cancel: returned|state is|cancel_requested is|cancel must raise",
    ClaimsTwice: "may not start|may start|the repeated claim answers",
    RescuesInWordsOnly: "state of .* is live, by the rules dead",
    ChargesHandBacks: r"attempt is \d, by the rules \d|was handed out as .*attempt=2",
    ForgetsUniqueValues: "enqueue: returned",
    OverrunsLanes: "may not start|goes on with|of at most|enqueue: returned .*RUNNING",
    LetsClassesWait: "may start for",
    ExtendsOldTerms: "extending a term that has ended",
    SkipsEnds: "and the feed of ended jobs has None",
    KeepsOldPayloads: "payload is .*, by the rules|was handed out as",
}
"""Every fault, and the words with which the comparison must report it."""
SOUGHT = sized([RenewsTheDead, ClaimsTwice, SwallowsCancels, KeepsOldPayloads], list(FAULTS))
"""Faults of this run: of a session, of a claim, of a cancel and of a record; in a full run all of them."""


# The search is fixed work, ten seconds and more: a busy machine may take minutes for it.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", SOUGHT, ids=lambda fault: fault.__name__)
def test_a_store_with_one_fault_is_found_out(opener: Opener, fault: type[Faulty]) -> None:
    async def open_faulty(clock: ManualClock) -> Store:
        return cast(Store, fault(await opener(clock)))

    with pytest.raises(Mismatch, match=FAULTS[fault]):
        run_state_machine_as_test(
            machine_of(open_faulty),
            settings=settings(
                max_examples=100,
                stateful_step_count=40,
                deadline=None,
                database=None,
                derandomize=True,
                report_multiple_bugs=False,
                # One proof is enough: the shortest one costs far more to find.
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
