"""A process that forks while its threads write or read: its child can use the same file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FORKING = """
import asyncio, os, sys, threading, time
from fairlane.store.sqlite import database
from fairlane.store.sqlite.store import SqliteStore
from fairlane.model.job import NewJob

url, how, seconds, database.LONGEST_FORK_DELAY = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
begun = threading.Event()

def slow(_):
    begun.set()
    time.sleep(seconds)

async def work():
    store = await SqliteStore.open(url)
    await getattr(store, how)(slow)
    await store.enqueue([NewJob(id="parent", task="task")])
    await store.close()

async def send():
    store = await SqliteStore.open(url)
    await store.enqueue([NewJob(id="child", task="task")])
    await store.close()

thread = threading.Thread(target=lambda: asyncio.run(work()))
thread.start()
begun.wait()
before = time.monotonic()
child = os.fork()
if child == 0:
    try:
        asyncio.run(send())
    except Exception as exc:
        print(exc)
        os._exit(1)
    os._exit(0)
waited = time.monotonic() - before
_, status = os.waitpid(child, 0)
thread.join()
print(f"waited {waited:.2f}")
sys.exit(status != 0)
"""


def fork(tmp_path: Path, how: str, seconds: float, patience: float = 5.0) -> tuple[int, str]:
    script = tmp_path / "forking.py"
    script.write_text(FORKING)
    url = f"sqlite:///{tmp_path}/fairlane.db"
    # From Python 3.12 on, a fork beside threads is warned of; it is what is tested here.
    python = [sys.executable, "-W", "ignore::DeprecationWarning"]
    command = [*python, str(script), url, how, str(seconds), str(patience)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert not ended.stderr
    return ended.returncode, ended.stdout


@pytest.mark.parametrize("how", ["_write", "_read"])
def test_a_fork_waits_for_what_is_under_way_and_the_child_can_use_the_file(tmp_path: Path, how: str) -> None:
    code, said = fork(tmp_path, how, 0.3)
    assert code == 0, said
    assert 0.1 < float(said.split()[-1]) < 5


def test_a_fork_does_not_wait_for_ever(tmp_path: Path) -> None:
    code, said = fork(tmp_path, "_read", 3.0, patience=0.2)
    assert code == 0, said
    assert float(said.split()[-1]) < 2


LOCKED = """
import asyncio, os, sys, threading, time
from pathlib import Path
from fairlane.store.sqlite.file_lock import FileLock
from fairlane.store.sqlite.store import SqliteStore
from fairlane.model.job import NewJob

path = Path(sys.argv[1])

async def work():
    store = await SqliteStore.open(f"sqlite:///{path}")
    lock = FileLock(path.with_name(path.name + "-lock"))
    with lock:
        writing = asyncio.ensure_future(store.enqueue([NewJob(id="parent", task="task")]))
        await asyncio.sleep(0.2)
        before = time.monotonic()
        if (child := os.fork()) == 0:
            os._exit(0)
        print(f"waited {time.monotonic() - before:.2f}")
        os.waitpid(child, 0)
    await writing
    await store.close()

asyncio.run(work())
"""


def test_a_fork_does_not_wait_for_a_file_that_another_process_keeps_locked(tmp_path: Path) -> None:
    """The process that forks may hold the lock itself, in its own transaction."""
    script = tmp_path / "locked.py"
    script.write_text(LOCKED)
    command = [sys.executable, str(script), str(tmp_path / "fairlane.db")]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert float(ended.stdout.split()[-1]) < 1
