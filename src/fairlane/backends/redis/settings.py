"""Changes of settings. They are merged here, and stored if nobody else has changed any meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from ...errors import InvalidInput
from ...settings import QueueOverride, QueueSettings, SettingsChange
from .functions import Functions
from .requests import decode, encode


async def configure(functions: Functions, changes: Sequence[SettingsChange]) -> None:
    """Store changes, all in one step."""
    while True:
        seen = int(await functions.look("HGET", "counter", "settings") or 0)
        made = [change for each in changes if (change := await _change_of(functions, each)) is not None]
        if not made or (await functions.call("configure", seen, encode(made)))["done"]:
            return
        await asyncio.sleep(0)


async def _change_of(functions: Functions, change: SettingsChange) -> dict[str, Any] | None:
    number = await functions.look("HGET", "queues", change.queue)
    raw = None if number is None else await functions.look("HGET", "queue", number)
    record = {} if raw is None else decode(raw)
    old = msgspec.json.decode(record.get("declared", "{}"), type=QueueSettings)
    version, laid = record.get("version", 0), record.get("override")
    before = None if laid is None else msgspec.json.decode(laid, type=QueueOverride)
    declared, override = old, before if change.override is msgspec.UNSET else change.override
    if change.declared is not None and change.version >= version:
        declared, version = change.declared, change.version
    if raw is not None and (declared, version, override) == (old, record.get("version", 0), before):
        return None
    try:
        settings = declared if override is None else override.over(declared)
    except InvalidInput as exc:
        raise InvalidInput(exc.field, f"{exc.problem} (queue {change.queue!r}, with its override)") from None
    lanes = (old if before is None else before.over(old)).lanes
    made: dict[str, Any] = {
        "queue": change.queue,
        "version": version,
        "declared": msgspec.json.encode(declared).decode(),
        "settings": msgspec.json.encode(settings).decode(),
        "lanes_changed": settings.lanes != lanes,
    }
    if override is not None:
        made["override"] = msgspec.json.encode(override).decode()
    return made
