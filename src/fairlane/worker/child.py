"""The child process: runs one body at a time for its worker, in its main thread, and ends when the worker is gone.

Three threads: one reads what the worker says, one writes what the body says, and the main one runs bodies, so that a
request to stop can be an exception in it and ``finally`` blocks run. The request comes by the socket and not as a mere
signal: whoever stops a whole service sends SIGTERM to all its processes, and the worker's grace period is for bodies
here too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, NoReturn

import msgspec

from .. import loops
from ..job import Claimed, Held
from ..running import RunningJob
from ..task import Task
from ..transactions import RunTransaction
from . import body, wire
from .whereabouts import store_of

SECONDS_TO_END = 5.0
"""For what bodies left behind, threads and exit handlers, when the worker has no more to do or is gone."""


class Stopped(BaseException):
    """Raised in the main thread to end a body."""


class Child:
    """One end of the conversation, and the body that runs."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._runs: SimpleQueue[wire.Run | None] = SimpleQueue()
        self._news: SimpleQueue[wire.Ended | None] = SimpleQueue()
        self._progress: wire.Progress | None = None
        self._reporting = threading.Lock()
        self._sending = threading.Lock()
        self._busy = False
        self._stop = False
        self._interrupt: Callable[[], None] | None = None
        self._runner = loops.runner()

    def serve(self) -> None:
        """Run bodies until the worker has no more."""
        signal.signal(signal.SIGTERM, self._on_signal)
        _let_forks_be_ended()
        for each in (self._listen, self._tell):
            threading.Thread(target=_vital, args=(each,), name=f"fairlane{each.__name__}", daemon=True).start()
        try:
            with self._runner:
                while (run := self._runs.get()) is not None:
                    # A body or a library may have put its own handler in this place.
                    signal.signal(signal.SIGTERM, self._on_signal)
                    ending = copy_context().run(self._run, run)
                    # Whoever is killed later does not get to write out what it holds back.
                    for stream in (sys.stdout, sys.stderr):
                        with suppress(Exception):
                            stream.flush()
                    self._busy = False
                    self._news.put(wire.Ended(_writable(ending)))
        except Stopped:
            sys.exit(128 + signal.SIGTERM)

    # -- the body ----------------------------------------------------------------------------------------------------

    def _run(self, run: wire.Run) -> body.Ending:
        job = run.job
        try:
            task = run.where.find(job.task)
            self._send(wire.Started())
            deadline = None if job.timeout is None else time.monotonic() + job.timeout
            transact = partial(_transact, task, run) if task.is_async else None
            running = RunningJob(job, self._report, deadline, transact)
            running.enter()
            if task.is_async:
                return self._runner.run(self._await(task, job, running), context=copy_context())
            return body.run_plain(task, job)
        except Stopped:
            raise
        except BaseException as exc:
            if self._stop and isinstance(exc, asyncio.CancelledError):
                raise Stopped from None
            return body.raised(exc)

    async def _await(self, task: Task[..., Any], job: Claimed, running: RunningJob) -> body.Ending:
        loop, me = asyncio.get_running_loop(), asyncio.current_task()
        assert me is not None

        def interrupt() -> None:
            loop.call_soon_threadsafe(me.cancel)

        self._interrupt = interrupt
        try:
            return await body.run_coroutine(task, job, running)
        finally:
            self._interrupt = None

    def _on_signal(self, *_: object) -> None:
        if not self._stop:
            return
        if self._interrupt is not None:
            self._interrupt()
        else:
            raise Stopped

    # -- what the worker says ----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while (message := wire.receive(self._sock)) is not None:
            if isinstance(message, wire.Hello):
                _see_as(message)
            elif isinstance(message, wire.Run):
                self._busy = True
                # Before the body: a death that comes earlier than this cannot have been its doing.
                self._send(wire.Begun())
                self._runs.put(message)
            else:
                self._stop = True
                main = threading.main_thread().ident
                assert main is not None
                # To the thread itself, so that whatever it waits for is interrupted.
                signal.pthread_kill(main, signal.SIGTERM)
        if self._busy:
            _end_all()
        self._runs.put(None)
        time.sleep(SECONDS_TO_END)
        _end_all()

    # -- what the body says ------------------------------------------------------------------------------------------

    def _report(self, held: Held, value: bytes) -> None:
        """Never waits: of several reports in a row, the last one goes out."""
        with self._reporting:
            first, self._progress = self._progress is None, wire.Progress(held, value)
        if first:
            self._news.put(None)

    def _tell(self) -> None:
        while True:
            ended = self._news.get()
            with self._reporting:
                progress, self._progress = self._progress, None
            if progress is not None:
                self._send(progress)
            if ended is not None:
                self._send(ended)

    def _send(self, message: wire.FromChild) -> None:
        frame = wire.frame(message)
        # That the worker is gone is noticed by the one who listens.
        with suppress(OSError), self._sending:
            self._sock.sendall(frame)


def _transact(task: Task[..., Any], run: wire.Run) -> RunTransaction:
    """A transaction for a body here, in the store of its application, under the session of the worker."""
    return RunTransaction(partial(store_of, task), run.session, run.job.held)


def _see_as(hello: wire.Hello) -> None:
    """Find the modules that the worker finds, and hand on to other programs what the worker would."""
    sys.path[:] = hello.path
    sys.argv[:] = hello.argv
    for name, value in hello.environ.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _writable(ending: body.Ending) -> body.Ending:
    """The same ending; in the text of an error, what UTF-8 cannot hold becomes a mark."""
    if not isinstance(ending, body.Raised):
        return ending
    error, group = (text.encode(errors="replace").decode() for text in (ending.error, ending.group))
    return msgspec.structs.replace(ending, error=error, group=group)


def _let_forks_be_ended() -> None:
    """Whoever a body forks, a pool of processes, say, is ended by SIGTERM as anybody else.

    The signal is held back around the fork: one that comes before the new process has reset its handler would be lost.
    """

    def let_through() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

    def reset() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        let_through()

    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]),
        after_in_parent=let_through,
        after_in_child=reset,
    )


def _vital(work: Callable[[], None]) -> None:
    """Without this thread the worker would wait for ever: the process ends with it."""
    try:
        work()
    except BaseException:
        traceback.print_exc()
        _end_all()


def _end_all() -> NoReturn:
    """End at once, with all that bodies have started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main(fd: int) -> None:
    """Serve the worker at the other end of a socket."""
    os.set_inheritable(fd, False)
    Child(socket.socket(fileno=fd)).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]))
