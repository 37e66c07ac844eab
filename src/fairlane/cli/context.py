"""What a command works on: an application and its store. Without ``-A`` the application is an empty one, so that every
command reads and writes through the same client.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum

import msgspec

from ..app import NO_TASKS, Fairlane
from ..client import Client
from ..config import Settings, without_password
from ..errors import InvalidInput
from ..runtime.connection import Connection
from .app_loader import find_apps, find_module


class Use(Enum):
    """What a command does to its store."""

    READ = "read"
    """Nothing: a store that is not there is not made, and what the application declares is not written."""
    CHANGE = "change"
    """It changes what there is: a store that is not there is not made for that."""
    MAKE = "make"


class Target:
    """The application of a command line, or several as one, with its store where the command line says."""

    def __init__(self, app_name: str | None, url: str | None, use: Use = Use.READ) -> None:
        # First, so that a bad variable is told as such, and not as an error in the user's module.
        settings = Settings.from_env(os.environ)
        self.has_code = app_name is not None
        self.names = [] if app_name is None else app_name.split(",")
        """What ``-A`` names, in order."""
        found = find_apps(self.names) if self.names else {"": Fairlane(settings=settings)}
        self.modules = [find_module(name).__name__ for name in self.names]
        """The modules of these names: a child process of a worker imports them before any task."""
        self.apps = list(found.values())
        """Every application that was named. The first one answers for all: it serves the tasks of the others too."""
        self.app = self.apps[0]
        if url is not None:
            for app in self.apps:
                app.settings = msgspec.structs.replace(app.settings, url=url)
        for app in self.apps:
            app.creates_store = use is Use.MAKE
            app.declares_queues = use is not Use.READ
        for name, app in list(found.items())[1:]:
            _merge(self.app, app, next(iter(found)), name)

    @property
    def url(self) -> str:
        """Where the store is."""
        return self.app.settings.url

    @property
    def shown_url(self) -> str:
        """The same as it may be shown."""
        return without_password(self.url)

    @property
    def connection(self) -> Connection:
        """The way to the store."""
        return self.app.connection

    def demand_code(self) -> None:
        """Refuse to go on without an application of the user's."""
        if not self.names:
            raise InvalidInput("--app", "say whose tasks to run: give -A module:app, or set FAIRLANE_APP")
        if not len(self.app.registry):
            raise InvalidInput("--app", f"{', '.join(self.names)}: {NO_TASKS}, or name them by another -A")

    async def close(self) -> None:
        """Close every application."""
        for app in self.apps:
            await app.close()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """The client, closed afterwards."""
        try:
            yield self.app.client
        finally:
            await self.close()


def _merge(app: Fairlane, other: Fairlane, name: str, other_name: str) -> None:
    """Let one application serve the tasks and queues of another too. What they disagree in is refused, naming both."""
    if other.settings.url != app.settings.url:
        mine, theirs = (without_password(each.settings.url) for each in (app, other))
        raise InvalidInput(
            "--app",
            f"{name} and {other_name} have different stores, {mine} and {theirs}; start two workers, or give --url",
        )
    for task in other.registry:
        known = app.registry.get(task.name)
        if known is not None and known is not task:
            raise InvalidInput(
                "--app",
                f"{name} and {other_name} both have a task {task.name!r}, in {known.module} and {task.module}; "
                "give one of them name=…",
            )
        app.registry.add(task)
    for queue, declaration in other._queues.items():
        if app._queues.setdefault(queue, declaration).settings != declaration.settings:
            raise InvalidInput("--app", f"{name} and {other_name} declare queue {queue!r} differently; declare it once")
