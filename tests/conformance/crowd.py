"""A crowd of processes that send at the same moment: forked from one that has imported everything, so they cost little.

``python -m tests.conformance.crowd URL PROCESSES ROUNDS``: in every round each process sends one job, the first of a
sticky key that no round before had. In even rounds all processes use the same key, in odd rounds each has its own.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
from multiprocessing.synchronize import Barrier
from threading import BrokenBarrierError

from fairlane.model.job import NewJob

from .reopening import open_again

QUEUES = tuple(f"crowd-{number}" for number in range(5))
"""Several, so that the calls have only the key and its pool in common."""
PATIENCE = 60.0


def key_of(round: int, number: int) -> str:
    """The sticky key that a process uses in a round."""
    return f"plan-{round}-{number}" if round % 2 else f"plan-{round}"


def job_of(round: int, number: int) -> NewJob:
    """The job that a process sends in a round."""
    queue = QUEUES[number % len(QUEUES)]
    return NewJob(id=f"{round}-from-{number}", task="task", queue=queue, sticky=key_of(round, number))


async def warm_up(url: str) -> None:
    """Import whatever the store needs."""
    store = await open_again(url)
    await store.close()


async def send(url: str, rounds: int, number: int, barrier: Barrier) -> None:
    """Send one job in each round, at the same moment as all other processes."""
    store = await open_again(url)
    try:
        # Whatever the first call creates exists by now: only the jobs themselves race.
        await store.queues()
        for round in range(rounds):
            barrier.wait(PATIENCE)
            await store.enqueue([job_of(round, number)])
    finally:
        await store.close()


def play(url: str, rounds: int, number: int, barrier: Barrier) -> None:
    """One process of the crowd. If it fails, the others do not wait for it."""
    try:
        asyncio.run(send(url, rounds, number, barrier))
    except BrokenBarrierError:
        sys.exit("another process has failed")
    except BaseException:
        barrier.abort()
        raise


def main(url: str, processes: str, rounds: str) -> int:
    """Run the crowd. Returns how many processes failed."""
    asyncio.run(warm_up(url))
    forking = multiprocessing.get_context("fork")
    barrier = forking.Barrier(int(processes))
    crowd = [forking.Process(target=play, args=(url, int(rounds), number, barrier)) for number in range(int(processes))]
    for process in crowd:
        process.start()
    for process in crowd:
        process.join()
    return sum(process.exitcode != 0 for process in crowd)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
