"""Merges changes of queue settings. The effective settings are stored beside the declaration and the override.

A merged change is written with the stamp that was read before. If another process changed the settings meanwhile, the
stamp is higher: then nothing is written, and the caller reads and merges again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ...errors import InvalidInput
from ...model.lanes import terms
from ...model.settings import LaneRule, QueueOverride, QueueSettings, SettingsChange
from ..shared.stored_settings import read_settings, warn_if_replaced
from .database import Record


class _Queue(msgspec.Struct):
    """The settings of a queue while changes are merged into them."""

    stamp: int = 0
    version: int = 0
    declared: QueueSettings = QueueSettings()
    override: QueueOverride | None = None

    def change(self, change: SettingsChange) -> None:
        if change.declared is not None and change.version >= self.version:
            warn_if_replaced(change, self.declared, self.version)
            self.declared, self.version = change.declared, change.version
        if change.override is not msgspec.UNSET:
            self.override = change.override
        try:
            self.effective()
        except InvalidInput as exc:
            raise InvalidInput(exc.field, f"{exc.problem} (queue {change.queue!r}, with its override)") from None

    def effective(self) -> QueueSettings:
        return self.declared if self.override is None else self.override.over(self.declared)


def changes_of(changes: Sequence[SettingsChange], rows: Iterable[Record]) -> str:
    """The argument of `configure`: changes merged into rows of (name, stamp, version, declared, override)."""
    queues = {
        name: _Queue(stamp, version, *read_settings(name, declared, override)[:2])
        for name, stamp, version, declared, override in rows
    }
    for change in changes:
        queues.setdefault(change.queue, _Queue()).change(change)
    return msgspec.json.encode([_change(name, queue) for name, queue in queues.items()]).decode()


def _change(name: str, queue: _Queue) -> dict[str, Any]:
    settings = queue.effective()
    return {
        "queue": name,
        "stamp": queue.stamp,
        "version": queue.version,
        "declared": msgspec.json.encode(queue.declared).decode(),
        "override": None if queue.override is None else msgspec.json.encode(queue.override).decode(),
        "paused": settings.paused,
        "slots": settings.limit,
        "reserved_high": settings.reserved.high,
        "reserved_normal": settings.reserved.normal,
        "max_pending": settings.max_pending,
        "closed": list(settings.closed) or None,
        "rules": [_rule(rule) for rule in settings.lanes],
    }


def _rule(rule: LaneRule) -> dict[str, Any]:
    # The terms of a key that matches this rule, if it were the only one.
    alone = terms(QueueSettings(lanes=(rule,)), rule.prefix or "any")
    return {
        "pattern": rule.pattern,
        "places": alone.limit,
        "weight": alone.weight,
        "ordered": alone.ordered,
        "max_pending": alone.max_pending,
    }
