"""The single thread that writes: shared commits, callers that are cancelled or fail, closing, and forks."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from fairlane.errors import Conflict, InvalidInput, NotFound, QueueFull, SessionLost, StoreError
from fairlane.model.job import Enqueued, Job, JobState, NewJob
from fairlane.model.maintenance import Retention
from fairlane.model.reading import Filter
from fairlane.model.session import Claim
from fairlane.model.settings import QueueSettings, SettingsChange
from fairlane.store.sqlite.store import SqliteStore

from ..lock_holder import lock_held_elsewhere

pytestmark = pytest.mark.anyio

CALLS = 64
WAL_HEADER, FRAME_HEADER = 32, 24

FORK = """
import asyncio, os, sys, warnings
from fairlane.store.sqlite.store import SqliteStore
from fairlane.errors import StoreError
from fairlane.model.job import NewJob

async def use(store):
    told = []
    for call in (
        lambda: store.enqueue([NewJob(id="child", task="task")]),
        lambda: store.get(["parent"]),
        lambda: store.recount(),
    ):
        try:
            await asyncio.wait_for(call(), 3)
            told.append("it worked")
        except StoreError as exc:
            told.append(str(exc))
        except TimeoutError:
            told.append("it hangs")
    # A child that ends tidily closes what it has, and takes nothing from its parent.
    await store.close()
    return told

async def warm_up(store):
    # As many reads at once as there may be readers: all their threads are gone after the fork.
    await asyncio.gather(*(store.get(["parent"]) for _ in range(20)))

loop = asyncio.new_event_loop()
store = loop.run_until_complete(SqliteStore.open(sys.argv[1]))
loop.run_until_complete(store.enqueue([NewJob(id="parent", task="task")]))
loop.run_until_complete(warm_up(store))
# Newer Pythons warn of a fork beside threads, for the very reason that this is about.
warnings.simplefilter("ignore", DeprecationWarning)
child = os.fork()
if not child:
    for line in asyncio.run(use(store)):
        os.write(1, (line + "\\n").encode())
    os._exit(0)
os.waitpid(child, 0)
loop.run_until_complete(store.enqueue([NewJob(id="parent again", task="task")]))
[known] = loop.run_until_complete(store.get(["parent again"]))
assert known is not None
loop.run_until_complete(store.close())
loop.close()
os.write(1, b"the parent goes on\\n")
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "fairlane.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    opened = await SqliteStore.open(f"sqlite:///{path}")
    yield opened
    await opened.close()


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold the lock that every writer takes first, as a slow writer in another process would; its file's number."""
    with lock_held_elsewhere(path):
        yield path.with_name(path.name + "-lock").stat().st_ino


def until_somebody_waits(inode: int) -> None:
    """Wait until the kernel lists a process that waits for the lock."""
    while not re.search(rf"-> POSIX .*:{inode} ", Path("/proc/locks").read_text()):
        time.sleep(0.001)


@asynccontextmanager
async def writer_waiting(store: SqliteStore, path: Path) -> AsyncIterator[None]:
    """Keep the writer waiting for the lock with one job in its batch; later calls are in the next batch."""
    with locked(path) as inode:
        plug = asyncio.ensure_future(store.enqueue([NewJob(id="plug", task="task")]))
        await asyncio.to_thread(until_somebody_waits, inode)
        yield
    await plug


def commits(path: Path) -> int:
    """Transactions in the write-ahead log: the last frame of each names the size of the file."""
    log = Path(f"{path}-wal").read_bytes()
    frame = FRAME_HEADER + int.from_bytes(log[8:12])
    frames = range(WAL_HEADER, len(log) - frame + 1, frame)
    return sum(log[at + 4 : at + 8] != b"\0\0\0\0" for at in frames)


def job(number: int, **fields: Any) -> NewJob:
    return NewJob(id=f"job-{number}", task="task", **fields)


async def known(store: SqliteStore, jobs: list[NewJob]) -> list[Job | None]:
    return await store.get([job.id for job in jobs])


# -- shared commits ----------------------------------------------------------------------------------------------


async def test_calls_made_at_once_share_their_commits(store: SqliteStore, path: Path) -> None:
    await store.enqueue([job(-1)])
    before = commits(path)
    answers = await asyncio.gather(*(store.enqueue([job(number)]) for number in range(CALLS)))
    made = commits(path) - before
    assert all(answer.created for [answer] in answers)
    # Calls that find the writer idle are written alone, so their number varies; one transaction each means none shared.
    assert 1 <= made < CALLS


async def test_calls_that_wait_for_another_process_share_one_commit(store: SqliteStore, path: Path) -> None:
    await store.enqueue([job(-1)])
    before = commits(path)
    async with writer_waiting(store, path):
        calls = [asyncio.ensure_future(store.enqueue([job(number)])) for number in range(CALLS)]
        await asyncio.sleep(0)
    await asyncio.gather(*calls)
    # The job in the writer's batch, and all the others.
    assert commits(path) - before == 2


async def test_calls_are_carried_out_in_the_order_they_were_made(store: SqliteStore, path: Path) -> None:
    async with writer_waiting(store, path):
        calls = [asyncio.ensure_future(store.enqueue([job(number)])) for number in range(CALLS)]
        await asyncio.sleep(0)
    await asyncio.gather(*calls)
    found = [found for found in await known(store, [job(number) for number in range(CALLS)]) if found is not None]
    arrivals = [job.arrival for job in found if job.arrival is not None]
    assert len(arrivals) == CALLS
    assert arrivals == sorted(arrivals)


async def test_a_call_that_fails_takes_nothing_of_the_others_with_it(store: SqliteStore, path: Path) -> None:
    await store.enqueue([job(0)])
    await store.configure([SettingsChange(queue="full", declared=QueueSettings(max_pending=1))])
    await store.enqueue([job(1, queue="full")])
    wrong: dict[int, tuple[Coroutine[Any, Any, Any], type[Exception]]] = {
        5: (store.enqueue([job(105), job(0, lane="another")]), Conflict),
        9: (store.enqueue([job(109), job(110, queue="full")]), QueueFull),
        13: (store.cancel([job(0).id, "nobody knows"]), NotFound),
        14: (store.enqueue([job(number) for number in range(2000, 3001)]), InvalidInput),
        20: (store.claim("nobody", Claim(number=1, asks=(), total=1)), SessionLost),
    }
    before = commits(path)
    async with writer_waiting(store, path):
        calls: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(wrong[number][0] if number in wrong else store.enqueue([job(number + 1000)]))
            for number in range(30)
        ]
        await asyncio.sleep(0)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert commits(path) - before == 2
    for number, answer in enumerate(answers):
        if number in wrong:
            assert isinstance(answer, wrong[number][1])
        else:
            assert answer == [Enqueued(f"job-{number + 1000}", True, JobState.PENDING)]
    others = [job(number + 1000) for number in range(30) if number not in wrong]
    assert None not in await known(store, others)
    # A call that failed leaves nothing: neither what it had stored before the error, nor what it had cancelled.
    assert await known(store, [job(105), job(109), job(110), job(2000)]) == [None] * 4
    [first] = await known(store, [job(0)])
    assert first is not None
    assert not first.state.final
    assert not (await store.recount()).differences


async def test_a_mistake_that_only_sqlite_notices_takes_nothing_of_the_others_with_it(
    store: SqliteStore, path: Path
) -> None:
    async with writer_waiting(store, path):
        calls: list[asyncio.Future[Any]] = [asyncio.ensure_future(store.enqueue([job(number)])) for number in range(10)]
        wrong = asyncio.ensure_future(store.leave(Path("not a text")))  # type: ignore[arg-type]  # the mistake
        await asyncio.sleep(0)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    with pytest.raises((StoreError, TypeError)):
        await wrong
    assert [answer for answer in answers if isinstance(answer, BaseException)] == []


# -- callers who give up -----------------------------------------------------------------------------------------


async def test_a_call_that_is_cancelled_before_it_runs_changes_nothing(store: SqliteStore, path: Path) -> None:
    async with writer_waiting(store, path):
        calls = [asyncio.ensure_future(store.enqueue([job(number)])) for number in range(20)]
        await asyncio.sleep(0)
        for call in calls[1::2]:
            call.cancel()
        await asyncio.sleep(0)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(answer, asyncio.CancelledError) for answer in answers] == [False, True] * 10
    found = await known(store, [job(number) for number in range(20)])
    assert None not in found[::2]
    assert found[1::2] == [None] * 10
    [again] = await store.enqueue([job(1)])
    assert again.created


async def test_calls_that_are_cancelled_at_any_time_do_not_stop_the_writer(store: SqliteStore) -> None:
    for turn in range(10):
        calls = [asyncio.ensure_future(store.enqueue([job(100 * turn + number)])) for number in range(20)]
        for _ in range(turn):
            await asyncio.sleep(0)
        for call in calls[: turn + 5]:
            call.cancel()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert not any(isinstance(answer, BaseException) for answer in answers[turn + 5 :])
    assert not (await store.recount()).differences


def test_a_loop_that_is_gone_does_not_stop_the_writer(path: Path) -> None:
    async def ask_and_leave(store: SqliteStore) -> None:
        calls.append(asyncio.ensure_future(store.enqueue([job(1)])))
        await asyncio.sleep(0)

    async def ask(store: SqliteStore) -> None:
        [answer] = await asyncio.wait_for(store.enqueue([job(2)]), 10)
        assert answer.created
        await store.close()

    calls: list[asyncio.Future[Any]] = []
    store = asyncio.run(SqliteStore.open(f"sqlite:///{path}"))
    with locked(path):
        asyncio.run(ask_and_leave(store))
    asyncio.run(ask(store))


# -- closing and forking -----------------------------------------------------------------------------------------


async def test_a_closed_store_refuses_every_call_and_may_be_closed_again(store: SqliteStore) -> None:
    await store.enqueue([job(1)])
    await store.close()
    await store.close()
    for call in (
        store.enqueue([job(2)]),
        store.get(["job-1"]),
        store.find(Filter()),
        store.queues(),
        store.promote(),
        store.prune(Retention()),
        store.recount(),
        store.cancel(["job-1"]),
    ):
        with pytest.raises(StoreError, match="closed; open it again"):
            await call


async def test_what_was_asked_before_closing_is_done_and_answered(store: SqliteStore, path: Path) -> None:
    async with writer_waiting(store, path):
        calls = [asyncio.ensure_future(store.enqueue([job(number)])) for number in range(CALLS)]
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(store.close())
        await asyncio.sleep(0)
    await closing
    assert all(answer.created for [answer] in await asyncio.gather(*calls))
    again = await SqliteStore.open(f"sqlite:///{path}")
    assert None not in await known(again, [job(number) for number in range(CALLS)])
    await again.close()


async def test_closing_leaves_one_file_without_a_log(store: SqliteStore, path: Path) -> None:
    await store.enqueue([job(1)])
    await store.get(["job-1"])
    await store.close()
    assert {file.name for file in path.parent.iterdir()} <= {path.name, f"{path.name}-lock"}


async def test_a_store_may_not_be_used_after_a_fork_but_its_parent_goes_on(path: Path) -> None:
    run = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", FORK, f"sqlite:///{path}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    *told, parent = run.stdout.splitlines()
    assert parent == "the parent goes on"
    assert ["open it again in the child" in line for line in told] == [True] * 3, told
