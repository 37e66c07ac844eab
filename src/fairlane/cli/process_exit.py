"""Ends a worker process that threads or tasks started by job functions would keep alive.

Python waits for non-daemon threads before it exits, and an event loop waits for its tasks and for the threads of its
executor. A worker that has stored every result and closed its store must exit regardless: what is left may run for the
rest of the grace period.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

logger = logging.getLogger("fairlane.worker")
LEAST_SECONDS = 1.0
"""The time the interpreter gets to exit by itself, even if the grace period is over."""
CHECK_SECONDS = 0.1
MOST_NAMES = 5


_may_force_exit = False


def allow_forced_exit() -> None:
    """Declare that this process exists only to run the command, so that a command may end it."""
    global _may_force_exit  # noqa: PLW0603 - a fact about the process
    _may_force_exit = True


def exit_after_grace(grace_left: Callable[[], float], code: int) -> None:
    """Make this process exit with `code` when the grace period is over, unless it exits by itself before.

    Call it when every result is stored and the store is closed. `grace_left` is asked repeatedly, because a second
    signal may shorten the grace period.
    """
    if not _may_force_exit:
        return
    least = time.monotonic() + LEAST_SECONDS
    watch = threading.Thread(target=_watch, args=(grace_left, least, code), name="fairlane-exit", daemon=True)
    watch.start()


def _watch(grace_left: Callable[[], float], least: float, code: int) -> None:
    while grace_left() > 0 or time.monotonic() < least:
        time.sleep(CHECK_SECONDS)
    logger.warning("the grace period is over: exiting although %s", _describe(lingering_threads()))
    for handler in (*logging.getLogger().handlers, *logging.getLogger("fairlane").handlers):
        with suppress(Exception):
            handler.flush()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def lingering_threads() -> list[threading.Thread]:
    """The threads that Python waits for; if there are none, all that are not ours, since executors are joined too."""
    threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    waited_for = [thread for thread in threads if not thread.daemon]
    return waited_for or [thread for thread in threads if not thread.name.startswith("fairlane")]


def _describe(threads: list[threading.Thread]) -> str:
    if not threads:
        return "a task or an exit handler has not ended"
    names = ", ".join(thread.name for thread in threads[:MOST_NAMES])
    more = f" and {len(threads) - MOST_NAMES} more" if len(threads) > MOST_NAMES else ""
    return f"threads still run: {names}{more}; a job should end the threads that it starts"
