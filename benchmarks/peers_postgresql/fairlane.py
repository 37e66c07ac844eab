"""Fairlane itself, on PostgreSQL."""

from __future__ import annotations

from benchmarks.itself import Itself


class OnPostgreSQL(Itself):
    """Each job has a row in `job`, and one in `outcome` when it has ended."""

    stored = "SELECT count(*) FROM fairlane.job"
    recorded = "SELECT count(*) FROM fairlane.outcome WHERE state = 4"


SIDE = OnPostgreSQL()
