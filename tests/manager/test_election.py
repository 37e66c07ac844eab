"""Elections: one leader at a time, terms that grow, and no trust in a term for longer than the store grants it."""

from __future__ import annotations

import asyncio
import time

import pytest

from fairlane.errors import TermLost
from fairlane.manager.election import Election
from fairlane.manager.leader_context import Contact
from fairlane.model.intervals import Intervals
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store

from .faults import faulty
from .waiting import running, until

SHORT = Intervals().scaled(0.1)


class Candidate:
    """An election with its own wrapper of the store, which can be made to fail."""

    def __init__(self, store: Store, session: str, intervals: Intervals, clock: ManualClock | None = None) -> None:
        self.store, self.faults = faulty(store)
        monotonic = time.monotonic if clock is None else clock.monotonic
        self.contact = Contact(monotonic)
        self.election = Election(self.store, session, intervals, self.contact, monotonic=monotonic)

    @property
    def leads(self) -> bool:
        return self.election.term is not None


# -- by the manual clock: one question at a time ---------------------------------------------------------------------


async def test_of_two_candidates_one_leads(store: Store, clock: ManualClock) -> None:
    one, two = (Candidate(store, name, Intervals(), clock) for name in ("one", "two"))

    answers = await asyncio.gather(one.election.ask(None), two.election.ask(None))

    assert sorted(answer is None for answer in answers) == [False, True]
    assert one.leads != two.leads


async def test_trust_ends_a_second_before_the_lease(store: Store, clock: ManualClock) -> None:
    candidate = Candidate(store, "one", Intervals(), clock)
    assert await candidate.election.ask(None) == 1

    led = []
    for seconds in (8.9, 0.1):
        clock.advance(seconds)
        led.append(candidate.leads)

    assert led == [True, False]
    assert await store.leader() is not None, "the store still believes in it"


async def test_a_slow_renewal_does_not_extend_the_trust(store: Store, clock: ManualClock) -> None:
    candidate = Candidate(store, "one", Intervals(), clock)
    term = await candidate.election.ask(None)
    clock.advance(3.0)
    candidate.faults.late["lead"] = lambda: clock.advance(5.0)

    assert await candidate.election.ask(term) == term

    # Asked at 3, answered at 8: trusted until 3 + 10 - 1.
    clock.advance(3.9)
    assert candidate.leads
    clock.advance(0.1)
    assert not candidate.leads


async def test_an_answer_that_comes_after_its_own_trust_is_worth_nothing(store: Store, clock: ManualClock) -> None:
    candidate = Candidate(store, "one", Intervals(), clock)
    candidate.faults.late["lead"] = lambda: clock.advance(9.0)

    assert await candidate.election.ask(None) is None
    assert not candidate.leads


async def test_a_candidate_whose_reply_was_lost_gets_the_same_term(store: Store, clock: ManualClock) -> None:
    candidate = Candidate(store, "one", Intervals(), clock)
    first = await candidate.election.ask(None)
    candidate.election.step_down()
    assert not candidate.leads

    assert await candidate.election.ask(None) == first


async def test_a_renewal_after_another_was_elected_is_refused(store: Store, clock: ManualClock) -> None:
    one, two = (Candidate(store, name, Intervals(), clock) for name in ("one", "two"))
    term = await one.election.ask(None)
    assert term is not None
    await store.resign(term)
    newer = await two.election.ask(None)
    assert newer is not None
    assert newer > term

    assert await one.election.ask(term) is None
    assert not one.leads
    with pytest.raises(TermLost):
        await store.promote(term=term)


async def test_the_leader_that_slept_past_its_trust_does_not_even_ask(store: Store, clock: ManualClock) -> None:
    candidate = Candidate(store, "one", Intervals(), clock)
    term = await candidate.election.ask(None)
    assert term is not None
    clock.advance(30.0)

    with pytest.raises(TermLost, match="ran out"):
        await candidate.election.keep(term)
    assert candidate.faults.calls["lead"] == 1


async def test_resigning_ends_the_term_in_the_store(store: Store, clock: ManualClock) -> None:
    one, two = (Candidate(store, name, Intervals(), clock) for name in ("one", "two"))
    term = await one.election.ask(None)
    assert term is not None

    await one.election.resign(term)

    assert not one.leads
    assert await two.election.ask(None) == term + 1


@pytest.mark.parametrize("fault", ["down", "hanging"])
async def test_resigning_from_a_store_that_does_not_answer_ends_all_the_same(live_store: Store, fault: str) -> None:
    candidate = Candidate(live_store, "one", SHORT)
    term = await candidate.election.win()
    if fault == "down":
        candidate.faults.down()
    else:
        candidate.faults.hanging.add("resign")

    async with asyncio.timeout(10):
        await candidate.election.resign(term)

    assert not candidate.leads


# -- by the machine's clock: standing and keeping --------------------------------------------------------------------


async def test_a_leader_that_renews_keeps_its_term(live_store: Store) -> None:
    candidate = Candidate(live_store, "one", SHORT)
    term = await candidate.election.win()
    async with running(candidate.election.keep(term)) as keeping:
        await until(lambda: candidate.faults.calls["lead"] >= 5)

        assert not keeping.done()
        assert candidate.election.term == term


@pytest.mark.parametrize("fault", ["down", "refused", "mistaken"])
async def test_one_failed_renewal_ends_the_term_at_once(live_store: Store, fault: str) -> None:
    candidate = Candidate(live_store, "one", Intervals(leader_renew=0.05))
    term = await candidate.election.win()
    if fault == "down":
        candidate.faults.down("lead")
    elif fault == "mistaken":
        candidate.faults.errors["lead"] = RuntimeError("a mistake")
    else:
        await live_store.resign(term)

    # Long before the lease of ten seconds ends.
    with pytest.raises(TermLost, match="renewal"):
        await asyncio.wait_for(candidate.election.keep(term), 30)
    assert candidate.faults.calls["lead"] == 2


async def test_a_renewal_that_hangs_ends_the_term_when_the_trust_is_over(live_store: Store) -> None:
    candidate = Candidate(live_store, "one", SHORT)
    asked = time.monotonic()
    term = await candidate.election.win()
    candidate.faults.hanging.add("lead")

    with pytest.raises(TermLost, match="did not answer"):
        await asyncio.wait_for(candidate.election.keep(term), 20)

    assert time.monotonic() - asked >= SHORT.leader_lease - SHORT.trust_margin - 0.01
    assert not candidate.leads
    assert candidate.contact.clean_seconds == 0.0, "silence is a failure"


async def test_a_standby_leads_after_the_leader_has_gone_silent(live_store: Store) -> None:
    one, two = Candidate(live_store, "one", SHORT), Candidate(live_store, "two", SHORT)
    term = await one.election.win()

    async with asyncio.timeout(30):
        newer = await two.election.win()

    assert newer > term
    assert not one.leads, "the old one lost its trust before the new one won"


async def test_a_standby_leads_at_once_when_the_leader_resigns(live_store: Store) -> None:
    patient = Intervals(stand=3_600.0)
    one, two = Candidate(live_store, "one", patient), Candidate(live_store, "two", patient)
    term = await one.election.win()
    standing = asyncio.create_task(two.election.win())
    await until(lambda: two.faults.calls["lead"] == 1)
    await asyncio.sleep(0.05)

    await one.election.resign(term)

    # It would try again only after half an hour: the wake-up brought it.
    assert await asyncio.wait_for(standing, 20) == term + 1


async def test_a_standby_rides_out_an_outage_with_two_words(
    live_store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    candidate = Candidate(live_store, "one", SHORT)
    candidate.faults.down()
    standing = asyncio.create_task(candidate.election.win())
    await until(lambda: candidate.faults.calls["lead"] >= 5)
    candidate.faults.up()

    assert await asyncio.wait_for(standing, 20) == 1
    assert caplog.messages == ["election: store unavailable, trying again (the line is cut)", "election: works again"]


async def test_a_standby_whose_call_hangs_tries_again(live_store: Store) -> None:
    candidate = Candidate(live_store, "one", SHORT)
    candidate.faults.hanging.add("lead")
    standing = asyncio.create_task(candidate.election.win())
    await until(lambda: candidate.faults.calls["lead"] == 2)
    candidate.faults.up()

    assert await asyncio.wait_for(standing, 20) == 1


async def test_many_candidates_never_hold_the_same_term(live_store: Store) -> None:
    """Each leads for a moment and resigns, again and again; terms are numbered without a double."""
    won: list[int] = []

    async def stand_thrice(name: str) -> None:
        candidate = Candidate(live_store, name, SHORT)
        for _ in range(3):
            term = await candidate.election.win()
            won.append(term)
            await candidate.election.resign(term)

    async with asyncio.timeout(60):
        await asyncio.gather(*(stand_thrice(f"candidate-{n}") for n in range(6)))

    assert won == sorted(set(won))
    assert len(won) == 18
