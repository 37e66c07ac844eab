"""Findings of a diagnosis: how severe they are, and what to do about them."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol, runtime_checkable

import msgspec


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARN = "warn"
    ERROR = "error"


class Finding(msgspec.Struct, frozen=True):
    """The result of one check."""

    level: Level
    topic: str
    what: str
    advice: str | None = None
    """What to do next; a command where there is one."""


@runtime_checkable
class Diagnosable(Protocol):
    """A store that can check more than the port exposes, such as the settings of its server."""

    async def findings(self) -> list[Finding]:
        """Check without changing anything. Settings that the user is not permitted to read are left out."""


@runtime_checkable
class Counted(Protocol):
    """A store whose servers keep counts, such as the deadlocks of PostgreSQL or what became of tokens in Redis."""

    async def counters(self) -> dict[str, int]:
        """The counters by name. They increase until the server's statistics are reset."""
