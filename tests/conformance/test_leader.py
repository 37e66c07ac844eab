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
    return term.number


async def test_the_first_to_stand_leads_and_everybody_can_see_it(kit: Kit) -> None:
    assert await kit.store.leader() is None
    term = await kit.store.lead("one", lease=10)
    assert term is not None
    assert (term.session, term.lease, term.remaining) == ("one", 10.0, 10.0)
    assert await kit.store.lead("two", lease=10) is None
    seen = await kit.store.leader()
    assert seen is not None
    assert (seen.number, seen.session) == (term.number, "one")


async def test_of_many_who_stand_at_once_one_wins(kit: Kit) -> None:
    terms = await asyncio.gather(*(kit.store.lead(f"manager-{number}", lease=10) for number in range(8)))
    won = [term for term in terms if term is not None]
    assert len(won) == 1
    assert await kit.store.leader() == won[0]


async def test_extending_keeps_the_number_and_renews_the_lease(kit: Kit) -> None:
    number = await _term(kit, "one")
    for _ in range(3):
        kit.clock.advance(6)
        extended = await kit.store.lead("one", lease=10, term=number)
        assert extended is not None
        assert (extended.number, extended.remaining) == (number, 10.0)
    assert await kit.store.lead("two", lease=10) is None


async def test_a_leader_is_told_how_much_of_its_lease_is_left(kit: Kit) -> None:
    await _term(kit, "one")
    kit.clock.advance(4)
    seen = await kit.store.leader()
    assert seen is not None
    assert seen.remaining == pytest.approx(6.0)


async def test_nobody_extends_the_term_of_somebody_else(kit: Kit) -> None:
    number = await _term(kit, "one")
    assert await kit.store.lead("two", lease=10, term=number) is None
    assert await kit.store.lead("one", lease=10, term=number + 1) is None
    seen = await kit.store.leader()
    assert seen is not None
    assert (seen.number, seen.session) == (number, "one")


async def test_a_lease_that_has_ended_is_not_extended_even_if_nobody_leads_since(kit: Kit) -> None:
    number = await _term(kit, "one")
    kit.clock.advance(10.1)
    assert await kit.store.leader() is None
    assert await kit.store.lead("one", lease=10, term=number) is None
    assert await kit.store.leader() is None
    assert await _term(kit, "one") > number


async def test_terms_only_grow_whoever_leads_and_however_the_last_one_ended(kit: Kit) -> None:
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
    assert await kit.store.lead("two", lease=10) is None
    kit.clock.step_wall(-200_000)
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
async def test_a_pass_under_a_term_that_ended_is_refused_although_nobody_else_leads(kit: Kit, run: Pass) -> None:
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
