"""The results of the leader's passes. `more` means that a pass reached its limit: run it again without sleeping."""

from __future__ import annotations

import msgspec

DAY = 86_400.0


class Promoted(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `promote`: due jobs, expired jobs, broadcasts whose time to join is over."""

    promoted: int
    expired: int
    more: bool
    next_due: float | None
    """Seconds until the next job becomes due or expires; None when there is none."""
    late: float | None
    """Seconds since the due time of the longest overdue job that this pass promoted; None when it promoted none."""


class Admitted(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `admit`. `repaired`: grants that had not been passed on; 0 unless something is wrong."""

    admitted: int
    moved: int
    """Grants moved away from jobs whose bound worker could not take them."""
    repaired: int
    more: bool


class Rescued(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `rescue`."""

    declared: tuple[str, ...]
    """Sessions declared dead by this pass."""
    retried: int
    failed: int
    cancelled: int
    lost_bindings: int
    drained: int
    """Open bindings that had not been used for a day."""
    more: bool
    now: float
    """The store's clock. The rescuer compares it with its own before it trusts that a lease has expired."""


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """How long final jobs are kept: by age, and by number for each queue."""

    completed_seconds: float = DAY
    completed_count: int = 100_000
    failed_seconds: float = 7 * DAY
    failed_count: int = 100_000
    history_seconds: float = 30 * DAY
    """How long ended sessions and closed bindings are kept."""
    id_seconds: float = DAY
    """An id stays taken at least this long after its job ended, even when the job was pruned by number. The id of a
    retry stays taken as long as failed jobs are kept, so that a failed job cannot be retried twice."""

    @property
    def retry_id_seconds(self) -> float:
        """How long the id of a retry stays taken after it ended."""
        return max(self.id_seconds, self.failed_seconds)


class Pruned(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `prune`."""

    jobs: int
    other: int
    """Old sessions, closed bindings, expired ids and unique values, empty lanes."""
    more: bool


class Recount(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `recount`: derived data compared with the job records. Differences were corrected."""

    jobs: int
    differences: tuple[str, ...]
