"""What a worker asks for: order of classes, the floor under each of them, and turns between sources.

The tests play the store in its simplest form: it answers ask by ask, within the slots.
"""

from collections import Counter
from collections.abc import Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.model.job import Priority
from fairlane.model.slots import FLOOR, Ask, Floor, Reserved, Slots, asks

HIGH, NORMAL, LOW = Priority
Source = str | None
Backlog = Counter[tuple[Source, Priority]]

sources_of = st.dictionaries(
    st.sampled_from([None, "images", "mail", "video"]), st.integers(1, 5), min_size=1, max_size=4
)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Slots, list[int]]:
    """Slots, and the jobs that run in them within the rules."""
    total = draw(st.integers(1, 40))
    high = draw(st.integers(0, total - 1))
    slots = Slots(total=total, reserved=Reserved(high=high, normal=draw(st.integers(0, total - 1 - high))))
    running = [0, 0, 0]
    for priority in draw(st.permutations(list(Priority))):
        running[priority] = draw(st.integers(0, slots.room(running, priority)))
    return slots, running


def answer(slots: Slots, running: list[int], wishes: list[Ask], backlog: Backlog) -> list[tuple[Source, Priority]]:
    """The jobs that a store starts for these asks."""
    running = list(running)
    started: list[tuple[Source, Priority]] = []
    for ask in wishes:
        source = (ask.queue, ask.priority)
        count = min(ask.most, backlog[source], slots.room(running, ask.priority))
        if ask.below is not None:
            count = min(count, max(0, ask.below - running[ask.priority]))
        backlog[source] -= count
        running[ask.priority] += count
        started += [source] * count
    return started


@given(situations(), sources_of, st.randoms(use_true_random=False))
def test_asks_name_known_sources_and_what_there_is_room_for(
    situation: tuple[Slots, list[int]], sources: Mapping[Source, int], random: Random
) -> None:
    slots, running = situation
    for ask in asks(slots, running, list(reversed(Priority)), sources, random):
        assert ask.queue in sources
        assert 1 <= ask.most <= slots.room(running, ask.priority)


@given(
    situations(),
    sources_of,
    st.lists(st.sampled_from(Priority), unique=True),
    st.randoms(use_true_random=False),
)
def test_a_full_worker_asks_for_nothing(
    situation: tuple[Slots, list[int]], sources: Mapping[Source, int], due: list[Priority], random: Random
) -> None:
    slots, running = situation
    running[HIGH] += slots.room(running, HIGH)
    assert asks(slots, running, due, sources, random) == []


def test_a_worker_without_sources_asks_for_nothing() -> None:
    assert asks(Slots(total=4), [0, 0, 0], [LOW], {}, Random(1)) == []


def test_a_worker_of_one_queue_asks_each_class_once_for_its_room() -> None:
    slots = Slots(total=10, reserved=Reserved(high=2, normal=3))
    assert asks(slots, [1, 1, 1], [], {"images": 1}, Random(1)) == [
        Ask("images", HIGH, 7),
        Ask("images", NORMAL, 6),
        Ask("images", LOW, 4),
    ]


@given(situations(), sources_of, st.randoms(use_true_random=False))
def test_without_a_due_class_high_comes_before_normal_before_low(
    situation: tuple[Slots, list[int]], sources: Mapping[Source, int], random: Random
) -> None:
    slots, running = situation
    order = [ask.priority for ask in asks(slots, running, [], sources, random)]
    assert order == sorted(order)


@given(situations(), sources_of, st.randoms(use_true_random=False))
def test_due_classes_are_asked_first_in_the_order_given(
    situation: tuple[Slots, list[int]], sources: Mapping[Source, int], random: Random
) -> None:
    slots, running = situation
    wishes = asks(slots, running, [LOW, NORMAL], sources, random)
    floor = [ask for ask in wishes if ask.below is not None]
    assert wishes[: len(floor)] == floor
    assert [ask.priority for ask in floor] == sorted((ask.priority for ask in floor), reverse=True)
    assert {ask.priority for ask in floor} <= {LOW, NORMAL}


@given(
    situations(),
    sources_of,
    st.lists(st.sampled_from(list(reversed(Priority))), unique=True),
    st.randoms(use_true_random=False),
)
def test_the_floor_of_a_class_is_a_tenth_of_the_slots_over_all_sources(
    situation: tuple[Slots, list[int]], sources: Mapping[Source, int], due: list[Priority], random: Random
) -> None:
    slots, running = situation
    tenth = (slots.total + FLOOR - 1) // FLOOR
    floor = [ask for ask in asks(slots, running, due, sources, random) if ask.below is not None]
    plenty: Backlog = Counter({(source, priority): 100 for source in sources for priority in Priority})
    started = Counter(priority for _, priority in answer(slots, running, floor, plenty))
    for priority in Priority:
        asked = [ask for ask in floor if ask.priority is priority]
        if priority not in due or running[priority] >= tenth or not slots.room(running, priority):
            assert not asked
        else:
            assert {ask.below for ask in asked} == {tenth}
            assert {ask.queue for ask in asked} == set(sources)
            assert running[priority] + started[priority] <= tenth


@pytest.mark.parametrize(("total", "tenth"), [(1, 1), (10, 1), (11, 2), (20, 2), (21, 3), (100, 10)])
def test_the_floor_is_rounded_up(total: int, tenth: int) -> None:
    wishes = asks(Slots(total=total), [0, 0, 0], [LOW], {"images": 1}, Random(1))
    assert wishes[0] == Ask("images", LOW, tenth, below=tenth)


def test_a_slot_that_is_free_only_because_it_is_reserved_is_not_offered_to_the_floor() -> None:
    slots = Slots(total=10, reserved=Reserved(high=2, normal=2))
    assert [ask.priority for ask in asks(slots, [0, 8, 0], [LOW], {"images": 1}, Random(1))] == [HIGH]
    assert [ask.priority for ask in asks(slots, [0, 2, 6], [LOW, NORMAL], {"images": 1}, Random(1))] == [HIGH]
    assert asks(slots, [0, 0, 6], [NORMAL, LOW], {"images": 1}, Random(1))[0] == Ask("images", NORMAL, 1, below=1)


@given(situations(), sources_of, st.data())
def test_no_slot_idles_while_a_job_may_use_it(
    situation: tuple[Slots, list[int]], sources: Mapping[Source, int], data: st.DataObject
) -> None:
    slots, running = situation
    backlog: Backlog = Counter(
        {(source, priority): data.draw(st.integers(0, 6)) for source in sources for priority in Priority}
    )
    wishes = asks(slots, running, data.draw(st.sampled_from([[], [LOW], [LOW, NORMAL]])), sources, Random(1))
    for _, priority in answer(slots, running, wishes, backlog):
        running[priority] += 1
    for (_, priority), left in backlog.items():
        assert not left or not slots.room(running, priority)


@pytest.mark.parametrize("free", [1, 2, 3, 4, 7, 20])
def test_sources_with_work_share_the_slots_by_weight(free: int) -> None:
    sources: dict[Source, int] = {None: 1, "images": 3, "mail": 2}
    random = Random(4)
    started: Counter[Source] = Counter()
    rounds = 6_000 // free
    for _ in range(rounds):
        plenty: Backlog = Counter({(source, NORMAL): 100 for source in sources})
        wishes = asks(Slots(total=free), [0, 0, 0], [], sources, random)
        started.update(source for source, _ in answer(Slots(total=free), [0, 0, 0], wishes, plenty))
    for source, weight in sources.items():
        assert started[source] == pytest.approx(rounds * free * weight / 6, rel=0.08)


@pytest.mark.parametrize("free", [1, 2, 5])
def test_what_an_empty_source_leaves_over_is_shared_by_weight_too(free: int) -> None:
    sources: dict[Source, int] = {None: 4, "images": 3, "mail": 1}
    random = Random(5)
    started: Counter[Source] = Counter()
    for _ in range(8_000 // free):
        busy: Backlog = Counter({("images", NORMAL): 100, ("mail", NORMAL): 100})
        wishes = asks(Slots(total=free), [0, 0, 0], [], sources, random)
        started.update(source for source, _ in answer(Slots(total=free), [0, 0, 0], wishes, busy))
    assert started["images"] / started["mail"] == pytest.approx(3, rel=0.1)


@given(sources_of, st.integers(1, 30), st.randoms(use_true_random=False))
def test_in_every_round_a_source_gets_its_share_to_within_one_job(
    sources: Mapping[Source, int], free: int, random: Random
) -> None:
    plenty: Backlog = Counter({(source, NORMAL): 100 for source in sources})
    slots = Slots(total=free)
    started = Counter(
        source for source, _ in answer(slots, [0, 0, 0], asks(slots, [0, 0, 0], [], sources, random), plenty)
    )
    for source, weight in sources.items():
        assert abs(started[source] - free * weight / sum(sources.values())) < 1


def test_every_source_comes_first_at_some_time() -> None:
    sources: dict[Source, int] = {None: 1, "images": 1, "mail": 1}
    first = {asks(Slots(total=1), [0, 0, 0], [], sources, Random(seed))[0].queue for seed in range(50)}
    assert first == set(sources)


def test_a_class_is_due_after_nine_starts_of_others() -> None:
    floor = Floor()
    assert floor.due() == []
    for _ in range(8):
        floor.started(HIGH)
    assert floor.due() == []
    floor.started(HIGH)
    assert floor.due() == [LOW, NORMAL]
    floor.started(NORMAL)
    assert floor.due() == [LOW]
    floor.started(LOW)
    assert floor.due() == []


def test_starts_are_counted_in_batches_too_and_no_start_is_none() -> None:
    floor = Floor()
    floor.started(HIGH, 9)
    assert floor.due() == [LOW, NORMAL]
    floor.started(LOW, 0)
    assert floor.due() == [LOW, NORMAL]
    floor.started(LOW, 20)
    assert floor.due() == [NORMAL, HIGH]


@pytest.mark.parametrize("slots", [Slots(total=1), Slots(total=4, reserved=Reserved(high=1)), Slots(total=20)])
@pytest.mark.parametrize("sources", [{"images": 1}, {None: 1, "images": 3, "mail": 1}], ids=["one", "three"])
def test_every_class_keeps_one_start_in_ten_under_a_flood_of_the_ones_above(
    slots: Slots, sources: dict[Source, int]
) -> None:
    random = Random(9)
    floor = Floor()
    running: list[Priority] = []
    starts: Counter[Priority] = Counter()
    low_source = list(sources)[-1]
    for _ in range(3_000):
        if running:
            # Jobs take equally long, so the one that started first ends first.
            running.pop(0)
        counts = [running.count(priority) for priority in Priority]
        backlog: Backlog = Counter({(source, HIGH): 99 for source in sources})
        backlog[low_source, LOW] = 99
        backlog[low_source, NORMAL] = 99
        for _, priority in answer(slots, counts, asks(slots, counts, floor.due(), sources, random), backlog):
            floor.started(priority)
            starts[priority] += 1
            running.append(priority)
    assert starts[LOW] == pytest.approx(starts.total() / 10, rel=0.15)
    assert starts[NORMAL] == pytest.approx(starts.total() / 10, rel=0.15)
