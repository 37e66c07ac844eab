"""Failed jobs, grouped by task and error."""

from __future__ import annotations

from typing import Any

import pytest

from fairlane.errors import InvalidInput
from fairlane.model import listings
from fairlane.model.job import Reason
from fairlane.model.maintenance import Retention
from fairlane.model.states import fail

from .kit import Kit, Worker

LONG_MESSAGE = """Traceback (most recent call last):
  File "a.py", line 1, in f
KeyError: 'a'
It is missing.

"""


async def _fail(
    kit: Kit,
    worker: Worker,
    task: str,
    *,
    error: str = "boom",
    reason: Reason = Reason.ERROR,
    group: str | None = None,
    **fields: Any,
) -> str:
    id = await kit.enqueue(task, **fields)
    [job] = await worker.claim(1)
    assert job.id == id
    await worker.finish(fail(job.held, reason, error, group=group))
    return id


async def test_failures_are_grouped_by_task_and_error(kit: Kit) -> None:
    assert await kit.store.failures() == []
    worker = await kit.worker("default", "mail", lease=1e6)
    began = kit.clock.now()
    await _fail(kit, worker, "paint", group="ValueError")
    kit.clock.advance(10)
    await _fail(kit, worker, "paint", group="KeyError", error=LONG_MESSAGE)
    kit.clock.advance(10)
    newest = await _fail(kit, worker, "paint", group="ValueError", error="Traceback:\nValueError: no", queue="mail")
    late = await _fail(kit, worker, "send", reason=Reason.TIMEOUT, error="")
    await kit.enqueue("paint")
    await worker.complete(*await worker.claim(1))
    await kit.store.cancel([await kit.enqueue("paint")])

    first, second, third = await kit.store.failures()

    assert (first.task, first.error_group, first.count) == ("paint", "ValueError", 2)
    assert (first.first_at, first.last_at, first.reason) == (began, began + 20, Reason.ERROR)
    assert (first.example_id, first.error_line, first.exact) == (newest, "ValueError: no", True)
    assert (second.task, second.error_group, second.count) == ("send", "timeout", 1)
    assert (second.reason, second.example_id, second.error_line) == (Reason.TIMEOUT, late, None)
    assert (third.error_group, third.error_line) == ("KeyError", "KeyError: 'a'")


async def test_filters_and_limit(kit: Kit) -> None:
    worker = await kit.worker("default", "mail", lease=1e6)
    for _ in range(2):
        await _fail(kit, worker, "paint", group="a")
    await _fail(kit, worker, "paint", group="a", queue="mail")
    await _fail(kit, worker, "send", group="a", queue="mail")

    async def counts(**options: Any) -> list[tuple[str, int]]:
        return [(group.task, group.count) for group in await kit.store.failures(**options)]

    assert await counts() == [("paint", 3), ("send", 1)]
    assert await counts(queue="mail") == [("paint", 1), ("send", 1)]
    assert await counts(queue="default") == [("paint", 2)]
    assert await counts(task="send") == [("send", 1)]
    assert await counts(task="paint", queue="mail") == [("paint", 1)]
    assert await counts(task="other") == []
    assert await counts(queue="unknown") == []
    assert await counts(limit=1) == [("paint", 3)]


async def test_what_is_forgotten_or_pruned_is_not_counted(kit: Kit) -> None:
    worker = await kit.worker(lease=1e6)
    ids = [await _fail(kit, worker, "paint") for _ in range(3)]
    assert (await kit.store.failures())[0].count == 3
    await kit.store.forget([ids[-1]], Retention())
    [group] = await kit.store.failures()
    assert (group.count, group.example_id) == (2, ids[1])
    kit.clock.advance(8 * 86_400)
    await kit.store.prune(Retention())
    assert await kit.store.failures() == []


async def test_what_ends_without_a_worker_is_a_failure_too(kit: Kit) -> None:
    worker = await kit.worker(lease=1)
    await kit.enqueue("paint", retries=0)
    await worker.claim(1)
    kit.clock.advance(5)
    await kit.store.rescue()
    [group] = await kit.store.failures()
    assert (group.task, group.reason, group.count) == ("paint", Reason.CRASHED, 1)
    assert group.error_line


@pytest.mark.parametrize("error", ["é" * 8_000, "x" + "é" * 8_000, "✓\n" + "a" * 16_000])
async def test_of_a_long_line_the_beginning_is_shown(kit: Kit, error: str) -> None:
    worker = await kit.worker()
    await _fail(kit, worker, "paint", error=error)
    [group] = await kit.store.failures()
    assert group.error_line == error.splitlines()[-1][: listings.LONGEST_LINE]


@pytest.mark.parametrize("queue", [None, "default"])
async def test_of_more_failures_than_are_looked_at_the_newest_count_and_say_so(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, queue: str | None
) -> None:
    monkeypatch.setattr(listings, "MOST_FAILURES", 3)
    worker = await kit.worker(lease=1e6)
    for _ in range(3):
        await _fail(kit, worker, "paint")
        kit.clock.advance(1)
    [group] = await kit.store.failures(queue=queue)
    assert (group.count, group.exact) == (3, True)
    newest = await _fail(kit, worker, "send")
    paint, send = await kit.store.failures(queue=queue)
    assert (paint.task, paint.count, paint.exact) == ("paint", 2, False)
    assert (send.task, send.count, send.exact, send.example_id) == ("send", 1, False, newest)


async def test_many_failures_are_counted(kit: Kit) -> None:
    await kit.enqueue_all([kit.new("paint" if n % 3 else "send") for n in range(1_200)])
    worker = await kit.worker(slots=400, lease=1e6)
    while jobs := await worker.claim(400):
        await worker.finish(*(fail(job.held, Reason.ERROR, "boom") for job in jobs))
    assert [(group.task, group.count) for group in await kit.store.failures()] == [("paint", 800), ("send", 400)]
    assert [(group.task, group.count) for group in await kit.store.failures(queue="default")] == [
        ("paint", 800),
        ("send", 400),
    ]


async def test_what_is_asked_for_is_checked(kit: Kit) -> None:
    wrong: tuple[dict[str, Any], ...] = ({"queue": "a b"}, {"task": "a\0"}, {"limit": 0}, {"limit": 501})
    for each in wrong:
        with pytest.raises(InvalidInput, match=next(iter(each))):
            await kit.store.failures(**each)
