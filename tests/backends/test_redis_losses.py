"""A server that lost data: who notices it, who is told, and what happens to what was completed before."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from fairlane.backends import open_store
from fairlane.backends.redis.losses import EMPTIED, WENT_BACK
from fairlane.errors import SessionLost
from fairlane.job import JobState, NewJob, Priority
from fairlane.session import Claim, NewSession, SessionKind
from fairlane.slots import Ask, usual_slots
from fairlane.states import complete
from fairlane.store import Store
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


def told(records: pytest.LogCaptureFixture, what: str) -> int:
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

    # The first call that comes to an answer tells of it.
    await until_renewed(store, "w")
    assert told(records, WENT_BACK) == 1
    assert told(records, "2 jobs that had been completed were completed again") == 1
    found = await store.get(["claimed", "waiting", "gone"])
    assert [job and (job.state, job.result) for job in found] == [(JobState.COMPLETED, b"1")] * 2 + [None]
    assert await work(store, "w", 3) == []
    assert (await store.recount()).differences == ()


async def test_a_loss_is_told_once_by_each_process_and_begins_a_new_generation_once(
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
        assert told(records, WENT_BACK) == 1
        # By now as many steps may be written again as the other one had seen: the generation tells it.
        for number in range(50):
            await store.enqueue(jobs(f"new-{number}"))
        await until_renewed(other, "b")
        assert told(records, EMPTIED) == 1
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
    assert told(records, EMPTIED) == 1
    await store.register(session("again"))
    await store.enqueue(jobs("new"))
    assert await work(store, "again", 1) == ["new"]
    assert len(records.records) == 1


async def test_answers_that_overtake_each_other_are_no_loss(store: Store, records: pytest.LogCaptureFixture) -> None:
    await store.register(session("w"))
    await asyncio.gather(*(store.enqueue(jobs(f"job-{number}")) for number in range(300)))
    await asyncio.gather(*(store.renew("w", [], claim=0) for _ in range(100)))
    assert records.records == []


async def until_renewed(store: Store, worker: str) -> None:
    """Renew as a worker does: again, if the connection was found broken."""
    async with asyncio.timeout(5):
        while True:
            try:
                await store.renew(worker, [], claim=0)
            except Exception as exc:
                if isinstance(exc, SessionLost):
                    raise
                await asyncio.sleep(0.05)
            else:
                return
