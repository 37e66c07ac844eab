"""Deadlines that work while event loops are blocked: one thread of the process calls back when a time is over.

The thread starts with the first alarm and sleeps until the earliest one is due. Setting or cancelling an alarm that is
not the earliest does not wake it, so a deadline for each wait costs almost nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("fairlane.store")
Call = Callable[[], float | None]
"""Called in the alarms' thread, so it must not block. Returns the seconds until the next call, or None for no more."""


class Alarm:
    """One deadline."""

    __slots__ = ("_alarms", "call", "when")

    def __init__(self, alarms: Alarms, when: float, call: Call) -> None:
        self._alarms = alarms
        self.when = when
        self.call = call

    def cancel(self) -> None:
        """Stop calling. A call that has begun continues."""
        self._alarms.drop(self)


class Alarms:
    """The alarms of a process. The child of a fork has none of them."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._alarms: set[Alarm] = set()
        self._sleeps_until = 0.0
        self._thread: threading.Thread | None = None

    def set(self, seconds: float, call: Call) -> Alarm:
        """Call `call` after a number of seconds."""
        alarm = Alarm(self, time.monotonic() + seconds, call)
        with self._changed:
            self._alarms.add(alarm)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fairlane-alarms", daemon=True)
                self._thread.start()
            elif alarm.when < self._sleeps_until:
                self._changed.notify()
        return alarm

    def drop(self, alarm: Alarm) -> None:
        """Remove an alarm."""
        with self._changed:
            self._alarms.discard(alarm)

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                due = [alarm for alarm in self._alarms if alarm.when <= now]
                if not due:
                    self._sleeps_until = min((alarm.when for alarm in self._alarms), default=float("inf"))
                    self._changed.wait(self._sleeps_until - now if self._alarms else None)
                    continue
            for alarm in due:
                self._call(alarm)

    def _call(self, alarm: Alarm) -> None:
        again: float | None = None
        try:
            again = alarm.call()
        except Exception:
            logger.exception("the callback of a deadline failed")
        with self._changed:
            if again is None:
                self._alarms.discard(alarm)
            else:
                alarm.when = time.monotonic() + again


ALARMS = Alarms()
