"""What readers see of jobs whose task is unknown to all workers, or to some of them."""

from __future__ import annotations

from typing import Any

import pytest

from fairlane.errors import InvalidInput
from fairlane.model.job import Held
from fairlane.model.maintenance import Retention
from fairlane.model.reading import DeclinedTask, Gate, JobPosition
from fairlane.model.session import NewSession, SessionKind
from fairlane.model.slots import Slots
from fairlane.model.states import decline

from .kit import Kit, Worker

KEEP_NOTHING = Retention(completed_seconds=0, failed_seconds=0, history_seconds=0, id_seconds=0)


async def _position_of(kit: Kit, id: str) -> JobPosition:
    position = await kit.positions(id)
    assert position is not None
    return position


async def _old(kit: Kit, *queues: str, **fields: Any) -> Worker:
    """A worker that knows another task than the one in question."""
    return await kit.worker(*queues, tasks=("other",), **fields)


async def _new(kit: Kit, *queues: str, **fields: Any) -> Worker:
    """A worker that knows both tasks."""
    return await kit.worker(*queues, tasks=("other", "task"), **fields)


async def test_why_says_whether_a_live_worker_knows_the_task(kit: Kit) -> None:
    old = await _old(kit)
    id = await kit.enqueue()
    await old.decline(*await old.claim())
    position = await _position_of(kit, id)
    assert (position.gate, position.why()) == (Gate.UNKNOWN_TASK, "no live worker knows task task")
    assert (position.eta(), position.worker) == (None, None)
    await _new(kit, "elsewhere")
    assert (await _position_of(kit, id)).gate is Gate.UNKNOWN_TASK

    new = await _new(kit)
    position = await _position_of(kit, id)
    assert (position.gate, position.why()) == (Gate.DECLINED, "waiting for a worker that knows task task")
    assert (position.place, position.of) == (1, 1)
    await new.leave()
    assert (await _position_of(kit, id)).gate is Gate.UNKNOWN_TASK
    await old.leave()
    assert (await _position_of(kit, id)).gate is Gate.NO_WORKER


async def test_a_worker_that_does_not_say_what_it_knows_may_know_it(kit: Kit) -> None:
    worker = await kit.worker()
    id = await kit.enqueue("draw")
    await worker.decline(*await worker.claim())
    assert (await _position_of(kit, id)).gate is Gate.DECLINED


async def test_tasks_that_wait_for_a_worker_that_knows_them_are_listed(kit: Kit) -> None:
    assert await kit.store.declined() == []
    old = await kit.worker("a", "b", tasks=())
    await kit.store.enqueue([kit.new("draw", queue="a"), kit.new("draw", queue="a"), kit.new("print", queue="b")])
    first = kit.clock.now()
    await old.decline(*await old.claim(2))
    kit.clock.advance(5)
    await old.decline(*await old.claim(2))
    printer = await kit.worker("b", tasks=("print",))
    assert await kit.store.declined() == [
        DeclinedTask(queue="a", task="draw", waiting=2, since=first, known=False),
        DeclinedTask(queue="b", task="print", waiting=1, since=first + 5, known=True),
    ]
    assert len(await kit.store.declined(limit=1)) == 1
    await printer.complete(*await printer.claim(2))
    assert [declined.task for declined in await kit.store.declined()] == ["draw"]
    with pytest.raises(InvalidInput):
        await kit.store.declined(limit=0)


async def test_a_set_of_tasks_is_forgotten_with_the_last_worker_that_has_it(kit: Kit) -> None:
    names = tuple(f"package.module.task_number_{number:03}.{'x' * 40}" for number in range(500))
    workers = [await kit.worker(tasks=names) for _ in range(3)]
    old = await _old(kit)
    id = await kit.enqueue(names[499])
    await old.decline(*await old.claim())
    for worker in workers[1:]:
        await worker.leave()
    kit.clock.advance(10)
    await kit.store.prune(KEEP_NOTHING)
    assert (await _position_of(kit, id)).gate is not Gate.UNKNOWN_TASK
    await workers[0].leave()
    kit.clock.advance(10)
    await kit.store.prune(KEEP_NOTHING)
    # Workers that declare the same tasks later know them, even if the stored set was deleted meanwhile.
    await kit.worker(tasks=names)
    await kit.worker(tasks=tuple(reversed(names)))
    assert (await _position_of(kit, id)).gate is not Gate.UNKNOWN_TASK
    assert not (await kit.store.prune(KEEP_NOTHING)).more


def test_tasks_are_checked_and_their_order_does_not_matter() -> None:
    def session(*tasks: str) -> NewSession:
        return NewSession(id="s", kind=SessionKind.WORKER, slots=Slots(total=1), tasks=tasks)

    with pytest.raises(InvalidInput, match="tasks"):
        session("not a name")
    assert session("a", "b").task_set == session("b", "a", "a").task_set != session("a").task_set
    assert NewSession(id="s", kind=SessionKind.WAITER).task_set is None
    with pytest.raises(InvalidInput, match="patience"):
        decline(Held("job", 1), "text", patience=-1)
