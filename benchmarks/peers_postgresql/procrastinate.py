"""Procrastinate: its own command line; a finished job stays in its table."""

# The peers need not be installed, and some have no types.
# mypy: disable-error-code="import-not-found, import-untyped, untyped-decorator"

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.board import Board
from benchmarks.side import SLOTS, Side, module_command, worker_url

if TYPE_CHECKING:
    from procrastinate import App

POOLS = {"pool of 20": 20, "pool of 4 (default)": 4}


class Sender:
    """Sends through the application."""

    def __init__(self, task: Any) -> None:
        self._task = task

    async def send(self, number: int) -> None:
        await self._task.defer_async(number=number)

    async def send_many(self, numbers: Sequence[int]) -> None:
        await self._task.batch_defer_async(*({"number": number} for number in numbers))


class Procrastinate(Side):
    """With as many concurrent jobs as there are slots."""

    package = "procrastinate"
    settings: ClassVar[Mapping[str, str]] = {
        name: f"procrastinate worker --concurrency {SLOTS}, {name}" for name in POOLS
    }
    stored = "SELECT count(*) FROM procrastinate_jobs"
    recorded = "SELECT count(*) FROM procrastinate_jobs WHERE status = 'succeeded'"
    share = 0.2

    async def install(self, url: str) -> None:
        async with _app(url, 4).open_async() as app:
            await app.schema_manager.apply_schema_async()

    @asynccontextmanager
    async def producer(self, url: str, setting: str) -> AsyncIterator[Sender]:
        async with _app(url, 4).open_async() as app:
            yield Sender(app.tasks["noop"])

    def command(self, url: str, setting: str) -> list[str]:
        app = f"benchmarks.peers_postgresql.procrastinate.worker_{POOLS[setting]}"
        return module_command("procrastinate", "--app", app, "worker", "--concurrency", str(SLOTS))


SIDE = Procrastinate()


def __getattr__(name: str) -> App:
    """`worker_4` and `worker_20`: what its command runs."""
    if not name.startswith("worker_"):
        raise AttributeError(name)
    return _worker(int(name.removeprefix("worker_")))


@cache
def _worker(connections: int) -> App:
    Board.mine().wait()
    return _app(worker_url(), connections)


def _app(url: str, connections: int) -> App:
    from procrastinate import App, PsycopgConnector

    app = App(connector=PsycopgConnector(conninfo=url, min_size=connections))

    @app.task(name="noop")
    async def noop(number: int) -> None:
        _board().ran(number)

    return app


@cache
def _board() -> Board:
    return Board.mine()
