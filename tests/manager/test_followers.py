"""A manager that does not lead changes nothing, and tries to lead again and again."""

from __future__ import annotations

from fairlane.manager.manager import Manager
from fairlane.model.intervals import Intervals
from fairlane.model.job import JobState, NewJob
from fairlane.model.session import SessionState
from fairlane.store.port import Store

from .faults import faulty
from .test_manager import dying_worker, state_of
from .waiting import running, until

SHORT = Intervals().scaled(0.1)


async def test_a_follower_asks_for_the_lead_alone_and_does_all_the_work_once_it_has_it(live_store: Store) -> None:
    term = await live_store.lead("elsewhere", lease=600.0)
    assert term is not None
    await dying_worker(live_store, "held", lease=0.2)
    await live_store.enqueue([NewJob(id="due", task="t", delay=0.1)])
    through, faults = faulty(live_store)
    manager = Manager(through, session="follower", intervals=SHORT)

    async with running(manager.run()):
        await until(lambda: faults.calls["lead"] >= 5)
        assert set(faults.calls) == {"lead"}
        assert await state_of(live_store, "due") is JobState.SCHEDULED
        assert await state_of(live_store, "held") is JobState.RUNNING
        assert [session.state for session in await live_store.sessions()] == [SessionState.LIVE]

        await live_store.resign(term.number)

        await until(lambda: (manager.counts["promoted"], manager.counts["rescued"]) == (1, 1))
    assert {await state_of(live_store, id) for id in ("due", "held")} == {JobState.PENDING}
