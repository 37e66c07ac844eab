"""Runs jobs in child processes, which can be killed: for timeouts, for code that may crash, and for suspects.

A child is a fresh interpreter, never a fork. It runs one job at a time and is kept for the next. Whatever happens to it
becomes an ending or a `Crashed`; a job that is being stopped counts as running until it has really ended.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..errors import FairlaneError
from ..model.job import Claimed
from ..runtime import logs, running_job
from ..supervisor.process import Process, in_words
from ..task import Task
from . import wire
from .body import PACKAGE, Ending
from .task_location import Where, importable

__all__ = ["Crashed", "Isolation", "importable"]

KILL_AFTER = 2.0
TRIES = 3
"""How many children may die before the job begins: one may have died while idle, but not all of them."""
SECONDS_TO_DRAIN = 0.5
"""How long to read on after the child has ended: a process that it started may keep the socket open."""


class Crashed(msgspec.Struct, frozen=True):
    """The child process died, and the job with it."""

    error: str
    begun: bool = True
    """False: the job had not begun, so it cannot be the cause."""


class Isolation:
    """Runs jobs in child processes, at most `most` at once. Belongs to one event loop."""

    def __init__(
        self,
        *,
        most: int,
        modules: Sequence[str] = (),
        jobs_per_child: int = 100,
        idle_seconds: float = 60.0,
        kill_after: float = KILL_AFTER,
    ) -> None:
        """`modules` are imported by a child before any task: they set up what tasks rely on, such as a framework."""
        self._room = asyncio.Semaphore(most)
        self._modules = list(modules)
        self._jobs_per_child = jobs_per_child
        self._idle_seconds = idle_seconds
        self._kill_after = kill_after
        self._children: set[_Child] = set()
        self._idle: list[_Child] = []
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False

    async def run(
        self,
        task: Task[..., Any],
        job: Claimed,
        *,
        session: str = "",
        report: running_job.Report,
        begun: Callable[[], None] = lambda: None,
        started: Callable[[], None] = lambda: None,
        patience: Callable[[], float] | None = None,
    ) -> Ending | Crashed:
        """Run a job. Cancelling this stops the job: first by an exception in it, after `patience` seconds by SIGKILL.

        `begun` is called when a child has accepted the job, `started` when it has imported the task and the function
        itself begins. This returns or raises only when the job has ended. If the job came to an ending by itself
        although it was being stopped, that ending is returned.
        """
        where = Where.of(task)
        if where is None:
            raise FairlaneError(
                f"task {task.name} cannot run in a child process: importing its module does not find it"
            )
        ask = wire.Run(where=where, job=job, session=session)
        exchange = Exchange(ask, report, begun, started, patience or (lambda: self._kill_after))
        async with self._room:
            for _ in range(TRIES):
                try:
                    child = self._take()
                except (OSError, RuntimeError) as exc:
                    # The system has no process, thread, memory or descriptor left.
                    return Crashed(f"no child process could be started ({exc})", begun=False)
                try:
                    ending = await child.run(exchange)
                finally:
                    self._put_back(child)
                if ending is not None:
                    return ending
            return Crashed(f"{child.words()} before the job began", begun=False)

    async def close(self) -> None:
        """End all children, and what runs in them."""
        self._closed = True
        for child in list(self._idle):
            self._retire(child)
        busy = list(self._children)
        for child in busy:
            child.stop(self._kill_after)
        for child in busy:
            await child.gone()
            self._retire(child)
        while self._ending:
            await asyncio.wait(self._ending)

    def _take(self) -> _Child:
        if self._closed:
            raise FairlaneError("no job can run in a child process any more: the worker is closed")
        while self._idle:
            child = self._idle.pop()
            child.rest(None)
            if child.alive:
                return child
            self._retire(child)
        child = _Child(self._modules)
        self._children.add(child)
        return child

    def _put_back(self, child: _Child) -> None:
        if self._closed or child.worn or child.jobs >= self._jobs_per_child:
            self._retire(child)
            return
        self._idle.append(child)
        child.rest(asyncio.get_running_loop().call_later(self._idle_seconds, self._retire, child))

    def _retire(self, child: _Child) -> None:
        """End a child in the background. Repeating it changes nothing."""
        if child in self._idle:
            self._idle.remove(child)
        if child in self._children:
            self._children.discard(child)
            self._in_background(child.end(self._kill_after))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


class Exchange(NamedTuple):
    """What a child is to run, and the callbacks for its messages."""

    ask: wire.Run
    report: running_job.Report
    begun: Callable[[], None]
    started: Callable[[], None]
    patience: Callable[[], float]


class _Child:
    """One child process, from the worker's side."""

    def __init__(self, modules: list[str]) -> None:
        self._modules = modules
        self._ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "fairlane.worker.child", str(theirs.fileno())]
        try:
            self._process = Process(command, fds=[theirs.fileno()], environ=os.environ | {"PYTHONPATH": _found_by()})
        except BaseException:
            self._ours.close()
            raise
        finally:
            theirs.close()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._stopping: asyncio.TimerHandle | None = None
        self._rest: asyncio.TimerHandle | None = None
        self.jobs = 0
        self.worn = False
        """It is being stopped, or has died: it must not be used again."""

    @property
    def alive(self) -> bool:
        return self._process.code is None

    async def gone(self) -> None:
        """Wait for its end."""
        await self._process.wait()

    def words(self) -> str:
        """How it died, for messages."""
        assert self._process.code is not None
        return f"the child process {in_words(self._process.code)}"

    def rest(self, timer: asyncio.TimerHandle | None) -> None:
        """Make it idle until `timer` ends it; None: it is not idle any more."""
        if self._rest is not None:
            self._rest.cancel()
        self._rest = timer

    async def run(self, exchange: Exchange) -> Ending | Crashed | None:
        """Run one job; None when the child died before the job began."""
        self.jobs += 1
        # In a task of its own, which is not cancelled with the caller: it must observe the end of the job.
        talking = asyncio.get_running_loop().create_task(self._talk(exchange))
        cancelled: asyncio.CancelledError | None = None
        while not talking.done():
            try:
                await asyncio.wait([talking])
            except asyncio.CancelledError as exc:
                cancelled = cancelled or exc
                self.stop(exchange.patience())
        ending = talking.result()
        if cancelled is not None and (ending is None or isinstance(ending, Crashed)):
            raise cancelled
        return ending

    async def _talk(self, exchange: Exchange) -> Ending | Crashed | None:
        begun = False
        try:
            reader, writer = self._streams or await self._connect()
            writer.write(wire.frame(exchange.ask))
            while (message := await wire.read(reader)) is not None:
                if isinstance(message, wire.Ended):
                    if message.held == exchange.ask.job.held:
                        return message.ending
                elif isinstance(message, wire.Begun):
                    begun = True
                    exchange.begun()
                elif isinstance(message, wire.Started):
                    exchange.started()
                elif message.held == exchange.ask.job.held:
                    exchange.report(message.held, message.value)
        except wire.GarbledError as exc:
            self.worn = True
            self._process.kill()
            await self._process.wait()
            return Crashed(f"the child process sent {exc}: the job has written to its socket") if begun else None
        except BaseException:
            self.worn = True
            self._process.kill()
            raise
        self.worn = True
        with suppress(TimeoutError):
            async with asyncio.timeout(SECONDS_TO_DRAIN):
                await self._process.wait()
        # A child that closes its socket and lives on is useless; processes that the job has started are killed too.
        self._process.kill()
        await self._process.wait()
        return Crashed(self.words()) if begun else None

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = self._streams = await asyncio.open_unix_connection(sock=self._ours)
        environ = {"PYTHONPATH": os.environ.get("PYTHONPATH")}
        hello = wire.Hello(path=sys.path, argv=sys.argv, environ=environ, modules=self._modules, log=logs.configured())
        writer.write(wire.frame(hello))
        self._watch = asyncio.get_running_loop().create_task(self._end_reading(reader))
        if self._stopping is not None:
            writer.write(wire.frame(wire.Stop()))
        return reader, writer

    async def _end_reading(self, reader: asyncio.StreamReader) -> None:
        await self._process.wait()
        await asyncio.sleep(SECONDS_TO_DRAIN)
        reader.feed_eof()

    def stop(self, kill_after: float) -> None:
        """Ask the job to stop, and kill the child after `kill_after` seconds. Repeating it changes nothing."""
        self.worn = True
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().call_later(kill_after, self._process.kill)
            if self._streams is not None:
                self._streams[1].write(wire.frame(wire.Stop()))

    async def end(self, kill_after: float) -> None:
        """Close the socket, so that the idle child ends, and wait for its end."""
        self.rest(None)
        if self._streams is not None:
            self._streams[1].close()
        else:
            self._ours.close()
        try:
            async with asyncio.timeout(kill_after):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if self._stopping is not None:
            self._stopping.cancel()
        if self._watch is not None:
            self._watch.cancel()


def _found_by() -> str:
    """A PYTHONPATH by which a fresh interpreter finds this package; the rest of the path is sent to it later."""
    return os.pathsep.join(filter(None, (str(Path(PACKAGE).parent), os.environ.get("PYTHONPATH"))))
