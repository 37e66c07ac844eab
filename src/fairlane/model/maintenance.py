"""What the manager's services tell after a pass. `more`: it was cut short, come back without sleeping."""

from __future__ import annotations

import msgspec

DAY = 86_400.0


class Promoted(msgspec.Struct, frozen=True, kw_only=True):
    """A pass over time: due jobs, expired jobs, broadcasts whose time to join is over."""

    promoted: int
    expired: int
    more: bool
    next_due: float | None
    """Seconds until the next job is due or expires; None when none is known."""


class Admitted(msgspec.Struct, frozen=True, kw_only=True):
    """A pass over arrivals and lanes. `repaired`: grants that were not handed on; 0 without faults."""

    admitted: int
    moved: int
    """Grants moved away from jobs whose bound worker could not take them."""
    repaired: int
    more: bool


class Rescued(msgspec.Struct, frozen=True, kw_only=True):
    """A pass over sessions."""

    declared: tuple[str, ...]
    """Sessions declared dead by this pass."""
    retried: int
    failed: int
    cancelled: int
    lost_bindings: int
    drained: int
    """Open bindings that nobody had used for a day."""
    more: bool
    now: float
    """The store's clock, which the rescuer compares with its own before it trusts a lease to have run out."""


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """How long finished jobs are kept: by age, and by number for each queue."""

    completed_seconds: float = DAY
    completed_count: int = 100_000
    failed_seconds: float = 7 * DAY
    failed_count: int = 100_000
    history_seconds: float = 30 * DAY
    """For ended sessions and closed bindings."""
    id_seconds: float = DAY
    """An id stays taken at least this long after its job ended, even when the job is gone by number. That of a retry
    does as long as failed jobs are kept: while there is a job to retry, it is known that it was."""

    @property
    def retry_id_seconds(self) -> float:
        """How long the id of a retry stays taken after it ended."""
        return max(self.id_seconds, self.failed_seconds)


class Pruned(msgspec.Struct, frozen=True, kw_only=True):
    """A pass over what is finished."""

    jobs: int
    other: int
    """Old sessions, closed bindings, forgotten ids and unique values, lanes that are empty."""
    more: bool


class Recount(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison of everything derived with the records it is derived from. Differences were corrected."""

    jobs: int
    differences: tuple[str, ...]
