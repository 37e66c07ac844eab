"""Fairlane itself, through its public surface: an application, and workers by ``fairlane worker``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import ClassVar

from fairlane import Fairlane, Task

from .board import Board
from .side import SLOTS, Side, module_command, worker_url

QUEUE = "bench"
LANES = {"": 0, "1,000 lanes": 1_000, "1,000 lanes, limit 1": 1_000}
NAMES = dict(zip(LANES, ("app", "app_lanes", "app_limited"), strict=True))


class Sender:
    """Sends through the application."""

    def __init__(self, app: Fairlane, noop: Task[[int], None], lanes: int) -> None:
        self._app = app
        self._tasks = [noop.options(lane=f"user:{lane}") for lane in range(lanes)] or [noop]

    async def send(self, number: int) -> None:
        await self._task(number).enqueue(number)

    async def send_many(self, numbers: Sequence[int]) -> None:
        await self._app.enqueue_many([self._task(number).call(number) for number in numbers])

    def _task(self, number: int) -> Task[[int], None]:
        return self._tasks[number % len(self._tasks)]


class Itself(Side):
    """Everything as it comes, but for the slots; on any server."""

    package = "fairlane"
    settings: ClassVar[Mapping[str, str]] = dict.fromkeys(LANES, f"fairlane worker --slots {SLOTS}")
    sending = tuple(LANES)

    async def install(self, url: str) -> None:
        app, _ = _made(url, "")
        # The first call opens the store, and so makes its tables.
        await app.client.queues()
        await app.close()

    @asynccontextmanager
    async def producer(self, url: str, setting: str) -> AsyncIterator[Sender]:
        app, noop = _made(url, setting)
        yield Sender(app, noop, LANES[setting])
        await app.close()

    def command(self, url: str, setting: str) -> list[str]:
        app = f"{__name__}:{NAMES[setting]}"
        # As the others, without a line for each job: at `info` that costs more than a job that does nothing.
        options = ("--queues", QUEUE, "--slots", str(SLOTS), "--log-level", "warning")
        return module_command("fairlane", "worker", "--app", app, *options)


def _made(url: str, setting: str) -> tuple[Fairlane, Task[[int], None]]:
    app = Fairlane(url)
    queue = app.queue(QUEUE)
    if setting.endswith("limit 1"):
        queue.lane("user:*", limit=1)

    @app.task(name="noop", queue=QUEUE)
    async def noop(number: int) -> None:
        _board().ran(number)

    return app, noop


@cache
def _board() -> Board:
    return Board.mine()


@cache
def _worker(setting: str) -> Fairlane:
    _board().wait()
    return _made(worker_url(), setting)[0]


def __getattr__(name: str) -> Fairlane:
    """The applications that the command of a worker names."""
    for setting, known in NAMES.items():
        if name == known:
            return _worker(setting)
    raise AttributeError(name)
