"""Sticky keys: all jobs of a plan run on one worker, where its files are, until the key is released.

python examples/sticky_keys.py

    plan 7: 3 jobs on 1 worker
    plan 8: 3 jobs on 1 worker
    the files of plan 7 are removed
    everywhere: completed, completed
"""

import asyncio

from fairlane import Fairlane

app = Fairlane()  # FAIRLANE_URL, else sqlite:///fairlane.db
removed = asyncio.Event()


@app.task(sticky="plan:{plan}")
async def step(plan: int, number: int) -> int:
    """Run on the worker that the key is bound to."""
    return number


@app.task
async def remove_files(plan: int) -> None:
    """Run last and alone on the worker of the key."""
    print("the files of plan", plan, "are removed")
    removed.set()


@app.task
async def reload() -> None:
    """Run once on every worker."""


async def main() -> None:
    """Run the jobs of two plans on two workers, release one key, and broadcast a task."""
    async with app:
        workers = [app.worker(slots=2, index=index) for index in (0, 1)]
        running = [asyncio.create_task(worker.run()) for worker in workers]
        for worker in workers:
            await worker.ready.wait()

        for plan in (7, 8):
            jobs = await app.enqueue_many([step.call(plan, number) for number in (1, 2, 3)])
            for job in jobs:
                await job.result(timeout=30)
            used = {(await job.job()).worker for job in jobs}
            print(f"plan {plan}:", len(jobs), "jobs on", len(used), "worker")

        await app.release("plan:7", cleanup=remove_files.call(7))
        await asyncio.wait_for(removed.wait(), 30)

        everywhere = await app.broadcast(reload.call())
        states = await everywhere.result(timeout=30)
        print("everywhere:", ", ".join(state.value for state in states.values()))

        for worker in workers:
            worker.stop()
        await asyncio.gather(*running)


if __name__ == "__main__":
    asyncio.run(main())
