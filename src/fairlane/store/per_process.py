"""State that belongs to one process: a fork starts with its own, made anew."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """A value for each process, made by `make` at the first `get`.

    A child process must not use its parent's value: threads and connections stay with the parent, and a lock that was
    held during the fork is never released in the child.
    """

    __slots__ = ("_make", "_values")

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: dict[int, T] = {}
        """By process id. Besides this process, only the parent can have an entry."""

    def get(self) -> T:
        """The value of this process. Safe to call from any thread."""
        pid = os.getpid()
        try:
            return self._values[pid]
        except KeyError:
            # setdefault is atomic: of several threads that come here at once, all get the value of the first.
            value = self._values.setdefault(pid, self._make())
            for other in [other for other in self._values if other != pid]:
                self._values.pop(other, None)
            return value

    def existing(self) -> T | None:
        """The value of this process, None if it was not made yet."""
        return self._values.get(os.getpid())
