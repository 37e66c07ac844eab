"""Fifty processes send the first job of a sticky key at the same moment, on the real clock."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fairlane.model.binding import Binding, BindingState
from fairlane.model.ids import new_id
from fairlane.model.session import NewSession, SessionKind
from fairlane.model.slots import Slots
from fairlane.store.port import Store
from tests.sizes import sized

from .crowd import QUEUES, job_of, key_of
from .reopening import open_again

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = 50
WORKERS = 5
ROUNDS = sized(4, 10)


@pytest.fixture
async def shared(store_url: str) -> AsyncIterator[Store]:
    """A store with five workers, on its real clock."""
    opened = await open_again(store_url)
    for _ in range(WORKERS):
        slots = Slots(total=10)
        new = NewSession(id=new_id(), kind=SessionKind.WORKER, lease=600, queues=QUEUES, slots=slots)
        await opened.register(new)
    yield opened
    await opened.close()


async def _sent_at_once(store: Store, url: str) -> list[list[Binding]]:
    """Let the crowd send. Returns the bindings that each round has created. Every job waits where its key is bound."""
    crowd = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.conformance.crowd", url, str(PROCESSES), str(ROUNDS)),
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    _, errors = await crowd.communicate()
    assert crowd.returncode == 0, f"{crowd.returncode} of {PROCESSES} processes failed\n{errors.decode()}"

    bindings = await store.bindings(limit=500)
    assert {binding.state for binding in bindings} == {BindingState.OPEN}
    made = []
    for round in range(ROUNDS):
        used = {key_of(round, number) for number in range(PROCESSES)}
        made.append([binding for binding in bindings if binding.key in used])
        place = {binding.key: f"default/{binding.index}" for binding in made[-1]}
        jobs = await store.get([job_of(round, number).id for number in range(PROCESSES)])
        assert all(job is not None and job.worker == place[job.sticky or ""] for job in jobs)
    return made


async def test_fifty_processes_at_once_make_one_binding_of_one_key_and_of_fifty_ten_for_each_of_five_workers(
    shared: Store, store_url: str
) -> None:
    rounds = await _sent_at_once(shared, store_url)
    for number, made in enumerate(rounds[0::2]):
        # One after the other, the keys of all fill the workers from the lowest index on.
        assert [(binding.key, binding.index) for binding in made] == [(f"plan-{2 * number}", number % WORKERS)]
    for made in rounds[1::2]:
        assert len({binding.key for binding in made}) == PROCESSES
        assert Counter(binding.index for binding in made) == dict.fromkeys(range(WORKERS), PROCESSES // WORKERS)
