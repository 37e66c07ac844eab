"""Reading stored settings and lists of records: one that cannot be read does not affect the others.

A disk, an operator or a bug of another version can damage any record. Settings that cannot be read count as the
defaults until they are declared again; `doctor` names the queue. A process logs each problem once, because these
records are read often.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import msgspec

from ...model.settings import QueueOverride, QueueSettings, SettingsChange

T = TypeVar("T")
R = TypeVar("R")
logger = logging.getLogger("fairlane.store")
MOST_LOGGED = 1_000
_declared = msgspec.json.Decoder(QueueSettings)
_override = msgspec.json.Decoder(QueueOverride)
_logged: set[str] = set()


class StoredSettings(NamedTuple):
    """The settings of a queue."""

    declared: QueueSettings
    override: QueueOverride | None
    settings: QueueSettings
    """The settings in effect: the declaration with the override applied."""
    problem: str | None
    """Why they cannot be read, if they cannot."""


def read_settings(queue: str, declared: Any, override: Any) -> StoredSettings:
    """Return the settings of a queue from two stored JSON texts, of which the override may be None."""
    problems: list[str] = []

    def read(name: str, decode: Callable[[Any], R], value: Any, default: R) -> R:
        try:
            return decode(value)
        except Exception as exc:
            problems.append(f"{name}: {exc}")
            return default

    declaration = read("declared", _declared.decode, declared, QueueSettings())
    applied = None if override is None else read("override", _override.decode, override, None)
    settings = declaration if applied is None else read("override", applied.over, declaration, declaration)
    if not problems:
        return StoredSettings(declaration, applied, settings, None)
    problem = "; ".join(problems)
    log_once(f"the settings of queue {queue!r} cannot be read ({problem}); declare them again")
    return StoredSettings(declaration, applied, settings, problem)


def readable(what: str, read: Callable[[T], R], records: Iterable[T]) -> list[R]:
    """Return the records that can be read. Others are logged."""
    found = []
    for record in records:
        try:
            found.append(read(record))
        except Exception as exc:
            log_once(f"a {what} cannot be read and is omitted ({type(exc).__name__}: {exc})")
    return found


def warn_if_replaced(change: SettingsChange, stored: QueueSettings, version: int) -> None:
    """Log that a declaration replaces another one of the same version, once in each process.

    Two applications that declare a queue differently overwrite each other whenever one of them opens the store.
    """
    if change.declared is None or change.version != version or stored in (change.declared, QueueSettings()):
        return
    new, old = (msgspec.json.encode(each).decode() for each in (change.declared, stored))
    log_once(
        f"the declaration of queue {change.queue!r} as {new} replaces {old} of the same version {version}; unless you "
        "have just changed it, another application declares it too: make both the same, or give Fairlane(version=…)",
        logging.WARNING,
    )


def log_once(problem: str, level: int = logging.ERROR) -> None:
    """Log a problem, once in each process."""
    if problem not in _logged:
        if len(_logged) >= MOST_LOGGED:
            _logged.clear()
        _logged.add(problem)
        logger.log(level, "%s", problem)
