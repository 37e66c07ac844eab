"""Revoking: `revoke` of Celery also cancels the job, which may not have reached a worker yet."""

from __future__ import annotations

from typing import Any

from celery.app.control import Control
from celery.utils.functional import maybe_list

from .applications import fair_of


class FairControl(Control):
    """Celery's remote control with a `revoke` that also cancels jobs."""

    def revoke(self, task_id: Any, destination: Any = None, terminate: bool = False, **options: Any) -> Any:
        """Revoke tasks: those that wait are cancelled; with `terminate`, those that run are stopped too."""
        try:
            return super().revoke(task_id, destination=destination, terminate=terminate, **options)
        finally:
            # Also if the broker is away: jobs are not there.
            fair_of(self.app).cancel([str(id) for id in maybe_list(task_id) or ()], running=terminate)
