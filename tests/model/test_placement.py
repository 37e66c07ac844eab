"""Where a sticky key goes, and which index an unnamed worker gets."""

from hypothesis import given
from hypothesis import strategies as st

from fairlane.model.placement import choose, lowest_free

indices = st.sets(st.integers(0, 30))
loads = st.dictionaries(st.integers(0, 30), st.integers(0, 5))


@given(indices, loads)
def test_a_key_goes_to_a_live_worker_with_the_fewest_bindings_and_of_those_to_the_lowest(
    live: set[int], bindings: dict[int, int]
) -> None:
    chosen = choose(live, bindings)
    if chosen is None:
        assert not live
        return
    assert chosen in live
    for other in live:
        theirs, its = bindings.get(other, 0), bindings.get(chosen, 0)
        assert theirs > its or (theirs == its and other >= chosen)


def test_without_a_live_worker_a_key_stays_unbound() -> None:
    assert choose([], {3: 0}) is None


@given(st.sets(st.integers(0, 30), min_size=1), st.integers(1, 100))
def test_keys_spread_evenly_and_the_lowest_indices_take_what_is_over(live: set[int], keys: int) -> None:
    bindings: dict[int, int] = {}
    for _ in range(keys):
        chosen = choose(live, bindings)
        assert chosen is not None
        bindings[chosen] = bindings.get(chosen, 0) + 1
    counts = [bindings.get(index, 0) for index in sorted(live)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1


@given(indices)
def test_an_unnamed_worker_gets_the_lowest_free_index(taken: set[int]) -> None:
    index = lowest_free(taken)
    assert index not in taken
    assert set(range(index)) <= taken


def test_the_first_worker_is_number_zero_and_gaps_are_filled() -> None:
    assert lowest_free([]) == 0
    assert lowest_free(iter([0, 1, 3])) == 2
