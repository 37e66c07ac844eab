"""The child process: runs one job at a time for its worker, in its main thread, and ends when the worker has ended.

It has three threads: one reads the worker's messages, one sends the job's messages, and the main thread runs jobs, so
that a request to stop can be raised in it as an exception and ``finally`` blocks run. The request comes through the
socket, not as a signal alone: a service manager that stops a service sends SIGTERM to all its processes, and the
worker's grace period applies to jobs in children too.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, NoReturn

import msgspec

from .. import event_loops
from ..hooks import Hooks, RunningWorker, name_of
from ..model.job import Claimed, Held
from ..model.states import bounded_error
from ..runtime import logs
from ..runtime.running_job import RunningJob
from ..store.transactions import RunTransaction
from ..task import Task
from . import body, wire
from .task_location import store_of

logger = logging.getLogger("fairlane.worker.child")
MOST_GROUP = 1_000
"""How many characters of an error group are sent."""
SECONDS_TO_END = 5.0
"""How long threads and exit handlers that jobs left behind may take when the child ends."""


class Stopped(BaseException):
    """Raised in the main thread to stop a job."""


class Child:
    """The child's side of the socket, and the running job."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._fd, self._inode = sock.fileno(), os.fstat(sock.fileno()).st_ino
        self._runs: SimpleQueue[wire.Run | None] = SimpleQueue()
        self._news: SimpleQueue[wire.Ended | None] = SimpleQueue()
        self._progress: wire.Progress | None = None
        self._reporting = threading.Lock()
        self._sending = threading.Lock()
        self._busy = False
        self._stop = False
        self._interrupt: Callable[[], None] | None = None
        self._modules: list[str] = []
        self._log: tuple[str, str | None] | None = None
        self._body: asyncio.Task[Any] | None = None
        self._runner = event_loops.runner()
        self._worker = RunningWorker(isolated=True)
        self._started: list[Hooks] = []

    def serve(self) -> None:
        """Run jobs until the worker closes the socket."""
        signal.signal(signal.SIGTERM, self._on_signal)
        _let_forks_be_ended()
        self._worker.enter()
        for each in (self._receive, self._send_all):
            threading.Thread(target=_vital, args=(each,), name=f"fairlane{each.__name__}", daemon=True).start()
        try:
            with self._runner:
                while (run := self._runs.get()) is not None:
                    # A job or a library may have replaced the handler.
                    signal.signal(signal.SIGTERM, self._on_signal)
                    ending = copy_context().run(self._run, run)
                    # Flushed now: a process that is killed later cannot flush.
                    for stream in (sys.stdout, sys.stderr):
                        with suppress(Exception):
                            stream.flush()
                    self._busy = False
                    self._news.put(wire.Ended(run.job.held, _writable(ending)))
                self._stop_hooks()
        except Stopped:
            sys.exit(128 + signal.SIGTERM)

    # -- the job -----------------------------------------------------------------------------------------------------

    def _run(self, run: wire.Run) -> body.Ending:
        job = run.job
        try:
            # Each time: a module that failed to import is tried again, and the others are cached.
            for module in self._modules:
                importlib.import_module(module)
            if self._log is not None:
                # After the application, as in the worker: the application's own handlers stay.
                logs.configure(*self._log)
                self._log = None
            task = run.where.find(job.task)
            self._start_hooks(task)
            self._send(wire.Started())
            deadline = None if job.timeout is None else time.monotonic() + job.timeout
            transact = partial(_transact, task, run) if task.is_async else None
            running = RunningJob(job, self._report, deadline, transact)
            running.enter()
            if task.is_async:
                return self._runner.run(self._await(task, job, running), context=copy_context())
            return body.run_plain(task, job, running, self._step)
        except Stopped:
            raise
        except BaseException as exc:
            if self._stop and isinstance(exc, asyncio.CancelledError):
                raise Stopped from None
            if self._body is not None and not self._body.done():
                self._lose_loop(exc)
            return body.raised(exc)

    def _start_hooks(self, task: Task[..., Any]) -> None:
        """Run the start hooks of a task's application, once. If one raises, the run fails."""
        if task.hooks is None or task.hooks in self._started:
            return
        load_tasks: Callable[[], None] | None = getattr(task._sender, "load_tasks", None)
        if load_tasks is not None:
            # Hooks may be declared in any module of the application.
            load_tasks()
        for hook in task.hooks.start:
            self._call(hook)
        self._started.append(task.hooks)

    def _stop_hooks(self) -> None:
        for hook in [hook for hooks in self._started for hook in hooks.stop][::-1]:
            try:
                self._call(hook)
            except Exception:
                logger.exception("the on_worker_stop hook %s failed in a child process", name_of(hook))

    def _call(self, hook: Callable[[RunningWorker], object]) -> None:
        answer = hook(self._worker)
        if inspect.isawaitable(answer):
            self._step(_awaited(answer), copy_context())

    def _step(self, coroutine: Coroutine[Any, Any, Any], context: Context) -> Any:
        return self._runner.run(coroutine, context=context)

    async def _await(self, task: Task[..., Any], job: Claimed, running: RunningJob) -> body.Ending:
        loop, me = asyncio.get_running_loop(), asyncio.current_task()
        assert me is not None
        self._body = me

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

    # -- messages of the worker --------------------------------------------------------------------------------------

    def _receive(self) -> None:
        while (message := wire.receive(self._sock)) is not None:
            if isinstance(message, wire.Hello):
                _see_as(message)
                self._modules, self._log = message.modules, message.log
            elif isinstance(message, wire.Run):
                self._busy = True
                # Before the job: if the process dies before this, the job cannot be the cause.
                self._send(wire.Begun())
                self._runs.put(message)
            else:
                self._stop = True
                main = threading.main_thread().ident
                assert main is not None
                # To the thread itself, so that a blocking call in it is interrupted.
                signal.pthread_kill(main, signal.SIGTERM)
        if self._busy:
            _end_all()
        self._runs.put(None)
        time.sleep(SECONDS_TO_END)
        _end_all()

    # -- messages of the job -----------------------------------------------------------------------------------------

    def _report(self, held: Held, value: bytes) -> None:
        """Never waits: of several reports in a row, only the last one is sent."""
        with self._reporting:
            first, self._progress = self._progress is None, wire.Progress(held, value)
        if first:
            self._news.put(None)

    def _send_all(self) -> None:
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
        with self._sending:
            try:
                # The job may have closed the descriptor, and another file may have its number now. The worker would not
                # notice, because the receiving thread keeps the socket open.
                if os.fstat(self._fd).st_ino != self._inode:
                    raise OSError(f"descriptor {self._fd} is another file now")
                self._sock.sendall(frame)
            except OSError as exc:
                self._lose_worker(exc)

    def _lose_loop(self, exc: BaseException) -> NoReturn:
        """The event loop has ended although the job has not: in the worker itself, that would have ended the worker.

        So it is a crash, and the job stays a suspect. The job must not go on beside the next one either.
        """
        logger.error("a job has ended the event loop of its child process; ending the process", exc_info=exc)
        _end_all()

    def _lose_worker(self, exc: OSError) -> NoReturn:
        """Messages cannot be sent any more: the worker has ended, or the job has closed the socket. End the process."""
        if not isinstance(exc, BrokenPipeError | ConnectionResetError):
            with suppress(Exception):
                sys.stderr.write(f"fairlane: a job has closed the socket to its worker ({exc}); ending its process\n")
                sys.stderr.flush()
        _end_all()


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


def _transact(task: Task[..., Any], run: wire.Run) -> RunTransaction:
    """A transaction for a job in this process, in the store of its application, under the session of the worker."""
    return RunTransaction(partial(store_of, task), run.session, run.job.held)


def _see_as(hello: wire.Hello) -> None:
    """Use the worker's import path, arguments and environment."""
    sys.path[:] = hello.path
    sys.argv[:] = hello.argv
    for name, value in hello.environ.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _writable(ending: body.Ending) -> body.Ending:
    """The same ending; characters of an error that UTF-8 cannot encode are replaced."""
    if not isinstance(ending, body.Raised):
        return ending
    # Bounded here too, because the message to the worker must be.
    group = ending.group[:MOST_GROUP].encode(errors="replace").decode()
    return msgspec.structs.replace(ending, error=bounded_error(ending.error), group=group)


def _let_forks_be_ended() -> None:
    """Make SIGTERM end processes that a job forks, such as a process pool.

    The signal is blocked around the fork: otherwise it would be lost in a new process that has not reset its handler.
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
    """Run a thread without which the worker would wait for ever: the process ends with it."""
    try:
        work()
    except BaseException:
        traceback.print_exc()
        _end_all()


def _end_all() -> NoReturn:
    """End at once, with every process that jobs have started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main(fd: int) -> None:
    """Serve the worker at the other end of a socket."""
    os.set_inheritable(fd, False)
    Child(socket.socket(fileno=fd)).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]))
