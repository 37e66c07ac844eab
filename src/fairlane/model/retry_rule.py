"""Which errors of a task are retried, by the class of the exception; decided in the process that caught it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..errors import Control, InvalidInput
from .names import shown
from .origin import class_names


class RetryRule(msgspec.Struct, frozen=True):
    """The `retry_on` and `no_retry_on` of a task. Without `retry_on` (None) every error is retried."""

    retry_on: tuple[type[BaseException], ...] | None = None
    no_retry_on: tuple[type[BaseException], ...] = ()

    def allows(self, exc: BaseException) -> bool:
        """Whether the run that raised `exc` may be retried. `no_retry_on` takes precedence over `retry_on`."""
        if isinstance(exc, self.no_retry_on):
            return False
        return self.retry_on is None or isinstance(exc, self.retry_on)

    def allows_named(self, names: Sequence[str]) -> bool:
        """The same for an exception of another process, by the names of its class and its bases."""
        if _any_of(self.no_retry_on, names):
            return False
        return self.retry_on is None or _any_of(self.retry_on, names)


def _any_of(kinds: Sequence[type], names: Sequence[str]) -> bool:
    return any(class_names(kind)[0] in names for kind in kinds)


def retry_rule(retry_on: Any, no_retry_on: Any) -> RetryRule | None:
    """Build the rule of a task from its settings, each an exception class or several; None when both are missing."""
    if retry_on is None and no_retry_on is None:
        return None
    return RetryRule(
        None if retry_on is None else _classes("retry_on", retry_on),
        () if no_retry_on is None else _classes("no_retry_on", no_retry_on),
    )


def _classes(field: str, kinds: Any) -> tuple[type[BaseException], ...]:
    if isinstance(kinds, str) or not isinstance(kinds, type | Sequence):
        raise InvalidInput(
            field, f"must be exception classes, such as (ConnectionError, TimeoutError), not {shown(kinds)}"
        )
    found = (kinds,) if isinstance(kinds, type) else tuple(kinds)
    if not found:
        raise InvalidInput(field, "lists no exception; to never retry a task use retries=0")
    for kind in found:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise InvalidInput(field, f"{shown(kind)} is not an exception class")
        if issubclass(kind, Control):
            raise InvalidInput(field, f"{kind.__name__} decides itself how a run ends; leave it out")
    return found
