"""Rare attributes of jobs are in a table of their own: always consistent, and repaired if they are not."""

from __future__ import annotations

from typing import Any

from fairlane.model.job import JobState
from fairlane.model.maintenance import Retention
from fairlane.model.reading import Filter
from tests.conformance.kit import Kit


async def rows(other: Any) -> int:
    count: int = await other.fetchval("SELECT count(*) FROM fairlane.job_extra")
    return count


async def test_a_job_with_nothing_special_has_no_row_there(kit: Kit, other: Any) -> None:
    await kit.enqueue()
    await kit.enqueue(unique="u")
    await kit.enqueue_all([kit.new(lane="a") for _ in range(20)])

    assert await rows(other) == 0


async def test_what_is_special_has_one_until_it_ends(kit: Kit, other: Any) -> None:
    worker = await kit.worker()
    late = await kit.enqueue(delay=60)
    await kit.enqueue(expires=60)
    await kit.enqueue(sticky="k")
    assert await rows(other) == 3

    await kit.store.cancel([late])
    assert await rows(other) == 2
    await worker.complete(*await worker.claim(10))
    assert await rows(other) == 0
    assert (await kit.store.recount()).differences == ()


async def test_a_recount_puts_right_what_is_missing_wrong_or_too_much(kit: Kit, other: Any) -> None:
    jobs = [kit.new(delay=60) for _ in range(3)]
    await kit.enqueue_all(jobs)
    plain = await kit.enqueue()
    await other.execute("DELETE FROM fairlane.job_extra WHERE seq = (SELECT min(seq) FROM fairlane.job_extra)")
    await other.execute("UPDATE fairlane.job_extra SET due = 1 WHERE seq = (SELECT max(seq) FROM fairlane.job_extra)")
    await other.execute(
        "INSERT INTO fairlane.job_extra (seq, class, gate, scheduled, inbox, due) "
        "SELECT seq, 1, 0, true, '', 1 FROM fairlane.job WHERE id = $1",
        plain,
    )
    await other.execute(
        "INSERT INTO fairlane.job_extra (seq, class, gate, scheduled, inbox) VALUES (999999, 1, 0, true, '')"
    )

    differences = (await kit.store.recount()).differences

    assert len(differences) == 4
    assert all("job_extra" in difference for difference in differences)
    assert (await kit.store.recount()).differences == ()
    page = await kit.store.find(Filter(state=JobState.SCHEDULED))
    assert {job.id for job in page.jobs} == {job.id for job in jobs}


async def test_relations_go_with_their_jobs(kit: Kit, other: Any) -> None:
    worker = await kit.worker()
    await kit.enqueue(sticky="k")
    assert await other.fetchval("SELECT count(*) FROM fairlane.job_link") == 1
    await worker.complete(*await worker.claim(1))
    assert len((await kit.store.find(Filter(sticky="k"))).jobs) == 1

    await kit.store.prune(Retention(completed_seconds=0, completed_count=0))

    assert await other.fetchval("SELECT count(*) FROM fairlane.job_link") == 0
