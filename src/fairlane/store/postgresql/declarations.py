"""The verbs of the store that write declarations: settings of queues, schedules, and tokens of the HTTP service."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from ...model.schedule import Schedule, StoredSchedule
from ...model.settings import SettingsChange
from ...model.tokens import AccessToken, NewToken, stored
from ..shared.token_rows import check_token, same_token, token_of, token_row, unknown_token
from . import settings
from .database import Database, Record
from .reader import Reader
from .statements import placed

LONG_SECONDS = 600.0
"""The timeout of the two verbs that may read everything: `configure` and `recount`."""
SETTINGS = "SELECT name, stamp, version, declared, override FROM fairlane.queue WHERE name = ANY($1)"


class Declarations(Reader):
    """Writes declarations to a schema."""

    _database: Database

    @abstractmethod
    async def _call(self, name: str, *values: Any, timeout: float | None = None, sent: int = 0) -> Record:
        """Call a verb's function with the clock's readings as last arguments, and announce the topics it returns."""

    async def configure(self, changes: Sequence[SettingsChange]) -> None:
        if not changes:
            return
        names = list({change.queue for change in changes})
        while True:
            rows = await self._database.fetch(placed(SETTINGS, self._database.address.schema), names)
            row = await self._call("configure", settings.changes_of(changes, rows), timeout=LONG_SECONDS)
            if row["applied"]:
                return

    async def declare(self, schedules: Sequence[Schedule]) -> list[StoredSchedule]:
        if schedules:
            await self._call(
                "declare", [s.name for s in schedules],
                [msgspec.json.encode(s.timetable).decode() for s in schedules], [s.job for s in schedules],
            )  # fmt: skip
        return await self.schedules()

    async def add_token(self, token: NewToken) -> AccessToken:
        id, name, digest, scopes, queues, lane_prefix, _, _, _, hint = token_row(stored(token, 0.0))
        row = await self._call("add_token", id, name, digest, scopes, queues, lane_prefix, token.expires, hint)
        return same_token(token_of(row), token)

    async def revoke_token(self, id: str) -> bool:
        check_token(id)
        revoked = (await self._call("revoke_token", id))["revoked"]
        if revoked is None:
            raise unknown_token(id)
        return bool(revoked)
