"""The child process: runs one body at a time for its worker, in its main thread, and ends when the worker is gone.

Three threads: one reads what the worker says, one writes what the body says, and the main one runs bodies, so that a
request to stop can be an exception in it and ``finally`` blocks run. The request comes by the socket and not as a mere
signal: whoever stops a whole service sends SIGTERM to all its processes, and the worker's grace period is for bodies
here too.
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
from ..model.names import ERROR_BYTES
from ..runtime import logs
from ..runtime.running_job import RunningJob
from ..store.transactions import RunTransaction
from ..task import Task
from . import body, wire
from .task_location import store_of

logger = logging.getLogger("fairlane.worker.child")
MOST_TEXT = 4 * ERROR_BYTES
"""Characters of an error that are sent."""
SECONDS_TO_END = 5.0
"""For what bodies left behind, threads and exit handlers, when the worker has no more to do or is gone."""


class Stopped(BaseException):
    """Raised in the main thread to end a body."""


class Child:
    """One end of the conversation, and the body that runs."""

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
        self._log: tuple[str, str] | None = None
        self._body: asyncio.Task[Any] | None = None
        self._runner = event_loops.runner()
        self._worker = RunningWorker(isolated=True)
        self._started: list[Hooks] = []

    def serve(self) -> None:
        """Run bodies until the worker has no more."""
        signal.signal(signal.SIGTERM, self._on_signal)
        _let_forks_be_ended()
        self._worker.enter()
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
                    self._news.put(wire.Ended(run.job.held, _writable(ending)))
                self._stop_hooks()
        except Stopped:
            sys.exit(128 + signal.SIGTERM)

    # -- the body ----------------------------------------------------------------------------------------------------

    def _run(self, run: wire.Run) -> body.Ending:
        job = run.job
        try:
            # Each time: one that has failed to import is tried again, and the others are there.
            for module in self._modules:
                importlib.import_module(module)
            if self._log is not None:
                # After the application, as in the worker: what that sets up stays beside it.
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
        """Run the start hooks of a task's application, once. What one raises fails the run."""
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

    # -- what the worker says ----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while (message := wire.receive(self._sock)) is not None:
            if isinstance(message, wire.Hello):
                _see_as(message)
                self._modules, self._log = message.modules, message.log
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
        with self._sending:
            try:
                # A body may have closed it, and something else may have its number now. The worker would not notice:
                # the thread that listens holds the socket open.
                if os.fstat(self._fd).st_ino != self._inode:
                    raise OSError(f"descriptor {self._fd} is another file now")
                self._sock.sendall(frame)
            except OSError as exc:
                self._lose_worker(exc)

    def _lose_loop(self, exc: BaseException) -> NoReturn:
        """The event loop has ended around a body that has not: in the worker itself that would have ended the worker.

        So it is a crash, and the job stays a suspect. The body must not go on beside the next one either.
        """
        logger.error("a body has ended the event loop of its child process, which ends with it", exc_info=exc)
        _end_all()

    def _lose_worker(self, exc: OSError) -> NoReturn:
        """Nothing can be told any more: the worker is gone, or a body has closed the socket. End with all there is."""
        if not isinstance(exc, BrokenPipeError | ConnectionResetError):
            with suppress(Exception):
                sys.stderr.write(f"fairlane: a body has closed the socket to its worker ({exc}); its process ends\n")
                sys.stderr.flush()
        _end_all()


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


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
    # The worker keeps the end of a long one; a message has to end somewhere too.
    texts = (ending.error[-MOST_TEXT:], ending.group[-MOST_TEXT:])
    error, group = (text.encode(errors="replace").decode() for text in texts)
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
