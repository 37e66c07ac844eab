"""Strict lanes: one job at a time per model, in order, with a place in line; your own code can wait there too.

python examples/strict_lanes.py

    place 1 of 3
    place 2 of 3
    place 3 of 3
    ran a cat, a dog, a cow
    ann runs
    bob runs
"""

import asyncio

from fairlane import Fairlane

app = Fairlane()  # FAIRLANE_URL, else sqlite:///fairlane.db
app.queue("models").lane("model:*", limit=1)
ran: list[str] = []


@app.task(queue="models", lane="model:{model}")
async def generate(model: str, prompt: str) -> None:
    """Use the model. No other job of this lane runs meanwhile."""
    ran.append(prompt)


async def visit(name: str) -> None:
    """Wait for a turn in the same lane without a worker: the code inside the block runs here."""
    async with app.turn("model:flux", queue="models", timeout=60):
        print(name, "runs")
        await asyncio.sleep(0.5)


async def main() -> None:
    """Run three jobs in order, then take two turns."""
    async with app:
        jobs = [await generate.enqueue("flux", prompt) for prompt in ("a cat", "a dog", "a cow")]
        for job in jobs:
            position = await job.position()
            assert position is not None
            print("place", position.place, "of", position.of)
        await app.worker(slots=2, burst=True).run()
        print("ran", ", ".join(ran))

        first = asyncio.create_task(visit("ann"))
        await asyncio.sleep(0.2)
        await visit("bob")
        await first


if __name__ == "__main__":
    asyncio.run(main())
