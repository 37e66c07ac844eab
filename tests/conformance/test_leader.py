"""Leadership: one term at a time, numbers that only grow, and verbs that refuse a term that has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from fairlane.errors import TermLost
from fairlane.model.job import JobState
from fairlane.model.maintenance import Retention
from fairlane.store.port import Store

from .kit import Kit

Pass = Callable[[Store, int | None], Awaitable[object]]


async def _promote(store: Store, term: int | None) -> object:
    return await store.promote(term=term)


async def _admit(store: Store, term: int | None) -> object:
    return await store.admit(term=term)


async def _rescue(store: Store, term: int | None) -> object:
    return await store.rescue(term=term)


async def _prune(store: Store, term: int | None) -> object:
    return await store.prune(Retention(), term=term)


PASSES: list[Pass] = [_promote, _admit, _rescue, _prune]


async def _term(kit: Kit, session: str, *, lease: float = 10.0) -> int:
    term = await kit.store.lead(session, lease=lease)
    assert term is not None
    assert term.session == session
    return term.number


async def _stands_in_vain(kit: Kit, session: str, *, leader: str) -> bool:
    """The session tries to become leader, and the answer is the term of the current leader, unchanged."""
    before = await kit.store.leader()
    answer = await kit.store.lead(session, lease=30)
    assert answer is not None
    return answer.session == leader and answer == before == await kit.store.leader()


async def test_the_first_session_to_stand_leads_and_the_leader_can_be_read(kit: Kit) -> None:
    assert await kit.store.leader() is None
    term = await kit.store.lead("one", lease=10)
    assert term is not None
    assert (term.session, term.lease, term.remaining) == ("one", 10.0, 10.0)
    assert await _stands_in_vain(kit, "two", leader="one")
    seen = await kit.store.leader()
    assert seen is not None
    assert (seen.number, seen.session) == (term.number, "one")


async def test_of_many_sessions_that_stand_at_once_one_wins(kit: Kit) -> None:
    terms = await asyncio.gather(*(kit.store.lead(f"manager-{number}", lease=10) for number in range(8)))
    won = await kit.store.leader()
    assert won is not None
    assert terms == [won] * 8, "each is answered with the one term there is"


async def test_extending_keeps_the_number_and_renews_the_lease(kit: Kit) -> None:
    number = await _term(kit, "one")
    for _ in range(3):
        kit.clock.advance(6)
        extended = await kit.store.lead("one", lease=10, term=number)
        assert extended is not None
        assert (extended.number, extended.remaining) == (number, 10.0)
    assert await _stands_in_vain(kit, "two", leader="one")


async def test_a_term_includes_how_much_of_its_lease_is_left(kit: Kit) -> None:
    await _term(kit, "one")
    kit.clock.advance(4)
    seen = await kit.store.leader()
    assert seen is not None
    assert seen.remaining == pytest.approx(6.0)


async def test_a_session_that_stands_in_vain_learns_how_long_the_term_lasts(kit: Kit) -> None:
    number = await _term(kit, "one")
    left = []
    for seconds in (0, 4, 5.5):
        kit.clock.advance(seconds)
        answer = await kit.store.lead("two", lease=60)
        assert answer is not None
        assert (answer.number, answer.session, answer.lease) == (number, "one", 10.0)
        left.append(answer.remaining)
    assert left == pytest.approx([10.0, 6.0, 0.5])
    kit.clock.advance(0.6)
    assert await _term(kit, "two") > number, "when that time is over, there is no leader"


async def test_what_remains_of_a_term_follows_its_renewals_also_to_a_shorter_lease(kit: Kit) -> None:
    number = await _term(kit, "one", lease=600)
    left = []
    for lease in (600.0, 10.0, 2.0):
        kit.clock.advance(1)
        assert await kit.store.lead("one", lease=lease, term=number) is not None
        answer = await kit.store.lead("two", lease=60)
        assert answer is not None
        left.append(answer.remaining)
    assert left == pytest.approx([600.0, 10.0, 2.0])
    kit.clock.advance(2.1)
    assert await _term(kit, "two") > number


async def test_after_a_resignation_nothing_remains_to_wait_for(kit: Kit) -> None:
    number = await _term(kit, "one", lease=600)
    assert await _stands_in_vain(kit, "two", leader="one")
    await kit.store.resign(number)
    assert await _term(kit, "two") == number + 1


async def test_a_session_cannot_extend_the_term_of_another(kit: Kit) -> None:
    number = await _term(kit, "one")
    assert await kit.store.lead("two", lease=10, term=number) is None
    assert await kit.store.lead("one", lease=10, term=number + 1) is None
    seen = await kit.store.leader()
    assert seen is not None
    assert (seen.number, seen.session) == (number, "one")


async def test_a_lease_that_has_ended_is_not_extended_even_without_a_new_leader(kit: Kit) -> None:
    number = await _term(kit, "one")
    kit.clock.advance(10.1)
    assert await kit.store.leader() is None
    assert await kit.store.lead("one", lease=10, term=number) is None
    assert await kit.store.leader() is None
    assert await _term(kit, "one") > number


async def test_terms_only_grow_however_the_last_one_ended(kit: Kit) -> None:
    numbers = []
    for step in range(6):
        numbers.append(await _term(kit, f"manager-{step % 2}"))
        if step % 2:
            await kit.store.resign(numbers[-1])
        else:
            kit.clock.advance(11)
    assert numbers == sorted(set(numbers))


async def test_resigning_frees_the_place_at_once(kit: Kit) -> None:
    number = await _term(kit, "one")
    await kit.store.resign(number)
    assert await kit.store.leader() is None
    assert await kit.store.lead("one", lease=10, term=number) is None
    assert await _term(kit, "two") > number


async def test_resigning_a_term_that_is_over_leaves_the_present_one_alone(kit: Kit) -> None:
    old = await _term(kit, "one")
    kit.clock.advance(11)
    present = await _term(kit, "two")
    await kit.store.resign(old)
    await kit.store.resign(present + 1)
    seen = await kit.store.leader()
    assert seen is not None
    assert (seen.number, seen.session) == (present, "two")


async def test_setting_the_wall_clock_does_not_end_a_term(kit: Kit) -> None:
    number = await _term(kit, "one")
    kit.clock.step_wall(86_400)
    assert await _stands_in_vain(kit, "two", leader="one")
    kit.clock.step_wall(-200_000)
    assert await _stands_in_vain(kit, "two", leader="one")
    assert await kit.store.lead("one", lease=10, term=number) is not None


@pytest.mark.parametrize("run", PASSES)
async def test_a_pass_under_a_term_that_was_taken_over_is_refused(kit: Kit, run: Pass) -> None:
    old = await _term(kit, "one")
    kit.clock.advance(11)
    present = await _term(kit, "two")
    with pytest.raises(TermLost):
        await run(kit.store, old)
    await run(kit.store, present)
    await run(kit.store, None)


@pytest.mark.parametrize("run", PASSES)
async def test_a_pass_under_a_term_that_ended_is_rejected_even_without_a_new_leader(kit: Kit, run: Pass) -> None:
    expired = await _term(kit, "one")
    kit.clock.advance(11)
    with pytest.raises(TermLost):
        await run(kit.store, expired)
    resigned = await _term(kit, "one")
    await kit.store.resign(resigned)
    with pytest.raises(TermLost):
        await run(kit.store, resigned)


@pytest.mark.parametrize("run", PASSES)
async def test_a_pass_under_a_term_that_never_was_is_refused(kit: Kit, run: Pass) -> None:
    with pytest.raises(TermLost):
        await run(kit.store, 7)


async def test_a_refused_pass_changes_nothing(kit: Kit) -> None:
    old = await _term(kit, "one")
    worker = await kit.worker()
    done = await kit.enqueue()
    await worker.complete(*await worker.claim())
    running = await kit.enqueue()
    await worker.claim()
    due = await kit.enqueue(delay=5)
    kit.clock.advance(8 * 86_400)
    present = await _term(kit, "two")
    for run in PASSES:
        with pytest.raises(TermLost):
            await run(kit.store, old)
    states = [await kit.state(id) for id in (done, running, due)]
    assert states == [JobState.COMPLETED, JobState.RUNNING, JobState.SCHEDULED]
    for run in PASSES:
        await run(kit.store, present)
    assert await kit.store.get([done]) == [None]
    assert [await kit.state(id) for id in (running, due)] == [JobState.PENDING, JobState.PENDING]
