"""The cases that every side is measured in, each in a database of its own and with processes of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Protocol

from . import side as sides
from .board import Board
from .processes import end_with_parent, processor
from .side import BATCH, URL, Side, module_command

PATIENCE = 60.0
"""Seconds without any progress after which a side has failed."""

Count = Callable[[str, int], Awaitable[int]]
"""How many jobs there are of a kind: what counts them (see `Side`), and how many were sent."""


class Server(Protocol):
    """What the sides are measured on."""

    async def database(self, name: str) -> str:
        """One that nobody has used yet; where it is."""

    async def drop(self, url: str) -> None:
        """Nobody needs it any more."""

    async def settle(self, url: str) -> None:
        """Let the work be done that storing a backlog has left for later."""

    def counting(self, url: str) -> AbstractAsyncContextManager[Count]:
        """The counter of jobs on that server."""

    def processor(self) -> float:
        """Processor seconds of the server so far."""


@dataclass(frozen=True)
class Flow:
    """How jobs went through."""

    rate: float
    """Jobs per second. Of a drain: from the first start until the end of every job was in the database."""
    client: float
    """Processor seconds per job of who worked, or sent."""
    server: float
    """Processor seconds per job of the server."""


@dataclass(frozen=True)
class Cases:
    """One side with one kind of worker, on one server."""

    server: Server
    kind: str
    name: str
    side: Side
    setting: str

    @property
    def title(self) -> str:
        return f"{self.name}, {self.setting}" if self.setting else self.name

    async def drain(self, jobs: int, workers: int) -> Flow:
        """Workers that find all jobs waiting; the time it takes to start them does not count."""
        async with self._database() as url:
            await self._call("load", url, jobs, BATCH, 0)
            await self.expect(url, self.side.stored, jobs)
            await self.server.settle(url)
            with board_of(jobs) as board:
                return await self._drained(url, board, workers)

    async def _drained(self, url: str, board: Board, workers: int) -> Flow:
        with self.workers(url, board, workers) as processes:
            await until(lambda: board.ready(workers), processes)
            await asyncio.sleep(0.3)
            board.go()
            await until(lambda: board.count > 0, processes)
            before = [sum(processor(each.pid) for each in processes), self.server.processor()]
            await _progress(lambda: board.count, board.jobs, processes)
            await self.expect(url, self.side.recorded, board.jobs)
            ended = time.perf_counter()
            after = [sum(processor(each.pid) for each in processes), self.server.processor()]
        board.check(self.title)
        return Flow(
            rate=board.jobs / (ended - board.first()),
            client=(after[0] - before[0]) / board.jobs,
            server=(after[1] - before[1]) / board.jobs,
        )

    async def send(self, jobs: int) -> Flow:
        """One call after the other; nobody works."""
        return await self._sent("send", jobs)

    async def load(self, jobs: int, batch: int) -> Flow:
        """In bulk; nobody works."""
        return await self._sent("load", jobs, batch, BATCH)

    async def _sent(self, verb: str, *numbers: int) -> Flow:
        async with self._database() as url:
            before = self.server.processor()
            answer = await self._call(verb, url, *numbers)
            spent = self.server.processor() - before
            await self.expect(url, self.side.stored, int(answer["sent"]))
        return Flow(answer["rate"], answer["processor"], spent / answer["sent"])

    async def latency(self, jobs: int) -> tuple[float, float]:
        """Seconds from before the call to the start of the body, on an idle worker: median and p99."""
        async with self._database() as url:
            with board_of(jobs + jobs // 9) as board, self.workers(url, board, 1) as processes:
                await until(lambda: board.ready(1), processes)
                board.go()
                await asyncio.sleep(3)
                answer = await self._call("latency", url, str(board.path))
                await self.expect(url, self.side.recorded, board.jobs)
                board.check(self.title)
                return answer["median"], answer["p99"]

    @asynccontextmanager
    async def _database(self) -> AsyncIterator[str]:
        url = await self.server.database(self.name)
        try:
            await self._call("install", url)
            yield url
        finally:
            await self.server.drop(url)

    async def _call(self, verb: str, url: str, *numbers: object) -> dict[str, float]:
        about = (verb, self.kind, self.name, url, self.setting, *map(str, numbers))
        command = module_command(sides.__name__, *about)
        process = await asyncio.create_subprocess_exec(
            *command,
            env=_environment(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        answer, complaint = await process.communicate()
        if process.returncode:
            raise AssertionError(f"{self.name} could not {verb}:\n{complaint.decode()[-4_000:]}")
        found: dict[str, float] = json.loads(answer.splitlines()[-1])
        return found

    async def expect(self, url: str, statement: str, jobs: int) -> None:
        """Ask until the database says so; some record in the background."""
        async with self.server.counting(url) as count:
            found, deadline = await count(statement, jobs), time.monotonic() + PATIENCE
            while found < jobs:
                if time.monotonic() > deadline:
                    raise AssertionError(f"{self.title}: the server knows of {found} of {jobs} jobs ({statement})")
                await asyncio.sleep(0.01)
                found = await count(statement, jobs)
        if found > jobs:
            raise AssertionError(f"{self.title}: {found} jobs instead of {jobs} ({statement})")

    @contextmanager
    def workers(self, url: str, board: Board, workers: int) -> Iterator[list[Worker]]:
        """Worker processes, which wait for the board."""
        command = self.side.command(url, self.setting)
        with ExitStack() as stack:
            started = []
            for worker in range(workers):
                environment = _environment() | {URL: url} | board.environment(worker)
                log = stack.enter_context(tempfile.TemporaryFile())
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=end_with_parent,  # noqa: PLW1509 - nothing here has threads
                )
                started.append(Worker(process, log))
                stack.callback(started[-1].stop)
            yield started


class Worker:
    """A worker process, and what it says."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self._process = process
        self._log = log
        self.pid = process.pid

    def check(self) -> None:
        """It must be there."""
        if self._process.poll() is not None:
            raise AssertionError(f"a worker ended with {self._process.returncode}:\n{self.said}")

    @property
    def said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-4_000:]

    def stop(self) -> None:
        """Ask it to end, and end it when it does not listen."""
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # Some start processes of their own, which must not go on beside the next measurement.
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


@contextmanager
def board_of(jobs: int) -> Iterator[Board]:
    """An empty board."""
    board = Board.make(jobs)
    try:
        yield board
    finally:
        board.close()


def _environment() -> dict[str, str]:
    """Without cached bytecode imports take longer, and this would be measured as latency."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


async def until(condition: Callable[[], bool], processes: list[Worker]) -> None:
    """Wait until it holds, as long as the workers are there."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        for each in processes:
            each.check()
        if time.monotonic() > deadline:
            raise AssertionError(f"it took more than a minute:\n{processes[0].said}")
        await asyncio.sleep(0.001)


async def _progress(count: Callable[[], int], jobs: int, processes: list[Worker]) -> None:
    """Wait until as many bodies have started, as long as it goes on."""
    last, deadline = 0, time.monotonic() + PATIENCE
    while (found := count()) < jobs:
        for each in processes:
            each.check()
        if found > last:
            last, deadline = found, time.monotonic() + PATIENCE
        if time.monotonic() > deadline:
            raise AssertionError(f"{found} of {jobs} jobs ran:\n{processes[0].said}")
        await asyncio.sleep(0.005)
