"""A live job as the steps handle it: the narrow row that moves, with what they need of its identity."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from ...errors import InvalidInput
from ...model.job import Attempt, Reason
from ...model.retry import DEFAULT_BACKOFF, Backoff
from ..shared.rows import decode_backoff, readable_attempts


class Entry(msgspec.Struct):
    """Mutable on purpose: a step loads it, changes it and saves it. The order is that of the query `entry_columns`."""

    seq: int
    queue: int
    class_: int
    state: int
    gate: int
    flow: int | None
    inbox: str
    lane: int | None
    rank: int
    granted: int
    granted_at: float | None
    arrival: int | None
    due: float | None
    expires_at: float | None
    session: int | None
    claim: int | None
    waiter: int | None
    binding: int | None
    fence: int
    attempt: int
    crashes: int
    suspect: int
    cancel: int
    refused: int
    paid: int
    started_at: float | None
    id: str
    kind: str
    lane_key: str | None
    cost: float
    pool: str
    sticky: str | None
    direct: int | None
    retries: int
    backoff_json: bytes | None
    uniq: str | None
    task: str
    parent: int | None
    attempts_json: bytes | None
    returns: int = 0
    """How often it was handed back in a row after it had begun."""

    @property
    def flow_key(self) -> str:
        """Its lane as flows know it: '' for jobs without one."""
        return self.lane_key or ""

    @property
    def backoff(self) -> Backoff:
        """Its policy; the default is not stored. It stands for one that cannot be read, too: the next claim ends it."""
        with contextlib.suppress(InvalidInput):
            return decode_backoff(self.backoff_json)
        return DEFAULT_BACKOFF

    @property
    def attempts(self) -> list[Attempt]:
        """Its finished claims, oldest first. A history that cannot be read begins anew."""
        return readable_attempts(self.attempts_json)


_encoder = msgspec.json.Encoder()


def encode_attempts(attempts: list[Attempt]) -> bytes:
    """The history column."""
    return _encoder.encode(attempts)


def entry_of(row: tuple[Any, ...]) -> Entry:
    """An entry out of a row of `entry_columns`."""
    return Entry(*row)


def reason_value(reason: Reason | None) -> str | None:
    """A reason as the column has it."""
    return None if reason is None else reason.value
