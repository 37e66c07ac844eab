"""Fairlane: a task queue for Python in which nobody blocks anybody else.

This is the engine: the vocabulary, the `Store` port and `open_store`. Modules hold the rest of the vocabulary:
`job`, `states`, `session`, `settings`, `slots`, `reading`, `binding`, `upkeep`, `schedule`.
"""

from .backends import open_store
from .clock import Clock, ManualClock, SystemClock
from .errors import (
    Busy,
    Conflict,
    FairlaneError,
    IndexTaken,
    InvalidInput,
    NotFound,
    NotSupported,
    QueueFull,
    SchemaMismatch,
    SessionLost,
    Stale,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
    TermLost,
)
from .ids import new_id
from .job import Job, JobState, NewJob, Priority, Reason
from .retry import Backoff
from .session import Claim, NewSession, SessionKind
from .settings import LaneRule, QueueOverride, QueueSettings, SettingsChange
from .slots import Ask, Reserved, Slots
from .store import Store
from .wakeups import Wakeups

__version__ = "0.1.0.dev0"

__all__ = [
    "Ask",
    "Backoff",
    "Busy",
    "Claim",
    "Clock",
    "Conflict",
    "FairlaneError",
    "IndexTaken",
    "InvalidInput",
    "Job",
    "JobState",
    "LaneRule",
    "ManualClock",
    "NewJob",
    "NewSession",
    "NotFound",
    "NotSupported",
    "Priority",
    "QueueFull",
    "QueueOverride",
    "QueueSettings",
    "Reason",
    "Reserved",
    "SchemaMismatch",
    "SessionKind",
    "SessionLost",
    "SettingsChange",
    "Slots",
    "Stale",
    "Store",
    "StoreError",
    "StoreFull",
    "StoreReadOnly",
    "StoreUnavailable",
    "SystemClock",
    "TermLost",
    "Wakeups",
    "__version__",
    "new_id",
    "open_store",
]
