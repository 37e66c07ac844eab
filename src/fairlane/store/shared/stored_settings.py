"""Settings of queues, and lists of sessions and bindings, as they are stored: what cannot be read hides nothing else.

A disk, an operator or another version's bug can damage any record. Settings that cannot be read are taken for the
defaults until they are declared again; `doctor` names the queue. Each damage is logged once by a process: these records
are read again and again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import msgspec

from ...model.settings import QueueOverride, QueueSettings

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
    """What counts: the declaration with the override laid over it."""
    problem: str | None
    """What of them cannot be read."""


def read_settings(queue: str, declared: Any, override: Any) -> StoredSettings:
    """The settings of a queue out of what is stored: two texts of JSON, the second of which may be None."""
    problems: list[str] = []

    def read(name: str, decode: Callable[[Any], R], value: Any, usual: R) -> R:
        try:
            return decode(value)
        except Exception as exc:
            problems.append(f"{name}: {exc}")
            return usual

    said = read("declared", _declared.decode, declared, QueueSettings())
    laid = None if override is None else read("override", _override.decode, override, None)
    settings = said if laid is None else read("override", laid.over, said, said)
    if not problems:
        return StoredSettings(said, laid, settings, None)
    problem = "; ".join(problems)
    log_once(f"the settings of queue {queue!r} cannot be read ({problem}); declare them again")
    return StoredSettings(said, laid, settings, problem)


def readable(what: str, read: Callable[[T], R], records: Iterable[T]) -> list[R]:
    """The records that can be read; each of the others is logged."""
    found = []
    for record in records:
        try:
            found.append(read(record))
        except Exception as exc:
            log_once(f"a {what} cannot be read and is left out ({type(exc).__name__}: {exc})")
    return found


def log_once(problem: str) -> None:
    """Log an error unless this process has logged it before."""
    if problem not in _logged:
        if len(_logged) >= MOST_LOGGED:
            _logged.clear()
        _logged.add(problem)
        logger.error("%s", problem)
