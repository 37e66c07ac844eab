"""The schema: bringing it up to date again changes nothing, however often and by however many at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fairlane.errors import StoreMissing
from fairlane.store.clock import ManualClock
from fairlane.store.port import Store

from .kit import Kit
from .reopening import open_again


def files_in(folder: Path) -> list[Path]:
    """Every file and folder there."""
    return sorted(folder.rglob("*"))


async def test_migrating_answers_the_version_and_repeating_it_changes_nothing(kit: Kit, store: Store) -> None:
    await kit.enqueue(id="job")
    before = await kit.job("job")

    versions = [await store.migrate() for _ in range(2)]

    assert versions[0] >= 1
    assert versions[0] == versions[1]
    assert await kit.job("job") == before


async def test_migrating_twice_at_once_is_harmless(kit: Kit, store: Store, store_url: str, clock: ManualClock) -> None:
    other = await open_again(store_url, clock)
    try:
        versions = await asyncio.gather(*(each.migrate() for each in (store, other) for _ in range(3)))
        await kit.enqueue(id="job")
        [seen] = await other.get(["job"])
    finally:
        await other.close()

    assert len(set(versions)) == 1
    assert seen == await kit.job("job")


async def test_reading_does_not_create_a_missing_store(store_url: str, clock: ManualClock, tmp_path: Path) -> None:
    before = files_in(tmp_path)
    for _ in range(2):
        with pytest.raises(StoreMissing):
            await open_again(store_url, clock, create=False)
    assert files_in(tmp_path) == before
    made = await open_again(store_url, clock)
    await made.enqueue([Kit(made, clock).new(id="job")])
    for _ in range(2):
        looking = await open_again(store_url, clock, create=False)
        assert (await looking.get(["job"]))[0] is not None
        await looking.close()
        # Once while another process has it open, and once while none has.
        await made.close()


async def test_opening_an_empty_store_many_times_at_once_makes_one_schema(store_url: str, clock: ManualClock) -> None:
    stores = await asyncio.gather(*(open_again(store_url, clock) for _ in range(4)))
    try:
        assert len({await each.migrate() for each in stores}) == 1
        first, *others = stores
        await first.enqueue([Kit(first, clock).new(id="job")])
        assert [(await each.get(["job"]))[0] is not None for each in others] == [True] * 3
    finally:
        for each in stores:
            await each.close()
