"""Observing: events of this process, Prometheus metrics, and why a job waits.

python examples/observe.py

    Enqueued render
    why: queue images is paused
    Started render
    Finished render
    fairlane_jobs_finished_total 1.0
"""

import asyncio

import prometheus_client

from fairlane import Fairlane
from fairlane.events import Enqueued, Event, Finished, Started
from fairlane.integrations.prometheus import Metrics

app = Fairlane()  # FAIRLANE_URL, else sqlite:///fairlane.db
app.queue("images")


@app.task(name="render", queue="images")
async def render() -> None:
    """Do something to observe."""


def show(event: Event) -> None:
    """Print the events of jobs. A listener must return quickly: it runs where the event happens."""
    if isinstance(event, Enqueued | Started | Finished):
        print(type(event).__name__, event.task)


async def main() -> None:
    """Run one job in a queue that is paused at first."""
    registry = prometheus_client.CollectorRegistry()
    metrics = Metrics(app.events, registry)
    app.events.subscribe(show)
    async with app:
        job = await render.enqueue()
        await app.client.pause("images")
        print("why:", await job.why())
        await app.client.resume("images")
        await app.worker(burst=True).run()
    labels = {"queue": "images", "task": "render", "state": "completed", "outcome": "completed"}
    print("fairlane_jobs_finished_total", registry.get_sample_value("fairlane_jobs_finished_total", labels))
    metrics.close()


if __name__ == "__main__":
    asyncio.run(main())
