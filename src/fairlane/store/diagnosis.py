"""What somebody who looks for trouble has found: how bad it is, and what to do about it."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol, runtime_checkable

import msgspec


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    ERROR = "error"


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    level: Level
    topic: str
    what: str
    advice: str | None = None
    """What to do next; the command to run where there is one."""


@runtime_checkable
class Diagnosable(Protocol):
    """A store that knows more of its health than the port tells, such as the settings of its server."""

    async def findings(self) -> list[Finding]:
        """Look, and change nothing. What the user may not see is left out; it is no finding."""


@runtime_checkable
class Counted(Protocol):
    """A store whose server counts what should not happen, such as deadlocks."""

    async def counters(self) -> dict[str, int]:
        """Each number by what was counted. They grow until the server's statistics are reset."""
