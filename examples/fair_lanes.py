"""Fair lanes: every tenant has a lane, and the lanes of a queue take turns. Gold tenants get twice the share.

python examples/fair_lanes.py

    reports: acme tiny acme acme … 21 in all
    exports: free-1 gold-1 gold-1 free-1 gold-1 gold-1
"""

import asyncio

from fairlane import Fairlane

app = Fairlane()  # FAIRLANE_URL, else sqlite:///fairlane.db
app.queue("reports")
app.queue("exports").lane("tenant:gold-*", weight=2)
started: list[str] = []


@app.task(queue="reports", lane="tenant:{tenant}")
async def report(tenant: str, page: int) -> None:
    """Note which tenant's job runs."""
    started.append(tenant)


@app.task(queue="exports", lane="tenant:{tenant}")
async def export(tenant: str) -> None:
    """Note which tenant's job runs."""
    started.append(tenant)


async def main() -> None:
    """Send the large backlog first; the single job of another tenant starts second."""
    async with app:
        await app.enqueue_many([report.call("acme", page) for page in range(20)])
        await report.enqueue("tiny", 1)
        await app.worker(queues=["reports"], slots=1, burst=True).run()
        print("reports:", *started[:4], "…", len(started), "in all")

        started.clear()
        await app.enqueue_many([export.call(tenant) for tenant in ("free-1", "gold-1") for _ in range(20)])
        await app.worker(queues=["exports"], slots=1, burst=True).run()
        print("exports:", *started[:6])


if __name__ == "__main__":
    asyncio.run(main())
