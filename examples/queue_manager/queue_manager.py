"""A queue manager: an API, two managers and workers on PostgreSQL, with a Redis for high and one for low priority.

Every process has the same settings:

    export FAIRLANE_URL=postgresql://localhost/app
    export FAIRLANE_REDIS_HIGH_URL=redis://localhost:6379 FAIRLANE_REDIS_LOW_URL=redis://localhost:6380

Each of these runs in a terminal of its own, in examples/queue_manager:

    fairlane serve -A queue_manager                              # the API
    fairlane manager                                             # leads: due tasks, rescues, tokens
    fairlane manager                                             # stands by
    fairlane worker -A queue_manager -c 4 --no-manager           # as many as you like

Then send tasks, and kill whatever you like:

    curl localhost:8000/api/v1/jobs -H 'Content-Type: application/json' \
         -d '{"task": "execute", "args": ["42"], "options": {"priority": "high"}}'
    python queue_manager.py 20
"""

import asyncio
import sys

from fairlane import Fairlane, FairlaneError

app = Fairlane()


@app.task(name="execute", retries=3)
async def execute(task_id: str) -> str:
    """What a task does."""
    await asyncio.sleep(0.05)
    return f"task {task_id} is done"


async def push_task(task_id: str, priority: str = "low", delay: float = 0.0) -> bool:
    """The old call: True if the task is stored, False if not; it never raises.

    Stored means that it will run: no message can be lost, because the row is the task.
    """
    try:
        await execute.options(id=f"task-{task_id}", priority=priority or "low", delay=delay).enqueue(task_id)
    except FairlaneError:
        return False
    return True


async def main(count: int) -> None:
    """Push tasks of both priorities, some of them due later, and wait for their results."""
    async with app:
        for number in range(count):
            stored = await push_task(str(number), "high" if number % 2 else "low", delay=0.5 * (number % 3 == 0))
            assert stored, f"task {number} was not stored"
        for number in range(count):
            print(await app.handle(f"task-{number}").result(timeout=60))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
