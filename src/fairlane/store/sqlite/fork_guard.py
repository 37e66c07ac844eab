"""Forks wait until no connection of ours is at work.

SQLite notes in the memory of a process which locks its connections hold. A child that was forked in the middle of a
transaction has a copy of these notes, and would take the file for locked as long as it lives. So whatever is done with
a connection is done `FORK_GUARD`, and a fork waits for the end of it.
"""

from __future__ import annotations

import os
import threading

PATIENCE = 5.0
"""Seconds after which a fork waits no longer: a program must not hang for a disk that does."""


class _ForkGuard:
    """How many threads are at work. They may be any number, each at one thing at a time."""

    def __init__(self) -> None:
        self._begin_anew()
        os.register_at_fork(before=self._stop, after_in_parent=self._go_on, after_in_child=self._begin_anew)

    def _begin_anew(self) -> None:
        """Also in the child: those who are at work stay with the parent."""
        self._changed = threading.Condition()
        self._count = 0

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def _stop(self) -> None:
        """Nobody begins from now on, because we keep the lock."""
        self._changed.acquire()
        self._changed.wait_for(lambda: self._count == 0, PATIENCE)

    def _go_on(self) -> None:
        self._changed.release()


FORK_GUARD = _ForkGuard()
