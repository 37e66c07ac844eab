"""Tasks that are retried by the class of their error, registered in three ways, for child processes to find."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fairlane import Backoff, Fairlane
from fairlane.task import Task

if TYPE_CHECKING:
    from .yard import Yard

app = Fairlane("sqlite:///never-opened.db")


class Busy(Exception):
    """An error that is retried."""


class TooBusy(Busy):
    """Another error that is retried."""


class Broken(Exception):
    """An error that is not retried."""


RULE: dict[str, Any] = {"retry_on": (Busy, OSError), "backoff": Backoff(base=0, most=0)}


@app.task(name="declared", **RULE)
def declared(kind: str) -> None:
    raise globals()[kind](kind)


def called(kind: str) -> None:
    raise globals()[kind](kind)


registered = app.task(name="called", **RULE)(called)


def elsewhere(kind: str) -> None:
    raise globals()[kind](kind)


def registered_here(yard: Yard) -> Task[..., Any]:
    """A task that is not found by a child process that imports only this module."""
    return Task(yard, elsewhere, {"name": "elsewhere", **RULE})  # type: ignore[arg-type,typeddict-item]  # not enqueued here
