"""Ends the process of a worker that what its bodies have left behind would keep.

Python waits for threads that are no daemons before it exits, and an event loop waits for its tasks and the threads of
its executor. Bodies start such things, and a worker that has written everything and closed its store must end all the
same: what is left gets the rest of the grace, as bodies do.
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
"""What the interpreter may take to exit by itself, also when there is no grace left."""
LOOK_EVERY = 0.1
MOST_NAMES = 5


_own = False


def own_process() -> None:
    """This process is here for the command alone and may end with it; a program that calls a command may not."""
    global _own  # noqa: PLW0603 - a fact about the process
    _own = True


def end_after(grace_left: Callable[[], float], code: int) -> None:
    """See to it that this process ends, with `code` at the latest when the grace is over; it may end by itself before.

    To be called when all is written and closed. A second signal may shorten the grace meanwhile.
    """
    if not _own:
        return
    least = time.monotonic() + LEAST_SECONDS
    watch = threading.Thread(target=_watch, args=(grace_left, least, code), name="fairlane-ending", daemon=True)
    watch.start()


def _watch(grace_left: Callable[[], float], least: float, code: int) -> None:
    while grace_left() > 0 or time.monotonic() < least:
        time.sleep(LOOK_EVERY)
    logger.warning("the grace is over: ending the process although %s", _words(left_behind()))
    for handler in (*logging.getLogger().handlers, *logging.getLogger("fairlane").handlers):
        with suppress(Exception):
            handler.flush()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def left_behind() -> list[threading.Thread]:
    """The threads that Python waits for; else all that are not our own, for a pool is waited for in any case."""
    threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    waited_for = [thread for thread in threads if not thread.daemon]
    return waited_for or [thread for thread in threads if not thread.name.startswith("fairlane")]


def _words(threads: list[threading.Thread]) -> str:
    if not threads:
        return "a task or an exit handler has not ended"
    names = ", ".join(thread.name for thread in threads[:MOST_NAMES])
    more = f" and {len(threads) - MOST_NAMES} more" if len(threads) > MOST_NAMES else ""
    return f"threads still run: {names}{more}. End what a body starts together with the body"
