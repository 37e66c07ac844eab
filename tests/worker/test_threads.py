"""Threads for plain functions: how many, in which context, and what happens to calls that were cancelled."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextvars import ContextVar

import pytest

from fairlane.worker.threads import Threads

pytestmark = pytest.mark.anyio

PATIENCE = 30.0


async def until(seen: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not seen():
            await asyncio.sleep(0.01)


class Gate:
    """A function that runs until it is released."""

    def __init__(self) -> None:
        self.begun = 0
        self.open = threading.Event()

    def has_begun(self) -> bool:
        """Whether it was called, once."""
        return self.begun == 1

    def __call__(self) -> int:
        self.begun += 1
        self.open.wait(PATIENCE)
        return threading.get_ident()


async def test_a_result_and_an_exception_come_back() -> None:
    threads = Threads(1)
    assert await threads.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await threads.run(divmod, 7, 0)
    assert await threads.run(threading.get_ident) != threading.get_ident()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
async def test_no_exception_of_a_function_ends_its_thread(error: type[BaseException]) -> None:
    def leave() -> None:
        raise error

    threads = Threads(1)
    future = threads.run(leave)
    await asyncio.wait([future])
    assert isinstance(future.exception(), error)
    assert await threads.run(len, "abc") == 3


async def test_a_stop_iteration_does_not_leave_its_caller_waiting() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await Threads(1).run(next, iter([]))


async def test_the_context_of_the_caller_is_carried_and_what_the_function_sets_stays_there() -> None:
    variable: ContextVar[str] = ContextVar("variable", default="nothing")
    variable.set("mine")

    def swap() -> str:
        found = variable.get()
        variable.set("theirs")
        return found

    threads = Threads(1)
    assert await threads.run(swap) == "mine"
    assert await threads.run(swap) == "mine"
    assert variable.get() == "mine"


async def test_one_thread_serves_one_call_after_the_other() -> None:
    threads = Threads(10)
    assert len({await threads.run(threading.get_ident) for _ in range(50)}) == 1


async def test_the_thread_used_last_is_used_first() -> None:
    threads = Threads(2)
    gates = [Gate(), Gate()]
    calls = [threads.run(gate) for gate in gates]
    for gate in gates:
        await until(gate.has_begun)
        gate.open.set()
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    idents = [await call for call in calls]
    # The second one went idle last; give it the time to get there.
    await asyncio.sleep(0.05)
    assert await threads.run(threading.get_ident) == idents[1]


async def test_at_most_so_many_run_at_once_and_the_others_wait_their_turn() -> None:
    threads = Threads(2)
    gate = Gate()
    order: list[int] = []
    busy = [threads.run(gate) for _ in range(2)]
    await until(lambda: gate.begun == 2)
    waiting = [threads.run(order.append, n) for n in range(5)]
    done, _ = await asyncio.wait(waiting, timeout=0.1)
    assert not done
    gate.open.set()
    await asyncio.gather(*busy, *waiting)
    assert sorted(order) == list(range(5))


async def test_a_call_that_is_cancelled_while_it_waits_is_never_made() -> None:
    threads = Threads(1)
    gate, made = Gate(), list[str]()
    busy = threads.run(gate)
    await until(lambda: gate.begun == 1)
    first, second = threads.run(made.append, "first"), threads.run(made.append, "second")
    first.cancel()
    gate.open.set()
    await asyncio.gather(busy, second)
    assert made == ["second"]


async def test_a_cancelled_call_gives_its_place_to_another() -> None:
    threads = Threads(1)
    gate = Gate()
    left = threads.run(gate)
    await until(lambda: gate.begun == 1)
    left.cancel()
    assert await asyncio.wait_for(threads.run(len, "abc"), PATIENCE) == 3
    # The one that took the place stays, for the next one.
    assert len({await threads.run(threading.get_ident) for _ in range(20)}) == 1
    assert len(threads) == 2
    gate.open.set()
    await until(lambda: len(threads) == 1)
    assert await threads.run(len, "abc") == 3


async def test_idle_threads_end() -> None:
    threads = Threads(4, idle_seconds=0.1)
    gate = Gate()
    calls = [threads.run(gate) for _ in range(4)]
    await until(lambda: gate.begun == 4)
    gate.open.set()
    await asyncio.gather(*calls)
    await until(lambda: len(threads) == 0)
    assert await threads.run(len, "abc") == 3


async def test_calls_that_come_just_as_threads_end_are_made() -> None:
    threads = Threads(2, idle_seconds=0.001)
    for n in range(100):
        assert await asyncio.wait_for(threads.run(int, n), PATIENCE) == n
        await asyncio.sleep(0.001)


async def test_an_idle_thread_holds_on_to_nothing() -> None:
    class Big:
        pass

    threads = Threads(1)
    argument = Big()
    seen = weakref.ref(argument)
    result = await threads.run(lambda given: Big(), argument)
    returned = weakref.ref(result)
    del argument, result

    def collected() -> bool:
        gc.collect()
        return seen() is None and returned() is None

    await until(collected)


async def test_many_calls_from_many_tasks_each_come_back_once() -> None:
    threads = Threads(4)
    assert await asyncio.gather(*(threads.run(int, n) for n in range(2000))) == list(range(2000))


LEFT = """
import asyncio, time
from fairlane.worker.threads import Threads

async def main():
    Threads(1).run(time.sleep, 60)
    await asyncio.sleep(0.1)

asyncio.run(main())
"""


def test_a_process_ends_although_a_function_does_not() -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - began < 40


def test_a_function_that_ends_after_its_event_loop_does_no_harm() -> None:
    gate = Gate()

    async def begin(threads: Threads) -> None:
        threads.run(gate)
        await until(lambda: gate.begun == 1)

    threads = Threads(1)
    asyncio.run(begin(threads))
    gate.open.set()

    async def again() -> int:
        return await threads.run(len, "abc")

    assert asyncio.run(again()) == 3
