"""Priorities: a slot that is reserved for high priority starts an urgent job at once, while bulk jobs fill the others.

python examples/priorities.py

    bulk 1 starts
    bulk 2 starts
    the alarm starts
    2 bulk jobs were running, 1 was waiting
"""

import asyncio

from fairlane import Fairlane, JobState, Reserved, Slots

app = Fairlane()  # FAIRLANE_URL, else sqlite:///fairlane.db
started = asyncio.Semaphore(0)
finish = asyncio.Event()


@app.task(priority="low")
async def bulk(number: int) -> None:
    """Keep a slot until the program says otherwise."""
    print("bulk", number, "starts")
    started.release()
    await finish.wait()


@app.task(priority="high")
async def alarm() -> None:
    """Start in the reserved slot."""
    print("the alarm starts")


async def main() -> None:
    """Fill two of three slots, then send an urgent job."""
    async with app:
        bulk_jobs = [await bulk.enqueue(number) for number in (1, 2, 3)]
        worker = app.worker(slots=Slots(total=3, reserved=Reserved(high=1)))
        running = asyncio.create_task(worker.run())
        for _ in range(2):
            await asyncio.wait_for(started.acquire(), 30)
        await (await alarm.enqueue()).result(timeout=30)
        states = [await job.state() for job in bulk_jobs]
        running_now, waiting = states.count(JobState.RUNNING), states.count(JobState.PENDING)
        print(running_now, "bulk jobs were running,", waiting, "was waiting")
        finish.set()
        worker.stop()
        await running


if __name__ == "__main__":
    asyncio.run(main())
