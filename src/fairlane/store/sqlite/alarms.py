"""Deadlines that hold while event loops are blocked: one thread of the process that calls back when a time is over.

The thread is started with the first alarm and sleeps until the earliest one is due. Setting and cancelling an alarm
that is not the earliest wakes nobody, so a deadline for each wait costs next to nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("fairlane.store")
Call = Callable[[], float | None]
"""Called in the alarms' thread, so it must not wait. Returns the seconds until it is to be called again, if at all."""


class Alarm:
    """One deadline."""

    __slots__ = ("_alarms", "call", "when")

    def __init__(self, alarms: Alarms, when: float, call: Call) -> None:
        self._alarms = alarms
        self.when = when
        self.call = call

    def cancel(self) -> None:
        """Do not call any more. A call that has begun goes on."""
        self._alarms.drop(self)


class Alarms:
    """The alarms of a process. In the child of a fork there are none."""

    def __init__(self) -> None:
        self._begin_anew()
        os.register_at_fork(after_in_child=self._begin_anew)

    def _begin_anew(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._alarms: set[Alarm] = set()
        self._sleeps_until = 0.0
        self._thread: threading.Thread | None = None

    def set(self, seconds: float, call: Call) -> Alarm:
        """Call `call` after so many seconds."""
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
        """Forget an alarm."""
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
                self._ring(alarm)

    def _ring(self, alarm: Alarm) -> None:
        again: float | None = None
        try:
            again = alarm.call()
        except Exception:
            logger.exception("what was to be done at a deadline failed")
        with self._changed:
            if again is None:
                self._alarms.discard(alarm)
            else:
                alarm.when = time.monotonic() + again


ALARMS = Alarms()
