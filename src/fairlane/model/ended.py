"""The feed of jobs that ended as failed or cancelled, for an integration that records such ends elsewhere."""

from __future__ import annotations

import msgspec

from . import names
from .job import JobKind, JobState, Reason

MOST_ENDED = 1_000
"""Jobs on one page of the feed."""


class EndedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that failed or was cancelled. `Store.get` has the rest of it, until it is pruned."""

    id: str
    task: str
    queue: str
    kind: JobKind
    state: JobState
    """`failed` or `cancelled`."""
    reason: Reason | None
    """None if it cannot be read."""
    error: str | None
    finished_at: float
    """By the store's clock."""


class EndedPage(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of the feed, oldest end first."""

    jobs: tuple[EndedJob, ...]
    cursor: str
    """Continues behind these jobs, at any time and in any process."""
    more: bool
    """Whether more jobs have ended already: the next page can be read at once."""


def check_ended(limit: int) -> int:
    """Check the length of a page of the feed."""
    return names.check_count("limit", limit, least=1, most=MOST_ENDED)
