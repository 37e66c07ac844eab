"""State that each process makes for itself."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable

from fairlane.store.per_process import PerProcess


def in_fork(check: Callable[[], bool]) -> int:
    """The exit code of a fork that calls `check`: 0 when it returns True."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if check() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_process_makes_its_value_once() -> None:
    numbers = itertools.count()
    state = PerProcess(lambda: next(numbers))
    assert state.existing() is None
    assert [state.get(), state.existing(), state.get()] == [0, 0, 0]


def test_a_fork_makes_its_own_and_drops_its_parents() -> None:
    state = PerProcess(list[int])
    mine = state.get()
    mine.append(os.getpid())

    def fresh() -> bool:
        return state.existing() is None and state.get() == [] and list(state._values) == [os.getpid()]

    assert in_fork(fresh) == 0
    assert state.get() is mine


def test_a_fork_of_a_fork_makes_its_own_too() -> None:
    state = PerProcess(list[int])
    state.get().append(1)
    assert in_fork(lambda: in_fork(lambda: state.existing() is None and state.get() == []) == 0) == 0


def test_a_lock_held_during_the_fork_is_free_in_the_child() -> None:
    state = PerProcess(threading.Lock)
    with state.get():
        assert in_fork(lambda: state.get().acquire(timeout=5)) == 0


def test_threads_that_come_at_once_get_the_same_value() -> None:
    barrier = threading.Barrier(8)
    state = PerProcess(object)
    found: list[object] = []

    def get() -> None:
        barrier.wait(30)
        found.append(state.get())

    threads = [threading.Thread(target=get) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
