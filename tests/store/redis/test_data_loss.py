"""A server that lost data: how it is noticed and reported, and what happens to earlier completions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from fairlane.errors import SessionLost, StoreUnavailable
from fairlane.model.job import Held, JobState, NewJob, Priority
from fairlane.model.session import Claim, NewSession, SessionKind
from fairlane.model.slots import Ask, usual_slots
from fairlane.model.states import complete
from fairlane.store import open_store
from fairlane.store.port import Store
from fairlane.store.redis.data_loss import (
    EMPTIED,
    KEPT_SECONDS,
    MOST_BYTES,
    WENT_BACK,
    Completed,
    DataLoss,
    Mark,
    Reported,
)
from tests.servers import valkey

ASKS = tuple(Ask("default", priority, 10) for priority in Priority)


class Rewound:
    """A durable server whose files can be kept, and put back later."""

    def __init__(self, folder: Path) -> None:
        self.server = valkey.own_server(durable=True)
        self._kept = folder / "kept"

    def keep(self) -> None:
        shutil.copytree(self.server.folder / "appendonlydir", self._kept)

    def go_back(self) -> None:
        self.server.kill()
        shutil.rmtree(self.server.folder / "appendonlydir")
        shutil.copytree(self._kept, self.server.folder / "appendonlydir")
        self.server.start()


@pytest.fixture
def rewound(tmp_path: Path) -> Iterator[Rewound]:
    made = Rewound(tmp_path)
    yield made
    made.server.close()


@pytest.fixture
async def store(rewound: Rewound) -> AsyncIterator[Store]:
    opened = await open_store(rewound.server.url)
    yield opened
    await opened.close()


@pytest.fixture(autouse=True)
def records(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.ERROR, logger="fairlane.store")
    return caplog


def logged(records: pytest.LogCaptureFixture, what: str) -> int:
    return sum(what in record.getMessage() for record in records.records)


def session(id: str) -> NewSession:
    return NewSession(
        id=id, kind=SessionKind.WORKER, lease=60.0, host="h", pid=1, pool="default", queues=("default",),
        slots=usual_slots(10),
    )  # fmt: skip


async def work(store: Store, worker: str, number: int) -> list[str]:
    """Claim what there is and complete it."""
    claimed = await store.claim(worker, Claim(number=number, asks=ASKS, total=10))
    await store.finish(worker, [complete(job.held, b"1") for job in claimed])
    return [job.id for job in claimed]


def jobs(*ids: str) -> list[NewJob]:
    return [NewJob(id=id, task="t", queue="default", payload=b"[]") for id in ids]


async def test_what_was_completed_before_a_server_went_back_does_not_run_again(
    rewound: Rewound, store: Store, records: pytest.LogCaptureFixture
) -> None:
    await store.register(session("w"))
    await store.enqueue(jobs("claimed", "waiting"))
    held = await store.claim("w", Claim(number=1, asks=(Ask("default", Priority.NORMAL, 1),), total=1))
    assert [job.id for job in held] == ["claimed"]
    rewound.keep()
    await store.finish("w", [complete(job.held, b"1") for job in held])
    assert await work(store, "w", 2) == ["waiting"]
    await store.enqueue(jobs("gone"))
    rewound.go_back()

    # The first call that is answered reports it.
    await until_renewed(store, "w")
    assert logged(records, WENT_BACK) == 1
    assert logged(records, "2 lost completions were repeated") == 1
    found = await store.get(["claimed", "waiting", "gone"])
    assert [job and (job.state, job.result) for job in found] == [(JobState.COMPLETED, b"1")] * 2 + [None]
    assert await work(store, "w", 3) == []
    assert (await store.recount()).differences == ()


async def test_a_loss_is_logged_once_by_each_process_and_begins_one_new_generation(
    rewound: Rewound, store: Store, records: pytest.LogCaptureFixture
) -> None:
    other = await open_store(rewound.server.url)
    try:
        for each, name in ((store, "a"), (other, "b")):
            await each.register(session(name))
            await each.renew(name, [], claim=0)
        rewound.keep()
        for number in range(5):
            await store.enqueue(jobs(f"gone-{number}"))
        await store.renew("a", [], claim=0)
        rewound.go_back()
        await until_renewed(store, "a")
        assert logged(records, WENT_BACK) == 1
        # By now as many steps may be written again as the other one had seen: the generation shows it.
        for number in range(50):
            await store.enqueue(jobs(f"new-{number}"))
        await until_renewed(other, "b")
        assert logged(records, WENT_BACK) == 2
        for _ in range(3):
            await store.renew("a", [], claim=0)
            await other.renew("b", [], claim=0)
        assert len(records.records) == 2
        assert rewound.server.ask("LLEN", "{fairlane}:lost") == 1
    finally:
        await other.close()


async def test_an_emptied_server_is_noticed_by_the_next_renewal(
    rewound: Rewound, store: Store, records: pytest.LogCaptureFixture
) -> None:
    await store.register(session("w"))
    await store.enqueue(jobs("gone"))
    await store.renew("w", [], claim=0)
    rewound.server.ask("FLUSHALL")
    with pytest.raises(SessionLost):
        await store.renew("w", [], claim=0)
    assert logged(records, EMPTIED) == 1
    await store.register(session("again"))
    await store.enqueue(jobs("new"))
    assert await work(store, "again", 1) == ["new"]
    assert len(records.records) == 1


async def test_a_later_job_of_the_same_id_is_not_taken_for_the_one_that_was_completed(
    rewound: Rewound, store: Store
) -> None:
    await store.register(session("w"))
    await store.enqueue(jobs("report"))
    assert await work(store, "w", 1) == ["report"]
    rewound.server.ask("FLUSHALL")
    await asyncio.sleep(0.01)
    await store.enqueue(jobs("report"))
    with pytest.raises(SessionLost):
        await store.renew("w", [], claim=0)
    [job] = await store.get(["report"])
    assert job is not None
    assert job.state is JobState.PENDING


async def test_many_callers_and_stores_make_one_loss_of_one_loss(
    rewound: Rewound, store: Store, records: pytest.LogCaptureFixture
) -> None:
    others = [await open_store(rewound.server.url) for _ in range(2)]
    try:
        for number, each in enumerate([store, *others]):
            await each.register(session(f"w{number}"))
            await each.enqueue(jobs(f"job-{number}"))
            await each.renew(f"w{number}", [], claim=0)
        rewound.server.ask("HSET", "{fairlane}:counter", "steps", 2)
        every = [(each, f"w{number}") for number, each in enumerate([store, *others])]
        for _ in range(5):
            await asyncio.gather(*(each.renew(name, [], claim=0) for each, name in every for _ in range(8)))
        assert rewound.server.ask("LLEN", "{fairlane}:lost") == 1
        assert logged(records, WENT_BACK) == 3
    finally:
        for each in others:
            await each.close()


async def test_what_is_emptied_twice_is_not_remembered(rewound: Rewound, store: Store) -> None:
    for _ in range(2):
        rewound.server.ask("FLUSHALL")
        await store.enqueue([NewJob(id="a", task="t", queue="first", payload=b"[]")])
        await store.enqueue(jobs("b"))
        assert [queue.name for queue in await store.queues()] == ["default", "first"]
    rewound.server.ask("FLUSHALL")
    await store.enqueue(jobs("c"))
    await store.register(session("w"))
    assert await work(store, "w", 1) == ["c"]


@pytest.mark.parametrize("trouble", [StoreUnavailable("gone again"), asyncio.CancelledError()], ids=["fails", "ends"])
async def test_a_loss_whose_report_failed_is_reported_later(trouble: BaseException) -> None:
    reported: list[int] = []

    async def report(generation: str, what: str, completed: Sequence[Completed]) -> Reported:
        reported.append(len(completed))
        if len(reported) == 1:
            raise trouble
        return Reported(Mark("new", 1), len(completed), what)

    data_loss = DataLoss("here", report)
    data_loss.mark = Mark("old", 100)
    data_loss.remember("w", [(complete(Held("job", 1), b"1"), b"stamp")])
    with contextlib.suppress(asyncio.CancelledError):
        await data_loss.check({"generation": "old", "steps": 5}, data_loss.mark)
    await data_loss.check({"generation": "old", "steps": 6}, data_loss.mark)
    await data_loss.check({"generation": "new", "steps": 7}, data_loss.mark)
    assert reported == [1, 1]
    assert data_loss.mark == Mark("new", 7)


def test_what_is_remembered_is_bounded_in_time_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    async def report(generation: str, what: str, completed: Sequence[Completed]) -> Reported:
        sent.append(len(completed))
        return Reported(Mark("new", 1), 0, what)

    data_loss = DataLoss("here", report)
    data_loss.mark = Mark("old", 1)
    large = b"x" * 262_144
    for number in range(100):
        data_loss.remember("w", [(complete(Held(f"job-{number}", 1), large), b"stamp")])
    asyncio.run(data_loss.check({"generation": "other", "steps": 1}, data_loss.mark))
    assert sent == [MOST_BYTES // len(large)]
    sent.clear()
    data_loss.remember("w", [(complete(Held("job", 1), None), b"stamp")])
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 2 * KEPT_SECONDS)
    asyncio.run(data_loss.check({"generation": "third", "steps": 1}, data_loss.mark))
    assert sent == [0]


async def test_answers_that_overtake_each_other_are_no_loss(store: Store, records: pytest.LogCaptureFixture) -> None:
    await store.register(session("w"))
    await asyncio.gather(*(store.enqueue(jobs(f"job-{number}")) for number in range(300)))
    await asyncio.gather(*(store.renew("w", [], claim=0) for _ in range(100)))
    assert records.records == []


async def until_renewed(store: Store, worker: str) -> None:
    """Renew as a worker does: again, if the connection was found broken."""
    async with asyncio.timeout(30):
        while True:
            try:
                await store.renew(worker, [], claim=0)
            except Exception as exc:
                if isinstance(exc, SessionLost):
                    raise
                await asyncio.sleep(0.05)
            else:
                return
