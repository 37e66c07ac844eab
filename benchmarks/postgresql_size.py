"""How much room a store takes after many jobs, beside a copy of it that holds the same rows and nothing else."""

from __future__ import annotations

from fairlane.store import open_store

from .contest import Options
from .figures import Bound, Figure
from .postgresql import started
from .postgresql_server import connected
from .workload import Run, Worker, job

BATCH = 100
LANES = 1_000
BACKLOG = 1_000
SIZES = """
SELECT relname, pg_total_relation_size(oid) FROM pg_class
WHERE relkind = 'r' AND relnamespace = 'fairlane'::regnamespace ORDER BY 2 DESC
"""


async def run(run: Run, options: Options) -> list[Figure]:
    """Send, claim and finish with a small backlog, as a store lives; then look at what is left."""
    jobs = 20_000 if run.quick else 100_000
    with started(run, options) as server:
        url = await server.database("size")
        store = await open_store(url)
        try:
            worker = await Worker.start(store, BATCH)
            await store.enqueue([job(f"user:{number % LANES}") for number in range(BACKLOG)])
            for start in range(BACKLOG, jobs, BATCH):
                await store.enqueue([job(f"user:{(start + number) % LANES}") for number in range(BATCH)])
                await worker.finish(await worker.claim(BATCH))
            done = jobs - BACKLOG + await worker.drain(BATCH)
        finally:
            await store.close()
        if done != jobs:
            raise AssertionError(f"{done} of {jobs} jobs were run")
        copy = await server.database("size_copy", template=url.rsplit("/", 1)[1])
        await server.execute("VACUUM FULL", copy.rsplit("/", 1)[1])
        before, after = await _sizes(url), await _sizes(copy)
    lived, vacuumed = sum(before.values()), sum(after.values())
    figures = [
        Figure(bench="postgresql-size", case=f"{jobs:,} jobs, vacuumed copy", value=vacuumed / 1e6, unit="MB"),
        Figure(
            bench="postgresql-size",
            case=f"{jobs:,} jobs, as it is",
            value=lived / 1e6,
            unit="MB",
            ratio=lived / vacuumed,
            against="vacuumed copy",
            bound=Bound(limit=3.0, least=False),
        ),
        Figure(bench="postgresql-size", case="a finished job", value=vacuumed / jobs, unit="bytes"),
    ]
    for name, size in list(before.items())[:6]:
        share = f"{jobs:,} jobs, as it is: table {name} with its indexes"
        figures.append(
            Figure(
                bench="postgresql-size",
                case=share,
                value=size / 1e6,
                unit="MB",
                ratio=size / max(1, after[name]),
                against="vacuumed copy",
            )
        )
    return figures


async def _sizes(url: str) -> dict[str, int]:
    async with connected(url) as connection:
        return dict(await connection.fetch(SIZES))
