"""The lock of writers: it is released when its holder dies, despite forked children, and waiting for it times out."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from fairlane.errors import StoreUnavailable
from fairlane.model.job import NewJob
from fairlane.store.sqlite import file_lock, writer
from fairlane.store.sqlite.file_lock import FileLock
from fairlane.store.sqlite.store import SqliteStore
from fairlane.store.sqlite.wakeups import meeting_place

from ..lock_holder import lock_held_elsewhere

PATIENCE = 30.0
DEADLINE = 0.5

FORKED = """
import ctypes, fcntl, multiprocessing, os, sys, time
from pathlib import Path
from fairlane.store.sqlite.file_lock import FileLock

database, how = Path(sys.argv[1]), sys.argv[2]
lock = FileLock.of(database)
lock.__enter__()
if how == "libc":
    child = ctypes.PyDLL(None).fork()  # without the hooks that Python has for forks
    if child == 0:
        time.sleep(60)
elif how == "multiprocessing":
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    process.start()
    child = process.pid
else:
    child = os.fork()
    if child == 0:
        if how == "close":
            lock.release()
            lock.close()
        elif how == "exec":
            os.execv("/bin/sleep", ["sleep", "60"])
        time.sleep(60)
print(child, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "fairlane.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    opened = await SqliteStore.open(f"sqlite:///{path}")
    yield opened
    await opened.close()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A short deadline."""
    monkeypatch.setattr(file_lock, "WAIT_SECONDS", DEADLINE)
    monkeypatch.setattr(writer, "WAIT_SECONDS", DEADLINE)
    return iter(())


def job(id: str) -> NewJob:
    return NewJob(id=id, task="task")


# -- forks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fork", "libc", "multiprocessing", "exec"])
def test_the_lock_of_a_killed_process_does_not_live_on_in_its_children(path: Path, how: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FORKED, str(path), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            holder.kill()
            holder.wait(PATIENCE)
            os.kill(child, 0)
            lock = FileLock.of(path)
            began = time.monotonic()
            with lock:
                assert time.monotonic() - began < 20
            lock.close()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_child_that_lets_go_of_the_lock_leaves_it_to_its_parent(path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FORKED, str(path), "close"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            time.sleep(0.1)
            lock = FileLock.of(path)
            assert not lock._try()
            lock.close()
        finally:
            holder.kill()
            os.kill(child, signal.SIGKILL)


# -- one process ---------------------------------------------------------------------------------------------------


def test_threads_of_one_process_exclude_each_other_and_closing_one_lock_keeps_the_others(path: Path) -> None:
    first, second = FileLock.of(path), FileLock.of(path)
    inside = most = 0

    def work(lock: FileLock) -> None:
        nonlocal inside, most
        for _ in range(50):
            with lock:
                inside += 1
                most = max(most, inside)
                time.sleep(0.0001)
                inside -= 1

    threads = [threading.Thread(target=work, args=(lock,)) for lock in (first, second, first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert most == 1
    with first:
        # Its descriptor is the other's: the kernel would give up the lock with any of them.
        second.close()
        alias = path.with_name("alias.db")
        alias.with_name("alias.db-lock").symlink_to(path.with_name(path.name + "-lock"))
        FileLock.of(alias).close()
        probe = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        told = subprocess.run(
            [sys.executable, "-c", probe, f"{path}-lock"], capture_output=True, text=True, check=False
        )
        assert "BlockingIOError" in told.stderr
    first.close()


def test_threads_get_the_lock_in_the_order_they_came(path: Path) -> None:
    lock = FileLock.of(path)
    order: list[int] = []

    def work(number: int) -> None:
        with lock:
            order.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    with lock:
        for thread in threads:
            thread.start()
            time.sleep(0.02)
    for thread in threads:
        thread.join(PATIENCE)
    assert order == list(range(5))
    lock.close()


# -- the deadline --------------------------------------------------------------------------------------------------


async def test_a_call_that_cannot_get_the_lock_fails_and_names_the_holder(
    store: SqliteStore, path: Path, short: None
) -> None:
    with lock_held_elsewhere(path) as pid:
        with pytest.raises(StoreUnavailable, match=rf"by process {pid} \(.*python.*Nothing was stored"):
            await asyncio.wait_for(store.enqueue([job("a")]), PATIENCE)
        # The writer still waits, and the next call has a deadline of its own.
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await asyncio.wait_for(store.enqueue([job("b")]), PATIENCE)
        assert time.monotonic() - began >= DEADLINE
        behind = asyncio.ensure_future(store.enqueue([job("c")]))
        await asyncio.sleep(0)
    # What was refused is not done later; what was still in time is.
    await asyncio.wait_for(behind, PATIENCE)
    assert [found and found.id for found in await store.get(["a", "b", "c"])] == [None, None, "c"]


async def test_a_stopped_holder_is_described_as_stopped(store: SqliteStore, path: Path, short: None) -> None:
    with lock_held_elsewhere(path) as pid:
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(StoreUnavailable, match=rf"by process {pid} .*, which is stopped"):
            await asyncio.wait_for(store.enqueue([job("a")]), PATIENCE)


async def test_opening_a_store_has_a_deadline(store: SqliteStore, path: Path, short: None) -> None:
    with lock_held_elsewhere(path) as pid, pytest.raises(StoreUnavailable, match=f"by process {pid} "):
        await asyncio.wait_for(SqliteStore.open(f"sqlite:///{path}"), PATIENCE)


async def test_a_store_can_be_closed_while_the_lock_is_held(path: Path, short: None) -> None:
    store = await SqliteStore.open(f"sqlite:///{path}")
    with lock_held_elsewhere(path):
        await asyncio.wait_for(store.close(), PATIENCE)
    # It leaves its connection open. From 3.13 on, Python warns of that, whenever the connection is collected.
    store._writer._connection.close()


async def test_a_transaction_of_a_body_has_a_deadline(store: SqliteStore, path: Path, short: None) -> None:
    with lock_held_elsewhere(path) as pid:
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match=f"by process {pid} "):
                await asyncio.wait_for(store.transactions.begin(), PATIENCE)
    begun = await asyncio.wait_for(store.transactions.begin(), PATIENCE)
    begun.connection.execute("CREATE TABLE mine (n)")
    await begun.roll_back()


def test_a_lock_that_the_system_refuses_keeps_no_other_thread_waiting(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = FileLock.of(path)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as refusing:
        refusing.setattr("fairlane.store.sqlite.file_lock.fcntl.lockf", refuse)
        with pytest.raises(StoreUnavailable, match="No locks available"):
            lock.acquire(lambda _: None)
    got = threading.Thread(target=lambda: lock.acquire(lambda _: None), daemon=True)
    got.start()
    got.join(PATIENCE)
    assert not got.is_alive()
    lock.release()
    lock.close()


def test_of_a_command_only_what_is_no_secret_is_shown() -> None:
    with subprocess.Popen(["/bin/sh", "-c", "sleep 60; exit", "--password=hunter2"]) as process:
        try:
            # A process that is just becoming another program shows no command for a moment.
            until = time.monotonic() + 10
            while not Path(f"/proc/{process.pid}/cmdline").read_bytes() and time.monotonic() < until:
                time.sleep(0.01)
            assert file_lock._described(process.pid) == f"process {process.pid} (/bin/sh -c sleep 60; exit)"
        finally:
            process.kill()
    assert file_lock._described(0) == "a process that is not visible from here"


# -- permissions ---------------------------------------------------------------------------------------------------


def modes(folder: Path) -> dict[str, str]:
    return {each.name: oct(stat.S_IMODE(each.lstat().st_mode)) for each in folder.rglob("*")}


async def test_the_files_of_a_store_are_private(store: SqliteStore, path: Path) -> None:
    subscription = store.wakeups.subscribe(["q:default"])
    await store.enqueue([job("a")])
    sockets = meeting_place(path)
    assert stat.S_IMODE(sockets.lstat().st_mode) == 0o700
    assert list(modes(sockets).values()) == ["0o600"]
    found = {name: mode for name, mode in modes(path.parent).items() if name.startswith(path.name)}
    found.pop(sockets.name, None)
    assert set(found) == {path.name, f"{path.name}-wal", f"{path.name}-shm", f"{path.name}-lock"}
    assert set(found.values()) == {"0o600"}
    subscription.close()


async def test_a_file_that_was_made_for_a_group_stays_one(path: Path) -> None:
    os.close(os.open(path, os.O_CREAT))
    await asyncio.to_thread(path.chmod, 0o660)
    store = await SqliteStore.open(f"sqlite:///{path}")
    await store.enqueue([job("a")])
    assert set(modes(path.parent).values()) == {"0o660"}
    await store.close()
