"""Jobs with large payloads and results: calls are bounded by bytes, and slots are not left idle for it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from fairlane.model.job import MOST_BYTES_PER_CALL, Held, JobState, Reason
from fairlane.model.states import retry
from fairlane.runtime.running_job import current_job
from fairlane.worker.completer import endings_by_call

from .faulty import Faulty
from .yard import QUICK, Yard

pytestmark = pytest.mark.anyio
BIG = 200_000
JOBS = 12
REPORT, REPORTS = 16_000, 160


async def test_all_slots_are_filled_by_several_claims_and_written_by_several_calls(yard: Yard) -> None:
    together = asyncio.Event()
    running = 0

    async def body(data: str) -> str:
        nonlocal running
        running += 1
        if running == JOBS:
            together.set()
        await together.wait()
        return data

    yard.task(body)
    ids = [await yard.enqueue("body", "x" * BIG) for _ in range(JOBS)]
    carried: list[int] = []

    def note(verb: str, args: tuple[Any, ...]) -> None:
        if verb == "finish":
            carried.append(sum(len(t.result or b"") for t in args[1]))

    faulty = Faulty(yard.store)
    faulty.refuse = note
    # Without a poll in between: what a claim had no room for is asked for at once.
    slow_to_poll = msgspec.structs.replace(QUICK, poll=60.0)
    async with yard.worker(store=faulty, slots=JOBS, intervals=slow_to_poll):
        for id in ids:
            assert (await yard.until(id)).state is JobState.COMPLETED
    assert JOBS * BIG > 2 * MOST_BYTES_PER_CALL
    assert max(carried) <= MOST_BYTES_PER_CALL


async def test_large_reports_of_progress_are_written_in_parts(yard: Yard) -> None:
    faulty = Faulty(yard.store)
    carried: list[int] = []

    def note(verb: str, args: tuple[Any, ...]) -> None:
        if verb == "progress":
            carried.append(sum(len(value) for _, value in args[1]))

    faulty.refuse = note

    async def body() -> None:
        current_job().progress("x" * REPORT)
        while sum(carried) < REPORTS * (REPORT + 2):
            await asyncio.sleep(0.02)

    yard.task(body)
    ids = [await yard.enqueue("body") for _ in range(REPORTS)]
    async with yard.worker(store=faulty, slots=REPORTS):
        for id in ids:
            assert len((await yard.until(id)).progress or b"") == REPORT + 2
    assert max(carried) <= MOST_BYTES_PER_CALL


def test_new_payloads_of_retries_are_written_in_parts() -> None:
    payload = b'"' + b"x" * BIG + b'"'
    retries = [retry(Held(f"job-{n}", 1), 0.0, Reason.ERROR, "boom", payload=payload) for n in range(JOBS)]

    parts = endings_by_call(retries)

    assert [t for part in parts for t in part] == retries
    assert max(sum(len(t.payload or b"") for t in part) for part in parts) <= MOST_BYTES_PER_CALL
