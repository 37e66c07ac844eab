"""The application and the store that a command works on.

Without ``-A`` the application is an empty one, so that every command reads and writes through the same client.
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


class StoreAccess(Enum):
    """What a command does to its store."""

    READ = "read"
    """Only reads: a missing store is an error, and the application's queue settings are not written."""
    CHANGE = "change"
    """Changes an existing store: a missing one is an error."""
    CREATE = "create"
    """Creates a missing store."""


class CommandContext:
    """The application that the command line names, or several merged into one, on the store it names."""

    def __init__(self, app_name: str | None, url: str | None, access: StoreAccess = StoreAccess.READ) -> None:
        # Read first, so that an invalid variable is not reported as an error in the user's module.
        settings = Settings.from_env(os.environ)
        self.has_app = app_name is not None
        self.names = [] if app_name is None else app_name.split(",")
        """The values of ``-A``, in order."""
        found = find_apps(self.names) if self.names else {"": Fairlane(settings=settings)}
        self.modules = [find_module(name).__name__ for name in self.names]
        """The modules of these names. A child process of a worker imports them before any task."""
        self.apps = list(found.values())
        """Every application that was named. The first one serves the tasks of the others too."""
        self.app = self.apps[0]
        if url is not None:
            for app in self.apps:
                app.settings = msgspec.structs.replace(app.settings, url=url)
        for app in self.apps:
            app.creates_store = access is StoreAccess.CREATE
            app.declares_queues = access is not StoreAccess.READ
        for name, app in list(found.items())[1:]:
            _merge(self.app, app, next(iter(found)), name)

    @property
    def url(self) -> str:
        """The URL of the store."""
        return self.app.settings.url

    @property
    def shown_url(self) -> str:
        """The URL without its password."""
        return without_password(self.url)

    @property
    def connection(self) -> Connection:
        """The connection to the store."""
        return self.app.connection

    def require_application(self) -> None:
        """Raise InvalidInput without ``-A``."""
        if not self.names:
            raise InvalidInput("--app", "is required: give -A module:app, or set FAIRLANE_APP")

    def require_tasks(self) -> None:
        """Raise InvalidInput unless ``-A`` names an application that has tasks."""
        self.require_application()
        if not len(self.app.registry):
            raise InvalidInput("--app", f"{', '.join(self.names)}: {NO_TASKS}, or name their module with another -A")

    async def close(self) -> None:
        """Close every application."""
        for app in self.apps:
            await app.close()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """Yield the client, and close the applications afterwards."""
        try:
            yield self.app.client
        finally:
            await self.close()


def _merge(app: Fairlane, other: Fairlane, name: str, other_name: str) -> None:
    """Add the tasks and queues of `other` to `app`. Conflicts are rejected with the names of both."""
    if other.settings.url != app.settings.url:
        mine, theirs = (without_password(each.settings.url) for each in (app, other))
        raise InvalidInput(
            "--app",
            f"{name} and {other_name} have different stores, {mine} and {theirs}; run a worker for each, or give --url",
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
