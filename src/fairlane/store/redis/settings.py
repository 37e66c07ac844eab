"""Changes of settings. They are merged here, and stored unless another process changed settings meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from ...errors import InvalidInput
from ...model.settings import QueueOverride, QueueSettings, SettingsChange
from ..shared.stored_settings import read_settings, warn_if_replaced
from .encoding import decode, encode
from .functions import Functions

MOST_MOVED = 1_000
"""The most jobs that one step changes after the limit of their lane has changed."""


async def configure(functions: Functions, changes: Sequence[SettingsChange]) -> None:
    """Store changes, all in one step, and apply new lane limits in steps."""
    while True:
        seen = int(await functions.look("HGET", "counter", "settings") or 0)
        made = []
        for queue in dict.fromkeys(change.queue for change in changes):
            before = await _stored(functions, queue)
            after = before or _Record(QueueSettings(), 0, None)
            for change in changes:
                if change.queue == queue:
                    after = _changed(after, change)
            if after != before:
                made.append(_request(queue, before, after))
        if not made:
            # Another process may have stored the same changes and died before all lanes were changed.
            more = bool(await functions.look("EXISTS", "unsettled"))
            break
        answer = await functions.call("configure", seen, encode(made), MOST_MOVED)
        more = answer["more"]
        if answer["done"]:
            break
        await asyncio.sleep(0)
    # Jobs of lanes with new limits are changed in steps, and other calls are served in between. If this process dies
    # before the last step, the leader continues.
    while more:
        more = (await functions.call("settle", MOST_MOVED))["more"]


class _Record(NamedTuple):
    """The settings of a queue: the last declaration, its version, and the override of an operator."""

    declared: QueueSettings
    version: int
    override: QueueOverride | None

    def settings(self) -> QueueSettings:
        return self.declared if self.override is None else self.override.over(self.declared)


async def _stored(functions: Functions, queue: str) -> _Record | None:
    number = await functions.look("HGET", "queues", queue)
    raw = None if number is None else await functions.look("HGET", "queue", number)
    if raw is None:
        return None
    try:
        record = decode(raw)
        stored, version = read_settings(queue, record["declared"], record.get("override")), int(record["version"])
        counted = read_settings(queue, record.get("settings", "{}"), None)
    except Exception:
        # Damaged: the new declaration replaces it.
        return None
    return None if stored.problem or counted.problem else _Record(stored.declared, version, stored.override)


def _changed(old: _Record, change: SettingsChange) -> _Record:
    declared, version, override = old
    if change.override is not msgspec.UNSET:
        override = change.override
    if change.declared is not None and change.version >= version:
        warn_if_replaced(change, declared, version)
        declared, version = change.declared, change.version
    new = _Record(declared, version, override)
    try:
        new.settings()
    except InvalidInput as exc:
        raise InvalidInput(exc.field, f"{exc.problem} (queue {change.queue!r}, with its override)") from None
    return new


def _request(queue: str, before: _Record | None, after: _Record) -> dict[str, Any]:
    settings = after.settings()
    made: dict[str, Any] = {
        "queue": queue,
        "version": after.version,
        "declared": msgspec.json.encode(after.declared).decode(),
        "settings": msgspec.json.encode(settings).decode(),
        "lanes_changed": settings.lanes != (QueueSettings() if before is None else before.settings()).lanes,
    }
    if after.override is not None:
        made["override"] = msgspec.json.encode(after.override).decode()
    return made
