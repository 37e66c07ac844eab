"""Ids: never twice, in the order of time, and fit to be a key."""

import time
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

from fairlane.model.ids import new_id
from fairlane.model.names import check_key


def test_a_hundred_thousand_ids_are_different_and_in_order() -> None:
    ids = [new_id() for _ in range(100_000)]
    assert len(set(ids)) == len(ids)
    assert ids == sorted(ids)


def test_threads_make_different_ids() -> None:
    with ThreadPoolExecutor(4) as pool:
        batches = list(pool.map(lambda _: [new_id() for _ in range(5_000)], range(4)))
    assert len({made for batch in batches for made in batch}) == 20_000
    assert all(batch == sorted(batch) for batch in batches)


def test_an_id_begins_with_the_time_it_was_made() -> None:
    before = time.time_ns() // 1_000_000
    made = UUID(new_id())
    after = time.time_ns() // 1_000_000
    assert made.version == 7
    assert before <= made.int >> 80 <= after


def test_an_id_is_a_valid_key() -> None:
    made = new_id()
    assert check_key("id", made) == made
