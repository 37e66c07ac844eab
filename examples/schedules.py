"""Schedules: run a task every few seconds or by cron, and a single job later. Any worker keeps the schedules.

python examples/schedules.py

    nightly: 0 3 * * *
    sweep: every 1 s
    the reminder is scheduled
    sweep ran
    sweep ran
"""

import asyncio
from datetime import timedelta

from fairlane import Fairlane

app = Fairlane()  # FAIRLANE_URL, else sqlite:///fairlane.db
sweeps = asyncio.Semaphore(0)


@app.task(name="nightly", cron="0 3 * * *", timezone="Europe/Berlin")
async def nightly() -> None:
    """Run at three in the morning in Berlin."""


@app.task(name="sweep", every=timedelta(seconds=1))
async def sweep() -> None:
    """Run every second, on one worker of the fleet."""
    print("sweep ran")
    sweeps.release()


@app.task
async def remind(user: str) -> None:
    """Run once, a day after it was sent."""


async def main() -> None:
    """List the schedules, send a job for tomorrow, and wait for two sweeps."""
    async with app:
        for schedule in app.schedules():
            timetable = schedule.timetable
            print(f"{schedule.name}:", timetable.cron or f"every {timetable.every:g} s")
        later = await remind.options(delay=timedelta(days=1)).enqueue("ann")
        print("the reminder is", (await later.state()).value)
        worker = app.worker(slots=2)
        running = asyncio.create_task(worker.run())
        for _ in range(2):
            await asyncio.wait_for(sweeps.acquire(), 60)
        worker.stop()
        await running


if __name__ == "__main__":
    asyncio.run(main())
