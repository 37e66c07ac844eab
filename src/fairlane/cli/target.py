"""What a command works on: an application and its store. Without ``-A`` the application is an empty one, so that every
command reads and writes through the same client.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from ..app import Fairlane
from ..client import Client
from ..config import Settings, without_password
from ..connection import Connection
from ..errors import InvalidInput
from .location import find_app


class Target:
    """The application of a command line, with its store where the command line says."""

    def __init__(self, app_name: str | None, url: str | None) -> None:
        # First, so that a bad variable is told as such, and not as an error in the user's module.
        settings = Settings.from_env(os.environ)
        self.has_code = app_name is not None
        self.app = find_app(app_name) if app_name is not None else Fairlane(settings=settings)
        if url is not None:
            self.app.settings = msgspec.structs.replace(self.app.settings, url=url)

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
        if not self.has_code:
            raise InvalidInput("--app", "say whose tasks to run: give -A module:app, or set FAIRLANE_APP")

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """The client, closed afterwards."""
        try:
            yield self.app.client
        finally:
            await self.app.close()
