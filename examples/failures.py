"""Failures: retries with a back-off, errors that are not retried, timeouts, cancellation, and retrying in bulk.

python examples/failures.py

    download: completed in attempt 3
    parse: failed in attempt 1
    stuck: failed (timeout)
    later: cancelled
    1 failed job retried
"""

import asyncio

from fairlane import Backoff, Fairlane, current_job

app = Fairlane()  # FAIRLANE_URL, else sqlite:///fairlane.db


@app.task(retries=3, backoff=Backoff(base=0.1), retry_on=ConnectionError)
async def download() -> None:
    """Fail twice, then succeed."""
    if current_job().attempt < 3:
        raise ConnectionError("no route to host")


@app.task(no_retry_on=ValueError)
async def parse(text: str) -> int:
    """Fail for good at the first ValueError."""
    return int(text)


@app.task(timeout=0.2, retries=0)
async def stuck() -> None:
    """Take longer than allowed."""
    await asyncio.sleep(60)


async def main() -> None:
    """Send one job of each, and look at how they ended."""
    async with app:
        fetched, parsed, timed_out = await download.enqueue(), await parse.enqueue("twelve"), await stuck.enqueue()
        cancelled = await parse.options(delay=60).enqueue("12")
        await cancelled.cancel()
        worker = app.worker(slots=4)
        running = asyncio.create_task(worker.run())
        for job in (fetched, parsed, timed_out):
            async for _ in job.watch():
                pass
        worker.stop()
        await running
        for name, job in (("download", fetched), ("parse", parsed)):
            record = await job.job()
            print(f"{name}: {record.state.value} in attempt {record.attempt}")
        record = await timed_out.job()
        print(f"stuck: {record.state.value} ({record.reason})")
        print("later:", (await cancelled.state()).value)
        retried = await app.client.retry_all(task=parse.name)
        print(retried.changed, "failed job retried")


if __name__ == "__main__":
    asyncio.run(main())
